// How the blocks of a team exchange the result of a step: the operand of the next product, and pairs of numbers for
// layer norm. What a team is: team.cuh. Torch-free.
//
// Operand. X, [k][row], lies in shared memory twice, as [chunk][row][64 bytes]; a chunk is 32 hidden units of 16 bits
// or 16 of float32. The four 16-byte pieces of a row are permuted by row / 2, so that neither fragment loads (16 bytes
// a lane) nor stores of single elements have bank conflicts.
//
// Exchange. Operands are numbered; number n lies in buffer n & 1. A slot of a warp is 8 units x 4 rows, sent as one
// slab. Every warp publishes the slabs it finished:
//     block    one block: stores into the buffer, then __syncthreads.
//     cluster  asynchronous stores to all blocks of the cluster, itself included; the receiver's mbarrier counts them.
//     grid     through global memory: 16-byte packets of 3 words of data, with the operand's number in each half.
//              Whoever reads the numbers has the data, so blocks need no barrier between them. All blocks must be
//              resident.
// Two buffers are enough: a block publishes number n + 2 only when it has all of n + 1, which every warp of every block
// published after its last read of n. The order breaks where a team goes on to another tile of the batch: `renew`.
#pragma once

#include "common/cuda/device.cuh"

namespace seqkern {

enum class RnnTier : int { block = 0, cluster = 1, grid = 2 };

// How the work is divided, and offsets in shared memory (bytes). Made by the host (`rnn_team_shape`).
struct RnnTeamShape {
  RnnTier tier;
  int blocks;    // of a team
  int groups;    // groups of 16 units in a block
  int parts;     // warps that share a group, a power of 2
  int hidden;    // hidden units
  int chunks;    // along k
  int per_warp;  // chunks of a warp
  int operand, partial, staging, sums, pairs, parameters, weights;
  int shared_bytes;
  long long mailbox_bytes;  // a team's, in global memory; grid tier only
};

constexpr int kRnnGroup = 16;  // hidden units of a group
constexpr int kRnnPairs = 2;   // most exchanges of pairs in a step: kinds 0 and 1

// Chunks of weights that a warp keeps in registers: 128 registers a lane, or 64 with twice as many accumulators.
constexpr int rnn_held(int element, int gates, int nt) { return element == 2 ? 16 / nt / gates : 0; }
// Rows of parameters that a step reads, one number a unit: biases, and weights and biases of the norms.
constexpr int rnn_parameters(int gates, bool norm) {
  return (gates == 1 ? 1 : 4) + (norm ? 2 * gates + (gates == 4 ? 2 : 0) : 0);
}
constexpr int rnn_packets(int element) { return (8 * element + 2) / 3; }  // of a slab in the mailbox

// `norm`: reserve room for exchanges of pairs.
inline RnnTeamShape rnn_team_shape(RnnTier tier, int hidden, int blocks, int groups, int parts, int element, int gates,
                                   int nt, bool norm) {
  RnnTeamShape s{};
  const int chunk = 64 / element, rows = 8 * nt, slots = 4 * nt, warps = groups * parts;
  s.tier = tier;
  s.blocks = blocks;
  s.groups = groups;
  s.parts = parts;
  s.hidden = hidden;
  s.chunks = (blocks * groups * kRnnGroup + chunk - 1) / chunk;
  s.per_warp = (s.chunks + parts - 1) / parts;
  const int in_shared = s.per_warp > rnn_held(element, gates, nt) ? s.per_warp - rnn_held(element, gates, nt) : 0;
  int at = 128;  // after the barriers
  s.operand = at;
  at += 2 * s.chunks * rows * 64;
  s.partial = at;
  if (parts > 1) at += warps * gates * slots * 128;
  s.staging = at;
  if (tier != RnnTier::block) at += warps * slots * 32 * element;
  s.sums = at;
  if (norm) at += warps * rows * 4;
  s.pairs = at;
  if (norm && tier != RnnTier::block) at += kRnnPairs * 2 * blocks * rows * 8;
  s.parameters = at;
  at += rnn_parameters(gates, norm) * groups * kRnnGroup * 4;
  s.weights = at;
  long long bytes = at + 1024LL * warps * in_shared * gates;
  // Weights for the registers are loaded through the operands' memory, which must have room.
  if (rnn_held(element, gates, nt) > 0 && bytes < s.operand + 1024LL * warps * gates) {
    bytes = s.operand + 1024LL * warps * gates;
  }
  s.shared_bytes = bytes > (1 << 30) ? 1 << 30 : static_cast<int>(bytes);
  if (tier == RnnTier::grid) {
    const long long slabs = 2LL * blocks * groups * slots;
    s.mailbox_bytes = 16 * (slabs * rnn_packets(element) + (norm ? kRnnPairs * 2LL * blocks * rows : 0));
  }
  return s;
}

// A 16-bit element: bfloat16 or float16, chosen at run time. They differ only in the product and the rounding; a kernel
// each would double the compilation.
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
template <class T, int NT>
struct RnnExchange {
  static constexpr int ELEMENT = sizeof(T), CHUNK = 64 / ELEMENT, PIECE = 16 / ELEMENT;  // elements
  static constexpr int ROWS = 8 * NT, SLOTS = 4 * NT;
  static constexpr int SLAB = 32 * ELEMENT, PACKETS = rnn_packets(ELEMENT);  // bytes; 16-byte packets in the mailbox

  RnnTeamShape shape;
  unsigned char *shared, *mailbox;
  int lane, warp, group, part, rank;
  uint32_t turn;  // number of the current or next operand

  // ---- who owns what -----------------------------------------------------------------------------------------------

  SK_DEVICE bool owns(int slot) const { return (slot & (shape.parts - 1)) == part; }
  // Index in the layer; may be beyond `hidden`.
  SK_DEVICE int unit(int slot) const { return first_unit() + lane / 4 + 8 * ((slot / 2) % 2); }
  SK_DEVICE int first_unit() const { return (rank * shape.groups + group) * kRnnGroup; }
  // Index in the tile of the batch. A lane has columns 0 ... 2 NT - 1; several slots share one.
  SK_DEVICE static int column(int slot) { return 2 * (slot / 4) + slot % 2; }
  SK_DEVICE int row_of(int column) const { return 8 * (column / 2) + 2 * (lane % 4) + column % 2; }
  SK_DEVICE int row(int slot) const { return row_of(column(slot)); }
  // Units of block `r` below `hidden`.
  SK_DEVICE int units_of(int r) const {
    const int first = r * shape.groups * kRnnGroup, count = shape.hidden - first;
    return max(0, min(count, shape.groups * kRnnGroup));
  }

  // ---- set-up and end ----------------------------------------------------------------------------------------------

  SK_DEVICE uint64_t* full(uint32_t buffer) const { return reinterpret_cast<uint64_t*>(shared) + buffer; }
  SK_DEVICE uint64_t* pairs_full(int kind, uint32_t buffer) const {
    return reinterpret_cast<uint64_t*>(shared) + 2 + 2 * kind + buffer;
  }
  SK_DEVICE unsigned operand_bytes() const {
    return static_cast<unsigned>(shape.blocks * shape.groups * kRnnGroup * ROWS * ELEMENT);
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

  // Call after writing the first operand and loading the weights.
  SK_DEVICE void start() {
    if (shape.tier == RnnTier::cluster) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }
  }
  // Call before another tile of the batch: waits until every block of the team is done with the last operand, so that a
  // new first one may be written. Grid tier only.
  SK_DEVICE void renew() {
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (owns(slot)) stage(slot, T{});
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

  // ---- operands ----------------------------------------------------------------------------------------------------

  // Offset of element (k, row) of an operand.
  SK_DEVICE int offset(int k, int row) const {
    const int inside = k % CHUNK;
    return (k / CHUNK * ROWS + row) * 64 + ((inside / PIECE) ^ ((row / 2) % 4)) * 16 + inside % PIECE * ELEMENT;
  }
  SK_DEVICE unsigned char* buffer(uint32_t number) const {
    return shared + shape.operand + (number & 1) * static_cast<unsigned>(shape.chunks * ROWS * 64);
  }
  // Element (k, row) of the first operand, to be written before `start`.
  SK_DEVICE T* operand(int k, int row) const { return reinterpret_cast<T*>(buffer(turn) + offset(k, row)); }

  // Writes one element of the next operand, of a pair that this lane owns.
  SK_DEVICE void stage(int slot, T value) const {
    if (shape.tier == RnnTier::block) {
      // Offset of the lane's first slot. Adding 8 units only flips bits, because a group starts at a multiple of 16
      // units.
      const int first = offset(unit(0), row(0)) ^ (slot / 2 % 2 * 8 * ELEMENT);
      *reinterpret_cast<T*>(buffer(turn + 1) + first + slab_row(slot) * 64) = value;
    } else {  // a slab: [row][unit]
      reinterpret_cast<T*>(slab(slot))[8 * (lane % 4) + lane / 4] = value;
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
    __syncwarp();  // all lanes have read the slab, so it may be written again
    ++turn;
  }

  SK_DEVICE void wait() {
    if (shape.tier == RnnTier::block) {
      __syncthreads();
    } else if (shape.tier == RnnTier::cluster) {
      mbarrier_wait_cluster(full(turn & 1), ((turn - 1) / 2) & 1);
      // Expects the operand after the next. Nobody sends that before having the next operand, of which this block's
      // share is not computed yet.
      if (threadIdx.x == 0) mbarrier_arrive_expect(full(turn & 1), operand_bytes());
    } else {
      read_mailbox();
      __syncthreads();
    }
  }

  // ---- sums over the units of a row --------------------------------------------------------------------------------

  // Sums over all lanes of the block that have the same row, for each of the lane's columns. All threads call it.
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

  // Sends this block's pair of numbers for each row to the other blocks and waits for theirs (`shared_pair`). Every
  // thread passes the pairs of its columns, equal in all lanes of a row. Each kind is exchanged at most once an
  // operand, whose number it uses. A team of one block must not call this.
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
      mbarrier_wait_cluster(pairs_full(kind, number & 1), (number / 2) & 1);
      if (threadIdx.x == 0) mbarrier_arrive_expect(pairs_full(kind, number & 1), pairs_bytes());
    } else {
      uint4* box = pair_box(kind, number);
      if (warp == 0 && lane < 4) {
#pragma unroll
        for (int c = 0; c < 2 * NT; ++c) {
          store_fresh_16(box + rank * ROWS + row_of(c),
                         {device_bits<uint32_t>(v[c].x), number + 1, device_bits<uint32_t>(v[c].y), number + 1});
        }
      }
#pragma unroll 1
      for (int at = threadIdx.x; at < shape.blocks * ROWS; at += blockDim.x) {
        uint4 packet = load_fresh_16(box + at);
        while (packet.y != number + 1 || packet.w != number + 1) {
          pause();
          packet = load_fresh_16(box + at);
        }
        pairs(kind, number)[at] = {device_bits<float>(packet.x), device_bits<float>(packet.z)};
      }
      __syncthreads();
    }
  }
  // The pair of block r for the lane's column, from the last `share` of that kind.
  SK_DEVICE float2 shared_pair(int kind, int r, int column) const {
    return pairs(kind, turn)[r * ROWS + row_of(column)];
  }

  // ---- details -----------------------------------------------------------------------------------------------------

  SK_DEVICE unsigned char* slab(int slot) const { return shared + shape.staging + (warp * SLOTS + slot) * SLAB; }
  // The first unit of a slab of group `of` (counted over the team), and the first of its rows, which are 2 apart.
  SK_DEVICE static int slab_unit(int of, int slot) { return of * kRnnGroup + 8 * ((slot / 2) % 2); }
  SK_DEVICE static int slab_row(int slot) { return 8 * (slot / 4) + slot % 2; }

  SK_DEVICE void send_to_cluster() const {
    constexpr int SENT = SLAB / 16;  // 16-byte pieces
    const int p = lane % SENT;
    const int row_step = p * PIECE / 8, unit_step = p * PIECE % 8;
    unsigned char* to = buffer(turn + 1);
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!owns(slot)) continue;
      const int u = slab_unit(rank * shape.groups + group, slot) + unit_step, r = slab_row(slot) + 2 * row_step;
      const uint4 v = reinterpret_cast<const uint4*>(slab(slot))[p];
      unsigned char* at = to + offset(u, r);
#pragma unroll 1
      for (int i = lane / SENT; i < shape.blocks; i += 32 / SENT) {
        const int peer = i + rank < shape.blocks ? i + rank : i + rank - shape.blocks;  // starts at its own rank
        store_async_16(at, full((turn + 1) & 1), peer, v);
      }
    }
  }

  // [buffer][group of the team][slot][packet], then the pairs [kind][buffer][block][row].
  SK_DEVICE uint4* box(uint32_t number) const {
    const int64_t packets = static_cast<int64_t>(shape.blocks * shape.groups) * (SLOTS * PACKETS);
    return reinterpret_cast<uint4*>(mailbox) + (number & 1) * packets;
  }
  SK_DEVICE uint4* pair_box(int kind, uint32_t number) const {
    return box(0) + 2 * (box(1) - box(0)) + (2 * kind + (number & 1)) * (shape.blocks * ROWS);
  }
  SK_DEVICE float2* pairs(int kind, uint32_t number) const {
    return reinterpret_cast<float2*>(shared + shape.pairs) + (2 * kind + (number & 1)) * (shape.blocks * ROWS);
  }

  // The tag in the upper half of a packet's second and fourth word: one in each 8 bytes, because only 8 bytes are
  // relied on to arrive whole. A mailbox still holds the operand two before this one, or zeros.
  SK_DEVICE static uint32_t tag(uint32_t number) { return number << 16; }
  SK_DEVICE void send_to_mailbox() const {
    uint4* to = box(turn + 1) + (rank * shape.groups + group) * (SLOTS * PACKETS);
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!owns(slot) || lane >= PACKETS) continue;
      const uint32_t* words = reinterpret_cast<const uint32_t*>(slab(slot));
      uint4 packet = {words[3 * lane], tag(turn + 1), 0, tag(turn + 1)};
      if (3 * lane + 1 < SLAB / 4) packet.z = words[3 * lane + 1];
      if (3 * lane + 2 < SLAB / 4) {
        packet.y |= words[3 * lane + 2] & 0xFFFF;
        packet.w |= words[3 * lane + 2] >> 16;
      }
      store_fresh_16(to + slot * PACKETS + lane, packet);
    }
  }

  SK_DEVICE void read_mailbox() const {
    const uint4* from = box(turn);
    unsigned char* to = buffer(turn);
    const int total = shape.blocks * shape.groups * (SLOTS * PACKETS);
    constexpr int FLIGHT = 4;  // packets in flight
#pragma unroll 1
    for (int first = threadIdx.x; first < total; first += FLIGHT * blockDim.x) {
      uint4 packet[FLIGHT];
      bool missing = true;
      while (missing) {
        missing = false;
#pragma unroll
        for (int j = 0; j < FLIGHT; ++j) {
          const int at = first + j * static_cast<int>(blockDim.x);
          packet[j] = uint4{0, tag(turn), 0, tag(turn)};
          if (at < total) packet[j] = load_fresh_16(from + at);
          missing = missing || ((packet[j].y ^ tag(turn)) | (packet[j].w ^ tag(turn))) >> 16 != 0;
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
    const int p = at % PACKETS, slot = at / PACKETS % SLOTS, of = at / (PACKETS * SLOTS);
    constexpr int LINE = 2 * ELEMENT;  // words in a row of a slab
    const uint32_t words[3] = {packet.x, packet.z, (packet.y & 0xFFFF) | packet.w << 16};
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      const int w = 3 * p + j;
      if (w < SLAB / 4) {
        const int u = slab_unit(of, slot) + w % LINE * 4 / ELEMENT;
        *reinterpret_cast<uint32_t*>(to + offset(u, slab_row(slot) + 2 * (w / LINE))) = words[j];
      }
    }
  }
};

}  // namespace seqkern
