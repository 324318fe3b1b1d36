// Gated linear units, host side: checks, allocates, registers the ops under the CPU key.
#include "glu.h"

#include <tuple>

#include "elementwise.h"
#include "ops.h"

namespace seqkern {
namespace {

Activation activation_of(int64_t activation, const char* op) {
  SK_CHECK(0 <= activation && activation <= 2, op, ": activation must be 0 (silu), 1 (gelu) or 2 (gelu by tanh), got ",
           activation);
  return static_cast<Activation>(activation);
}

Tensor glu_fwd(const Tensor& gate, const Tensor& up, int64_t activation) {
  const char* op = "glu_fwd";
  const ElementRows rows({&gate, &up}, {"gate", "up"}, op);
  Tensor output = rows.result();
  const GluForward args{
      .dtype = rows.dtype,
      .activation = activation_of(activation, op),
      .columns = rows.columns,
      .gate = rows.data(0),
      .gate_stride = rows.stride(0),
      .up = rows.data(1),
      .up_stride = rows.stride(1),
      .output = output.mutable_data_ptr(),
  };
  const auto forward = glu_kernels().forward;
  for_elements(rows.elements, [&](int64_t begin, int64_t end) { forward(args, begin, end); });
  return output;
}

std::tuple<Tensor, Tensor> glu_bwd(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                                   int64_t activation) {
  const char* op = "glu_bwd";
  const ElementRows rows({&gate, &up, &grad_output}, {"gate", "up", "grad_output"}, op);
  Tensor grad_gate = rows.result(), grad_up = rows.result();
  const GluBackward args{
      .dtype = rows.dtype,
      .activation = activation_of(activation, op),
      .columns = rows.columns,
      .grad_output = rows.data(2),
      .grad_output_stride = rows.stride(2),
      .gate = rows.data(0),
      .gate_stride = rows.stride(0),
      .up = rows.data(1),
      .up_stride = rows.stride(1),
      .grad_gate = grad_gate.mutable_data_ptr(),
      .grad_up = grad_up.mutable_data_ptr(),
  };
  const auto backward = glu_kernels().backward;
  for_elements(rows.elements, [&](int64_t begin, int64_t end) { backward(args, begin, end); });
  return {grad_gate, grad_up};
}

SK_DIRECT_OP(glu_fwd)
SK_DIRECT_OP(glu_bwd)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("glu_fwd", TORCH_BOX(&glu_fwd));
  m.impl("glu_bwd", TORCH_BOX(&glu_bwd));
}

}  // namespace seqkern
