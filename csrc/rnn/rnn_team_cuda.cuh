// What the persistent recurrent scans share: a team of thread blocks that owns one direction and a tile of the batch.
// Torch-free.
//
// The idea. Every step multiplies the same weights with an operand that the step before made: forward the state h,
// backward the gradients of the gates. The weights are divided over the team once and stay on chip for the whole
// sequence; only the operand travels. Block r owns units [16 groups r, 16 groups (r + 1)), and computes
//
//     sums[tile][unit][row] = sum over k of A[tile][unit][k] X[k][row]
//
// for TILES rows of A a unit and ROWS = 8 NT rows of the batch. k runs over PLANES times all units of the team, padded
// with zeros: k = plane * shape.plane + unit. Forward: a tile is a gate, one plane (h). Backward: one tile (the unit's
// dh), a plane is a gate.
//
// Division. A group is 16 units: with its TILES tiles of 16 rows the M of mma m16n8k16, batch on N. `parts` warps share
// a group, each a part of k, and add up through shared memory. A lane owns, of its group, units lane / 4 and that + 8,
// and rows 2 (lane % 4) and the next of every 8: all tiles of a pair (unit, row) come out in one lane. Its pairs are
// SLOTS = 4 NT; slot s is unit half (s / 2) % 2, row 8 (s / 4) + s % 2. With several parts, warp `part` finishes the
// slots s % parts == part. A slot of a warp is 8 units x 4 rows: what is exchanged as one, a slab.
//
// Operand. X lies in shared memory twice, [chunk][row][64 bytes]: a chunk is 32 units of 16 bits or 16 floats. The four
// 16-byte pieces of a row are swapped by row / 2, so that neither the loads of fragments (16 bytes a lane) nor the
// stores of single elements meet in a bank. A lane reads 8 neighbouring units as the two B fragments of 16 k each: in
// what order the mma counts k is free, as long as A says the same, and A is then 16 neighbouring bytes of a weight row.
//
// Weights. 1 KB for a tile and a chunk, in either type. Of 16 bits, HELD chunks a warp are in registers (128 of them a
// lane), the rest in shared memory as ready fragments. float32 has no tensor cores with its exactness: fused
// multiply-adds, 4 k at a time, all weights in shared memory.
//
// Exchange. Operands are numbered; number n lies in buffer n & 1. Every warp publishes the slabs that it finished:
//   block    one block: straight into the buffer, then __syncthreads.
//   cluster  to all blocks of the cluster, this one too, by asynchronous stores that the receiver's mbarrier counts.
//   grid     through global memory, 3 words of data and the operand's number in 16 bytes: whoever reads the number has
//            the data, so there is no barrier between blocks. All blocks must be resident.
// Two buffers are enough: a block publishes number n + 2 only when it has all of n + 1, which every warp of every block
// published after its last look at n. That order breaks where a team turns to another tile of the batch: `renew`.
//
// How a kernel uses it (forward: TILES = gates, PLANES = 1; backward: TILES = 1, PLANES = gates):
//
//     RnnTeam<T, TILES, PLANES, NT> team;
//     team.begin(shape, shared, rank, mailbox);        // once: all threads
//     team.load_weights(weights);                       // 16 bytes of A: weights(tile, unit, plane, k)
//     for all k, rows: *team.operand(k, row) = ...;     // the first operand, whole, by each block; zeros are there
//     team.start();
//     for each step:
//       team.product(sums, half);                       // reads operand number `turn`
//       team.finish(sums);                              // now sums[tile][slot] are complete where team.owns(slot)
//       if owns(slot): team.stage(slot, plane, value);  // every plane of every slot that is owned, padding too (0)
//       team.publish();                                 // turn += 1
//       (stores and loads that nobody waits for)
//       team.wait();                                    // the operand number `turn` is here
//     team.renew() before the next tile of the batch, team.end() behind the last.
//
// Sums over all units of a row (layer norm): team.block_sum, then team.share and team.shared_pair.
#pragma once

#include "cuda_device.cuh"

namespace seqkern {

enum class RnnTier : int { block = 0, cluster = 1, grid = 2 };

// How the work is divided, and where things lie in shared memory (bytes): made by the host (`rnn_team_shape`).
struct RnnTeamShape {
  RnnTier tier;
  int blocks;    // of a team
  int groups;    // of 16 units, of a block
  int parts;     // warps of a group, a power of 2
  int hidden;    // units
  int plane;     // of k: all units of the team, in whole chunks
  int chunks;    // of k
  int per_warp;  // of those
  int operand, partial, staging, sums, pairs, weights;
  int shared_bytes;
  long long mailbox_bytes;  // of a team, in global memory; grid only
};

constexpr int kRnnGroup = 16;  // units
constexpr int kRnnPairs = 2;   // exchanges of pairs in a step at most: kinds 0 and 1

// Chunks of weights in registers: 128 of a lane's, or 64 where it has twice as many sums.
constexpr int rnn_held(int element, int tiles, int nt) { return element == 2 ? 16 / nt / tiles : 0; }
constexpr int rnn_packets(int element) { return (8 * element + 2) / 3; }  // of a slab, in the mailbox

// `norm`: room for exchanges of pairs.
inline RnnTeamShape rnn_team_shape(RnnTier tier, int hidden, int blocks, int groups, int parts, int element, int tiles,
                                   int planes, int nt, bool norm) {
  RnnTeamShape s{};
  const int chunk = 64 / element, rows = 8 * nt, slots = 4 * nt, warps = groups * parts;
  s.tier = tier;
  s.blocks = blocks;
  s.groups = groups;
  s.parts = parts;
  s.hidden = hidden;
  s.plane = (blocks * groups * kRnnGroup + chunk - 1) / chunk * chunk;
  s.chunks = planes * (s.plane / chunk);
  s.per_warp = (s.chunks + parts - 1) / parts;
  const int in_shared = s.per_warp > rnn_held(element, tiles, nt) ? s.per_warp - rnn_held(element, tiles, nt) : 0;
  int at = 128;  // barriers
  s.operand = at;
  at += 2 * s.chunks * rows * 64;
  s.partial = at;
  if (parts > 1) at += warps * tiles * slots * 128;
  s.staging = at;
  if (tier != RnnTier::block) at += warps * slots * planes * 32 * element;
  s.sums = at;
  if (norm) at += warps * rows * 4;
  s.pairs = at;
  if (norm && tier != RnnTier::block) at += kRnnPairs * 2 * blocks * rows * 8;
  s.weights = at;
  long long bytes = at + 1024LL * warps * in_shared * tiles;
  // What is held comes by way of the operands' memory.
  if (rnn_held(element, tiles, nt) > 0 && bytes < s.operand + 1024LL * warps * tiles) {
    bytes = s.operand + 1024LL * warps * tiles;
  }
  s.shared_bytes = bytes > (1 << 30) ? 1 << 30 : static_cast<int>(bytes);
  if (tier == RnnTier::grid) {
    const long long slabs = 2LL * blocks * groups * slots * planes;
    s.mailbox_bytes = 16 * (slabs * rnn_packets(element) + (norm ? kRnnPairs * 2LL * blocks * rows : 0));
  }
  return s;
}

// Elements of 16 bits: of bfloat16 or float16, which a kernel is told when it runs. All they differ in is the product
// and the rounding; a kernel each would be compiled twice for that.
struct RnnShort {
  uint16_t bits;
};
template <class T>
SK_DEVICE T rnn_narrow(float x, bool half) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return T{half ? narrow<Half>(x).bits : narrow<BFloat16>(x).bits};
  }
}
SK_DEVICE float rnn_widen(float x, bool) { return x; }
SK_DEVICE float rnn_widen(RnnShort x, bool half) { return half ? widen(Half{x.bits}) : widen(BFloat16{x.bits}); }

// T: float or RnnShort.
template <class T, int TILES, int PLANES, int NT>
struct RnnTeam {
  static constexpr int ELEMENT = sizeof(T), CHUNK = 64 / ELEMENT, PIECE = 16 / ELEMENT;  // in elements
  static constexpr int ROWS = 8 * NT, SLOTS = 4 * NT;
  static constexpr int HELD = rnn_held(ELEMENT, TILES, NT);
  static constexpr bool TWO = ELEMENT == 2 && TILES * NT <= 2;  // chains of sums, where one would wait for itself
  static constexpr int SLAB = 32 * ELEMENT, PACKETS = rnn_packets(ELEMENT);  // bytes; 16-byte packets of the mailbox

  RnnTeamShape shape;
  unsigned char *shared, *mailbox;
  int lane, warp, group, part, rank;
  uint32_t turn;                                             // number of the operand that comes next or is here
  uint4 held[HELD > 0 ? HELD : 1][HELD > 0 ? TILES : 1][2];  // A, in fragments

  // ---- who owns what -----------------------------------------------------------------------------------------------

  SK_DEVICE bool owns(int slot) const { return (slot & (shape.parts - 1)) == part; }
  // In the layer: may lie beyond `hidden`.
  SK_DEVICE int unit(int slot) const { return first_unit() + lane / 4 + 8 * ((slot / 2) % 2); }
  SK_DEVICE int first_unit() const { return (rank * shape.groups + group) * kRnnGroup; }
  // In the tile of the batch; `column` of a lane is 0 ... 2 NT - 1, and slots share it.
  SK_DEVICE static int column(int slot) { return 2 * (slot / 4) + slot % 2; }
  SK_DEVICE int row_of(int column) const { return 8 * (column / 2) + 2 * (lane % 4) + column % 2; }
  SK_DEVICE int row(int slot) const { return row_of(column(slot)); }
  // Units of block `r` that exist.
  SK_DEVICE int units_of(int r) const {
    const int first = r * shape.groups * kRnnGroup, count = shape.hidden - first;
    return max(0, min(count, shape.groups * kRnnGroup));
  }

  // ---- set-up ------------------------------------------------------------------------------------------------------

  SK_DEVICE uint64_t* full(uint32_t buffer) const { return reinterpret_cast<uint64_t*>(shared) + buffer; }
  SK_DEVICE uint64_t* pairs_full(int kind, uint32_t buffer) const {
    return reinterpret_cast<uint64_t*>(shared) + 2 + 2 * kind + buffer;
  }
  SK_DEVICE unsigned operand_bytes() const {
    return static_cast<unsigned>(shape.blocks * shape.groups * kRnnGroup * PLANES * ROWS * ELEMENT);
  }
  SK_DEVICE unsigned pairs_bytes() const { return static_cast<unsigned>(shape.blocks * ROWS * 8); }

  SK_DEVICE void begin(const RnnTeamShape& s, unsigned char* shared_memory, int rank_in_team, unsigned char* global) {
    shape = s;
    shared = shared_memory;
    mailbox = global;
    rank = rank_in_team;
    lane = static_cast<int>(threadIdx.x % 32);
    warp = static_cast<int>(threadIdx.x / 32);
    group = warp / s.parts;
    part = warp % s.parts;
    turn = 0;
    clear_operands();
    if (s.tier == RnnTier::cluster && threadIdx.x == 0) {
      for (int b = 0; b < 2 + 2 * kRnnPairs; ++b) mbarrier_init(full(b), 1);
      mbarrier_fence_init();
      for (int b = 0; b < 2; ++b) {
        mbarrier_arrive_expect(full(b), operand_bytes());
        for (int kind = 0; kind < kRnnPairs; ++kind) mbarrier_arrive_expect(pairs_full(kind, b), pairs_bytes());
      }
    }
    __syncthreads();
  }
  SK_DEVICE void clear_operands() {
#pragma unroll 1
    for (int at = 16 * static_cast<int>(threadIdx.x); at < 2 * shape.chunks * ROWS * 64; at += 16 * blockDim.x) {
      *reinterpret_cast<uint4*>(shared + shape.operand + at) = uint4{0, 0, 0, 0};
    }
  }

  // weights(tile, unit, plane, k) gives A[tile][unit][plane][k ... k + PIECE - 1] as it lies in memory, zeros where
  // `unit` or a k is not below `hidden`.
  // All threads; the operands are zero afterwards.
  template <class Weights>
  SK_DEVICE void load_weights(const Weights& weights) {
    const int count = own_chunks();
    __syncthreads();
    if constexpr (HELD > 0) {
      // By way of the memory that later is the operands': the loop that loads stands there once for a chunk.
      uint4* way = reinterpret_cast<uint4*>(shared + shape.operand + 1024 * TILES * warp);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        if (i < count) load_chunk(weights, i, way);
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          held[i][tile][0] = held[i][tile][1] = uint4{0, 0, 0, 0};
          if (i < count) {
            held[i][tile][0] = way[64 * tile + lane];
            held[i][tile][1] = way[64 * tile + 32 + lane];
          }
        }
        __syncwarp();
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int i = HELD; i < count; ++i) load_chunk(weights, i, weight_at(i, 0));
    clear_operands();
    __syncthreads();
  }
  // A chunk of A as the product reads it, TILES KB. Of 16 bits: the two fragments of a lane, [fragment][lane]. float:
  // [k / 4][unit].
  template <class Weights>
  SK_DEVICE void load_chunk(const Weights& weights, int i, uint4* to) const {
    const int k = (part * shape.per_warp + i) * CHUNK, plane = PLANES == 1 ? 0 : k / shape.plane;
    const int k_plane = k - plane * shape.plane;
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile, to += 64) {
      if constexpr (ELEMENT == 2) {
        const int unit = first_unit() + lane / 4, at = k_plane + lane % 4 * PIECE;
        const uint4 low = weights(tile, unit, plane, at), high = weights(tile, unit + 8, plane, at);
        to[lane] = {low.x, high.x, low.y, high.y};
        to[32 + lane] = {low.z, high.z, low.w, high.w};
      } else {
        const int unit = first_unit() + lane % 16, at = k_plane + lane / 16 * PIECE;
        to[lane] = weights(tile, unit, plane, at);
        to[32 + lane] = weights(tile, unit, plane, at + 2 * PIECE);
      }
    }
  }
  // Behind the first operand and the weights.
  SK_DEVICE void start() {
    if (shape.tier == RnnTier::cluster) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }
  // Before another tile of the batch: every block of the team has done with the last operand, and a new first one may
  // be written. Grid only.
  SK_DEVICE void renew() {
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
      for (int plane = 0; plane < PLANES && owns(slot); ++plane) stage(slot, plane, T{});
    }
    publish();
    wait();
    __syncthreads();
    clear_operands();
    __syncthreads();
  }
  // No block of a cluster leaves while another may still write to it.
  SK_DEVICE void end() {
    if (shape.tier == RnnTier::cluster) {
      cluster_arrive();
      cluster_wait();
    }
  }

  // ---- the product -------------------------------------------------------------------------------------------------

  // Where element (k, row) of an operand lies.
  SK_DEVICE int offset(int k, int row) const {
    const int inside = k % CHUNK;
    return (k / CHUNK * ROWS + row) * 64 + ((inside / PIECE) ^ ((row / 2) % 4)) * 16 + inside % PIECE * ELEMENT;
  }
  SK_DEVICE unsigned char* buffer(uint32_t number) const {
    return shared + shape.operand + (number & 1) * static_cast<unsigned>(shape.chunks * ROWS * 64);
  }
  // The operand that comes next, before `start`.
  SK_DEVICE T* operand(int k, int row) const { return reinterpret_cast<T*>(buffer(turn) + offset(k, row)); }

  // half: of 16 bits, whether they are float16.
  SK_DEVICE void product(float (&sums)[TILES][SLOTS], bool half) const {
    if (ELEMENT == 2 && half) {
      product_of<Half>(sums);
    } else {
      product_of<BFloat16>(sums);
    }
  }
  template <class As>
  SK_DEVICE void product_of(float (&sums)[TILES][SLOTS]) const {
    const int count = own_chunks();
    const unsigned char* x = buffer(turn) + part * shape.per_warp * (ROWS * 64);
    float d[TILES][NT][4], e[TWO ? TILES : 1][NT][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) d[tile][n][j] = e[TWO ? tile : 0][n][j] = 0;
      }
    }
    if constexpr (ELEMENT == 2) {
      const unsigned char* x_lane = x + (lane / 4) * 64 + ((lane % 4) ^ ((lane / 8) % 4)) * 16;
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        if (i < count) {
          uint4 b[NT];
#pragma unroll
          for (int n = 0; n < NT; ++n) b[n] = *reinterpret_cast<const uint4*>(x_lane + (i * ROWS + 8 * n) * 64);
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
            multiply<As>(d[tile], e[TWO ? tile : 0], held[i][tile][0], held[i][tile][1], b);
        }
      }
      for (int i = HELD; i < count; ++i) {
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) b[n] = *reinterpret_cast<const uint4*>(x_lane + (i * ROWS + 8 * n) * 64);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const uint4* a = weight_at(i, tile);
          multiply<As>(d[tile], e[TWO ? tile : 0], a[lane], a[32 + lane], b);
        }
      }
    } else {
      for (int i = 0; i < count; ++i) {
#pragma unroll
        for (int piece = 0; piece < 4; ++piece) {
          float4 b[2 * NT];
#pragma unroll
          for (int c = 0; c < 2 * NT; ++c) {
            const int at = (i * ROWS + row_of(c)) * 64 + (piece ^ (lane % 4)) * 16;
            b[c] = *reinterpret_cast<const float4*>(x + at);
          }
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            const float4* a = reinterpret_cast<const float4*>(weight_at(i, tile)) + 16 * piece + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float4 w = a[8 * half];
#pragma unroll
              for (int c = 0; c < 2 * NT; ++c) {
                float& sum = d[tile][c / 2][2 * half + c % 2];
                sum = fmaf(w.w, b[c].w, fmaf(w.z, b[c].z, fmaf(w.y, b[c].y, fmaf(w.x, b[c].x, sum))));
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        sums[tile][slot] = d[tile][slot / 4][slot % 4];
        if constexpr (TWO) sums[tile][slot] += e[tile][slot / 4][slot % 4];
      }
    }
  }

  // Adds the parts up, in their order.
  SK_DEVICE void finish(float (&sums)[TILES][SLOTS]) const {
    if (shape.parts == 1) return;
    float* partial = reinterpret_cast<float*>(shared + shape.partial) + lane;
    const auto at = [&](int w, int tile, int slot) { return ((w * TILES + tile) * SLOTS + slot) * 32; };
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) partial[at(warp, tile, slot)] = sums[tile][slot];
    }
    __syncthreads();
    const float* first = partial + at(warp - part, 0, 0);
#pragma unroll 1
    for (int p = 0; p < shape.parts; ++p, first += TILES * SLOTS * 32) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        if (!owns(slot)) continue;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const float v = first[(tile * SLOTS + slot) * 32];
          sums[tile][slot] = p == 0 ? v : sums[tile][slot] + v;
        }
      }
    }
  }

  // ---- the exchange of operands ------------------------------------------------------------------------------------

  // One element of the next operand, of the pair that this lane owns.
  SK_DEVICE void stage(int slot, int plane, T value) const {
    if (shape.tier == RnnTier::block) {
      // Of the lane's first slot; 8 units on only flips bits, as a group begins with a whole number of 16 units.
      const int first = offset(plane * shape.plane + unit(0), row(0)) ^ (slot / 2 % 2 * 8 * ELEMENT);
      *reinterpret_cast<T*>(buffer(turn + 1) + first + slab_row(slot) * 64) = value;
    } else {  // a slab: [row][unit]
      reinterpret_cast<T*>(slab(slot, plane))[8 * (lane % 4) + lane / 4] = value;
    }
  }

  SK_DEVICE void publish() {
    if (shape.tier == RnnTier::cluster) {
      __syncwarp();
      send_to_cluster();
    } else if (shape.tier == RnnTier::grid) {
      __syncwarp();
      send_to_mailbox();
    }
    ++turn;
  }

  SK_DEVICE void wait() {
    if (shape.tier == RnnTier::block) {
      __syncthreads();
    } else if (shape.tier == RnnTier::cluster) {
      mbarrier_wait(full(turn & 1), ((turn - 1) / 2) & 1);
      // For the operand after the next: nobody sends that before having the next, of which this block's part is not
      // yet computed.
      if (threadIdx.x == 0) mbarrier_arrive_expect(full(turn & 1), operand_bytes());
    } else {
      read_mailbox();
      __syncthreads();
    }
  }

  // ---- sums over the units of a row --------------------------------------------------------------------------------

  // The sum over all lanes of the block that own the same row, for each of the lane's columns; all threads take part.
  SK_DEVICE void block_sum(float (&v)[2 * NT]) const {
    float* sums = reinterpret_cast<float*>(shared + shape.sums);
#pragma unroll
    for (int c = 0; c < 2 * NT; ++c) {
      for (int distance = 4; distance < 32; distance *= 2) v[c] += __shfl_xor_sync(0xffffffffu, v[c], distance);
      if (lane < 4) sums[warp * ROWS + row_of(c)] = v[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2 * NT; ++c) {
      v[c] = sums[row_of(c)];
#pragma unroll 1
      for (int w = 1; w < shape.groups * shape.parts; ++w) v[c] += sums[w * ROWS + row_of(c)];
    }
    __syncthreads();
  }

  // Gives the other blocks this block's pair of numbers for each row, and waits for theirs: `shared_pair`. Every thread
  // brings the pairs of its columns, the same in all lanes of a row. One exchange of a kind with every operand: they
  // are numbered alike. In a team of one block there is nothing to do, and nothing to ask for.
  SK_DEVICE void share(int kind, const float2 (&v)[2 * NT]) {
    if (shape.tier == RnnTier::block) return;
    const uint32_t number = turn;
    float2* mine = pairs(kind, number) + rank * ROWS;
    if (shape.tier == RnnTier::cluster) {
      if (warp == 0) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const float2 a = v[2 * n], b = v[2 * n + 1];
          const uint4 packet = {device_bits<uint32_t>(a.x), device_bits<uint32_t>(a.y), device_bits<uint32_t>(b.x),
                                device_bits<uint32_t>(b.y)};
#pragma unroll 1
          for (int peer = lane / 4; peer < shape.blocks; peer += 8) {
            store_async_16(mine + row_of(2 * n), pairs_full(kind, number & 1), peer, packet);
          }
        }
      }
      mbarrier_wait(pairs_full(kind, number & 1), (number / 2) & 1);
      if (threadIdx.x == 0) mbarrier_arrive_expect(pairs_full(kind, number & 1), pairs_bytes());
    } else {
      uint4* box = pair_box(kind, number);
      if (warp == 0 && lane < 4) {
#pragma unroll
        for (int c = 0; c < 2 * NT; ++c) {
          store_fresh_16(box + rank * ROWS + row_of(c),
                         {device_bits<uint32_t>(v[c].x), device_bits<uint32_t>(v[c].y), 0, number + 1});
        }
      }
#pragma unroll 1
      for (int at = threadIdx.x; at < shape.blocks * ROWS; at += blockDim.x) {
        uint4 packet = load_fresh_16(box + at);
        while (packet.w != number + 1) {
          pause();
          packet = load_fresh_16(box + at);
        }
        pairs(kind, number)[at] = {device_bits<float>(packet.x), device_bits<float>(packet.y)};
      }
      __syncthreads();
    }
  }
  // Of block r, for the lane's column, from the last `share` of that kind.
  SK_DEVICE float2 shared_pair(int kind, int r, int column) const {
    return pairs(kind, turn)[r * ROWS + row_of(column)];
  }

  // ---- details -----------------------------------------------------------------------------------------------------

  SK_DEVICE int own_chunks() const { return min(shape.per_warp, shape.chunks - part * shape.per_warp); }
  SK_DEVICE uint4* weight_at(int i, int tile) const {
    const int kept = (warp * (shape.per_warp - HELD) + i - HELD) * TILES + tile;
    return reinterpret_cast<uint4*>(shared + shape.weights + 1024 * kept);
  }
  // Two fragments of 16 k: the halves of 16 neighbouring bytes of X.
  template <class As>
  SK_DEVICE static void multiply(float (&d)[NT][4], float (&e)[NT][4], uint4 first, uint4 second,
                                 const uint4 (&b)[NT]) {
    if constexpr (ELEMENT == 2) {
      const uint32_t a0[4] = {first.x, first.y, first.z, first.w}, a1[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint32_t b0[2] = {b[n].x, b[n].y}, b1[2] = {b[n].z, b[n].w};
        mma_16816<As>(d[n], a0, b0);
        if constexpr (TWO) {
          mma_16816<As>(e[n], a1, b1);
        } else {
          mma_16816<As>(d[n], a1, b1);
        }
      }
    }
  }

  SK_DEVICE unsigned char* slab(int slot, int plane) const {
    return shared + shape.staging + ((warp * SLOTS + slot) * PLANES + plane) * SLAB;
  }
  // The first unit of a slab of group `of` (counted over the team), and the first of its rows, which are 2 apart.
  SK_DEVICE static int slab_unit(int of, int slot) { return of * kRnnGroup + 8 * ((slot / 2) % 2); }
  SK_DEVICE static int slab_row(int slot) { return 8 * (slot / 4) + slot % 2; }

  SK_DEVICE void send_to_cluster() const {
    constexpr int SENT = SLAB / 16;  // pieces of 16 bytes
    const int p = lane % SENT;
    const int row_step = p * PIECE / 8, unit_step = p * PIECE % 8;
    unsigned char* to = buffer(turn + 1);
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!owns(slot)) continue;
      const int u = slab_unit(rank * shape.groups + group, slot) + unit_step, r = slab_row(slot) + 2 * row_step;
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        const uint4 v = reinterpret_cast<const uint4*>(slab(slot, plane))[p];
        unsigned char* at = to + offset(plane * shape.plane + u, r);
#pragma unroll 1
        for (int i = lane / SENT; i < shape.blocks; i += 32 / SENT) {
          const int peer = i + rank < shape.blocks ? i + rank : i + rank - shape.blocks;  // not all to the same first
          store_async_16(at, full((turn + 1) & 1), peer, v);
        }
      }
    }
  }

  // [buffer][group of the team][slot][plane][packet], then the pairs [kind][buffer][block][row].
  SK_DEVICE uint4* box(uint32_t number) const {
    const int64_t packets = static_cast<int64_t>(shape.blocks * shape.groups) * (SLOTS * PLANES * PACKETS);
    return reinterpret_cast<uint4*>(mailbox) + (number & 1) * packets;
  }
  SK_DEVICE uint4* pair_box(int kind, uint32_t number) const {
    return box(0) + 2 * (box(1) - box(0)) + (2 * kind + (number & 1)) * (shape.blocks * ROWS);
  }
  SK_DEVICE float2* pairs(int kind, uint32_t number) const {
    return reinterpret_cast<float2*>(shared + shape.pairs) + (2 * kind + (number & 1)) * (shape.blocks * ROWS);
  }

  SK_DEVICE void send_to_mailbox() const {
    uint4* to = box(turn + 1) + (rank * shape.groups + group) * (SLOTS * PLANES * PACKETS);
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!owns(slot) || lane >= PACKETS) continue;
#pragma unroll
      for (int plane = 0; plane < PLANES; ++plane) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(slab(slot, plane));
        uint4 packet = {words[3 * lane], 0, 0, turn + 1};
        if (3 * lane + 1 < SLAB / 4) packet.y = words[3 * lane + 1];
        if (3 * lane + 2 < SLAB / 4) packet.z = words[3 * lane + 2];
        store_fresh_16(to + (slot * PLANES + plane) * PACKETS + lane, packet);
      }
    }
  }

  SK_DEVICE void read_mailbox() const {
    const uint4* from = box(turn);
    unsigned char* to = buffer(turn);
    const int total = shape.blocks * shape.groups * (SLOTS * PLANES * PACKETS);
    constexpr int FLIGHT = 4;  // packets asked for at once
#pragma unroll 1
    for (int first = threadIdx.x; first < total; first += FLIGHT * blockDim.x) {
      uint4 packet[FLIGHT];
      bool missing = true;
      while (missing) {
        missing = false;
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) {
          const int at = first + j * static_cast<int>(blockDim.x);
          packet[j] = uint4{0, 0, 0, turn};
          if (at < total) packet[j] = load_fresh_16(from + at);
          missing = missing || packet[j].w != turn;
        }
        if (missing) pause();
      }
#pragma unroll
      for (int j = 0; j < FLIGHT; ++j) {
        const int at = first + j * static_cast<int>(blockDim.x);
        if (at < total) unpack(to, at, packet[j]);
      }
    }
  }
  SK_DEVICE void unpack(unsigned char* to, int at, uint4 packet) const {
    const int p = at % PACKETS, plane = at / PACKETS % PLANES, slot = at / (PACKETS * PLANES) % SLOTS;
    const int of = at / (PACKETS * PLANES * SLOTS);
    constexpr int LINE = 2 * ELEMENT;  // words of a row of a slab
    const uint32_t words[3] = {packet.x, packet.y, packet.z};
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int w = 3 * p + j;
      if (w < SLAB / 4) {
        const int u = plane * shape.plane + slab_unit(of, slot) + w % LINE * 4 / ELEMENT;
        *reinterpret_cast<uint32_t*>(to + offset(u, slab_row(slot) + 2 * (w / LINE))) = words[j];
      }
    }
  }
};

}  // namespace seqkern
