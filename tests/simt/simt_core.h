// The host executor's scheduler: every CUDA thread is a fiber with its own stack, all on one host thread.
//
// Scheduling is cooperative. A fiber runs until a synchronisation point: a barrier, a warp collective, a poll (pause,
// load_acquire ...) or an atomic. The next fiber is drawn from the run queue: some schedules draw uniformly, others
// mostly take the fiber that became ready last, so that one warp or one block runs far ahead. SEQKERN_SIMT_SEED picks
// the schedule; the same seed gives the same one.
//
// The blocks of a cluster are co-resident, and so is the whole grid of a cooperative (all_resident) launch. Other
// grids run in waves of a few blocks, in random order: nothing may rely on their co-residency.
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

// The source location of a call (as std::source_location): a default argument `Place at = Place()`.
struct Place {
  const char* file;
  int line;
  constexpr Place(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
  bool operator==(const Place& other) const;
};

struct Block;
struct Warp;
struct Cluster;
struct BlockAsync;  // simt_async.h

// A pending cp.async of 16 bytes. The source may be read at issue or at completion: the schedule draws which.
struct CpAsync {
  unsigned char* to;
  const unsigned char* from;
  int bytes;
  bool read;       // data holds the source
  unsigned group;  // commit group
  const void* pc;  // of the call, for race reports
  unsigned char data[16];
};

// A suspended stack.
struct Context {
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's
  char* stack = nullptr;       // its lowest address
  size_t stack_bytes = 0;
};

struct Fiber {
  Context context;
  uint3 thread;
  unsigned thread_rank;    // within the block
  unsigned resident_rank;  // among all co-resident threads: its component of a vector clock
  unsigned lane;
  Block* block;
  Warp* warp;
  bool started, finished;
  bool in_hook;  // inside a ThreadSanitizer callback, which the compiler assumes not to throw
  // What it blocks on or polls, and where. mask, payload: of a warp collective, its member mask and this lane's
  // operands; payload also holds the mbarrier that is polled.
  const char* waits;
  Place at;
  unsigned mask;
  void* payload;
  // Pending cp.async, and the commit group that is open.
  std::vector<CpAsync> copies;
  unsigned commit_group;
  // barrier.cluster: whether the thread has arrived without a wait since, and in which phase.
  bool arrived;
  unsigned arrived_phase;
};

// A warp collective (*_sync) at which some lanes of the member mask have arrived. The last lane to arrive executes it
// for all of them.
struct Collective {
  const char* name;
  unsigned mask, arrived;
  void (*complete)(Warp&, unsigned mask);
};

struct Warp {
  Block* block;
  unsigned live_mask;  // lanes that have not exited
  Fiber* lane[32];
  std::vector<Collective> pending;
};

struct Mbarrier {
  uint64_t* word;
  unsigned count, pending;  // arrivals: expected in a phase, outstanding in this one
  int64_t tx_count;         // bytes expected less bytes completed
  unsigned phases;          // completed
  Clock clock;              // released by arrivals and completed transactions
  bool cluster_scope;       // another block arrives or stores here: a wait must acquire at cluster scope
};

struct Block {
  uint3 index;
  unsigned rank;  // within the cluster
  Cluster* cluster;
  unsigned char* shared;
  unsigned threads, exited;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  // __syncthreads and its variants: threads that have arrived, at which call, and the reduction.
  unsigned arrived;
  const char* barrier;
  Place at;
  int sum, result;
  std::vector<Mbarrier> mbarriers;
  std::shared_ptr<BlockAsync> async;
  size_t first_actor;  // of the block's asynchronous actors (simt_race.h)
};

struct Cluster {
  std::vector<Block*> blocks;
  unsigned alive, arrived, phase;  // threads that have not exited, threads at barrier.cluster, its phase
  Clock clock, last_clock;         // released by the arrivals of this phase, and of the phase before
};

// A pending st.async of 16 bytes to the distributed shared memory of the cluster.
struct StAsync {
  Block* block;
  unsigned char* to;
  uint64_t* barrier;
  uint32_t data[4];
  Clock clock;
};

// The simulated device while one kernel runs: launch configuration, run queue and schedule.
struct Machine {
  const char* op;
  dim3 grid, threads;
  size_t shared_bytes;
  int architecture;
  const std::function<void()>* body;
  Context main;
  std::vector<Fiber*> ready;  // run queue
  std::vector<StAsync> st_asyncs;
  uint64_t seed, rng;
  uint64_t uniform_mask;  // one draw in uniform_mask + 1 (a power of 2) is uniform; the others take the latest fiber
  uint64_t idle_polls;    // since the last progress
  size_t alive;           // threads that have not exited
  bool cancelling;
  std::string error;
};

extern Fiber* running;  // null: the host thread that launches
extern Machine machine;

// xorshift64*
inline uint64_t random_bits() {
  uint64_t x = machine.rng;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  machine.rng = x;
  return x * 0x2545F4914F6CDD1Du >> 16;  // the low bits are weaker
}
inline size_t random_below(size_t n) { return random_bits() % n; }

// Ends the launch with an error that names the op, the block and the thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
// The same where nothing may be thrown (ThreadSanitizer callbacks): abandons the stack without unwinding it.
[[noreturn]] void fail_in_hook(const std::string& message);
[[noreturn]] void abandon();
// Blocks the running fiber until `wake`.
void wait(const char* what, const Place& at);
void wake(Fiber* fiber);
// Forward progress: something changed that other threads may poll for.
inline void progress() { machine.idle_polls = 0; }
// A spin-loop iteration of the running fiber: yields, and raises a livelock error after too many without progress.
// Without a name it counts as another poll of what was polled last.
void poll(const char* what, const Place& at);
// Yields to another fiber: always, or with probability 1/4.
void yield_now();
void maybe_yield();

// A warp collective with member mask `mask`: blocks until all its lanes have arrived, each with its payload. The last
// one calls `complete`.
void collective(const char* name, unsigned mask, void (*complete)(Warp&, unsigned), void* payload, const Place& at);
// bar.sync of the whole block with a reduction: returns the sum of `value`.
int block_barrier(const char* name, int value, const Place& at);

// Memory that the executor reads or writes for a kernel, checked by AddressSanitizer as the kernel's own access.
void check_read(const void* p, size_t bytes);
void check_write(void* p, size_t bytes);
// Later accesses are errors (AddressSanitizer), or read NaN.
void poison(void* p, size_t bytes);
// `bytes` from p on must lie in the shared memory of the block.
void check_shared(const char* what, const Block& block, const void* p, size_t bytes, size_t alignment);
// Byte offset of an address in the block's shared memory.
inline std::ptrdiff_t offset(const Block& block, const void* p) {
  return static_cast<const unsigned char*>(p) - block.shared;
}
// At thread exit: completes its cp.async, leaves the cluster barrier (simt_memory.cpp).
void finish_cp_async(Fiber& fiber);
void exit_cluster(Fiber& fiber);
// One pending st.async, drawn at random.
void complete_any_st_async();
// Asynchronous operations of Hopper (simt_hopper.cpp). start_async: before a wave of blocks. step_async: some may
// complete now; true while TMA loads are pending. exit_async: checks at thread exit. waiting_async: details for a
// report.
void start_async();
bool step_async();
void exit_async(Fiber& fiber);
std::string waiting_async(const Fiber& fiber);
// That the mbarrier exists; complete_tx on it (simt_memory.cpp).
void check_mbarrier(const char* what, uint64_t* word);
void complete_tx(const char* what, Block& block, uint64_t* word, unsigned bytes, const Clock& clock);

// The scheduler, for simt_launch.cpp.
extern std::vector<std::unique_ptr<Block>> blocks;  // those with fibers are resident
void entry();                                       // where a fiber starts
void transfer(Fiber* next, bool ending = false);    // switches to a fiber, or to the launching thread (null)
Fiber* pick();                                      // takes the next fiber from the run queue
std::string waiting();                              // which threads wait where, for a report: a dozen groups at most
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
constexpr unsigned char kNaN = 0xFF;  // fill byte: NaN in every floating-point type

struct Limits {
  int architecture, multiprocessors, shared_per_block, max_cluster;
  int gpc;  // multiprocessors in a GPC: a cluster does not span two
};
Limits limits();
// As CUDA's occupancy functions (cudaOccupancyMaxActive...), from threads and shared memory alone.
int resident_blocks(dim3 block, size_t shared_bytes);
int resident_clusters(dim3 block, size_t shared_bytes, int cluster);

// Launches a kernel and waits for it. Raises std::runtime_error with the op's name if the launch or a thread fails.
void launch(const char* op, dim3 grid, dim3 block, size_t shared_bytes, int cluster, bool all_resident,
            const std::function<void()>& body);

}  // namespace simt
