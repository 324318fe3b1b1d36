// Layer norm in the backward scan: of w_hh's product and, for an LSTM, of the cell state on its way to h.
//
// Mean and rstd of every row are known before the scan starts: one kernel computes them for all steps. Left for the
// loop are the sums over a row's units that couple its elements: with g = grad w, the gradient of what was normalised,
// over n elements, is rstd (g - sum g / n - xhat sum (g xhat) / n).
//
// An LSTM has two norms in sequence, but they cost one exchange. After the norm of the cell, with the sums A = sum g
// and A' = sum g xhat_c, the gradient of the gates is linear in A and A':
//     dc~ = P - rstd_c / H (A + A' xhat_c)        da_k = dc~ D_k  (i, f, g)        da_o without dc~
// So the sums of the second norm, of da_k w_k and da_k w_k xhat_k, follow from six sums that need neither A nor A':
// those with P in place of dc~, and those of D_k w_k [xhat_k] alone and times xhat_c.
#pragma once

#include "backward_team.cuh"

namespace seqkern {
namespace rnn_backward {

// Of a row at one time: of the product, and of the new cell state.
using Statistics = float4;  // mean, rstd, mean, rstd

// What the scan reads and writes for the norms.
struct NormArgs {
  const float* products;   // (D, T, B, G H): w_hh's
  Statistics* statistics;  // (D, T, B)
  float* sums;             // (D, B, 2 G H [+ 2 H]): gradients of weights and biases
};

template <class F>
SK_DEVICE float warp_mean(int count, F f) {
  float sum = 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32) sum += f(i);
  for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  return sum / static_cast<float>(count);
}
// (mean, rstd), centred twice as in kernels/rnn/cells.py.
template <class F>
SK_DEVICE float2 warp_statistics(int count, float eps, F f) {
  const float first = warp_mean(count, f);
  const float mean = first + warp_mean(count, [&](int i) { return f(i) - first; });
  const float variance = warp_mean(count, [&](int i) { return (f(i) - mean) * (f(i) - mean); });
  return {mean, 1.0f / sqrtf(variance + eps)};
}

// A warp for each row and time; skips those that are not active. `state(row, t, d, unit)` is c before the step.
template <int CELL, class State>
SK_DEVICE void row_statistics(const RnnScan& s, const NormArgs& norm, const float* gates, State state) {
  constexpr int G = rnn_gates(CELL), R = rnn_kept(CELL);
  const int64_t at = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int row = static_cast<int>(at % s.batch), t = static_cast<int>(at / s.batch % s.steps);
  const int64_t d = at / s.batch / s.steps;
  if (d >= s.directions || t >= rnn_length(s, row)) return;
  const int H = s.hidden;
  const float* product = norm.products + at * (int64_t{G} * H);
  const float2 of_product = warp_statistics(G * H, s.eps, [&](int i) { return product[i]; });
  float2 of_cell = {0, 0};
  if constexpr (CELL == kRnnLstm) {
    const float* gate = gates + at * (int64_t{R} * H);
    of_cell = warp_statistics(H, s.eps, [&](int i) {
      return gate[int64_t{H} + i] * state(row, t, static_cast<int>(d), i) + gate[i] * gate[int64_t{2} * H + i];
    });
  }
  if (threadIdx.x % 32 == 0) norm.statistics[at] = {of_product.x, of_product.y, of_cell.x, of_cell.y};
}

// The norm's data of one unit of one row.
template <int CELL>
struct ElementNorm {
  static constexpr int G = rnn_gates(CELL), SUMS = norm_sums(CELL);
  float weight[G], weight_c, bias_c;
  float xhat[G], rstd, mean_c, rstd_c;               // of the current step
  float weighted[G], plain[G], weighted_c, plain_c;  // summed over the steps

  SK_DEVICE void begin(const RnnScan& s, int d, int unit, bool there) {
    const int64_t H = s.hidden;
    const float* from = s.norm + d * (2 * G * H + (CELL == kRnnLstm ? 2 * H : 0)) + unit;
#pragma unroll
    for (int k = 0; k < G; ++k) {
      weight[k] = there ? from[k * H] : 0.0f;
      weighted[k] = plain[k] = xhat[k] = 0;
    }
    weight_c = CELL == kRnnLstm && there ? from[2 * G * H] : 0.0f;
    bias_c = CELL == kRnnLstm && there ? from[2 * G * H + H] : 0.0f;
    weighted_c = plain_c = rstd = mean_c = rstd_c = 0;
  }
  SK_DEVICE void fetch(const NormArgs& norm, int64_t stored, int hidden, int unit) {
    const Statistics s = norm.statistics[stored];
#pragma unroll
    for (int k = 0; k < G; ++k) xhat[k] = (norm.products[(stored * G + k) * hidden + unit] - s.x) * s.y;
    rstd = s.y, mean_c = s.z, rstd_c = s.w;
  }
  SK_DEVICE void end(const RnnScan& s, const NormArgs& norm, int d, int row, int unit) const {
    const int64_t H = s.hidden, columns = 2 * G * H + (CELL == kRnnLstm ? 2 * H : 0);
    float* to = norm.sums + (int64_t{d} * s.batch + row) * columns + unit;
#pragma unroll
    for (int k = 0; k < G; ++k) to[k * H] = weighted[k], to[(G + k) * H] = plain[k];
    if (CELL == kRnnLstm) to[2 * G * H] = weighted_c, to[2 * G * H + H] = plain_c;
  }

  // This element's share of the sums that `gates` needs. of_h: gradients of the norm's output.
  SK_DEVICE void share(const float (&of_h)[G], float (&sums)[SUMS]) const {
#pragma unroll
    for (int k = 0; k < G; ++k) sums[0] += of_h[k] * weight[k], sums[1] += of_h[k] * weight[k] * xhat[k];
  }
  // Turns gradients of the norm's output into gradients of the product, given the two sums.
  SK_DEVICE void gates(float sum, float along, int hidden, float (&of_h)[G]) {
    const float each = 1.0f / (static_cast<float>(G) * static_cast<float>(hidden));
#pragma unroll
    for (int k = 0; k < G; ++k) {
      weighted[k] += of_h[k] * xhat[k];
      plain[k] += of_h[k];
      of_h[k] = (of_h[k] * weight[k] - sum * each - xhat[k] * (along * each)) * rstd;
    }
  }
};

}  // namespace rnn_backward
}  // namespace seqkern
