// The recurrent scan, forward: all steps of a layer in one launch, the weights on chip (rnn_team_cuda.cuh).
#pragma once

#include "rnn_cell_cuda.cuh"
#include "rnn_team_cuda.cuh"

namespace seqkern {

struct RnnForwardArgs {
  RnnTeamShape shape;
  RnnScan scan;
  const void* x;                    // (directions, steps, batch, G hidden), float or the weights' type
  int64_t x_strides[3];             // of directions, steps, rows
  bool x_wide, h0_wide, c0_wide;    // float
  const void* w_hh;                 // (directions, G hidden, hidden)
  const float* bias;                // (directions, R hidden), or null
  const void *h0, *c0;              // (directions, batch, hidden)
  void* output;                     // (steps, batch, directions hidden)
  float *cells, *gates, *products;  // (directions, steps, batch, .), or null
  float *h_n, *c_n;                 // (directions, batch, hidden)
  unsigned char* mailbox;
};

// Rows of w_hh as the team wants them.
template <class T>
struct RnnForwardWeights {
  const T* w;  // (G hidden, hidden)
  int hidden;

  SK_DEVICE uint4 operator()(int gate, int unit, int, int k) const {
    constexpr int COUNT = 16 / sizeof(T);
    uint4 v = {0, 0, 0, 0};
    if (unit >= hidden || k >= hidden) return v;
    const T* row = w + (static_cast<int64_t>(gate) * hidden + unit) * hidden + k;
    if (hidden % COUNT == 0) return __ldg(reinterpret_cast<const uint4*>(row));
    uint64_t low = 0, high = 0;  // one element after the other: this is done once, and stands in many places
#pragma unroll 1
    for (int i = min(COUNT, hidden - k) - 1; i >= 0; --i) {
      constexpr int BITS = 8 * sizeof(T);
      high = high << BITS | low >> (64 - BITS);
      low <<= BITS;
      if constexpr (sizeof(T) == 2) {
        low |= row[i].bits;
      } else {
        low |= device_bits<uint32_t>(row[i]);
      }
    }
    return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
            static_cast<uint32_t>(high >> 32)};
  }
};

template <class T>
SK_DEVICE float load_either(const void* p, int64_t at, bool wide) {
  return wide ? static_cast<const float*>(p)[at] : widen(static_cast<const T*>(p)[at]);
}

// h as the product takes it.
template <class T>
SK_DEVICE T rnn_operand(const RnnScan& s, float h, int64_t state_at, bool reset) {
  if (reset) return narrow<T>(0.0f);
  const T rounded = narrow<T>(h);
  return s.mask == nullptr ? rounded : narrow<T>(widen(rounded) * s.mask[state_at]);
}

// CELL: kRnnLstm, kRnnGru, or kRnnTanh for both simple cells.
template <class T, int CELL, int NT>
struct RnnForwardScan {
  static constexpr int G = rnn_gates(CELL), R = rnn_kept(CELL), COLUMNS = 2 * NT;
  using Team = RnnTeam<T, G, 1, NT>;
  static constexpr int SLOTS = Team::SLOTS;

  const RnnForwardArgs& args;
  const RnnScan& scan;
  Team team;
  int d;
  bool backwards;
  int first_row;
  int length[COLUMNS];
  float h[SLOTS], c[SLOTS], x[G][SLOTS], kept[R][SLOTS];

  SK_DEVICE explicit RnnForwardScan(const RnnForwardArgs& a) : args(a), scan(a.scan) {}

  SK_DEVICE int row(int slot) const { return first_row + team.row(slot); }
  SK_DEVICE bool here(int slot) const { return team.owns(slot) && exists(slot); }
  SK_DEVICE bool exists(int slot) const { return team.unit(slot) < scan.hidden && row(slot) < scan.batch; }
  SK_DEVICE int64_t state_at(int slot) const {
    return (static_cast<int64_t>(d) * scan.batch + row(slot)) * scan.hidden + team.unit(slot);
  }
  SK_DEVICE int64_t stored_at(int t, int slot) const {
    return (static_cast<int64_t>(d) * scan.steps + t) * scan.batch + row(slot);
  }

  SK_DEVICE void run() {
    const int teams = static_cast<int>(gridDim.x) / args.shape.blocks;
    const int first = static_cast<int>(blockIdx.x) / args.shape.blocks;
    const int rank = static_cast<int>(blockIdx.x) % args.shape.blocks;
    const int tiles = (scan.batch + Team::ROWS - 1) / Team::ROWS;
    SK_SHARED(shared);
    team.begin(args.shape, shared, rank, args.mailbox + first * args.shape.mailbox_bytes);
    d = -1;
    for (int tile = first; tile < tiles * scan.directions; tile += teams) {
      if (tile != first) team.renew();
      const int direction = tile / tiles;
      if (direction != d) {
        d = direction;
        const int64_t weights = static_cast<int64_t>(G) * scan.hidden * scan.hidden;
        team.load_weights(RnnForwardWeights<T>{static_cast<const T*>(args.w_hh) + d * weights, scan.hidden});
      }
      backwards = rnn_backwards(scan, d);
      first_row = tile % tiles * Team::ROWS;
      sequence();
    }
    team.end();
  }

  SK_DEVICE void sequence() {
    for (int column = 0; column < COLUMNS; ++column) length[column] = rnn_length(scan, first_row + team.row_of(column));
    first_operand();
    first_state();
    load_x(0);
    unsigned reset = resets_at(0), reset_next = resets_at(1);
    team.start();
    for (int step = 0; step < scan.steps; ++step) {
      float sums[G][SLOTS];
      team.product(sums);
      team.finish(sums);
      const int t = rnn_time(scan, step, backwards);
      cells(sums, t, reset, reset_next);
      const bool last = step + 1 == scan.steps;
      if (!last) {
        team.publish();
        load_x(step + 1);
      }
      reset = reset_next;
      reset_next = resets_at(step + 2);
      store(t);
      if (!last) team.wait();
    }
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!here(slot)) continue;
      args.h_n[state_at(slot)] = h[slot];
      if constexpr (CELL == kRnnLstm) args.c_n[state_at(slot)] = c[slot];
    }
  }

  // Every block makes the whole of it.
  SK_DEVICE void first_operand() {
    const int t = rnn_time(scan, 0, backwards);
    for (int at = threadIdx.x; at < Team::ROWS * scan.hidden; at += blockDim.x) {
      const int r = at / scan.hidden, k = at % scan.hidden;
      const int b = first_row + r;
      if (b >= scan.batch) break;
      const int64_t from = (static_cast<int64_t>(d) * scan.batch + b) * scan.hidden + k;
      const bool reset = scan.steps > 0 && rnn_resets(scan, t, backwards, b, rnn_length(scan, b));
      *team.operand(k, r) = rnn_operand<T>(scan, load_either<T>(args.h0, from, args.h0_wide), from, reset);
    }
  }
  SK_DEVICE void first_state() {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      h[slot] = c[slot] = 0;
      if (!here(slot)) continue;
      h[slot] = load_either<T>(args.h0, state_at(slot), args.h0_wide);
      if constexpr (CELL == kRnnLstm) c[slot] = load_either<T>(args.c0, state_at(slot), args.c0_wide);
    }
  }
  SK_DEVICE void load_x(int step) {
    if (step >= scan.steps) return;
    const int t = rnn_time(scan, step, backwards);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int64_t from = d * args.x_strides[0] + t * args.x_strides[1] + row(slot) * args.x_strides[2];
#pragma unroll
      for (int k = 0; k < G; ++k) {
        x[k][slot] = 0;
        if (here(slot)) {
          x[k][slot] =
              load_either<T>(args.x, from + static_cast<int64_t>(k) * scan.hidden + team.unit(slot), args.x_wide);
        }
      }
    }
  }
  // A bit for each column.
  SK_DEVICE unsigned resets_at(int step) const {
    unsigned bits = 0;
    if (scan.resets == nullptr || step >= scan.steps) return bits;
    const int t = rnn_time(scan, step, backwards);
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      const int b = first_row + team.row_of(column);
      if (rnn_resets(scan, t, backwards, b, length[column])) bits |= 1u << column;
    }
    return bits;
  }

  // Where zoneout keeps the old value: a bit for each slot, of h and then of c.
  SK_DEVICE unsigned stays_at(int t) const {
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < (CELL == kRnnLstm ? 2 : 1) * SLOTS; ++i) {
      const int slot = i % SLOTS;
      if (here(slot) && rnn_stays(scan, i / SLOTS, t, d, row(slot), team.unit(slot))) bits |= 1u << i;
    }
    return bits;
  }

  // What comes behind the product. The next operand is staged.
  SK_DEVICE void cells(float (&sums)[G][SLOTS], int t, unsigned reset, unsigned reset_next) {
    const bool zones = scan.expected || scan.seed != nullptr;
    const unsigned stays = scan.seed == nullptr ? 0 : stays_at(t);
    const float* bias = args.bias == nullptr ? nullptr : args.bias + static_cast<int64_t>(d) * R * scan.hidden;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!team.owns(slot)) continue;
      const int column = Team::column(slot), unit = team.unit(slot);
      if (!exists(slot)) {
        team.stage(slot, 0, narrow<T>(0.0f));
        continue;
      }
      const bool active = t < length[column];
      if (reset >> column & 1) h[slot] = c[slot] = 0;
      float a[R];
#pragma unroll
      for (int k = 0; k < G; ++k) {
        if constexpr (CELL == kRnnGru) {
          a[k] = k == 2 ? x[k][slot] : x[k][slot] + sums[k][slot];
        } else {
          a[k] = x[k][slot] + sums[k][slot];
        }
      }
      if constexpr (CELL == kRnnGru) a[3] = sums[2][slot];
      if (bias != nullptr) {
#pragma unroll
        for (int k = 0; k < R; ++k) a[k] += __ldg(bias + static_cast<int64_t>(k) * scan.hidden + unit);
      }
      float y, c_new = 0;
      if constexpr (CELL == kRnnLstm) {
        a[0] = sigmoid(a[0]);
        a[1] = sigmoid(a[1]);
        a[2] = tanhf(a[2]);
        a[3] = sigmoid(a[3]);
        c_new = a[1] * c[slot] + a[0] * a[2];
        y = a[3] * tanhf(c_new);
      } else if constexpr (CELL == kRnnGru) {
        a[0] = sigmoid(a[0]);
        a[1] = sigmoid(a[1]);
        a[2] = tanhf(a[2] + a[0] * a[3]);
        y = (1.0f - a[1]) * a[2] + a[1] * h[slot];
      } else {
        a[0] = scan.cell == kRnnTanh ? tanhf(a[0]) : a[0] < 0 ? 0.0f : a[0];
        y = a[0];
      }
#pragma unroll
      for (int k = 0; k < R; ++k) kept[k][slot] = a[k];
      if (active) {
        if (zones) {
          y = rnn_zone(scan, y, h[slot], 0, stays >> slot & 1);
          if constexpr (CELL == kRnnLstm) c_new = rnn_zone(scan, c_new, c[slot], 1, stays >> (SLOTS + slot) & 1);
        }
        h[slot] = y;
        if constexpr (CELL == kRnnLstm) c[slot] = c_new;
      }
      team.stage(slot, 0, rnn_operand<T>(scan, h[slot], state_at(slot), reset_next >> column & 1));
    }
  }

  SK_DEVICE void store(int t) {
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!here(slot)) continue;
      const int unit = team.unit(slot);
      const bool active = t < length[Team::column(slot)];
      const int64_t out_at =
          ((static_cast<int64_t>(t) * scan.batch + row(slot)) * scan.directions + d) * scan.hidden + unit;
      static_cast<T*>(args.output)[out_at] = narrow<T>(active ? h[slot] : 0.0f);
      if constexpr (CELL == kRnnLstm) {
        if (args.cells != nullptr) args.cells[stored_at(t, slot) * scan.hidden + unit] = active ? c[slot] : 0.0f;
      }
      if (args.gates != nullptr) {
#pragma unroll
        for (int k = 0; k < R; ++k) args.gates[(stored_at(t, slot) * R + k) * scan.hidden + unit] = kept[k][slot];
      }
    }
  }
};

template <class T, int CELL, int NT>
__global__ void __launch_bounds__(256) rnn_forward_kernel(RnnForwardArgs args) {
  RnnForwardScan<T, CELL, NT> scan(args);
  scan.run();
}

}  // namespace seqkern
