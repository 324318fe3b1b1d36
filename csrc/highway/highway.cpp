// Highway layers after their product, host side: checks, allocates, registers the ops under the CPU key.
#include "highway.h"

#include <tuple>

#include "elementwise.h"

namespace seqkern {
namespace {

HighwayActivation activation_of(int64_t activation, const char* op) {
  SK_CHECK(0 <= activation && activation <= 3, op,
           ": activation must be 0 (relu), 1 (tanh), 2 (gelu) or 3 (silu), got ", activation);
  return static_cast<HighwayActivation>(activation);
}
HighwayRows rows_of(const ElementRows& rows, size_t i) { return {rows.data(i), rows.stride(i)}; }

Tensor highway_fwd(const Tensor& candidate, const Tensor& gate, const Tensor& x, int64_t activation) {
  const char* op = "highway_fwd";
  const ElementRows rows({&candidate, &gate, &x}, {"candidate", "gate", "x"}, op);
  Tensor output = rows.result();
  const HighwayForward args{
      .dtype = rows.dtype,
      .activation = activation_of(activation, op),
      .columns = rows.columns,
      .candidate = rows_of(rows, 0),
      .gate = rows_of(rows, 1),
      .x = rows_of(rows, 2),
      .output = output.mutable_data_ptr(),
  };
  const auto forward = highway_kernels().forward;
  for_elements(rows.elements, [&](int64_t begin, int64_t end) { forward(args, begin, end); });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> highway_bwd(const Tensor& grad_output, const Tensor& candidate, const Tensor& gate,
                                               const Tensor& x, int64_t activation) {
  const char* op = "highway_bwd";
  const ElementRows rows({&candidate, &gate, &x, &grad_output}, {"candidate", "gate", "x", "grad_output"}, op);
  Tensor grad_candidate = rows.result(), grad_gate = rows.result(), grad_x = rows.result();
  const HighwayBackward args{
      .dtype = rows.dtype,
      .activation = activation_of(activation, op),
      .columns = rows.columns,
      .grad_output = rows_of(rows, 3),
      .candidate = rows_of(rows, 0),
      .gate = rows_of(rows, 1),
      .x = rows_of(rows, 2),
      .grad_candidate = grad_candidate.mutable_data_ptr(),
      .grad_gate = grad_gate.mutable_data_ptr(),
      .grad_x = grad_x.mutable_data_ptr(),
  };
  const auto backward = highway_kernels().backward;
  for_elements(rows.elements, [&](int64_t begin, int64_t end) { backward(args, begin, end); });
  return {grad_candidate, grad_gate, grad_x};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("highway_fwd", TORCH_BOX(&highway_fwd));
  m.impl("highway_bwd", TORCH_BOX(&highway_bwd));
}

}  // namespace seqkern
