// What the recurrent scans in CUDA C++ know of the layer, forward and backward: its options, and one step's flags.
// The equations stand in kernels/rnn/rnn.py. Torch-free.
#pragma once

#include "common/cuda/device.cuh"

namespace seqkern {

constexpr int kRnnLstm = 0, kRnnGru = 1, kRnnTanh = 2, kRnnRelu = 3;

// Tiles of a cell's gates, G, and what is kept of them, R: the GRU's q = zh_n too.
constexpr int rnn_gates(int cell) { return cell == kRnnLstm ? 4 : cell == kRnnGru ? 3 : 1; }
constexpr int rnn_kept(int cell) { return cell == kRnnLstm || cell == kRnnGru ? 4 : 1; }

// An address is null where there is no such option.
struct RnnScan {
  int steps, batch, hidden, directions;
  bool reverse;
  int cell;
  const int64_t* lengths;  // (batch)
  const uint8_t* resets;   // (steps, batch)
  const float* mask;       // (directions, batch, hidden): factors of h on its way into the product
  const float* norm;       // (directions, 2 G hidden [+ 2 hidden]): weight, bias, and of an LSTM's c
  float eps;
  const int64_t* seed;    // zoneout in training
  bool expected;          // zoneout in evaluation
  uint32_t threshold[2];  // of h and c: words below it keep the old value
  float zoneout[2];
};

SK_DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }

SK_DEVICE bool rnn_backwards(const RnnScan& s, int d) { return s.reverse || d == 1; }
SK_DEVICE int rnn_time(const RnnScan& s, int step, bool backwards) { return backwards ? s.steps - 1 - step : step; }
// Times that sequence `row` has; none for rows beyond the batch. Lengths on a device are not read back to be checked:
// one out of range is as good as the nearest that is not.
SK_DEVICE int rnn_length(const RnnScan& s, int row) {
  if (row >= s.batch) return 0;
  if (s.lengths == nullptr) return s.steps;
  const int64_t length = s.lengths[row];
  return length < 0 ? 0 : length > s.steps ? s.steps : static_cast<int>(length);
}
// Whether the state is 0 before the step at time t: a flag is a border between its time and the one before.
SK_DEVICE bool rnn_resets(const RnnScan& s, int t, bool backwards, int row, int length) {
  const int border = t + (backwards ? 1 : 0);
  return s.resets != nullptr && t >= 0 && border < length &&
         s.resets[static_cast<int64_t>(border) * s.batch + row] != 0;
}

// Whether zoneout in training keeps the old value of an element. kind: 0 for h, 1 for c.
SK_DEVICE bool rnn_stays(const RnnScan& s, int kind, int t, int d, int row, int unit) {
  const int64_t counter = (static_cast<int64_t>(2 * d + kind) * s.steps + t) * s.batch + row;
  const uint4 words = philox(static_cast<uint64_t>(*s.seed), counter, unit);
  const uint32_t word = unit % 4 == 0 ? words.x : unit % 4 == 1 ? words.y : unit % 4 == 2 ? words.z : words.w;
  return word < s.threshold[kind];
}
// stays: what `rnn_stays` said; not asked for in evaluation.
SK_DEVICE float rnn_zone(const RnnScan& s, float value, float old, int kind, bool stays) {
  if (s.expected) return s.zoneout[kind] * old + (1.0f - s.zoneout[kind]) * value;
  return stays ? old : value;
}

}  // namespace seqkern
