// The team of thread blocks that runs the backward scan of a direction: weights, product and exchange. The idea:
// backward.cuh.
#pragma once

#include <algorithm>

#include "cell.cuh"

namespace seqkern {
namespace rnn_backward {

enum Exchange { kBlock, kCluster, kGrid };

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 8;         // of the batch, in a tile
constexpr int kPack = 4;         // rows of one unit in a packet
constexpr unsigned kEpochs = 3;  // values of the two epoch bits beside 0, which means nothing has arrived
constexpr int kShortest = 32;    // units up to which every thread has one element
constexpr int kLongest = 128;    // most units of a block

// Tiles (16 units by all gates of a block) that a warp keeps in registers: 96 registers a thread, 64 with layer norm.
// Only where a thread has one element, which leaves room, and the block's gates are of at most 32 units.
constexpr int held_tiles(int cell, int element, int units, bool norm) {
  return element == 2 && units <= kShortest ? (norm ? 8 : 12) / rnn_gates(cell) : 0;
}

// Sums over a row's units that layer norm needs, rounded up to whole packets.
constexpr int norm_sums(int cell) { return cell == kRnnLstm ? 8 : 4; }

// How a block divides its work and its shared memory. Made by the host.
struct Layout {
  int groups;  // groups of 8 units in the layer
  int units;   // most units of a block
  int k, m;    // the block's rows of W, and all units: rounded up to tiles
  int planes;  // parts that `sum` adds
  int row_planes;
  int64_t da, parts, where, barriers, rows, total;  // offsets in bytes; the weights are at 0
};

// `element`: bytes of an element of the dtype.
inline Layout layout_of(int hidden, int cell, int blocks, Exchange exchange, int element, bool norm) {
  Layout l;
  l.groups = (hidden + 7) / 8;
  l.units = (l.groups + blocks - 1) / blocks * 8;
  const int tile = element == 2 ? 16 : 1;
  l.k = (rnn_gates(cell) * l.units + tile - 1) / tile * tile;
  l.m = (hidden + 15) / 16 * 16;
  const int packets = kRows * norm_sums(cell) / 4;
  l.planes = exchange == kGrid ? std::min(blocks, kThreads / (2 * l.units)) : blocks;
  l.row_planes = exchange == kGrid ? std::min(blocks, kThreads / packets) : blocks;
  const int in_shared = std::max(0, l.m - 16 * kWarps * held_tiles(cell, element, l.units, norm));
  l.da = int64_t{l.k} * in_shared * element;
  l.parts = l.da + 2 * int64_t{l.k} * kRows * element;
  l.where = l.parts + int64_t{exchange == kCluster ? 2 : 1} * l.planes * l.units * kRows * 4;
  l.barriers = l.where + (l.groups * 4 + 15) / 16 * 16;
  l.rows = l.barriers + 32;
  // 4 rows from every warp, all rows of every plane.
  l.total = l.rows + (norm ? 16 * (kWarps * packets / 2 + l.row_planes * packets) : 0);
  return l;
}

// The team's shape and mailboxes.
struct TeamShape {
  Exchange exchange;
  int blocks;  // of a team
  int teams;   // of a direction
  int first_direction;
  Layout layout;
  uint4* mailbox;      // grid tier: [buffer][receiving block][sending rank][half][unit]
  uint4* row_mailbox;  // layer norm: [sending block][row][sums / 4]
};

// The first group of each rank. Every rank has at least one: there are never more ranks than groups.
SK_DEVICE int first_group(int rank, int groups, int blocks) {
  return static_cast<int>(static_cast<int64_t>(rank) * groups / blocks);
}

// ---- packets of the grid ------------------------------------------------------------------------------------------

// Tags each 8 bytes with the epoch, because only 8 bytes are relied on to arrive whole. A mailbox still holds the
// exchange before this one, or the one before that.
SK_DEVICE uint4 tagged(float4 v, unsigned epoch) {
  const unsigned low = epoch & 1, high = epoch >> 1;
  return {(device_bits<uint32_t>(v.x) & ~1u) | low, (device_bits<uint32_t>(v.y) & ~1u) | high,
          (device_bits<uint32_t>(v.z) & ~1u) | low, (device_bits<uint32_t>(v.w) & ~1u) | high};
}
SK_DEVICE float untagged(uint32_t v) { return device_bits<float>(v & ~1u); }
SK_DEVICE bool arrived(uint4 v, unsigned epoch) {
  return ((v.x & 1) | (v.y & 1) << 1) == epoch && ((v.z & 1) | (v.w & 1) << 1) == epoch;
}

// Sums a packet from each of the senders first, first + stride ... `inbox` points to sender 0's.
SK_DEVICE float4 collect(const uint4* inbox, int64_t between, int first, int stride, int senders, unsigned epoch) {
  constexpr int kAhead = 4;
  float4 sums = {0, 0, 0, 0};
  for (int s = first; s < senders; s += kAhead * stride) {
    uint4 packet[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (s + i * stride < senders) packet[i] = load_fresh_16(inbox + (s + i * stride) * between);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (s + i * stride < senders) {
        while (!arrived(packet[i], epoch)) {
          pause();
          packet[i] = load_fresh_16(inbox + (s + i * stride) * between);
        }
        sums.x += untagged(packet[i].x), sums.y += untagged(packet[i].y);
        sums.z += untagged(packet[i].z), sums.w += untagged(packet[i].w);
      }
    }
  }
  return sums;
}

// ---- the team -----------------------------------------------------------------------------------------------------

// CELL: kRnnLstm, kRnnGru, or kRnnTanh for both simple cells. E: elements of a thread. A warp's lanes are 8 units by 4
// rows: global memory is read in whole 32-byte sectors, and the parts (4 rows of a unit, then 4 rows of the next)
// without bank conflicts.
template <class T, int CELL, int E, bool NORM>
struct Team {
  static constexpr int G = rnn_gates(CELL);
  static constexpr int HELD = held_tiles(CELL, sizeof(T), 32 * E, NORM), HELD_K = HELD > 0 ? G * kShortest / 16 : 1;
  static constexpr int SUMS = norm_sums(CELL), PACKETS = SUMS / 4;  // of a row

  const TeamShape& shape;
  const Layout& layout;
  unsigned char* shared;
  int hidden, rank, number, direction;  // number: index of the team
  int first_unit, mine;                 // the block's units
  int thread, lane, warp;
  int half, u, row_in_tile;  // element i is unit i * 32 + u of the block; all elements share the row
  uint32_t count = 0;        // exchanges so far
  uint4 held[HELD > 0 ? HELD : 1][HELD_K];

  SK_DEVICE Team(const TeamShape& s, int hidden_size, unsigned char* memory)
      : shape(s),
        layout(s.layout),
        shared(memory),
        hidden(hidden_size),
        rank(static_cast<int>(blockIdx.x) % s.blocks),
        number(static_cast<int>(blockIdx.x) / s.blocks),
        direction(s.first_direction + number / s.teams),
        thread(static_cast<int>(threadIdx.x)),
        lane(thread % 32),
        warp(thread / 32) {
    const int begin = first_group(rank, layout.groups, s.blocks);
    first_unit = begin * 8;
    mine = min((first_group(rank + 1, layout.groups, s.blocks) - begin) * 8, hidden - first_unit);
    half = warp % 2, u = warp / 2 * 8 + lane % 8, row_in_tile = half * kPack + lane / 8;
  }

  SK_DEVICE unsigned buffer() const { return count % 2; }
  SK_DEVICE unsigned epoch() const { return 1 + count % kEpochs; }
  SK_DEVICE unsigned char* da() const { return shared + layout.da + buffer() * (layout.k * kRows * sizeof(T)); }
  SK_DEVICE float* parts() const { return reinterpret_cast<float*>(shared + layout.parts); }
  SK_DEVICE uint32_t* where() const { return reinterpret_cast<uint32_t*>(shared + layout.where); }
  SK_DEVICE uint64_t* barriers() const { return reinterpret_cast<uint64_t*>(shared + layout.barriers); }

  // ---- weights -----------------------------------------------------------------------------------------------------

  // The lane's 8 elements of tile (m, k): element (row, column) is W[the block's gate `column`, unit `row`].
  SK_DEVICE uint4 fragment(const T* w_hh, int m, int k) const {
    uint32_t words[4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int unit = m * 16 + lane / 4 + (e / 2 % 2) * 8;
      const int row = k * 16 + lane % 4 * 2 + e % 2 + e / 4 * 8;
      const int gate = row / layout.units, place = row % layout.units;
      if (gate < G && place < mine && unit < hidden) {
        const T w = w_hh[(int64_t{gate} * hidden + first_unit + place) * hidden + unit];
        words[e / 2] |= static_cast<uint32_t>(device_bits<uint16_t>(w)) << (e % 2 * 16);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }

  // w_hh: (G H, H) of the direction. Gates that are not the block's become zeros.
  SK_DEVICE void load_weights(const T* w_hh) {
    if constexpr (sizeof(T) == 2) {
      const int k_tiles = layout.k / 16;
      if constexpr (HELD > 0) {
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
#pragma unroll
          for (int k = 0; k < HELD_K; ++k) {
            held[j][k] = k < k_tiles ? fragment(w_hh, warp + j * kWarps, k) : uint4{0, 0, 0, 0};
          }
        }
      }
      for (int m = HELD * kWarps + warp; m < layout.m / 16; m += kWarps) {
        for (int k = 0; k < k_tiles; ++k) tile(m, k)[lane] = fragment(w_hh, m, k);
      }
    } else {
      float* to = reinterpret_cast<float*>(shared);
      for (int at = thread; at < layout.k * layout.m; at += kThreads) {
        const int unit = at % layout.m, row = at / layout.m;
        const int gate = row / layout.units, place = row % layout.units;
        const bool there = place < mine && unit < hidden;
        to[at] = there ? w_hh[(int64_t{gate} * hidden + first_unit + place) * hidden + unit] : 0.0f;
      }
    }
  }
  SK_DEVICE uint4* tile(int m, int k) const {
    return reinterpret_cast<uint4*>(shared) + ((m - HELD * kWarps) * (layout.k / 16) + k) * 32;
  }

  // Everything before the first step. All threads call it.
  SK_DEVICE void begin(const T* w_hh) {
    load_weights(w_hh);
    for (int at = thread; at < 2 * layout.k * kRows; at += kThreads) {
      reinterpret_cast<T*>(shared + layout.da)[at] = T{};
    }
    for (int r = thread; r < shape.blocks; r += kThreads) {  // the owner of each group, and its first group
      const int from = first_group(r, layout.groups, shape.blocks),
                to = first_group(r + 1, layout.groups, shape.blocks);
      for (int group = from; group < to; ++group) where()[group] = static_cast<uint32_t>(r) << 16 | from;
    }
    if (shape.exchange == kCluster && thread == 0) {
      for (int i = 0; i < 3; ++i) mbarrier_init(barriers() + i, 1);
      mbarrier_fence_init();
    }
    __syncthreads();
    meet();
  }
  // Cluster barrier: nobody writes to a block that has not started or has already left.
  SK_DEVICE void meet() const {
    if (shape.exchange != kCluster) return;
    cluster_arrive();
    cluster_wait();
  }

  // ---- the product -------------------------------------------------------------------------------------------------

  // Computes the parts of dh for all units and sends them to the units' owners, 4 rows of a unit at a time. Call after
  // a barrier, when da is complete.
  SK_DEVICE void product() const {
    if constexpr (sizeof(T) == 2) {
      const int k_tiles = layout.k / 16;
      if constexpr (HELD > 0) {
#pragma unroll
        for (int j = 0; j < HELD; ++j) {
          if (warp + j * kWarps < layout.m / 16) {
            float sums[2][4] = {};
#pragma unroll
            for (int k = 0; k < HELD_K; k += 2) {
              if (k >= k_tiles) continue;
              uint32_t b[4];
              operand(k, b);
              multiply(sums[0], held[j][k], b[0], b[1]);
              if (k + 1 < HELD_K) multiply(sums[1], held[j][min(k + 1, HELD_K - 1)], b[2], b[3]);
            }
            send_tile(warp + j * kWarps, sums);
          }
        }
      }
      for (int m = HELD * kWarps + warp; m < layout.m / 16; m += kWarps) {
        float sums[2][4] = {};
        for (int k = 0; k < k_tiles; k += 2) {
          uint32_t b[4];
          operand(k, b);
          multiply(sums[0], tile(m, k)[lane], b[0], b[1]);
          if (k + 1 < k_tiles) multiply(sums[1], tile(m, k + 1)[lane], b[2], b[3]);
        }
        send_tile(m, sums);
      }
    } else {
      for (int unit = thread; unit < layout.m; unit += kThreads) {
        const float* w = reinterpret_cast<const float*>(shared) + unit;
        const float4* x = reinterpret_cast<const float4*>(da());
        float4 sums[2] = {};
#pragma unroll 2
        for (int k = 0; k < layout.k; ++k) {
          const float weight = w[k * layout.m];
#pragma unroll
          for (int which = 0; which < 2; ++which) {
            const float4 rows = x[k * 2 + which];
            sums[which].x = fmaf(weight, rows.x, sums[which].x), sums[which].y = fmaf(weight, rows.y, sums[which].y);
            sums[which].z = fmaf(weight, rows.z, sums[which].z), sums[which].w = fmaf(weight, rows.w, sums[which].w);
          }
        }
        for (int which = 0; which < 2; ++which) send(unit, which, sums[which]);
      }
    }
  }
  // The operands of gate tiles k and k + 1; zeros if there is no second.
  SK_DEVICE void operand(int k, uint32_t (&b)[4]) const {
    if (k + 1 < layout.k / 16) {
      ldmatrix_x4_trans(b, da() + (k * 16 + lane) * 16);
    } else {
      uint32_t one[2];
      ldmatrix_x2_trans(one, da() + (k * 16 + lane % 16) * 16);
      b[0] = one[0], b[1] = one[1], b[2] = b[3] = 0;
    }
  }
  SK_DEVICE static void multiply(float (&sums)[4], uint4 a, uint32_t b0, uint32_t b1) {
    mma_16816<T>(sums, {a.x, a.y, a.z, a.w}, {b0, b1});
  }
  // A lane holds 2 rows of units g and g + 8. Neighbouring lanes exchange, so that each has 4 rows of one unit.
  SK_DEVICE void send_tile(int m, const float (&sums)[2][4]) const {
    const bool odd = lane % 2;
    float s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = sums[0][i] + sums[1][i];
    const float got0 = __shfl_xor_sync(0xffffffffu, odd ? s[0] : s[2], 1);
    const float got1 = __shfl_xor_sync(0xffffffffu, odd ? s[1] : s[3], 1);
    const float4 rows = odd ? float4{got0, got1, s[2], s[3]} : float4{s[0], s[1], got0, got1};
    send(m * 16 + lane / 4 + odd * 8, lane % 4 / 2, rows);
  }
  SK_DEVICE void send(int unit, int which, float4 rows) const {
    if (unit >= hidden) return;
    const uint32_t owner = where()[unit / 8];
    const int to = static_cast<int>(owner >> 16), place = unit - static_cast<int>(owner & 0xffff) * 8;
    if (shape.exchange == kGrid) {
      const int64_t box = (int64_t{buffer()} * gridDim.x + number * shape.blocks + to) * shape.blocks + rank;
      store_fresh_16(shape.mailbox + (box * 2 + which) * layout.units + place, tagged(rows, epoch()));
    } else {
      const int plane = shape.exchange == kCluster ? static_cast<int>(buffer()) * shape.blocks + rank : 0;
      float* at = parts() + ((plane * 2 + which) * layout.units + place) * kPack;
      if (shape.exchange == kBlock) {
        *reinterpret_cast<float4*>(at) = rows;
      } else {
        store_async_16(at, barriers() + buffer(), to, device_bits<uint4>(rows));
      }
    }
  }

  // Waits for the parts of all blocks; afterwards `sum` gives an element's dh. All threads call it.
  SK_DEVICE void wait() const {
    if (shape.exchange == kCluster) {
      uint64_t* barrier = barriers() + buffer();
      if (thread == 0) mbarrier_arrive_expect(barrier, static_cast<unsigned>(shape.blocks * mine * kRows * 4));
      mbarrier_wait_cluster(barrier, count / 2 % 2);
      return;
    }
    if (shape.exchange == kGrid) {
      const int place = thread % (2 * layout.units), plane = thread / (2 * layout.units);
      if (plane < layout.planes && place % layout.units < mine) {
        const int64_t box = (int64_t{buffer()} * gridDim.x + blockIdx.x) * shape.blocks;
        *reinterpret_cast<float4*>(parts() + (plane * 2 * layout.units + place) * kPack) =
            collect(shape.mailbox + box * 2 * layout.units + place, 2 * layout.units, plane, layout.planes,
                    shape.blocks, epoch());
      }
    }
    __syncthreads();
  }
  SK_DEVICE float sum(int i) const {
    const int plane = layout.units * kRows;
    const float* from = parts() + (half * layout.units + u + 32 * i) * kPack + lane / 8;
    if (shape.exchange == kCluster) from += buffer() * shape.blocks * plane;
    float sum = 0;
    for (int n = 0; n < layout.planes; ++n) sum += from[n * plane];
    return sum;
  }

  // ---- sums over the units of a row --------------------------------------------------------------------------------

  // Turns a lane's share into the sums over the whole team for its row. All threads call it, at most once a step,
  // before `product`.
  SK_DEVICE void sum_rows(float (&sums)[SUMS]) const {
    float4* of_warps = reinterpret_cast<float4*>(shared + layout.rows);  // [warp][row of 4][packet]
    float4* of_ranks = of_warps + kWarps * kPack * PACKETS;              // [plane][row of 8][packet]
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
#pragma unroll
      for (int other = 1; other < 8; other *= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], other);
    }
    if (lane % 8 == 0) {
#pragma unroll
      for (int i = 0; i < PACKETS; ++i) {
        of_warps[(warp * kPack + lane / 8) * PACKETS + i] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2],
                                                             sums[4 * i + 3]};
      }
    }
    __syncthreads();
    constexpr int ALL = kRows * PACKETS;
    const int copies = shape.exchange == kCluster ? shape.blocks : 1;
    for (int at = thread; at < ALL * copies; at += kThreads) {
      const int row = at % ALL / PACKETS, packet = at % PACKETS;
      float4 sum = {0, 0, 0, 0};
      for (int w = row / kPack; w < kWarps; w += 2) {
        const float4 share = of_warps[(w * kPack + row % kPack) * PACKETS + packet];
        sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
      }
      if (shape.exchange == kCluster) {
        store_async_16(of_ranks + rank * ALL + at % ALL, barriers() + 2, at / ALL, device_bits<uint4>(sum));
      } else if (shape.exchange == kGrid) {
        store_fresh_16(shape.row_mailbox + int64_t{blockIdx.x} * ALL + at, tagged(sum, epoch()));
      } else {
        of_ranks[at] = sum;
      }
    }
    if (shape.exchange == kCluster) {
      if (thread == 0) mbarrier_arrive_expect(barriers() + 2, static_cast<unsigned>(shape.blocks * ALL * 16));
      mbarrier_wait_cluster(barriers() + 2, count % 2);
    } else {
      if (shape.exchange == kGrid && thread / ALL < layout.row_planes) {
        of_ranks[thread] = collect(shape.row_mailbox + int64_t{number} * shape.blocks * ALL + thread % ALL, ALL,
                                   thread / ALL, layout.row_planes, shape.blocks, epoch());
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) {
      float4 sum = {0, 0, 0, 0};
      for (int plane = 0; plane < layout.row_planes; ++plane) {
        const float4 share = of_ranks[plane * ALL + row_in_tile * PACKETS + i];
        sum.x += share.x, sum.y += share.y, sum.z += share.z, sum.w += share.w;
      }
      sums[4 * i] = sum.x, sums[4 * i + 1] = sum.y, sums[4 * i + 2] = sum.z, sums[4 * i + 3] = sum.w;
    }
  }
};

}  // namespace rnn_backward
}  // namespace seqkern
