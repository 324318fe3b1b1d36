// Scratch memory of the CPU ops: one allocator for host code and kernels. Torch-free.
//
// Host code takes a block for one call (Scratch). Host code and kernels cut a block into pieces that begin on cache
// lines (Pieces). A kernel lists its pieces in one place; the same list counts their bytes on null memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace seqkern {

// Internal linkage: the functions must not leave their tier's translation unit.
namespace {

constexpr int64_t kCacheLine = 64;
// The bytes that a piece takes up.
constexpr int64_t piece_bytes(int64_t bytes) { return (bytes + kCacheLine - 1) & -kCacheLine; }

class Pieces {
 public:
  explicit Pieces(void* memory) : base_(static_cast<char*>(memory)) {}
  template <class T>
  __attribute__((always_inline)) T* take(int64_t count) {
    char* const piece = base_ + used_;
    used_ += piece_bytes(count * static_cast<int64_t>(sizeof(T)));
    return reinterpret_cast<T*>(piece);
  }
  int64_t bytes() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace

// Uninitialised memory for one call. A small block belongs to the thread, which keeps it from call to call; a large one
// comes from the pool (pool.h). If all of the thread's blocks are in use, a small one comes from the heap.
class Scratch {
 public:
  Scratch() = default;
  // `count` pieces of `bytes` each, for workers or for items. Allocates nothing if that is nothing.
  explicit Scratch(int64_t bytes, int64_t count = 1);
  Scratch(Scratch&& other) noexcept;
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch();

  void* data() const { return data_; }
  void* piece(int64_t index) const { return data_ + index * stride_; }

 private:
  struct Kept;
  static Kept* kept(size_t size);

  char* data_ = nullptr;
  int64_t stride_ = 0;
  // Where the memory came from: at most one of these is set.
  Kept* kept_ = nullptr;
  void* block_ = nullptr;
  size_t block_size_ = 0;
  std::unique_ptr<unsigned char[]> own_;
};

}  // namespace seqkern
