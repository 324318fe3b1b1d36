// The teams of the persistent forward scan: how thread blocks and warps divide the recurrent weights, hold them on chip
// and multiply them with h. Torch-free.
//
// The idea. Every step multiplies the same weights with the h of the step before. A team of thread blocks owns one
// direction and a tile of ROWS = 8 NT rows of the batch. Its blocks divide the weights once and keep them on chip for
// the whole sequence; only h travels (exchange.cuh). Block r owns the hidden units [16 groups r, 16 groups (r
// + 1)) and computes, for each of the G gates of a unit,
//
//     sums[gate][unit][row] = sum over k of A[gate][unit][k] X[k][row]
//
// where X is h with rows of the batch as columns, and k runs over all units of the team, padded with zeros.
//
// Division. A group is 16 units: for each gate the M of mma m16n8k16; the batch is N. `parts` warps share a group; each
// takes a part of k, and the parts are added in order through shared memory. A lane owns, of its group, units lane / 4
// and lane / 4 + 8, and of every 8 rows 2 (lane % 4) and the next. All gates of a pair (unit, row) are thus in one lane
// and, with one part, stay in its registers. Its pairs are SLOTS = 4 NT: slot s is unit half (s / 2) % 2, row 8 (s / 4)
// + s % 2. With several parts, warp `part` finishes the slots with s % parts == part.
//
// Fragments. A lane reads 8 neighbouring units of X, 16 bytes, as the two B fragments of 16 k each. The order in which
// the mma counts k is free as long as A uses the same one; a lane's A is then 16 neighbouring bytes of a row of w_hh.
//
// Weights. 1 KB for a gate and a chunk, in either type. Of 16-bit weights, HELD chunks a warp are in registers (128 a
// lane, 64 with NT = 2), the rest in shared memory as ready fragments. float32 does not use tensor cores, which are
// less exact: fused multiply-adds, 4 k at a time, all weights in shared memory.
//
// How a kernel uses it:
//
//     RnnTeam<T, G, NT> team;
//     team.begin(shape, shared, rank, mailbox);      // once; all threads
//     team.load_weights(weights);                    // 16 bytes of A: weights(gate, unit, k)
//     for all k, rows: *team.operand(k, row) = ...;  // each block writes the whole first operand; it starts as zeros
//     team.start();
//     for each step:
//       team.product(sums, half);                    // reads operand number `turn`
//       team.finish(sums);                           // sums[gate][slot] are complete where team.owns(slot)
//       if owns(slot): team.stage(slot, value);      // every owned slot, padding too (0)
//       team.publish();                              // turn += 1
//       (stores and loads that nobody waits for)
//       team.wait();                                 // operand number `turn` is here
//     team.renew() before the next tile of the batch, team.end() after the last.
//
// Sums over all units of a row (layer norm): team.block_sum, then team.share and team.shared_pair.
#pragma once

#include "exchange.cuh"

namespace seqkern {

// T: float or RnnShort.
template <class T, int G, int NT>
struct RnnTeam : RnnExchange<T, NT> {
  using Base = RnnExchange<T, NT>;
  using Base::ELEMENT, Base::CHUNK, Base::PIECE, Base::ROWS, Base::SLOTS;
  using Base::owns, Base::first_unit, Base::row_of, Base::buffer, Base::clear_operands;
  using Base::shape, Base::shared, Base::lane, Base::warp, Base::part, Base::turn;
  static constexpr int HELD = rnn_held(ELEMENT, G, NT);
  static constexpr bool TWO = ELEMENT == 2 && G * NT <= 2;  // two accumulators: one mma would wait for the one before

  uint4 held[HELD > 0 ? HELD : 1][HELD > 0 ? G : 1][2];  // A, as fragments

  // ---- weights -----------------------------------------------------------------------------------------------------

  // weights(gate, unit, k) returns A[gate][unit][k ... k + PIECE - 1] as in memory, zeros where `unit` or a k is not
  // below `hidden`. All threads call it; afterwards the operands are zero.
  template <class Weights>
  SK_DEVICE void load_weights(const Weights& weights) {
    const int count = own_chunks();
    __syncthreads();
    if constexpr (HELD > 0) {
      // Through the memory that later holds the operands, so that the loading loop is compiled once and not unrolled
      // for every register. A lane reads only what it wrote.
      uint4* way = reinterpret_cast<uint4*>(shared + shape.operand + 1024 * G * warp);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        if (i < count) load_chunk(weights, i, way);
#pragma unroll
        for (int gate = 0; gate < G; ++gate) {
          held[i][gate][0] = held[i][gate][1] = uint4{0, 0, 0, 0};
          if (i < count) {
            held[i][gate][0] = way[64 * gate + lane];
            held[i][gate][1] = way[64 * gate + 32 + lane];
          }
        }
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int i = HELD; i < count; ++i) load_chunk(weights, i, weight_at(i, 0));
    clear_operands();
    __syncthreads();
  }
  // Loads a chunk of A, G KB, in the product's layout: of 16 bits a lane's two fragments, [fragment][lane]; of float
  // [k / 4][unit].
  template <class Weights>
  SK_DEVICE void load_chunk(const Weights& weights, int i, uint4* to) const {
    const int k = (part * shape.per_warp + i) * CHUNK;
#pragma unroll 1
    for (int gate = 0; gate < G; ++gate, to += 64) {
      if constexpr (ELEMENT == 2) {
        const int unit = first_unit() + lane / 4, at = k + lane % 4 * PIECE;
        const uint4 low = weights(gate, unit, at), high = weights(gate, unit + 8, at);
        to[lane] = {low.x, high.x, low.y, high.y};
        to[32 + lane] = {low.z, high.z, low.w, high.w};
      } else {
        const int unit = first_unit() + lane % 16, at = k + lane / 16 * PIECE;
        to[lane] = weights(gate, unit, at);
        to[32 + lane] = weights(gate, unit, at + 2 * PIECE);
      }
    }
  }
  // ---- the product -------------------------------------------------------------------------------------------------

  // half: whether 16-bit elements are float16.
  SK_DEVICE void product(float (&sums)[G][SLOTS], bool half) const {
    if (ELEMENT == 2 && half) {
      product_of<Half>(sums);
    } else {
      product_of<BFloat16>(sums);
    }
  }
  template <class As>
  SK_DEVICE void product_of(float (&sums)[G][SLOTS]) const {
    const int count = own_chunks();
    const unsigned char* x = buffer(turn) + part * shape.per_warp * (ROWS * 64);
    float d[G][NT][4], e[TWO ? G : 1][NT][4];
#pragma unroll
    for (int gate = 0; gate < G; ++gate) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) d[gate][n][j] = e[TWO ? gate : 0][n][j] = 0;
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
          for (int gate = 0; gate < G; ++gate)
            multiply<As>(d[gate], e[TWO ? gate : 0], held[i][gate][0], held[i][gate][1], b);
        }
      }
      for (int i = HELD; i < count; ++i) {
        uint4 b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) b[n] = *reinterpret_cast<const uint4*>(x_lane + (i * ROWS + 8 * n) * 64);
#pragma unroll
        for (int gate = 0; gate < G; ++gate) {
          const uint4* a = weight_at(i, gate);
          multiply<As>(d[gate], e[TWO ? gate : 0], a[lane], a[32 + lane], b);
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
          for (int gate = 0; gate < G; ++gate) {
            const float4* a = reinterpret_cast<const float4*>(weight_at(i, gate)) + 16 * piece + lane / 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const float4 w = a[8 * half];
#pragma unroll
              for (int c = 0; c < 2 * NT; ++c) {
                float& sum = d[gate][c / 2][2 * half + c % 2];
                sum = fmaf(w.w, b[c].w, fmaf(w.z, b[c].z, fmaf(w.y, b[c].y, fmaf(w.x, b[c].x, sum))));
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int gate = 0; gate < G; ++gate) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        sums[gate][slot] = d[gate][slot / 4][slot % 4];
        if constexpr (TWO) sums[gate][slot] += e[gate][slot / 4][slot % 4];
      }
    }
  }

  // Adds the parts in order.
  SK_DEVICE void finish(float (&sums)[G][SLOTS]) const {
    if (shape.parts == 1) return;
    float* partial = reinterpret_cast<float*>(shared + shape.partial) + lane;
    const auto at = [&](int w, int gate, int slot) { return ((w * G + gate) * SLOTS + slot) * 32; };
#pragma unroll
    for (int gate = 0; gate < G; ++gate) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) partial[at(warp, gate, slot)] = sums[gate][slot];
    }
    __syncthreads();
    const float* first = partial + at(warp - part, 0, 0);
#pragma unroll 1
    for (int p = 0; p < shape.parts; ++p, first += G * SLOTS * 32) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        if (!owns(slot)) continue;
#pragma unroll
        for (int gate = 0; gate < G; ++gate) {
          const float v = first[(gate * SLOTS + slot) * 32];
          sums[gate][slot] = p == 0 ? v : sums[gate][slot] + v;
        }
      }
    }
  }

  // ---- details -----------------------------------------------------------------------------------------------------

  SK_DEVICE int own_chunks() const { return min(shape.per_warp, shape.chunks - part * shape.per_warp); }
  SK_DEVICE uint4* weight_at(int i, int gate) const {
    const int kept = (warp * (shape.per_warp - HELD) + i - HELD) * G + gate;
    return reinterpret_cast<uint4*>(shared + shape.weights + 1024 * kept);
  }
  // Multiplies two fragments of 16 k, which are the halves of 16 neighbouring bytes of X.
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
};

}  // namespace seqkern
