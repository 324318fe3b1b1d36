// What the CUDA C++ recurrent scans, forward and backward, know of the layer: its options, and the flags of a step.
// Equations: kernels/rnn/rnn.py. Torch-free.
#pragma once

#include "common/cuda/device.cuh"

namespace seqkern {

constexpr int kRnnLstm = 0, kRnnGru = 1, kRnnTanh = 2, kRnnRelu = 3;

// Gates of a cell, G, and values kept of each step, R: the GRU also keeps q = zh_n.
constexpr int rnn_gates(int cell) { return cell == kRnnLstm ? 4 : cell == kRnnGru ? 3 : 1; }
constexpr int rnn_kept(int cell) { return cell == kRnnLstm || cell == kRnnGru ? 4 : 1; }

// The address of an absent option is null.
struct RnnScan {
  int steps, batch, hidden, directions;
  int cell;
  const int64_t* lengths;  // (batch)
  const uint8_t* resets;   // (steps, batch)
  const float* mask;       // (directions, batch, hidden): multiplies h before the product
  const float* norm;       // (directions, 2 G hidden [+ 2 hidden]): weight, bias; for an LSTM also those of c
  float eps;
  const int64_t* seed;    // of zoneout in training
  bool expected;          // zoneout in evaluation
  uint32_t threshold[2];  // for h and c: a word below it keeps the old value
  float zoneout[2];
};

SK_DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

// The second direction visits the last step first.
SK_DEVICE bool rnn_backwards(int d) { return d == 1; }
SK_DEVICE int rnn_time(const RnnScan& s, int step, bool backwards) { return backwards ? s.steps - 1 - step : step; }
// Steps of sequence `row`; 0 beyond the batch. Lengths on a device are not read back for checking: one out of range is
// clamped.
SK_DEVICE int rnn_length(const RnnScan& s, int row) {
  if (row >= s.batch) return 0;
  if (s.lengths == nullptr) return s.steps;
  const int64_t length = s.lengths[row];
  return length < 0 ? 0 : length > s.steps ? s.steps : static_cast<int>(length);
}
// Whether the state is set to 0 before the step at time t. A flag marks the border between its time and the one before.
SK_DEVICE bool rnn_resets(const RnnScan& s, int t, bool backwards, int row, int length) {
  const int border = t + (backwards ? 1 : 0);
  return s.resets != nullptr && t >= 0 && border < length &&
         s.resets[static_cast<int64_t>(border) * s.batch + row] != 0;
}

// Whether zoneout in training keeps an element's old value. kind: 0 for h, 1 for c.
SK_DEVICE bool rnn_stays(const RnnScan& s, int kind, int t, int d, int row, int unit) {
  const int64_t counter = (static_cast<int64_t>(2 * d + kind) * s.steps + t) * s.batch + row;
  const uint4 words = philox(static_cast<uint64_t>(*s.seed), counter, unit);
  const uint32_t word = unit % 4 == 0 ? words.x : unit % 4 == 1 ? words.y : unit % 4 == 2 ? words.z : words.w;
  return word < s.threshold[kind];
}
// stays: the result of `rnn_stays`; ignored in evaluation.
SK_DEVICE float rnn_zone(const RnnScan& s, float value, float old, int kind, bool stays) {
  if (s.expected) return s.zoneout[kind] * old + (1.0f - s.zoneout[kind]) * value;
  return stays ? old : value;
}

}  // namespace seqkern
