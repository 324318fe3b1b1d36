#include "scratch.h"

#include <cstring>
#include <new>
#include <utility>

#include "pool.h"
#include "tensor.h"

namespace seqkern {

// One of a thread's blocks.
struct Scratch::Kept {
  std::unique_ptr<unsigned char[]> memory;
  size_t size = 0;
  bool taken = false;
};

// The smallest free block that is large enough, else the largest free one; null if all are in use. Several blocks, not
// one, save page faults (NOTES.md).
Scratch::Kept* Scratch::kept(size_t size) {
  constexpr int kBlocks = 8;
  static thread_local Kept blocks[kBlocks];
  Kept* best = nullptr;
  for (Kept& block : blocks) {
    if (block.taken) continue;
    const bool fits = block.size >= size;
    if (!best || (best->size >= size ? fits && block.size < best->size : block.size > best->size)) best = &block;
  }
  return best;
}

Scratch::Scratch(int64_t bytes, int64_t count) {
  constexpr size_t kLarge = size_t{1} << 20;  // from here on the pool serves
  constexpr int64_t kMost = INT64_MAX / 2;
  int64_t all = 0;
  SK_CHECK(bytes <= kMost && !__builtin_mul_overflow(piece_bytes(bytes), count, &all) && all <= kMost,
           "seqkern: the size of scratch memory overflows int64");
  stride_ = piece_bytes(bytes);
  if (all == 0) return;
  const size_t size = static_cast<size_t>(all + kCacheLine);
  void* memory = nullptr;
  if (size >= kLarge) memory = block_ = pool_take(size, block_size_);
  if (!memory) {
    const auto allocate = [&] {
      std::unique_ptr<unsigned char[]> own(new (std::nothrow) unsigned char[size]);
      SK_CHECK(own, "seqkern: no memory for ", size, " bytes of scratch");
      return own;
    };
    if (Kept* k = size < kLarge ? kept(size) : nullptr) {
      if (k->size < size) k->memory = allocate(), k->size = size;
      k->taken = true;
      kept_ = k;
      memory = k->memory.get();
    } else {
      own_ = allocate();
      memory = own_.get();
    }
    if (pool_poisons()) std::memset(memory, 0xff, size);
  }
  const auto address = reinterpret_cast<uintptr_t>(memory);
  data_ = reinterpret_cast<char*>((address + kCacheLine - 1) / kCacheLine * kCacheLine);
}

Scratch::Scratch(Scratch&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      stride_(other.stride_),
      kept_(std::exchange(other.kept_, nullptr)),
      block_(std::exchange(other.block_, nullptr)),
      block_size_(other.block_size_),
      own_(std::move(other.own_)) {}

Scratch::~Scratch() {
  if (kept_) kept_->taken = false;
  if (block_) pool_give(block_, block_size_);
}

}  // namespace seqkern
