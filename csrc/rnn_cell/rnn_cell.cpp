// Recurrent cells of one step, host side, for gates that are already summed over their inputs.
#include "rnn_cell.h"

#include <algorithm>
#include <tuple>

#include "ops.h"
#include "rnn/problem.h"

namespace seqkern {
namespace {

// Elements of a thread, at least.
constexpr int64_t kGrainElements = 4096;

template <class Body>
void for_cells(int64_t batch, int64_t hidden, const Body& body) {
  torch::stable::parallel_for(0, batch, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, hidden)), body);
}

std::tuple<Tensor, Tensor, Tensor> rnn_cell_fwd(const Tensor& x_gates, const Tensor& h_gates, const Tensor& h,
                                                const MaybeTensor& c, int64_t cell_number) {
  const char* op = "rnn_cell_fwd";
  const Cell cell = cell_of(cell_number, op);
  SK_CHECK(cell <= Cell::relu, op, ": cell must have an op of a single step, got ", cell_number);
  const bool lstm = cell == Cell::lstm;
  const Dtype dtype = dtype_of(h, op, "h");
  const ScalarType type = h.scalar_type();
  check_dim(h, 2, op, "h");
  const int64_t batch = h.size(0), hidden = h.size(1), gates = checked_product({gate_count(cell), hidden}, op);
  check_like(h, {batch, hidden}, type, op, "h");
  check_like(x_gates, {batch, gates}, type, op, "x_gates");
  check_like(h_gates, {batch, gates}, type, op, "h_gates");
  SK_CHECK(c.has_value() == lstm, op, ": c is for LSTM, which needs it");
  if (lstm) check_like(*c, {batch, hidden}, type, op, "c");
  const int64_t saved = checked_product({saved_count(cell), hidden}, op);
  checked_product({8, batch, saved}, op);
  const Tensor x = as_contiguous(x_gates), z = as_contiguous(h_gates), h_prev = as_contiguous(h);
  const Tensor c_prev = lstm ? as_contiguous(*c) : h_prev;
  Tensor h_new = empty(x, {batch, hidden}, type), c_new = lstm ? empty(x, {batch, hidden}, type) : empty(x, {0}, type);
  Tensor activated = empty(x, {batch, saved}, acc_type(dtype));
  const RnnCellForward args{.dtype = dtype,
                            .cell = cell,
                            .hidden = hidden,
                            .x_gates = x.const_data_ptr(),
                            .h_gates = z.const_data_ptr(),
                            .h = h_prev.const_data_ptr(),
                            .c = c_prev.const_data_ptr(),
                            .h_new = h_new.mutable_data_ptr(),
                            .c_new = c_new.mutable_data_ptr(),
                            .activated = activated.mutable_data_ptr()};
  const RnnCellKernels& kernels = rnn_cell_kernels();
  for_cells(batch, hidden, [&](int64_t begin, int64_t end) { kernels.forward(args, begin, end); });
  return {h_new, c_new, activated};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rnn_cell_bwd(const Tensor& grad_h, const MaybeTensor& grad_c,
                                                        const Tensor& h, const MaybeTensor& c, const MaybeTensor& c_new,
                                                        const Tensor& activated, int64_t cell_number) {
  const char* op = "rnn_cell_bwd";
  const Cell cell = cell_of(cell_number, op);
  SK_CHECK(cell <= Cell::relu, op, ": cell must have an op of a single step, got ", cell_number);
  const bool lstm = cell == Cell::lstm, gru = cell == Cell::gru;
  const Dtype dtype = dtype_of(h, op, "h");
  const ScalarType type = h.scalar_type();
  check_dim(h, 2, op, "h");
  const int64_t batch = h.size(0), hidden = h.size(1), gates = checked_product({gate_count(cell), hidden}, op);
  check_like(h, {batch, hidden}, type, op, "h");
  check_like(grad_h, {batch, hidden}, type, op, "grad_h");
  check_like(activated, {batch, checked_product({saved_count(cell), hidden}, op)}, acc_type(dtype), op, "activated");
  SK_CHECK(c.has_value() == lstm && c_new.has_value() == lstm, op, ": c and c_new are for LSTM, which needs them");
  SK_CHECK(lstm || !grad_c, op, ": grad_c is for LSTM");
  const auto checked = [&](const MaybeTensor& t, const char* argument) -> MaybeTensor {
    if (!t) return std::nullopt;
    check_like(*t, {batch, hidden}, type, op, argument);
    return as_contiguous(*t);
  };
  const MaybeTensor dc = checked(grad_c, "grad_c"), c_prev = checked(c, "c"), c_next = checked(c_new, "c_new");
  const Tensor dh = as_contiguous(grad_h), h_prev = as_contiguous(h), saved = as_contiguous(activated);
  const auto result = [&](bool needed, int64_t columns) {
    return needed ? empty(h_prev, {batch, columns}, type) : empty(h_prev, {0}, type);
  };
  Tensor grad_x = result(true, gates), grad_h_gates = result(gru, gates), grad_h_prev = result(gru, hidden);
  Tensor grad_c_prev = result(lstm, hidden);
  const RnnCellBackward args{.dtype = dtype,
                             .cell = cell,
                             .hidden = hidden,
                             .grad_h = dh.const_data_ptr(),
                             .grad_c = data_or_null(dc),
                             .h = h_prev.const_data_ptr(),
                             .c = data_or_null(c_prev),
                             .c_new = data_or_null(c_next),
                             .activated = saved.const_data_ptr(),
                             .grad_x_gates = grad_x.mutable_data_ptr(),
                             .grad_h_gates = grad_h_gates.mutable_data_ptr(),
                             .grad_h_prev = grad_h_prev.mutable_data_ptr(),
                             .grad_c_prev = grad_c_prev.mutable_data_ptr()};
  const RnnCellKernels& kernels = rnn_cell_kernels();
  for_cells(batch, hidden, [&](int64_t begin, int64_t end) { kernels.backward(args, begin, end); });
  return {grad_x, grad_h_gates, grad_h_prev, grad_c_prev};
}

SK_DIRECT_OP(rnn_cell_fwd)
SK_DIRECT_OP(rnn_cell_bwd)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("rnn_cell_fwd", TORCH_BOX(&rnn_cell_fwd));
  m.impl("rnn_cell_bwd", TORCH_BOX(&rnn_cell_bwd));
}

}  // namespace seqkern
