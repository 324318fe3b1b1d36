// Layer norm and RMS norm, host side: checks, allocates, divides the work, registers the ops under the CPU key.
#include "layer_norm.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "ops.h"
#include "parallel.h"
#include "scratch.h"
#include "tensor.h"

namespace seqkern {
namespace {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kGrainElements = 16384;
// Partial sums of the parameters' gradients: at most about so many chunks, and about so many elements in all.
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kPartialElements = int64_t{1} << 22;
constexpr int64_t kLeastRows = 8;   // of a chunk; twice as many if there are many rows
constexpr int64_t kMostRows = 512;  // of a chunk: longer float32 sums would lose digits

// The division of a backward pass's rows: by the shape alone, so that the order of every sum is the same on any number
// of threads. A chunk of fewer elements than the grain, or of few rows, would spend its time on its partial sums.
struct Chunks {
  int64_t rows_per_chunk, count;
  int64_t workers;  // each takes neighbouring chunks; their number does not change the result
  Chunks(int64_t rows, int64_t columns) {
    const int64_t width = std::max<int64_t>(1, columns);
    const int64_t most = std::clamp<int64_t>(kPartialElements / width, 4, kMaxChunks);
    const int64_t least = rows < 32 * kLeastRows ? kLeastRows : 2 * kLeastRows;
    rows_per_chunk = std::min(kMostRows, std::max({least, kGrainElements / width, (rows + most - 1) / most}));
    if (rows_per_chunk < 2 * kRowsPerSum) rows_per_chunk = std::min(rows_per_chunk, kRowsPerSum);
    count = (rows + rows_per_chunk - 1) / rows_per_chunk;
    const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, rows_per_chunk * columns));
    workers = worker_count(count / grain);
  }
};

void run_forward(const LayerNormForward& args, int64_t rows) {
  const auto forward = layer_norm_kernels().forward;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, args.columns)),
                              [&](int64_t begin, int64_t end) { forward(args, begin, end); });
}

// Bytes that a worker needs to sum rows, and for the weight in packet order.
size_t sums_size(int64_t columns, size_t acc_size) { return (3 * columns * acc_size + 63) / 64 * 64; }

// Writes the sums for the parameters to grad_weight and grad_bias (null where not needed). `sums`: sums_size bytes for
// each worker.
void run_backward(const LayerNormBackward& args, const Chunks& chunks, void* sums, void* grad_weight, void* grad_bias) {
  const auto& kernels = layer_norm_kernels();
  const size_t size = sums_size(args.columns, args.dtype == Dtype::f64 ? 8 : 4);
  torch::stable::parallel_for(0, chunks.workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      const auto first = [&](int64_t of) { return chunks.count * of / chunks.workers; };
      kernels.backward(args, first(worker), first(worker + 1), static_cast<unsigned char*>(sums) + worker * size);
    }
  });
  if (chunks.count == 1) return;
  const int64_t grain = kGrainElements / std::clamp<int64_t>(chunks.count, 1, kGrainElements);
  for (const auto& [partial, total] :
       {std::pair{args.grad_weight_partial, grad_weight}, std::pair{args.grad_bias_partial, grad_bias}}) {
    if (!total) continue;
    torch::stable::parallel_for(0, args.columns, grain,
                                [&, partial = partial, total = total](int64_t begin, int64_t end) {
                                  kernels.reduce(args.dtype, chunks.count, args.columns, partial, total, begin, end);
                                });
  }
}

// A parameter as the kernels read it: contiguous, in the accumulation type, `offset` added.
std::optional<Tensor> parameter(const std::optional<Tensor>& t, const Tensor& input, Dtype dtype, const char* op,
                                const char* argument, double offset = 0) {
  if (!t) return std::nullopt;
  check_parameter(*t, input, op, argument);
  const Tensor contiguous = as_contiguous(*t);
  if (t->scalar_type() == acc_type(dtype) && offset == 0) return contiguous;
  Tensor widened = empty(input, {input.size(1)}, acc_type(dtype));
  layer_norm_kernels().widen(dtype, dtype_of(*t, op, argument), input.size(1), contiguous.const_data_ptr(), offset,
                             widened.mutable_data_ptr());
  return widened;
}

Dropout dropout_of(const std::optional<Tensor>& seed, double p, const Tensor& input, const char* op) {
  check_dropout(seed, p, input, op);
  if (!seed) return {};
  return Dropout::with(p, static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr())));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, const std::optional<Tensor>& residual,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& bias,
                                                          const std::optional<Tensor>& seed, double eps,
                                                          double dropout_p, bool centred, double weight_offset,
                                                          bool round_before_weight) {
  const char* op = "layer_norm_fwd";
  check_dim(input, 2, op, "input");
  const Dtype dtype = dtype_of(input, op, "input");
  check_memory(input, op, "input");
  const ScalarType acc = acc_type(dtype);
  const int64_t rows = input.size(0), columns = input.size(1);
  const auto weight_acc = parameter(weight, input, dtype, op, "weight", weight_offset);
  const auto bias_acc = parameter(bias, input, dtype, op, "bias");
  const Tensor x = with_unit_last_stride(input);
  const auto r = matrix_beside(residual, input, op, "residual");
  const Dropout dropout = dropout_of(seed, dropout_p, input, op);
  SK_CHECK(r || !dropout.active, op, ": dropout needs a residual");
  SK_CHECK(!centred || !round_before_weight, op, ": round_before_weight is RMS norm's alone");

  Tensor output = empty(x, {rows, columns}, input.scalar_type());
  Tensor sum = r ? empty(x, {rows, columns}, input.scalar_type()) : empty(x, {0}, input.scalar_type());
  Tensor mean = empty(x, {centred ? rows : 0}, acc), rstd = empty(x, {rows}, acc);
  LayerNormForward args{};
  args.dtype = dtype;
  args.centred = centred;
  args.columns = columns;
  args.input = x.const_data_ptr();
  args.input_stride = x.stride(0);
  args.residual = data_or_null(r);
  args.residual_stride = r ? r->stride(0) : 0;
  args.dropout = dropout;
  args.weight = data_or_null(weight_acc);
  args.bias = data_or_null(bias_acc);
  args.eps = eps;
  args.round_before_weight = round_before_weight;
  args.output = output.mutable_data_ptr();
  args.sum = sum.mutable_data_ptr();
  args.mean = centred ? mean.mutable_data_ptr() : nullptr;
  args.rstd = rstd.mutable_data_ptr();
  run_forward(args, rows);
  return {output, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_bwd(
    const Tensor& grad_output, const std::optional<Tensor>& grad_sum, const Tensor& input, const Tensor& mean,
    const Tensor& rstd, const std::optional<Tensor>& weight, const std::optional<Tensor>& seed, double dropout_p,
    bool centred, double weight_offset, bool need_weight, bool need_bias) {
  const char* op = "layer_norm_bwd";
  check_dim(input, 2, op, "input");
  const Dtype dtype = dtype_of(input, op, "input");
  check_memory(input, op, "input");
  const ScalarType acc = acc_type(dtype);
  const int64_t rows = input.size(0), columns = input.size(1);
  const Tensor dy = *matrix_beside(grad_output, input, op, "grad_output");
  const auto ds = matrix_beside(grad_sum, input, op, "grad_sum");
  const Tensor rstd_c = statistic(rstd, input, dtype, op, "rstd");
  const Tensor mean_c = centred ? statistic(mean, input, dtype, op, "mean") : mean;
  const auto weight_acc = parameter(weight, input, dtype, op, "weight", weight_offset);
  const Dropout dropout = dropout_of(seed, dropout_p, input, op);
  const Tensor x = with_unit_last_stride(input);

  const Chunks chunks(rows, columns);
  Tensor grad_residual = empty(x, {rows, columns}, input.scalar_type());
  Tensor grad_input =
      dropout.active ? empty(x, {rows, columns}, input.scalar_type()) : empty(x, {0}, input.scalar_type());
  Tensor grad_weight = empty(x, {need_weight ? columns : 0}, acc), grad_bias = empty(x, {need_bias ? columns : 0}, acc);
  Tensor weight_partial = chunks.count == 1 ? grad_weight : empty(x, {need_weight ? chunks.count : 0, columns}, acc);
  Tensor bias_partial = chunks.count == 1 ? grad_bias : empty(x, {need_bias ? chunks.count : 0, columns}, acc);
  LayerNormBackward args{};
  args.dtype = dtype;
  args.centred = centred;
  args.rows = rows;
  args.columns = columns;
  args.grad_output = dy.const_data_ptr();
  args.grad_output_stride = dy.stride(0);
  args.grad_sum = data_or_null(ds);
  args.grad_sum_stride = ds ? ds->stride(0) : 0;
  args.input = x.const_data_ptr();
  args.input_stride = x.stride(0);
  args.mean = centred ? mean_c.const_data_ptr() : nullptr;
  args.rstd = rstd_c.const_data_ptr();
  args.weight = data_or_null(weight_acc);
  args.grad_residual = grad_residual.mutable_data_ptr();
  args.dropout = dropout;
  args.grad_input = dropout.active ? grad_input.mutable_data_ptr() : nullptr;
  args.rows_per_chunk = chunks.rows_per_chunk;
  args.grad_weight_partial = need_weight ? weight_partial.mutable_data_ptr() : nullptr;
  args.grad_bias_partial = need_bias ? bias_partial.mutable_data_ptr() : nullptr;
  const Scratch sums(static_cast<int64_t>(sums_size(columns, dtype == Dtype::f64 ? 8 : 4)), chunks.workers);
  run_backward(args, chunks, sums.data(), need_weight ? grad_weight.mutable_data_ptr() : nullptr,
               need_bias ? grad_bias.mutable_data_ptr() : nullptr);
  return {grad_residual, grad_input, grad_weight, grad_bias};
}

SK_DIRECT_OP(layer_norm_fwd)
SK_DIRECT_OP(layer_norm_bwd)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
}

}  // namespace seqkern
