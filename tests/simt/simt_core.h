// The host executor's scheduler: every GPU thread is a fiber with a stack of its own, and one of them runs at a time.
//
// A fiber goes on until it comes to something that waits for others (a barrier, a warp collective), to a poll (pause,
// load_acquire ...) or to an atomic; which one goes on then is drawn at random. Some schedules draw evenly, some mostly
// take the one that became ready last, so that one warp or one block runs far ahead of the others. SEQKERN_SIMT_SEED
// picks the schedule: the same seed gives the same one.
//
// All blocks of an all_resident launch run together, and a cluster's blocks. Others need not be on the device together:
// a few of them, drawn by chance, run at once, in random order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "simt_race.h"

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace simt {

// Where in the sources something was called: a default argument `Place at = Place()`.
struct Place {
  const char* file;
  int line;
  constexpr Place(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
  bool operator==(const Place& other) const;
};

struct Block;
struct Warp;
struct Cluster;
struct Async;  // simt_async.h

// 16 bytes on their way to shared memory: read when they are asked for or when they arrive, either is right.
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  int bytes;
  bool read;
  unsigned group;
  const void* at;  // in the code
  unsigned char data[16];
};

struct Context {
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  char* stack = nullptr;       // its lowest address
  size_t stack_bytes = 0;
};

struct Fiber {
  Context context;
  uint3 thread;
  unsigned number;    // within the block
  unsigned together;  // among all that run together
  unsigned lane;
  Block* block;
  Warp* warp;
  bool started, finished;
  bool in_hook;  // of simt_race.cpp, which the compiler believes to throw nothing
  // What it waits for, and what a warp collective reads and writes of it.
  const char* waits;
  Place at;
  unsigned mask;
  void* payload;
  // cp.async
  std::vector<Copy> copies;
  unsigned group;
  // The cluster barrier: whether it has arrived, and in which round.
  bool arrived;
  unsigned arrived_round;
};

// A warp collective that some of its lanes have come to. The last one completes it for all of them.
struct Collective {
  const char* name;
  unsigned mask, arrived;
  void (*complete)(Warp&, unsigned mask);
};

struct Warp {
  Block* block;
  unsigned lanes;  // those that have not left
  Fiber* lane[32];
  std::vector<Collective> pending;
};

struct Mbarrier {
  uint64_t* word;
  unsigned count, pending;
  int64_t bytes;  // expected less those that came
  unsigned phases;
  Clock past;
  bool beyond;  // another block has arrived, or stored: who waits has to acquire of the cluster
};

struct Block {
  uint3 index;
  unsigned rank;  // within the cluster
  Cluster* cluster;
  unsigned char* shared;
  unsigned threads, left;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  // __syncthreads and its kin
  unsigned arrived;
  const char* barrier;
  Place at;
  int sum, result;
  std::vector<Mbarrier> mbarriers;
  std::shared_ptr<Async> async;
  size_t first_actor;  // for simt_race.h
};

struct Cluster {
  std::vector<Block*> blocks;
  unsigned alive, arrived, round;
  Clock past, last_past;  // of those that have arrived, and of the round before
};

// 16 bytes on their way to the shared memory of a block of the cluster.
struct Store {
  Block* block;
  unsigned char* to;
  uint64_t* barrier;
  uint32_t data[4];
  Clock past;
};

// One launch.
struct Machine {
  const char* op;
  dim3 grid, threads;
  size_t shared_bytes;
  int architecture;
  const std::function<void()>* body;
  Context main;
  std::vector<Fiber*> ready;
  std::vector<Store> stores;
  uint64_t seed, state;
  uint64_t even;  // one choice in even + 1 is drawn evenly (a power of 2, less 1); the others take the latest
  uint64_t idle;  // polls since anything changed
  size_t alive;
  bool cancelling;
  std::string error;
};

extern Fiber* running;  // null: the launching thread
extern Machine machine;

inline uint64_t random_bits() {
  uint64_t x = machine.state;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  machine.state = x;
  return x * 0x2545F4914F6CDD1Du >> 16;  // the low bits are weaker
}
inline size_t random_below(size_t n) { return random_bits() % n; }

// Ends the launch with an error that names the op, the block and the thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The same from where nothing may be thrown: the stack is left as it is, its destructors do not run.
[[noreturn]] void fail_in_hook(const std::string& message);
[[noreturn]] void abandon();
// The running fiber waits until somebody wakes it.
void wait(const char* what, const Place& at);
void wake(Fiber* fiber);
// Something changed that others may wait for.
inline void progress() { machine.idle = 0; }
// The running fiber asks for something that others may not have done yet: another one goes on. Without a name it is
// the one asked for last.
void poll(const char* what, const Place& at);
// Another one goes on, at once or now and then.
void yield_now();
void maybe_yield();

// All lanes of `mask` come to the same collective, each with its payload; the last one calls `complete`.
void collective(const char* name, unsigned mask, void (*complete)(Warp&, unsigned), void* payload, const Place& at);
// All threads of the block; returns the sum of `value`.
int block_barrier(const char* name, int value, const Place& at);

// Of memory that the executor reads or writes for a kernel: AddressSanitizer looks at it here.
void check_read(const void* p, size_t bytes);
void check_write(void* p, size_t bytes);
// From now on nobody may touch that memory.
void forbid(void* p, size_t bytes);
// `bytes` from p on must lie in the shared memory of the block.
void check_shared(const char* what, const Block& block, const void* p, size_t bytes, size_t alignment);
// In bytes, of an address in its shared memory.
inline std::ptrdiff_t offset(const Block& block, const void* p) {
  return static_cast<const unsigned char*>(p) - block.shared;
}
// What a thread leaves open when it ends (simt_memory.cpp).
void finish_copies(Fiber& fiber);
void leave_cluster(Fiber& fiber);
void deliver_one();
// What goes on behind the threads' backs (simt_hopper.cpp): between two groups of blocks; some of it may happen now,
// true where something is left that others may wait for; what a thread leaves; for a report, where it waits.
void start_async();
bool step_async();
void leave_async(Fiber& fiber);
std::string waiting_async(const Fiber& fiber);
// As if `bytes` arrived at the mbarrier (simt_memory.cpp), which is there.
void check_barrier(const char* what, uint64_t* word);
void complete_bytes(const char* what, Block& block, uint64_t* word, unsigned bytes, const Clock& past);

// What simt_launch.cpp needs of the scheduler. The blocks that run now (others have no fibers), where a fiber starts,
// going to a fiber or to the launching thread (null), the one to go on with, and who waits where, a dozen groups at
// most.
extern std::vector<std::unique_ptr<Block>> blocks;
void entry();
void transfer(Fiber* next, bool ending = false);
Fiber* pick();
std::string waiting();
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
constexpr unsigned char kNaN = 0xFF;  // in every byte: NaN in all types

struct Limits {
  int architecture, multiprocessors, shared_per_block, max_cluster;
  int gpc;  // multiprocessors of one: a cluster lies within it
};
Limits limits();
// As CUDA's occupancy functions, by threads and shared memory alone.
int resident_blocks(dim3 block, size_t shared_bytes);
int resident_clusters(dim3 block, size_t shared_bytes, int cluster);

// Raises std::runtime_error with the op's name in it where the launch, or any thread of it, fails.
void launch(const char* op, dim3 grid, dim3 block, size_t shared_bytes, int cluster, bool all_resident,
            const std::function<void()>& body);

}  // namespace simt
