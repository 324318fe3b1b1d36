// The activation of a feed-forward block, host side: checks, allocates, registers the ops under the CPU key.
#include "ffn.h"

#include <tuple>

#include "elementwise.h"
#include "ops.h"

namespace seqkern {
namespace {

Activation activation_of(int64_t activation, const char* op) {
  SK_CHECK(0 <= activation && activation <= 3, op,
           ": activation must be 0 (silu), 1 (gelu), 2 (gelu by tanh) or 3 (relu), got ", activation);
  return static_cast<Activation>(activation);
}

void check_z(const Tensor& z, bool gated, const char* op) {
  check_cpu(z, op, "z");
  check_dim(z, 2, op, "z");
  SK_CHECK(!gated || z.size(1) % 2 == 0, op, ": z must have an even number of columns, gate and up, got ", z.size(1));
}

Tensor ffn_fwd(const Tensor& z, int64_t activation, bool gated) {
  const char* op = "ffn_fwd";
  const Dtype dtype = dtype_of(z, op, "z");
  check_z(z, gated, op);
  const int64_t columns = gated ? z.size(1) / 2 : z.size(1);
  const Tensor from = as_contiguous(z);
  Tensor output = empty(z, {z.size(0), columns}, z.scalar_type());
  const FfnForward args{.dtype = dtype,
                        .activation = activation_of(activation, op),
                        .gated = gated,
                        .columns = columns,
                        .z = from.const_data_ptr(),
                        .output = output.mutable_data_ptr()};
  const auto forward = ffn_kernels().forward;
  for_elements(output.numel(), [&](int64_t begin, int64_t end) { forward(args, begin, end); });
  return output;
}

std::tuple<Tensor, Tensor> ffn_bwd(const Tensor& grad_output, const Tensor& z, int64_t activation, bool gated) {
  const char* op = "ffn_bwd";
  const Dtype dtype = dtype_of(z, op, "z");
  check_z(z, gated, op);
  const int64_t columns = gated ? z.size(1) / 2 : z.size(1);
  check_cpu(grad_output, op, "grad_output");
  check_dim(grad_output, 2, op, "grad_output");
  check_type(grad_output, z.scalar_type(), op, "grad_output");
  check_size(grad_output, 0, z.size(0), op, "grad_output");
  check_size(grad_output, 1, columns, op, "grad_output");
  const Tensor from = as_contiguous(z), grad = as_contiguous(grad_output);
  Tensor grad_z = empty(z, {z.size(0), z.size(1)}, z.scalar_type());
  Tensor output = empty(z, {z.size(0), columns}, z.scalar_type());
  const FfnBackward args{.dtype = dtype,
                         .activation = activation_of(activation, op),
                         .gated = gated,
                         .columns = columns,
                         .grad_output = grad.const_data_ptr(),
                         .z = from.const_data_ptr(),
                         .grad_z = grad_z.mutable_data_ptr(),
                         .output = output.mutable_data_ptr()};
  const auto backward = ffn_kernels().backward;
  for_elements(output.numel(), [&](int64_t begin, int64_t end) { backward(args, begin, end); });
  return {grad_z, output};
}

SK_DIRECT_OP(ffn_fwd)
SK_DIRECT_OP(ffn_bwd)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("ffn_fwd", TORCH_BOX(&ffn_fwd));
  m.impl("ffn_bwd", TORCH_BOX(&ffn_bwd));
}

}  // namespace seqkern
