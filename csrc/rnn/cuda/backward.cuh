// The backward scan of a recurrent layer on the GPU: one persistent kernel runs all steps of all sequences, in both
// directions.
//
// A *team* of C thread blocks owns one direction and walks tiles of 8 rows of the batch, last step first. Block r owns
// groups of 8 hidden units: their gates, cell state and incoming gradients. With da the gradients of the gates
// (equations: kernels/rnn/rnn.py), a step is
//
//     pointwise   da of the block's units, from dh, dc and the saved state; rounded to the dtype, stored in shared and
//                 global memory
//     product     part (H x 8) = W[the block's gates, :]^T da (the block's gates x 8), for all H units
//     exchange    each block receives the parts of its own units
//     sum         dh of the block's units = the parts of all blocks, added in order of rank
//
// The product splits its summed index, the gates. What travels is float32, but only H x 8 numbers, whatever the cell.
// (Split along the units, as in the forward scan, each block would need da of all G H gates, for an LSTM twice the
// bytes, and its warps would share a long sum and meet at one more barrier.)
//
// Weights. A block's rows of W stay on chip for the whole scan, as ready tensor core operands: units on M, gates on K,
// the batch on N = 8, mma m16n8k16; warp w takes every eighth tile of 16 units. float32 uses fused multiply-adds
// without tensor cores, 8 rows of a unit in a thread. Sums have one order, and the number of blocks does not depend on
// the batch: the bits of a row are the same in every run and every batch.
//
// The tiers differ only in the exchange:
//     block     C = 1, up to 128 units: shared memory.
//     cluster   C = 2 ... 16: 16-byte stores into the owner's shared memory, counted by its mbarrier; two buffers. A
//               block writes a buffer again only after it has every part of the step between. Whoever sent that part
//               had read the buffer, so the loop needs no cluster barrier.
//     grid      any C that is resident at once: global memory, also two buffers. A packet of 16 bytes is 4 rows of a
//               unit. The lowest bits of its 4 words (2^-24 of the value) hold the step's epoch, once in each half; the
//               owner polls until both match. The bits are cleared before the sum, so results do not depend on the
//               epoch.
// da has two buffers as well: one warp may still multiply while another already has its sum and goes on.
//
// Registers: 96 of weights a thread (64 with layer norm) when a block has at most 32 units; none when a thread has 4
// elements. Shared memory: the other weights, 2 G H U bytes for U units (4 G H U in float32) less 256 to 384 units'
// columns in registers; da, 32 or 64 bytes a gate; parts, 32 U bytes from every sender, twice that in a cluster.
//
// A step of a block: 16 G H U FLOP, 32 H bytes sent and 32 H received, the weights in shared memory read once at 128
// bytes a clock. What a step reads of global memory is prefetched a step ahead; what it writes follows the product. A
// team skips the exchange at times that no row of its tile has. NOTES.md has the estimated floor and what was tried.
#pragma once

#include "backward_norm.cuh"

namespace seqkern {
namespace rnn_backward {

// Addresses of gradients that are absent or not wanted are null.
struct BackwardArgs {
  RnnScan scan;
  TeamShape team;
  NormArgs norm;
  const void *grad_output, *grad_h_n, *grad_c_n;
  const float *grad_cells, *gates, *cells;
  const void *c0, *output, *h0, *w_hh;
  void *grad_x, *grad_products;
  float *grad_h0, *grad_c0;
  int64_t grad_output_time, grad_output_row, grad_products_direction, grad_products_time;  // strides
};

// ---- one step of one unit and row ---------------------------------------------------------------------------------

template <class T>
SK_DEVICE float read(const void* p, int64_t at) {
  return widen(static_cast<const T*>(p)[at]);
}

// A lane's row of the batch: all its elements are in one row.
struct Row {
  int number, length;  // length: 0 beyond the batch
};

// The saved state and incoming gradients of one element at one step.
struct Kept {
  float gates[4], state, grad_h, grad_c;  // state: c, or h, before the step
};

struct Flags {
  bool active, reset;
};
SK_DEVICE Flags flags(const RnnScan& s, const Row& row, bool backwards, int t) {
  Flags f;
  f.active = t >= 0 && t < row.length;
  f.reset = f.active && rnn_resets(s, t, backwards, row.number, row.length);
  return f;
}

// c before a step that does not reset it.
template <class T>
SK_DEVICE float cell_before(const BackwardArgs& p, int row, int length, int unit, int d, bool backwards, int t) {
  const int past = backwards ? t + 1 : t - 1;
  const int64_t B = p.scan.batch, H = p.scan.hidden;
  if (past < 0 || past >= length) return read<T>(p.c0, (d * B + row) * H + unit);
  return p.cells[((int64_t{d} * p.scan.steps + past) * B + row) * H + unit];
}

// For an active step only.
template <class T, int CELL>
SK_DEVICE Kept fetch(const BackwardArgs& p, const Row& row, int unit, int d, bool backwards, int t, bool reset) {
  constexpr int R = rnn_kept(CELL);
  Kept kept = {};
  const int64_t B = p.scan.batch, H = p.scan.hidden;
  const int64_t before = int64_t{d} * p.scan.steps * B + row.number, first = (d * B + row.number) * H + unit;
  const int past = backwards ? t + 1 : t - 1;
  const bool inside = past >= 0 && past < row.length;
#pragma unroll
  for (int k = 0; k < R; ++k) kept.gates[k] = p.gates[((before + t * B) * R + k) * H + unit];
  if (CELL == kRnnLstm && !reset) { kept.state = cell_before<T>(p, row.number, row.length, unit, d, backwards, t); }
  if (CELL == kRnnGru && !reset) {
    kept.state =
        inside ? read<T>(p.output, ((past * B + row.number) * p.scan.directions + d) * H + unit) : read<T>(p.h0, first);
  }
  if (p.grad_output != nullptr) {
    kept.grad_h = read<T>(p.grad_output, t * p.grad_output_time + row.number * p.grad_output_row + d * H + unit);
  }
  if (CELL == kRnnLstm && p.grad_cells != nullptr) kept.grad_c = p.grad_cells[(before + t * B) * H + unit];
  return kept;
}

// Undoes zoneout: turns `grad` of the state after zoneout into that before it, and returns the share of the old state.
// kind: 0 for h, 1 for c.
SK_DEVICE float through_zoneout(const RnnScan& s, int kind, int t, int d, int row, int unit, float& grad) {
  float of_old = 0;
  if (s.expected) {
    of_old = grad * s.zoneout[kind];
    grad *= 1.0f - s.zoneout[kind];
  } else if (s.seed != nullptr && rnn_stays(s, kind, t, d, row, unit)) {
    of_old = grad;
    grad = 0;
  }
  return of_old;
}

// The gradient through one step. `begin` goes up to the sums over units that layer norm needs, `end` uses them.
template <int CELL, bool NORM>
struct Step {
  static constexpr int G = rnn_gates(CELL), SUMS = norm_sums(CELL);
  float of_x[G], of_h[G];  // gradients of zx and of w_hh's product
  float beside;            // of the old h, except through the product
  float grad_c, beside_c;  // of the new cell state; of the old one through zoneout
  float xhat_c, through_c;

  SK_DEVICE void nothing() {
    beside = grad_c = beside_c = xhat_c = through_c = 0;
#pragma unroll
    for (int k = 0; k < G; ++k) of_x[k] = of_h[k] = 0;
  }

  // With layer norm, of_x of i, f and g still lack their factor grad_c.
  SK_DEVICE void begin(const RnnScan& s, int row, int unit, const Kept& kept, int d, int t, float later, float later_c,
                       const ElementNorm<CELL>& norm, float (&sums)[SUMS]) {
    float grad = later + kept.grad_h;
    beside = through_zoneout(s, 0, t, d, row, unit, grad);
    if constexpr (CELL == kRnnLstm) {
      const float i = kept.gates[0], f = kept.gates[1], g = kept.gates[2], o = kept.gates[3], c = kept.state;
      grad_c = later_c + kept.grad_c;
      beside_c = through_zoneout(s, 1, t, d, row, unit, grad_c);
      float c_new = f * c + i * g;
      if constexpr (NORM) {
        xhat_c = (c_new - norm.mean_c) * norm.rstd_c;
        c_new = xhat_c * norm.weight_c + norm.bias_c;
      }
      const float tanh_c = tanhf(c_new);
      through_c = grad * o * (1.0f - tanh_c * tanh_c);
      of_x[0] = g * i * (1.0f - i);
      of_x[1] = c * f * (1.0f - f);
      of_x[2] = i * (1.0f - g * g);
      of_x[3] = grad * tanh_c * o * (1.0f - o);
      if constexpr (NORM) {
        const float weighted = through_c * norm.weight_c;
        grad_c += weighted * norm.rstd_c;
        float q[2] = {};
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          q[0] += of_x[k] * norm.weight[k];
          q[1] += of_x[k] * norm.weight[k] * norm.xhat[k];
        }
        const float last = of_x[3] * norm.weight[3];
        sums[0] = grad_c * q[0] + last;
        sums[1] = grad_c * q[1] + last * norm.xhat[3];
        sums[2] = weighted, sums[3] = weighted * xhat_c;
        sums[4] = q[0], sums[5] = q[0] * xhat_c;
        sums[6] = q[1], sums[7] = q[1] * xhat_c;
      } else {
        grad_c += through_c;
      }
    } else if constexpr (CELL == kRnnGru) {
      const float r = kept.gates[0], z = kept.gates[1], n = kept.gates[2], q = kept.gates[3];
      of_x[2] = grad * (1.0f - z) * (1.0f - n * n);
      of_x[0] = of_x[2] * q * r * (1.0f - r);
      of_x[1] = grad * (kept.state - n) * z * (1.0f - z);
      beside += grad * z;
      of_h[0] = of_x[0], of_h[1] = of_x[1], of_h[2] = of_x[2] * r;
    } else {
      const float y = kept.gates[0];
      of_x[0] = s.cell == kRnnRelu ? (y <= 0.0f ? 0.0f : grad) : grad * (1.0f - y * y);
      of_h[0] = of_x[0];
    }
    if constexpr (NORM && CELL != kRnnLstm) norm.share(of_h, sums);
  }

  // Turns `later_c` into the gradient of the old cell state.
  SK_DEVICE void end(const RnnScan& s, const Kept& kept, bool reset, float (&sums)[SUMS], ElementNorm<CELL>& norm,
                     float& later_c) {
    if constexpr (CELL == kRnnLstm) {
      if constexpr (NORM) {
        const float each = norm.rstd_c / static_cast<float>(s.hidden);
        const float sum = sums[2] * each, along = sums[3] * each;
        grad_c -= sum + along * xhat_c;
        sums[0] -= sum * sums[4] + along * sums[5];
        sums[1] -= sum * sums[6] + along * sums[7];
        norm.weighted_c += through_c * xhat_c;
        norm.plain_c += through_c;
      }
#pragma unroll
      for (int k = 0; k < 3; ++k) of_x[k] *= grad_c;
#pragma unroll
      for (int k = 0; k < G; ++k) of_h[k] = of_x[k];
      later_c = reset ? 0.0f : beside_c + grad_c * kept.gates[1];
    }
    if constexpr (NORM) norm.gates(sums[0], sums[1], s.hidden, of_h);
  }
};

// ---- the kernels --------------------------------------------------------------------------------------------------

template <class T, int CELL>
__global__ void __launch_bounds__(kThreads, 4) row_statistics_kernel(const BackwardArgs p) {
  const RnnScan& s = p.scan;
  row_statistics<CELL>(s, p.norm, p.gates, [&](int row, int t, int d, int unit) {
    const bool backwards = rnn_backwards(d);
    const int length = rnn_length(s, row);
    return rnn_resets(s, t, backwards, row, length) ? 0.0f : cell_before<T>(p, row, length, unit, d, backwards, t);
  });
}

template <class T, int CELL, int E, bool NORM>
__global__ void __launch_bounds__(kThreads, 1) scan_backward_kernel(const BackwardArgs p) {
  constexpr int G = rnn_gates(CELL);
  SK_SHARED(shared);
  Team<T, CELL, E, NORM> team(p.team, p.scan.hidden, shared);
  const RnnScan& scan = p.scan;
  const int64_t B = scan.batch, H = scan.hidden, D = scan.directions;
  const int d = team.direction;
  const bool backwards = rnn_backwards(d);
  team.begin(static_cast<const T*>(p.w_hh) + d * (G * H) * H);

  const int tiles = (scan.batch + kRows - 1) / kRows;
  for (int tile = team.number % p.team.teams; tile < tiles; tile += p.team.teams) {
    Row row;
    row.number = tile * kRows + team.row_in_tile;
    row.length = rnn_length(scan, row.number);
    bool there[E];
    float factor[E], later[E], later_c[E];
    Kept kept[E];
    ElementNorm<CELL> norm[NORM ? E : 1];

    // Prefetches an element's saved state and gradients, one step ahead.
    const auto prefetch = [&](int i, bool wanted, int t, const Flags& flags) {
      if (!wanted || !flags.active) return;
      const int unit = team.first_unit + team.u + 32 * i;
      kept[i] = fetch<T, CELL>(p, row, unit, d, backwards, t, flags.reset);
      if constexpr (NORM) { norm[i].fetch(p.norm, (int64_t{d} * scan.steps + t) * B + row.number, scan.hidden, unit); }
    };

    int longest = 0;  // of the tile: at later times no row is active and the team has nothing to exchange
    for (int i = 0; i < kRows; ++i) longest = max(longest, rnn_length(scan, tile * kRows + i));
    const int last = rnn_time(scan, scan.steps - 1, backwards);
    Flags now = flags(scan, row, backwards, last);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const int unit = team.first_unit + team.u + 32 * i;
      there[i] = row.number < scan.batch && team.u + 32 * i < team.mine;
      factor[i] = 1, later[i] = later_c[i] = 0;
      if constexpr (NORM) norm[i].begin(scan, d, unit, there[i]);
      if (!there[i]) continue;
      const int64_t at = (d * B + row.number) * H + unit;
      if (scan.mask != nullptr) factor[i] = scan.mask[at];
      if (p.grad_h_n != nullptr) later[i] = read<T>(p.grad_h_n, at);
      if (CELL == kRnnLstm && p.grad_c_n != nullptr) later_c[i] = read<T>(p.grad_c_n, at);
      prefetch(i, true, last, now);
    }

    for (int step = scan.steps - 1; step >= 0; --step) {
      const int t = rnn_time(scan, step, backwards), ahead = rnn_time(scan, step - 1, backwards);
      const bool any = t < longest;
      const Flags next = step > 0 ? flags(scan, row, backwards, ahead) : Flags{};
      Step<CELL, NORM> grads[E];
      T of_x[E][G], of_h[E][G];
      float sums[norm_sums(CELL)] = {};
#pragma unroll
      for (int i = 0; i < E; ++i) {
        grads[i].nothing();
        if (!there[i] || !now.active) continue;
        grads[i].begin(scan, row.number, team.first_unit + team.u + 32 * i, kept[i], d, t, later[i], later_c[i],
                       norm[NORM ? i : 0], sums);
      }
      if constexpr (NORM) {
        if (any) team.sum_rows(sums);
      }
#pragma unroll
      for (int i = 0; i < E; ++i) {
        if (there[i] && now.active) { grads[i].end(scan, kept[i], now.reset, sums, norm[NORM ? i : 0], later_c[i]); }
        prefetch(i, there[i], ahead, next);
        if (team.u + 32 * i >= team.mine) continue;
#pragma unroll
        for (int k = 0; k < G; ++k) {
          of_x[i][k] = narrow<T>(grads[i].of_x[k]), of_h[i][k] = narrow<T>(grads[i].of_h[k]);
          const int place = k * team.layout.units + team.u + 32 * i;
          reinterpret_cast<T*>(team.da())[place * kRows + team.row_in_tile] = of_h[i][k];
        }
      }
      if (any) {
        __syncthreads();
        team.product();
      }

      // What the GEMMs after the scan read. Stored here because the next step does not wait for it.
#pragma unroll
      for (int i = 0; i < E; ++i) {
        if (!there[i]) continue;
        const int unit = team.first_unit + team.u + 32 * i;
        T* x = static_cast<T*>(p.grad_x) + ((t * B + row.number) * D + d) * (G * H) + unit;
#pragma unroll
        for (int k = 0; k < G; ++k) x[k * H] = of_x[i][k];
        if (p.grad_products != nullptr) {
          const int slab = d == 1 ? scan.steps - 1 - t : t;
          T* h = static_cast<T*>(p.grad_products) + d * p.grad_products_direction + slab * p.grad_products_time +
                 row.number * (G * H) + unit;
#pragma unroll
          for (int k = 0; k < G; ++k) h[k * H] = of_h[i][k];
        }
      }

      if (any) {
        team.wait();
#pragma unroll
        for (int i = 0; i < E; ++i) {
          if (!there[i] || !now.active) continue;
          later[i] = now.reset ? 0.0f : grads[i].beside + factor[i] * team.sum(i);
        }
        ++team.count;
      }
      now = next;
    }
#pragma unroll
    for (int i = 0; i < E; ++i) {
      if (!there[i]) continue;
      const int unit = team.first_unit + team.u + 32 * i;
      const int64_t at = (d * B + row.number) * H + unit;
      p.grad_h0[at] = later[i];
      if (CELL == kRnnLstm) p.grad_c0[at] = later_c[i];
      if constexpr (NORM) norm[i].end(scan, p.norm, d, row.number, unit);
    }
  }
  team.meet();
}

}  // namespace rnn_backward
}  // namespace seqkern
