// The forward recurrent scan, host side: checks, plan, launch. The kernel: forward.cuh.
#include <string>
#include <tuple>

#include "common/cuda/launch.h"
#include "forward.cuh"
#include "plan.h"
#include "scan.h"

namespace seqkern {
namespace {

using Kernel = void (*)(RnnForwardArgs);
constexpr int64_t kMostUnits = 1 << 16;

// NT: a tile has 8 NT rows of the batch.
template <class T, int NT>
Kernel kernel_of(int cell) {
  switch (cell) {
    case kRnnLstm: return rnn_forward_kernel<T, kRnnLstm, NT>;
    case kRnnGru: return rnn_forward_kernel<T, kRnnGru, NT>;
    default: return rnn_forward_kernel<T, kRnnTanh, NT>;
  }
}
Kernel kernel_of(Dtype dtype, int cell, int rows) {
  // float32 has no kernels for tiles of 16 rows: its products are bound by arithmetic, not by latency.
  if (dtype == Dtype::f32) return rows == 8 ? kernel_of<float, 1>(cell) : nullptr;
  return rows == 8 ? kernel_of<RnnShort, 1>(cell) : kernel_of<RnnShort, 2>(cell);
}

// The weights' dtype; raises unless they are (D, G H, H).
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

std::tuple<Tensor, Tensor> rnn_scan_fwd(const Tensor& x, const Tensor& w_hh, const MaybeTensor& bias,
                                        const MaybeTensor& norm, const MaybeTensor& lengths, const MaybeTensor& resets,
                                        const MaybeTensor& recurrent_mask, const MaybeTensor& seed, const Tensor& h0,
                                        const MaybeTensor& c0, double zoneout_h, double zoneout_c, double eps,
                                        int64_t cell_number, const Tensor& output, const MaybeTensor& cells,
                                        const MaybeTensor& gates, const MaybeTensor& products,
                                        const std::string& tier) {
  const char* op = "rnn_scan_fwd";
  const Dtype dtype = check_weights(w_hh, cell_number, op);
  const ScalarType type = w_hh.scalar_type(), wide = ScalarType::Float;
  const int cell = static_cast<int>(cell_number);
  const int64_t g = rnn_gates(cell), r = rnn_kept(cell), d = w_hh.size(0), h = w_hh.size(2);
  const bool lstm = cell == kRnnLstm;
  const RnnScanChecks check{op, w_hh};
  check(w_hh, {d, g * h, h}, type, "w_hh");
  check_dim(x, 4, op, "x");
  const int64_t t = x.size(1), b = x.size(2);
  const auto float_or_type = [&](const Tensor& tensor) { return tensor.scalar_type() == wide ? wide : type; };
  check(x, {d, t, b, g * h}, float_or_type(x), "x", true);
  check(h0, {d, b, h}, float_or_type(h0), "h0");
  SK_CHECK(lstm == c0.has_value(), op, ": c0 is for an LSTM, and an LSTM needs it");
  if (c0) check(*c0, {d, b, h}, float_or_type(*c0), "c0");
  check(output, {t, b, d * h}, type, "output");
  check(bias, {d, r * h}, wide, "bias");
  check(cells, {d, t, b, h}, wide, "cells");
  check(gates, {d, t, b, r * h}, wide, "gates");
  check(products, {d, t, b, g * h}, wide, "products");
  RnnForwardArgs args{};
  args.scan = checked_scan(check, {norm, lengths, resets, recurrent_mask, seed, zoneout_h, zoneout_c, eps, cell}, t, b);

  const OnDevice guard(w_hh);
  const RnnPlan plan = plan_forward(w_hh, b, cell, norm.has_value(), tier, op);
  SK_CHECK(plan.served, op, ": no tier of the scan serves a hidden size of ", h, ": ", plan.why);
  Tensor h_n = empty(w_hh, {d, b, h}, wide), c_n = empty(w_hh, {lstm ? d : 0, b, h}, wide);
  if (!lstm) c_n = empty(w_hh, {0}, wide);

  args.shape = plan.shape;
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
  args.c0 = data_or_null(c0);
  args.output = output.mutable_data_ptr();
  args.cells = writable_or_null<float>(cells);
  args.gates = writable_or_null<float>(gates);
  args.products = writable_or_null<float>(products);
  args.h_n = static_cast<float*>(h_n.mutable_data_ptr());
  args.c_n = lstm ? static_cast<float*>(c_n.mutable_data_ptr()) : nullptr;

  if (plan.teams == 0) return {h_n, c_n};
  Tensor mailbox = empty(w_hh, {plan.teams * plan.shape.mailbox_bytes}, ScalarType::Byte);
  if (plan.shape.tier == RnnTier::grid) {
    // A number in a tag must not repeat while the mailbox may still hold its earlier operand.
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
