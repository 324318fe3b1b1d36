// Layer norm, host side: checks, allocation, division of the work, registration under the CPU key.
#include "layer_norm.h"

#include <algorithm>
#include <tuple>

#include "tensor.h"

namespace seqkern {
namespace {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kGrainElements = 16384;
// The partial sums of the parameter gradients: at most so many chunks, and about so many elements in all.
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kPartialElements = int64_t{1} << 22;

const void* data_or_null(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }

std::optional<Tensor> parameter(const std::optional<Tensor>& t, int64_t columns, ScalarType type, const char* op,
                                const char* argument) {
  if (!t) return std::nullopt;
  check_cpu(*t, op, argument);
  check_dim(*t, 1, op, argument);
  check_size(*t, 0, columns, op, argument);
  dtype_of(*t, op, argument);
  return as_contiguous(t->scalar_type() == type ? *t : torch::stable::to(*t, type));
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, const std::optional<Tensor>& weight,
                                                  const std::optional<Tensor>& bias, double eps) {
  const char* op = "layer_norm_fwd";
  check_dim(input, 2, op, "input");
  const Dtype dtype = dtype_of(input, op, "input");
  const ScalarType acc = acc_type(dtype);
  const int64_t rows = input.size(0), columns = input.size(1);
  const auto weight_acc = parameter(weight, columns, acc, op, "weight");
  const auto bias_acc = parameter(bias, columns, acc, op, "bias");
  const Tensor x = with_unit_last_stride(input);

  Tensor output = empty(x, {rows, columns}, input.scalar_type());
  Tensor mean = empty(x, {rows}, acc), rstd = empty(x, {rows}, acc);
  const LayerNormForward args{dtype,
                              columns,
                              x.const_data_ptr(),
                              x.stride(0),
                              data_or_null(weight_acc),
                              data_or_null(bias_acc),
                              eps,
                              output.mutable_data_ptr(),
                              mean.mutable_data_ptr(),
                              rstd.mutable_data_ptr()};
  const auto forward = layer_norm_kernels().forward;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, columns)),
                              [&](int64_t begin, int64_t end) { forward(args, begin, end); });
  return {output, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                                                  const Tensor& rstd, const std::optional<Tensor>& weight,
                                                  bool need_weight, bool need_bias) {
  const char* op = "layer_norm_bwd";
  check_dim(input, 2, op, "input");
  check_dim(grad_output, 2, op, "grad_output");
  const Dtype dtype = dtype_of(input, op, "input");
  const ScalarType acc = acc_type(dtype);
  const int64_t rows = input.size(0), columns = input.size(1);
  check_cpu(grad_output, op, "grad_output");
  check_type(grad_output, input.scalar_type(), op, "grad_output");
  check_size(grad_output, 0, rows, op, "grad_output");
  check_size(grad_output, 1, columns, op, "grad_output");
  for (const auto& [name, t] : {std::pair{"mean", &mean}, std::pair{"rstd", &rstd}}) {
    check_cpu(*t, op, name);
    check_dim(*t, 1, op, name);
    check_size(*t, 0, rows, op, name);
    check_type(*t, acc, op, name);
  }
  const auto weight_acc = parameter(weight, columns, acc, op, "weight");
  const Tensor x = with_unit_last_stride(input), dy = with_unit_last_stride(grad_output);
  const Tensor mean_c = as_contiguous(mean), rstd_c = as_contiguous(rstd);

  // By the shape alone, so that the order of every sum is the same on any number of threads. A chunk of fewer elements
  // than the grain would spend its time on its partial sums.
  const int64_t most = std::clamp<int64_t>(kPartialElements / std::max<int64_t>(1, columns), 4, kMaxChunks);
  const int64_t least_rows = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, columns));
  const int64_t rows_per_chunk = std::max(least_rows, (rows + most - 1) / most);
  const int64_t chunks = (rows + rows_per_chunk - 1) / rows_per_chunk;

  Tensor grad_input = empty(x, {rows, columns}, input.scalar_type());
  Tensor weight_partial = empty(x, {need_weight ? chunks : 0, columns}, acc);
  Tensor bias_partial = empty(x, {need_bias ? chunks : 0, columns}, acc);
  const LayerNormBackward args{dtype,
                               rows,
                               columns,
                               dy.const_data_ptr(),
                               dy.stride(0),
                               x.const_data_ptr(),
                               x.stride(0),
                               mean_c.const_data_ptr(),
                               rstd_c.const_data_ptr(),
                               data_or_null(weight_acc),
                               grad_input.mutable_data_ptr(),
                               rows_per_chunk,
                               need_weight ? weight_partial.mutable_data_ptr() : nullptr,
                               need_bias ? bias_partial.mutable_data_ptr() : nullptr};
  const auto& kernels = layer_norm_kernels();
  const int64_t chunk_elements = std::max<int64_t>(1, rows_per_chunk * columns);
  torch::stable::parallel_for(0, chunks, std::max<int64_t>(1, kGrainElements / chunk_elements),
                              [&](int64_t begin, int64_t end) { kernels.backward(args, begin, end); });

  const auto total = [&](const Tensor& partial, bool needed) {
    Tensor sum = empty(x, {needed ? columns : 0}, acc);
    if (needed) {
      torch::stable::parallel_for(0, columns, kGrainElements / std::max<int64_t>(1, std::min(chunks, kGrainElements)),
                                  [&](int64_t begin, int64_t end) {
                                    kernels.reduce(dtype, chunks, columns, partial.const_data_ptr(),
                                                   sum.mutable_data_ptr(), begin, end);
                                  });
    }
    return sum;
  };
  return {grad_input, total(weight_partial, need_weight), total(bias_partial, need_bias)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
}

}  // namespace seqkern
