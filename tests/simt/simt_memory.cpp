// Copies and stores that arrive later than they are asked for, mbarriers, and clusters.
#include <cstring>

#include "simt.h"

namespace simt {

namespace {

void read_source(CpAsync& copy) {
  memset(copy.data, 0, 16);
  check_read(copy.from, static_cast<size_t>(copy.bytes));
  memcpy(copy.data, copy.from, static_cast<size_t>(copy.bytes));
  copy.read = true;
}

void complete(CpAsync& copy) {
  if (!copy.read) read_source(copy);
  race_write(copy.to, 16, copy.pc);
  memcpy(copy.to, copy.data, 16);
}

// What an mbarrier's word holds from its initialisation on: anything else means that something was written over it.
uint64_t magic(const uint64_t* word) { return 0x5EC0BA771E12C0DEu ^ reinterpret_cast<uintptr_t>(word); }

Mbarrier& find(Block& block, const char* what, uint64_t* word) {
  if (block.exited == block.threads) fail("%s: the block of rank %u has ended", what, block.rank);
  check_shared(what, block, word, 8, 8);
  for (Mbarrier& m : block.mbarriers) {
    if (m.word != word) continue;
    if (*word != magic(word)) fail("%s: the mbarrier at offset %td was written over", what, offset(block, word));
    return m;
  }
  fail("%s: there is no mbarrier at offset %td, or not yet", what, offset(block, word));
}

// A phase ends when all arrivals and all bytes are in; the next one waits for as many arrivals again.
void try_complete_phase(Mbarrier& m) {
  progress();
  if (m.pending == 0 && m.tx_count == 0) {
    m.pending = m.count;
    ++m.phases;
  }
}

void arrive_on(Mbarrier& m, const Block& block, const char* what) {
  if (m.pending == 0) {
    fail("%s: more arrivals at the mbarrier at offset %td than its count of %u", what, offset(block, m.word), m.count);
  }
  --m.pending;
  race_release(m.clock);
  try_complete_phase(m);
}

Block& peer(const char* what, unsigned rank) {
  Cluster& cluster = *running->block->cluster;
  if (rank >= cluster.blocks.size()) fail("%s: rank %u in a cluster of %zu", what, rank, cluster.blocks.size());
  return *cluster.blocks[rank];
}

bool clusters_exist() { return machine.architecture >= 90; }

void complete_st_async(size_t i) {
  StAsync store = machine.st_asyncs[i];
  machine.st_asyncs[i] = machine.st_asyncs.back();
  machine.st_asyncs.pop_back();
  Mbarrier& m = find(*store.block, "store_async_16", store.barrier);
  memcpy(store.to, store.data, 16);
  m.tx_count -= 16;
  race_merge(m.clock, store.clock);
  try_complete_phase(m);
}

}  // namespace

void complete_any_st_async() {
  if (!machine.st_asyncs.empty()) complete_st_async(random_below(machine.st_asyncs.size()));
}

// ---- cp.async ------------------------------------------------------------------------------------------------------

void cp_async(void* shared, const void* global, int bytes) {
  Fiber& self = *running;
  check_shared("cp_async_16", *self.block, shared, 16, 16);
  if (bytes < 0 || bytes > 16) fail("cp_async_16: %d bytes", bytes);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) fail("cp_async_16: the source is not a multiple of 16 bytes");
  CpAsync copy;
  copy.to = static_cast<unsigned char*>(shared);
  copy.from = static_cast<const unsigned char*>(global);
  copy.bytes = bytes;
  copy.read = false;
  copy.group = self.commit_group;
  copy.pc = __builtin_return_address(0);
  race_read(global, static_cast<size_t>(bytes), copy.pc);
  race_write(shared, 16, copy.pc);
  if (random_bits() & 1) read_source(copy);
  memset(shared, kNaN, 16);
  self.copies.push_back(copy);
}

void cp_async_commit_group() { ++running->commit_group; }

void cp_async_wait_group(unsigned pending) {
  Fiber& self = *running;
  // Groups 0 ... group - 1 are closed, the last `open` of them may go on; so may what belongs to no closed group.
  if (pending >= self.commit_group) return;
  const unsigned first_pending = self.commit_group - pending;
  size_t kept = 0;
  for (size_t i = 0; i < self.copies.size(); ++i) {
    if (self.copies[i].group < first_pending) {
      complete(self.copies[i]);
    } else {
      self.copies[kept++] = self.copies[i];
    }
  }
  self.copies.resize(kept);
}

void finish_cp_async(Fiber& fiber) {
  for (CpAsync& copy : fiber.copies) complete(copy);
  fiber.copies.clear();
}

// ---- clusters ------------------------------------------------------------------------------------------------------

namespace {

void try_complete_cluster_phase(Cluster& cluster) {
  if (cluster.alive == 0 || cluster.arrived < cluster.alive) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.last_clock = cluster.clock;
  cluster.clock = nullptr;
  progress();
  for (Block* block : cluster.blocks) {
    for (Fiber* f : block->fibers) {
      if (f->waits != nullptr && strcmp(f->waits, "cluster_wait") == 0) wake(f);
    }
  }
}

}  // namespace

void exit_cluster(Fiber& fiber) {
  Block& block = *fiber.block;
  Cluster& cluster = *block.cluster;
  if (fiber.arrived && fiber.arrived_phase == cluster.phase) --cluster.arrived;
  --cluster.alive;
  if (block.exited == block.threads) {
    for (const StAsync& store : machine.st_asyncs) {
      if (store.block == &block) fail("the block of rank %u ends while stores to it are on their way", block.rank);
    }
    // Others must not reach into a block that has ended.
    if (cluster.alive > 0) poison(block.shared, machine.shared_bytes);
  }
  try_complete_cluster_phase(cluster);
}

unsigned rank_in_cluster() { return running->block->rank; }
unsigned blocks_in_cluster() { return static_cast<unsigned>(running->block->cluster->blocks.size()); }

void cluster_barrier_arrive() {
  if (!clusters_exist()) return;
  Fiber& self = *running;
  if (self.arrived) fail("cluster_arrive: the thread has arrived already, without cluster_wait");
  Cluster& cluster = *self.block->cluster;
  self.arrived = true;
  self.arrived_phase = cluster.phase;
  ++cluster.arrived;
  race_release(cluster.clock);
  progress();
  try_complete_cluster_phase(cluster);
  maybe_yield();
}

void cluster_barrier_wait(const Place& at) {
  if (!clusters_exist()) return;
  Fiber& self = *running;
  if (!self.arrived) fail("cluster_wait without cluster_arrive");
  if (self.arrived_phase == self.block->cluster->phase) wait("cluster_wait", at);
  race_acquire(self.block->cluster->last_clock);
  self.arrived = false;
}

void* mapa(const void* p, unsigned rank) {
  Block& own = *running->block;
  if (!clusters_exist()) return const_cast<void*>(p);
  check_shared("map_shared", own, p, 0, 1);
  Block& other = peer("map_shared", rank);
  if (other.exited == other.threads) fail("map_shared: the block of rank %u has ended", rank);
  return other.shared + offset(own, p);
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

void mbarrier_init(uint64_t* word, unsigned arrivals) {
  if (!clusters_exist()) return;
  Block& block = *running->block;
  check_shared("mbarrier_init", block, word, 8, 8);
  if (arrivals == 0 || arrivals >= 1u << 20) fail("mbarrier_init: a count of %u", arrivals);
  for (const Mbarrier& m : block.mbarriers) {
    if (m.word == word) fail("mbarrier_init: the mbarrier at offset %td exists already", offset(block, word));
  }
  *word = magic(word);
  block.mbarriers.push_back({word, arrivals, arrivals, 0, 0, nullptr, false});
  progress();
}

void mbarrier_arrive(uint64_t* word, unsigned bytes) {
  if (!clusters_exist()) return;
  maybe_yield();
  Block& block = *running->block;
  const char* what = bytes == 0 ? "mbarrier_arrive" : "mbarrier_arrive_expect";
  Mbarrier& m = find(block, what, word);
  m.tx_count += bytes;
  if (m.tx_count >= 1 << 20) fail("%s: %lld bytes expected at one time", what, static_cast<long long>(m.tx_count));
  arrive_on(m, block, what);
  maybe_yield();
}

void mbarrier_arrive_remote(uint64_t* word, unsigned rank) {
  if (!clusters_exist()) return;
  maybe_yield();
  Block& other = peer("mbarrier_arrive_remote", rank);
  auto* there = reinterpret_cast<uint64_t*>(other.shared + offset(*running->block, word));
  Mbarrier& m = find(other, "mbarrier_arrive_remote", there);
  m.cluster_scope |= &other != running->block;
  arrive_on(m, other, "mbarrier_arrive_remote");
  maybe_yield();
}

bool mbarrier_done(uint64_t* word, unsigned parity, bool cluster_scope, const Place& at) {
  if (!clusters_exist()) return true;
  Block& block = *running->block;
  if (parity > 1) fail("mbarrier_done: a parity of %u", parity);
  const auto done = [&] { return (find(block, "mbarrier_done", word).phases & 1) != parity; };
  if (!done()) {
    running->payload = word;
    poll("mbarrier_done", at);
    if (!done()) return false;
  }
  running->waits = nullptr;
  const Mbarrier& m = find(block, "mbarrier_done", word);
  if (m.cluster_scope && !cluster_scope) {
    fail(
        "mbarrier_done: other blocks of the cluster come to the mbarrier at offset %td: mbarrier_done_cluster sees "
        "what "
        "they did",
        offset(block, word));
  }
  race_acquire(m.clock);
  return true;
}

void check_mbarrier(const char* what, uint64_t* word) { find(*running->block, what, word); }

void complete_tx(const char* what, Block& block, uint64_t* word, unsigned bytes, const Clock& clock) {
  Mbarrier& m = find(block, what, word);
  m.tx_count -= bytes;
  race_merge(m.clock, clock);
  try_complete_phase(m);
}

void st_async(void* p, uint64_t* word, unsigned rank, const uint32_t (&v)[4]) {
  if (!clusters_exist()) return;
  maybe_yield();
  Block& own = *running->block;
  check_shared("store_async_16", own, p, 16, 16);
  if (own.cluster->blocks.size() < 2) fail("store_async_16: undefined in a cluster of one block");
  Block& other = peer("store_async_16", rank);
  auto* there = reinterpret_cast<uint64_t*>(other.shared + offset(own, word));
  find(other, "store_async_16", there).cluster_scope |= &other != &own;
  StAsync store = {&other, other.shared + offset(own, p), there, {v[0], v[1], v[2], v[3]}, nullptr};
  race_write(store.to, 16, __builtin_return_address(0));
  race_release(store.clock);
  // From now on nobody knows what is there, until the barrier says so.
  memset(store.to, kNaN, 16);
  machine.st_asyncs.push_back(store);
  progress();
  if (random_bits() % 4 == 0) complete_any_st_async();
  maybe_yield();
}

}  // namespace simt
