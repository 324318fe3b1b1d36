// TMA: what a load, a store or an addition reads and writes. See simt_hopper.h; simt_hopper.cpp says when.
#include <algorithm>
#include <cstring>

#include "simt_async.h"

namespace simt {

namespace {

void check_map(const char* what, const seqkern::TensorMap& map) {
  if (map.magic != kMapMagic) fail("%s: there is no tensor map", what);
  if (reinterpret_cast<uintptr_t>(&map) % 64 != 0) fail("%s: the tensor map is not at a multiple of 64 bytes", what);
}

size_t rows_of(const seqkern::TensorMap& map) {
  return static_cast<size_t>(map.box[1]) * static_cast<size_t>(map.box[2]) * static_cast<size_t>(map.box[3]);
}

// Calls f(row of the box, address in the tensor, first and last element of the row that lie in the tensor) for every
// row that does so at all.
template <class F>
void for_rows(const seqkern::TensorMap& map, const int (&at)[4], F f) {
  const int64_t first = std::max<int64_t>(0, -static_cast<int64_t>(at[0]));
  const int64_t last = std::min<int64_t>(map.box[0], map.sizes[0] - at[0]);
  size_t row = 0;
  for (int i3 = 0; i3 < map.box[3]; ++i3) {
    for (int i2 = 0; i2 < map.box[2]; ++i2) {
      for (int i1 = 0; i1 < map.box[1]; ++i1, ++row) {
        const int64_t c[3] = {int64_t{at[1]} + i1, int64_t{at[2]} + i2, int64_t{at[3]} + i3};
        bool inside = first < last;
        int64_t offset = at[0];
        for (int i = 0; i < 3; ++i) {
          inside = inside && c[i] >= 0 && c[i] < map.sizes[i + 1];
          offset += c[i] * map.strides[i + 1];
        }
        if (inside) f(row, const_cast<unsigned char*>(map.data) + offset * 2, first, last);
      }
    }
  }
}

void read_source(TmaLoad& load) {
  load.data.assign(rows_of(load.map) * 128, 0);
  for_rows(load.map, load.at, [&](size_t row, const unsigned char* from, int64_t first, int64_t last) {
    const auto bytes = static_cast<size_t>(last - first) * 2;
    check_read(from + first * 2, bytes);
    race_actor_read(from + first * 2, bytes, false, load.pc);
    memcpy(&load.data[row * 128 + static_cast<size_t>(first) * 2], from + first * 2, bytes);
  });
  load.read = true;
}

// Bytes [at, at + 16) of a box's rows, one behind the other from `tile` on, lie here.
unsigned char* chunk_of(const Block& block, const unsigned char* tile, size_t at) {
  return block.shared + swizzled(static_cast<size_t>(tile - block.shared) + at);
}

}  // namespace

void finish(TmaLoad& load) {
  Block& block = *load.block;
  Clock clock;
  race_actor_begin(block.first_actor + block.threads / 128, load.issue_clock, &clock);
  if (!load.read) read_source(load);
  for (size_t at = 0; at < load.data.size(); at += 16) {
    unsigned char* to = chunk_of(block, load.to, at);
    race_actor_write(to, 16, true, load.pc);
    memcpy(to, &load.data[at], 16);
  }
  race_actor_end();
  complete_tx("tma_load_4d", block, load.barrier, static_cast<unsigned>(load.data.size()), clock);
}

static void begin_store(BulkStore& store, Clock* clock) {
  race_actor_begin(store.block->first_actor + store.block->threads / 128 + 1, store.issue_clock, clock);
}
void read_store(BulkStore& store) {
  if (store.read) return;
  begin_store(store, &store.done_clock);
  store.data.resize(store.bytes);
  for (size_t at = 0; at < store.bytes; at += 16) {
    const unsigned char* from = store.adds ? store.from + at : chunk_of(*store.block, store.from, at);
    check_read(from, 16);
    race_actor_read(from, 16, true, store.pc);
    memcpy(&store.data[at], from, 16);
  }
  race_actor_end();
  store.read = true;
}
void write_store(BulkStore& store) {
  read_store(store);
  if (store.written) return;
  store.written = true;
  Clock clock;
  begin_store(store, &clock);
  if (store.adds) {
    // Whole numbers at a time, but in an order that has to be somebody's choice: as a race it is found where it is not.
    check_write(store.global, store.bytes);
    race_actor_write(store.global, store.bytes, false, store.pc);
    for (size_t i = 0; i < store.bytes / 4; ++i) {
      float x;
      memcpy(&x, &store.data[i * 4], 4);
      store.global[i] += x;
    }
  } else {
    for_rows(store.map, store.at, [&](size_t row, unsigned char* to, int64_t first, int64_t last) {
      const auto bytes = static_cast<size_t>(last - first) * 2;
      check_write(to + first * 2, bytes);
      race_actor_write(to + first * 2, bytes, false, store.pc);
      memcpy(to + first * 2, &store.data[row * 128 + static_cast<size_t>(first) * 2], bytes);
    });
  }
  race_actor_end();
  race_merge(store.done_clock, clock);
  store.data = {};
  progress();
}

static void add_store(const std::shared_ptr<BulkStore>& store, const void* pc) {
  ThreadAsync& thread = thread_async(*running);
  store->block = running->block;
  store->pc = pc;
  store->group = thread.bulk_group;
  race_release(store->issue_clock);
  thread.stores.push_back(store);
  if (eager()) read_store(*store);
  schedule(running->block, store);
  progress();
  maybe_yield();
}

void tma_load(void* shared, const seqkern::TensorMap& map, uint64_t* barrier, const int (&at)[4]) {
  require_sm90("tma_load_4d");
  maybe_yield();
  check_map("tma_load_4d", map);
  Block& block = *running->block;
  const size_t bytes = rows_of(map) * 128;
  check_shared("tma_load_4d", block, shared, bytes, 128);
  check_mbarrier("tma_load_4d", barrier);
  auto load = std::make_shared<TmaLoad>();
  load->block = &block;
  load->map = map;
  load->to = static_cast<unsigned char*>(shared);
  load->barrier = barrier;
  std::copy(at, at + 4, load->at);
  load->pc = __builtin_return_address(0);
  race_release(load->issue_clock);
  // The tile is lost from here on, which the search for races has to know too.
  Clock unused;
  race_actor_begin(block.first_actor + block.threads / 128, load->issue_clock, &unused);
  for (size_t i = 0; i < bytes; i += 16) {
    unsigned char* to = chunk_of(block, load->to, i);
    if (to + 16 > block.shared + machine.shared_bytes) fail("tma_load_4d: the swizzled tile leaves the shared memory");
    race_actor_write(to, 16, true, load->pc);
    memset(to, kNaN, 16);
  }
  if (random_bits() & 1) read_source(*load);
  race_actor_end();
  // It has seen its own beginning.
  race_merge(load->issue_clock, unused);
  progress();
  // Neighbours may be far apart.
  const uint64_t draw = random_bits();
  if (draw % 8 == 0) {
    finish(*load);
  } else {
    schedule(load, (draw >> 8) % (draw % 4 == 1 ? 4000 : 100));
  }
  maybe_yield();
}

void tma_store(const seqkern::TensorMap& map, const void* shared, const int (&at)[4]) {
  require_sm90("tma_store_4d");
  maybe_yield();
  check_map("tma_store_4d", map);
  auto store = std::make_shared<BulkStore>();
  store->bytes = rows_of(map) * 128;
  check_shared("tma_store_4d", *running->block, shared, store->bytes, 128);
  store->adds = false;
  store->map = map;
  std::copy(at, at + 4, store->at);
  store->from = static_cast<const unsigned char*>(shared);
  add_store(store, __builtin_return_address(0));
}

void bulk_reduce_add(float* global, const void* shared, int bytes) {
  require_sm90("bulk_reduce_add_f32");
  maybe_yield();
  if (bytes < 16 || bytes % 16 != 0) fail("bulk_reduce_add_f32: %d bytes", bytes);
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) fail("bulk_reduce_add_f32: the sums are not at a multiple of 16");
  auto store = std::make_shared<BulkStore>();
  store->bytes = static_cast<size_t>(bytes);
  check_shared("bulk_reduce_add_f32", *running->block, shared, store->bytes, 16);
  store->adds = true;
  store->global = global;
  store->from = static_cast<const unsigned char*>(shared);
  add_store(store, __builtin_return_address(0));
}

void bulk_commit_group() {
  require_sm90("bulk_commit");
  ++thread_async(*running).bulk_group;
}

void bulk_wait_group(unsigned pending, bool written) {
  require_sm90("bulk_wait");
  ThreadAsync& thread = thread_async(*running);
  maybe_yield();
  if (thread.bulk_group <= pending) return;
  size_t kept = 0;
  for (size_t i = 0; i < thread.stores.size(); ++i) {
    const std::shared_ptr<BulkStore> store = thread.stores[i];
    if (store->group < thread.bulk_group - pending) {
      read_store(*store);
      if (written) write_store(*store);
      store->waited = true;
      race_acquire(store->done_clock);
      if (written) continue;
    }
    thread.stores[kept++] = store;
  }
  thread.stores.resize(kept);
  maybe_yield();
}

void proxy_fence(bool shared) {
  require_sm90(shared ? "fence_async_shared" : "fence_async_global");
  if (shared) race_proxy_fence();
  maybe_yield();
}

}  // namespace simt
