// The backward scan of a recurrent layer on the GPU: all steps of all sequences, in both directions, in one launch.
//
// A *team* of C thread blocks owns one direction and walks tiles of 8 rows of the batch, the last step first. Block r
// owns some groups of 8 units: the gates, cell state and incoming gradients of those units. With da the gradients of
// the gates (equations: kernels/rnn/rnn.py), a step is
//
//   pointwise   da of my units from dh, dc and what was kept; rounded to the dtype, into shared memory and to memory
//   product     part (H x 8) = W[my gates, :]^T da (my gates x 8), for all H units
//   exchange    the part of every block's units goes to that block
//   sum         dh of my units = the parts of all blocks, added up in the order of their ranks
//
// The product is divided along its sum, the gates: what travels is float32, but only H x 8 of it, whatever the cell.
// (Divided along the units, as forward, each block would have to hold da of all G H gates, for an LSTM twice the bytes,
// and its warps would have to share a long sum and meet once more.) My rows of W never leave the chip. They stand as
// operands of the tensor cores, ready made: units on M, gates on K, the batch on N = 8, m16n8k16, a warp every eighth
// tile of 16 units; float32 multiplies and adds without tensor cores, a thread 8 rows of a unit. Sums have one order
// and the number of blocks does not depend on the batch, so the bits of a row are the same in every run and in every
// batch.
//
// The three ways to exchange, the only difference between the tiers:
//   block     C = 1, to 128 units: shared memory.
//   cluster   C = 2 ... 16, into the shared memory of the owner, 16 bytes at a time, counted by its mbarrier; two
//             buffers. A block writes a buffer again only after it has every part of the step between, and whoever sent
//             that had read the buffer: no barrier of the cluster in the loop.
//   grid      any C that is resident at once, through global memory, two buffers likewise. A packet of 16 bytes is 4
//             rows of a unit; the lowest bits of its 4 words, 2^-24 of the value, say which step it belongs to, twice,
//             once in each half, and the owner polls until both do. They are cleared before the sum: a result does not
//             depend on the count.
// da has two buffers as well: a warp may still multiply when another has the sum and goes on.
//
// Registers: of weights 96 (64 beside layer norm) where a block has no more than 32 units; none where a thread has 4
// elements. Shared memory: the other weights, 2 G H U bytes of U units (4 G H U in float32) less 256 to 384 units'
// columns in registers; 32 or 64 bytes a gate of da; parts of 32 U bytes from every sender, twice in a cluster.
// A step of a block: 16 G H U FLOP, 32 H bytes sent and as many received, the weights in shared memory read once, 128
// bytes a clock. Of an LSTM of 512 units in bf16, C = 16, U = 32: 32 KB of weights in shared memory (256 clocks), 256
// mma, 16 KB each way; of 1024 units, C = 32: 160 KB (1280 clocks), 512 mma; 128 units in a block: 128 KB (1024
// clocks). At 1.75 GHz these reads alone are a floor of 0.15, 0.73 and 0.59 us a step, an estimate without the
// exchange. What a step reads of memory is asked for a step ahead, what it writes goes behind the product. A team does
// not exchange at times that no row of its tile has. No GPU speed has been measured yet.
//
// What was tried, judged by the compiler's report and by the host executor:
// - 64 registers of weights for all: an LSTM of 2048 units did not fit 132 blocks; with 96 it needs 220 KB a block;
// - float32, 8 rows of a unit, the loop unrolled 4 times: spills with 4 elements a thread; twice: none;
// - float32, 4 rows of a unit a thread: weights read twice, 16 instead of 12 loads of shared memory for the same sums;
// - one buffer of da: wrong in a cluster (the executor's random order of threads finds it).
#pragma once

#include "backward_norm.cuh"

namespace seqkern {
namespace rnn_backward {

// An address is null where there is no such gradient, or it is not wanted.
struct Problem {
  RnnScan scan;
  TeamShape team;
  NormProblem norm;
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

// A lane's row of the batch: all its elements are of one.
struct Row {
  int number, length;  // no times beyond the batch
};

// What memory holds of a step of one element.
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

// c before a step that does not reset.
template <class T>
SK_DEVICE float cell_before(const Problem& p, int row, int length, int unit, int d, bool backwards, int t) {
  const int past = backwards ? t + 1 : t - 1;
  const int64_t B = p.scan.batch, H = p.scan.hidden;
  if (past < 0 || past >= length) return read<T>(p.c0, (d * B + row) * H + unit);
  return p.cells[((int64_t{d} * p.scan.steps + past) * B + row) * H + unit];
}

// Of an active step.
template <class T, int CELL>
SK_DEVICE Kept fetch(const Problem& p, const Row& row, int unit, int d, bool backwards, int t, bool reset) {
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

// Takes from the gradient of a state after zoneout that before; what of it the old state gets. kind: 0 for h, 1 for c.
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

// The way of a gradient through one step: `begin` as far as the sums over units that layer norm needs, `end` with them.
template <int CELL, bool NORM>
struct Step {
  static constexpr int G = rnn_gates(CELL), SUMS = norm_sums(CELL);
  float of_x[G], of_h[G];  // the gradients of zx and of w_hh's product
  float beside;            // that of the old h past the product
  float grad_c, beside_c;  // of the new cell state, of the old one beside it
  float xhat_c, through_c;

  SK_DEVICE void nothing() {
    beside = grad_c = beside_c = xhat_c = through_c = 0;
#pragma unroll
    for (int k = 0; k < G; ++k) of_x[k] = of_h[k] = 0;
  }

  // With a norm, of_x of i, f and g are left without their factor grad_c.
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

  // `later_c` becomes the gradient of the old cell state.
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
__global__ void __launch_bounds__(kThreads, 4) row_statistics_kernel(const Problem p) {
  const RnnScan& s = p.scan;
  row_statistics<CELL>(s, p.norm, p.gates, [&](int row, int t, int d, int unit) {
    const bool backwards = rnn_backwards(s, d);
    const int length = rnn_length(s, row);
    return rnn_resets(s, t, backwards, row, length) ? 0.0f : cell_before<T>(p, row, length, unit, d, backwards, t);
  });
}

template <class T, int CELL, int E, bool NORM>
__global__ void __launch_bounds__(kThreads, 1) scan_backward_kernel(const Problem p) {
  constexpr int G = rnn_gates(CELL);
  SK_SHARED(shared);
  Team<T, CELL, E, NORM> team(p.team, p.scan.hidden, shared);
  const RnnScan& scan = p.scan;
  const int64_t B = scan.batch, H = scan.hidden, D = scan.directions;
  const int d = team.direction;
  const bool backwards = rnn_backwards(scan, d);
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

    // What memory holds of a step, asked for a step ahead.
    const auto ask = [&](int i, bool wanted, int t, const Flags& flags) {
      if (!wanted || !flags.active) return;
      const int unit = team.first_unit + team.u + 32 * i;
      kept[i] = fetch<T, CELL>(p, row, unit, d, backwards, t, flags.reset);
      if constexpr (NORM) { norm[i].fetch(p.norm, (int64_t{d} * scan.steps + t) * B + row.number, scan.hidden, unit); }
    };

    int longest = 0;  // of the tile: the team has nothing to exchange at times that no row has
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
      ask(i, true, last, now);
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
        ask(i, there[i], ahead, next);
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

      // off the way that the next step waits for: what the GEMMs behind the scan read
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
