// Checks and arguments that the host sides of both CUDA C++ recurrent scans share.
#pragma once

#include <optional>
#include <utility>

#include "cell.cuh"
#include "dropout.h"
#include "tensor.h"

namespace seqkern {

using MaybeTensor = std::optional<Tensor>;

template <class T = void>
T* writable_or_null(const MaybeTensor& t) {
  return t ? static_cast<T*>(t->mutable_data_ptr()) : nullptr;
}

// Checks tensors beside w_hh: contiguous, or with `any_strides` only in the last dimension.
struct RnnScanChecks {
  const char* op;
  const Tensor& w_hh;

  void operator()(const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type, const char* argument,
                  bool any_strides = false) const {
    check_beside(t, w_hh, op, argument, "w_hh");
    check_type(t, type, op, argument);
    check_dim(t, static_cast<int64_t>(sizes.size()), op, argument);
    int64_t dim = 0;
    for (int64_t size : sizes) check_size(t, dim++, size, op, argument);
    SK_CHECK(any_strides ? unit_last_stride(t) : t.is_contiguous(), op, ": ", argument,
             any_strides ? " must have a contiguous last dimension" : " must be contiguous");
  }
  void operator()(const MaybeTensor& t, std::initializer_list<int64_t> sizes, ScalarType type, const char* argument,
                  bool any_strides = false) const {
    if (t) (*this)(*t, sizes, type, argument, any_strides);
  }
};

struct RnnScanOptions {
  const MaybeTensor &norm, &lengths, &resets, &recurrent_mask, &seed;
  double zoneout_h, zoneout_c, eps;
  int cell;
};

inline int64_t norm_columns_of(int cell, int64_t hidden) {
  return 2 * rnn_gates(cell) * hidden + (cell == kRnnLstm ? 2 * hidden : 0);
}

// w_hh gives the sizes (directions, gates, hidden).
inline RnnScan checked_scan(const RnnScanChecks& check, const RnnScanOptions& o, int64_t steps, int64_t batch) {
  const int64_t D = check.w_hh.size(0), H = check.w_hh.size(2);
  const char* op = check.op;
  SK_CHECK(steps < int64_t{1} << 30 && batch < int64_t{1} << 30, op, ": at most 2^30 steps and sequences, got ", steps,
           " and ", batch);
  checked_product({D, steps, batch, rnn_kept(o.cell), H}, op);
  check(o.norm, {D, norm_columns_of(o.cell, H)}, ScalarType::Float, "norm");
  check(o.lengths, {batch}, ScalarType::Long, "lengths");
  check(o.resets, {steps, batch}, ScalarType::Byte, "resets");
  check(o.recurrent_mask, {D, batch, H}, ScalarType::Float, "recurrent_mask");
  if (o.seed) {
    SK_CHECK(o.seed->numel() == 1 && o.seed->scalar_type() == ScalarType::Long, op, ": seed must be one int64");
    check_beside(*o.seed, check.w_hh, op, "seed", "w_hh");
  }
  RnnScan scan{};
  scan.steps = static_cast<int>(steps);
  scan.batch = static_cast<int>(batch);
  scan.hidden = static_cast<int>(H);
  scan.directions = static_cast<int>(D);
  scan.cell = o.cell;
  scan.lengths = data_or_null<int64_t>(o.lengths);
  scan.resets = data_or_null<uint8_t>(o.resets);
  scan.mask = data_or_null<float>(o.recurrent_mask);
  scan.norm = data_or_null<float>(o.norm);
  scan.eps = static_cast<float>(o.eps);
  const bool zones = o.zoneout_h > 0 || o.zoneout_c > 0;
  scan.seed = zones ? data_or_null<int64_t>(o.seed) : nullptr;
  scan.expected = zones && !o.seed;
  for (const auto& [kind, p] : {std::pair{0, o.zoneout_h}, std::pair{1, o.zoneout_c}}) {
    SK_CHECK(p >= 0 && p <= 1, op, ": zoneout must be a probability, between 0 and 1, got ", p);
    scan.threshold[kind] = Dropout::with(p, 0).threshold;
    scan.zoneout[kind] = static_cast<float>(p);
  }
  return scan;
}

}  // namespace seqkern
