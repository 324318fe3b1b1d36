// The recurrent scan, forward, host side: checks, plan, launch. The kernel: rnn_forward_cuda.cuh.
#include <cmath>
#include <optional>
#include <string>
#include <tuple>

#include "cuda_launch.h"
#include "dropout.h"
#include "rnn_forward_cuda.cuh"
#include "rnn_plan_cuda.h"
#include "tensor.h"

namespace seqkern {
namespace {

using Kernel = void (*)(RnnForwardArgs);
using Optional = std::optional<Tensor>;
constexpr int64_t kMostUnits = 1 << 16;

// NT: 8 NT rows of the batch in a tile.
template <class T, int NT>
Kernel kernel_of(int cell) {
  switch (cell) {
    case kRnnLstm: return rnn_forward_kernel<T, kRnnLstm, NT>;
    case kRnnGru: return rnn_forward_kernel<T, kRnnGru, NT>;
    default: return rnn_forward_kernel<T, kRnnTanh, NT>;
  }
}
Kernel kernel_of(Dtype dtype, int cell, int rows) {
  // float32 has no kernels for 16 rows: its products are bound by arithmetic, not by waiting.
  if (dtype == Dtype::f32) return rows == 8 ? kernel_of<float, 1>(cell) : nullptr;
  return rows == 8 ? kernel_of<RnnShort, 1>(cell) : kernel_of<RnnShort, 2>(cell);
}

// Of the weights, (D, G H, H): their type and the hidden size, or an error.
Dtype check_weights(const Tensor& w_hh, int64_t cell, const char* op) {
  SK_CHECK(cell >= kRnnLstm && cell <= kRnnRelu, op, ": cell must be between 0 and 3, got ", cell);
  check_dim(w_hh, 3, op, "w_hh");
  const Dtype dtype = dtype_of(w_hh, op, "w_hh");
  SK_CHECK(dtype != Dtype::f64, op, ": w_hh must be float32, bfloat16 or float16, got float64");
  const int64_t hidden = w_hh.size(2);
  SK_CHECK(hidden >= 1 && hidden <= kMostUnits, op, ": w_hh must have between 1 and ", kMostUnits, " columns, got ",
           hidden);
  SK_CHECK(w_hh.size(0) == 1 || w_hh.size(0) == 2, op, ": w_hh must have 1 or 2 directions, got ", w_hh.size(0));
  check_size(w_hh, 1, rnn_gates(static_cast<int>(cell)) * hidden, op, "w_hh");
  return dtype;
}

RnnPlan plan_forward(const Tensor& w_hh, int64_t batch, int cell, bool norm, const std::string& tier, const char* op) {
  const Dtype dtype = check_weights(w_hh, cell, op);
  RnnPlanRequest request{};
  request.op = op;
  request.batch = batch;
  request.directions = static_cast<int>(w_hh.size(0));
  request.hidden = static_cast<int>(w_hh.size(2));
  request.element = dtype == Dtype::f32 ? 4 : 2;
  request.gates = rnn_gates(cell);
  request.norm = norm;
  request.tier = tier;
  for (int i : {0, 1}) request.kernels[i] = reinterpret_cast<const void*>(kernel_of(dtype, cell, 8 + 8 * i));
  return rnn_plan(cuda_device(w_hh), request);
}

// A contiguous tensor of these sizes on the device of w_hh.
void check_beside(const Tensor& t, const Tensor& w_hh, std::initializer_list<int64_t> sizes, ScalarType type,
                  const char* op, const char* argument) {
  SK_CHECK(t.is_cpu() == w_hh.is_cpu() && t.get_device_index() == w_hh.get_device_index(), op, ": ", argument,
           " must be on the device of w_hh");
  check_memory(t, op, argument);
  check_dim(t, static_cast<int64_t>(sizes.size()), op, argument);
  int64_t dim = 0;
  for (int64_t size : sizes) check_size(t, dim++, size, op, argument);
  check_type(t, type, op, argument);
  SK_CHECK(t.is_contiguous(), op, ": ", argument, " must be contiguous");
}
template <class T>
const T* data_or_null(const Optional& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}
float* writable_or_null(const Optional& t) { return t ? static_cast<float*>(t->mutable_data_ptr()) : nullptr; }

std::tuple<Tensor, Tensor> rnn_scan_fwd(const Tensor& x, const Tensor& w_hh, const Optional& bias, const Optional& norm,
                                        const Optional& lengths, const Optional& resets, const Optional& recurrent_mask,
                                        const Optional& seed, const Tensor& h0, const Optional& c0, double zoneout_h,
                                        double zoneout_c, double eps, int64_t cell_number, bool reverse,
                                        const Tensor& output, const Optional& cells, const Optional& gates,
                                        const Optional& products, const std::string& tier) {
  const char* op = "rnn_scan_fwd";
  const Dtype dtype = check_weights(w_hh, cell_number, op);
  const ScalarType type = w_hh.scalar_type(), wide = ScalarType::Float;
  const int cell = static_cast<int>(cell_number);
  const int64_t g = rnn_gates(cell), r = rnn_kept(cell), d = w_hh.size(0), h = w_hh.size(2);
  const bool lstm = cell == kRnnLstm;
  check_beside(w_hh, w_hh, {d, g * h, h}, type, op, "w_hh");
  check_dim(x, 4, op, "x");
  const int64_t t = x.size(1), b = x.size(2);
  SK_CHECK(t < int64_t{1} << 30 && b < int64_t{1} << 30, op, ": x has ", t, " steps of ", b,
           " sequences, more than 2^30");
  checked_product({d, t, b, r, h}, op);
  SK_CHECK(x.is_cpu() == w_hh.is_cpu() && x.get_device_index() == w_hh.get_device_index(), op,
           ": x must be on the device of w_hh");
  check_memory(x, op, "x");
  check_size(x, 0, d, op, "x");
  check_size(x, 3, g * h, op, "x");
  SK_CHECK(x.scalar_type() == wide || x.scalar_type() == type, op, ": x must be float32 or of the type of w_hh");
  SK_CHECK(unit_last_stride(x), op, ": x must be contiguous in its last dimension");
  for (const auto& [state, name] : {std::pair{&h0, "h0"}, std::pair{c0 ? &*c0 : nullptr, "c0"}}) {
    if (state == nullptr) continue;
    check_beside(*state, w_hh, {d, b, h}, state->scalar_type() == wide ? wide : type, op, name);
  }
  SK_CHECK(lstm == c0.has_value(), op, ": c0 is for an LSTM, and an LSTM needs it");
  check_beside(output, w_hh, {t, b, d * h}, type, op, "output");
  if (bias) check_beside(*bias, w_hh, {d, r * h}, wide, op, "bias");
  if (norm) check_beside(*norm, w_hh, {d, 2 * g * h + (lstm ? 2 * h : 0)}, wide, op, "norm");
  if (lengths) check_beside(*lengths, w_hh, {b}, ScalarType::Long, op, "lengths");
  if (resets) check_beside(*resets, w_hh, {t, b}, ScalarType::Byte, op, "resets");
  if (recurrent_mask) check_beside(*recurrent_mask, w_hh, {d, b, h}, wide, op, "recurrent_mask");
  if (cells) check_beside(*cells, w_hh, {d, t, b, h}, wide, op, "cells");
  if (gates) check_beside(*gates, w_hh, {d, t, b, r * h}, wide, op, "gates");
  if (products) check_beside(*products, w_hh, {d, t, b, g * h}, wide, op, "products");
  const bool zones = zoneout_h > 0 || zoneout_c > 0;
  for (double p : {zoneout_h, zoneout_c}) SK_CHECK(p >= 0 && p <= 1, op, ": zoneout must be a probability, got ", p);
  if (seed) {
    SK_CHECK(seed->numel() == 1 && seed->scalar_type() == ScalarType::Long, op, ": seed must be one int64");
    SK_CHECK(seed->device() == w_hh.device(), op, ": seed must be on the device of w_hh");
  }

  const OnDevice guard(w_hh);
  const RnnPlan plan = plan_forward(w_hh, b, cell, norm.has_value(), tier, op);
  SK_CHECK(plan.served, op, ": no tier of the scan serves a hidden size of ", h, ": ", plan.why);
  Tensor h_n = empty(w_hh, {d, b, h}, wide), c_n = empty(w_hh, {lstm ? d : 0, b, h}, wide);
  if (!lstm) c_n = empty(w_hh, {0}, wide);

  RnnForwardArgs args{};
  args.shape = plan.shape;
  args.scan.steps = static_cast<int>(t);
  args.scan.batch = static_cast<int>(b);
  args.scan.hidden = static_cast<int>(h);
  args.scan.directions = static_cast<int>(d);
  args.scan.reverse = reverse;
  args.scan.cell = cell;
  args.scan.lengths = data_or_null<int64_t>(lengths);
  args.scan.resets = data_or_null<uint8_t>(resets);
  args.scan.mask = data_or_null<float>(recurrent_mask);
  args.scan.norm = data_or_null<float>(norm);
  args.scan.eps = static_cast<float>(eps);
  args.scan.seed = zones ? data_or_null<int64_t>(seed) : nullptr;
  args.scan.expected = zones && !seed;
  for (int kind : {0, 1}) {
    const double p = kind == 0 ? zoneout_h : zoneout_c;
    args.scan.threshold[kind] = Dropout::with(p, 0).threshold;
    args.scan.zoneout[kind] = static_cast<float>(p);
  }
  args.half = dtype == Dtype::f16;
  args.x = x.const_data_ptr();
  for (int dim : {0, 1, 2}) args.x_strides[dim] = x.stride(dim);
  args.x_wide = x.scalar_type() == wide;
  args.h0_wide = h0.scalar_type() == wide;
  args.c0_wide = c0 && c0->scalar_type() == wide;
  args.w_hh = w_hh.const_data_ptr();
  args.aligned =
      reinterpret_cast<uintptr_t>(args.w_hh) % 16 == 0 && h * static_cast<int64_t>(w_hh.element_size()) % 16 == 0;
  args.bias = data_or_null<float>(bias);
  args.h0 = h0.const_data_ptr();
  args.c0 = data_or_null<void>(c0);
  args.output = output.mutable_data_ptr();
  args.cells = writable_or_null(cells);
  args.gates = writable_or_null(gates);
  args.products = writable_or_null(products);
  args.h_n = static_cast<float*>(h_n.mutable_data_ptr());
  args.c_n = lstm ? static_cast<float*>(c_n.mutable_data_ptr()) : nullptr;

  if (plan.teams == 0) return {h_n, c_n};
  Tensor mailbox = empty(w_hh, {plan.teams * plan.shape.mailbox_bytes}, ScalarType::Byte);
  if (plan.shape.tier == RnnTier::grid) {
    // Numbers of operands must not come round to those that memory still has.
    const int64_t in_turn = d * ((b + plan.rows - 1) / plan.rows) / plan.teams + 1;
    SK_CHECK(in_turn * (t + 1) < int64_t{1} << 31, op, ": too many steps for the grid tier: ", t);
    torch::stable::zero_(mailbox);
    args.mailbox = static_cast<unsigned char*>(mailbox.mutable_data_ptr());
  }
  launch(op, kernel_of(dtype, cell, plan.rows), rnn_launch_shape(plan.shape, plan.teams), current_stream(w_hh), args);
  return {h_n, c_n};
}

std::string rnn_scan_plan(const Tensor& w_hh, int64_t batch, int64_t cell, bool norm, bool backward,
                          const std::string& tier) {
  const char* op = "rnn_scan_plan";
  if (w_hh.dim() == 3 && (w_hh.size(2) < 1 || w_hh.size(2) > kMostUnits)) return "none: it takes 1 to 65536 units";
  check_weights(w_hh, cell, op);
  const OnDevice guard(w_hh);
  if (backward) return rnn_plan_backward(w_hh, static_cast<int>(cell), norm, tier).why;
  return plan_forward(w_hh, batch, static_cast<int>(cell), norm, tier, op).why;
}

}  // namespace
}  // namespace seqkern

STABLE_TORCH_LIBRARY_IMPL(seqkern_cuda, SK_CUDA_KEY, m) {
  m.impl("rnn_scan_fwd", TORCH_BOX(&seqkern::rnn_scan_fwd));
  m.impl("rnn_scan_plan", TORCH_BOX(&seqkern::rnn_scan_plan));
}
