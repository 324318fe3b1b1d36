// TMA: what a load, a store or an addition reads and writes. See simt_hopper.h; simt_hopper.cpp says when.
#include <algorithm>
#include <cstring>

#include "simt_async.h"

namespace simt {

namespace {

void check_map(const char* what, const seqkern::TensorMap& map) {
  if (map.known != kKnownMap) fail("%s: there is no tensor map", what);
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

void read_source(Load& load) {
  load.data.assign(rows_of(load.map) * 128, 0);
  for_rows(load.map, load.at, [&](size_t row, const unsigned char* from, int64_t first, int64_t last) {
    const auto bytes = static_cast<size_t>(last - first) * 2;
    check_read(from + first * 2, bytes);
    race_actor_read(from + first * 2, bytes, false, load.code);
    memcpy(&load.data[row * 128 + static_cast<size_t>(first) * 2], from + first * 2, bytes);
  });
  load.read = true;
}

// Bytes [at, at + 16) of a box's rows, one behind the other from `tile` on, lie here.
unsigned char* chunk_of(const Block& block, const unsigned char* tile, size_t at) {
  return block.shared + swizzled(static_cast<size_t>(tile - block.shared) + at);
}

}  // namespace

void finish(Load& load) {
  Block& block = *load.block;
  Clock clock;
  race_actor(block.first_actor + block.threads / 128, load.past, &clock);
  if (!load.read) read_source(load);
  for (size_t at = 0; at < load.data.size(); at += 16) {
    unsigned char* to = chunk_of(block, load.to, at);
    race_actor_write(to, 16, true, load.code);
    memcpy(to, &load.data[at], 16);
  }
  race_actor_end();
  complete_bytes("tma_load_4d", block, load.barrier, static_cast<unsigned>(load.data.size()), clock);
}

static void begin_store(BulkStore& store, Clock* clock) {
  race_actor(store.block->first_actor + store.block->threads / 128 + 1, store.past, clock);
}
void read_store(BulkStore& store) {
  if (store.read) return;
  begin_store(store, &store.clock);
  store.data.resize(store.bytes);
  for (size_t at = 0; at < store.bytes; at += 16) {
    const unsigned char* from = store.adds ? store.from + at : chunk_of(*store.block, store.from, at);
    check_read(from, 16);
    race_actor_read(from, 16, true, store.code);
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
    race_actor_write(store.global, store.bytes, false, store.code);
    for (size_t i = 0; i < store.bytes / 4; ++i) {
      float x;
      memcpy(&x, &store.data[i * 4], 4);
      store.global[i] += x;
    }
  } else {
    for_rows(store.map, store.at, [&](size_t row, unsigned char* to, int64_t first, int64_t last) {
      const auto bytes = static_cast<size_t>(last - first) * 2;
      check_write(to + first * 2, bytes);
      race_actor_write(to + first * 2, bytes, false, store.code);
      memcpy(to + first * 2, &store.data[row * 128 + static_cast<size_t>(first) * 2], bytes);
    });
  }
  race_actor_end();
  race_merge(store.clock, clock);
  store.data = {};
  progress();
}

static void add_store(const std::shared_ptr<BulkStore>& store, const void* code) {
  Lane& lane = lane_of(*running);
  store->block = running->block;
  store->code = code;
  store->group = lane.bulk_group;
  race_release(store->past);
  lane.stores.push_back(store);
  if (at_once()) read_store(*store);
  later(running->block, store);
  progress();
  maybe_yield();
}

void box_load(void* shared, const seqkern::TensorMap& map, uint64_t* barrier, const int (&at)[4]) {
  need_hopper("tma_load_4d");
  maybe_yield();
  check_map("tma_load_4d", map);
  Block& block = *running->block;
  const size_t bytes = rows_of(map) * 128;
  check_shared("tma_load_4d", block, shared, bytes, 128);
  check_barrier("tma_load_4d", barrier);
  auto load = std::make_shared<Load>();
  load->block = &block;
  load->map = map;
  load->to = static_cast<unsigned char*>(shared);
  load->barrier = barrier;
  std::copy(at, at + 4, load->at);
  load->code = __builtin_return_address(0);
  race_release(load->past);
  // The tile is lost from here on, which the search for races has to know too.
  Clock unused;
  race_actor(block.first_actor + block.threads / 128, load->past, &unused);
  for (size_t i = 0; i < bytes; i += 16) {
    unsigned char* to = chunk_of(block, load->to, i);
    if (to + 16 > block.shared + machine.shared_bytes) fail("tma_load_4d: the swizzled tile leaves the shared memory");
    race_actor_write(to, 16, true, load->code);
    memset(to, kNaN, 16);
  }
  if (random_bits() & 1) read_source(*load);
  race_actor_end();
  // It has seen its own beginning.
  race_merge(load->past, unused);
  progress();
  // Neighbours may be far apart.
  const uint64_t draw = random_bits();
  if (draw % 8 == 0) {
    finish(*load);
  } else {
    later(load, (draw >> 8) % (draw % 4 == 1 ? 4000 : 100));
  }
  maybe_yield();
}

void box_store(const seqkern::TensorMap& map, const void* shared, const int (&at)[4]) {
  need_hopper("tma_store_4d");
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

void bulk_add(float* global, const void* shared, int bytes) {
  need_hopper("bulk_reduce_add_f32");
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

void bulk_close() {
  need_hopper("bulk_commit");
  ++lane_of(*running).bulk_group;
}

void bulk_cover(unsigned open, bool written) {
  need_hopper("bulk_wait");
  Lane& lane = lane_of(*running);
  maybe_yield();
  if (lane.bulk_group <= open) return;
  size_t kept = 0;
  for (size_t i = 0; i < lane.stores.size(); ++i) {
    const std::shared_ptr<BulkStore> store = lane.stores[i];
    if (store->group < lane.bulk_group - open) {
      read_store(*store);
      if (written) write_store(*store);
      store->covered = true;
      race_acquire(store->clock);
      if (written) continue;
    }
    lane.stores[kept++] = store;
  }
  lane.stores.resize(kept);
  maybe_yield();
}

void proxy_fence(bool shared) {
  need_hopper(shared ? "fence_async_shared" : "fence_async_global");
  if (shared) race_proxy_fence();
  maybe_yield();
}

}  // namespace simt
