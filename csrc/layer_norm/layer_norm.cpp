// Layer norm and RMS norm, host side: checks, allocates, divides the work, registers the ops under the CPU key.
#include "layer_norm.h"

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "layer_norm_arguments.h"
#include "layer_norm_direct.h"
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

// A parameter as the kernels read it: contiguous, in the accumulation type.
std::optional<Tensor> parameter(const std::optional<Tensor>& t, const Tensor& input, Dtype dtype, const char* op,
                                const char* argument) {
  if (!t) return std::nullopt;
  check_parameter(*t, input, op, argument);
  const Tensor contiguous = as_contiguous(*t);
  if (t->scalar_type() == acc_type(dtype)) return contiguous;
  Tensor widened = empty(input, {input.size(1)}, acc_type(dtype));
  layer_norm_kernels().widen(dtype, dtype_of(*t, op, argument), input.size(1), contiguous.const_data_ptr(),
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
                                                          double dropout_p, bool centred) {
  const char* op = "layer_norm_fwd";
  check_dim(input, 2, op, "input");
  const Dtype dtype = dtype_of(input, op, "input");
  check_memory(input, op, "input");
  const ScalarType acc = acc_type(dtype);
  const int64_t rows = input.size(0), columns = input.size(1);
  const auto weight_acc = parameter(weight, input, dtype, op, "weight");
  const auto bias_acc = parameter(bias, input, dtype, op, "bias");
  const Tensor x = with_unit_last_stride(input);
  const auto r = matrix_beside(residual, input, op, "residual");
  const Dropout dropout = dropout_of(seed, dropout_p, input, op);
  SK_CHECK(r || !dropout.active, op, ": dropout needs a residual");

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
  args.output = output.mutable_data_ptr();
  args.sum = sum.mutable_data_ptr();
  args.mean = centred ? mean.mutable_data_ptr() : nullptr;
  args.rstd = rstd.mutable_data_ptr();
  run_forward(args, rows);
  return {output, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_output,
                                                          const std::optional<Tensor>& grad_sum, const Tensor& input,
                                                          const Tensor& mean, const Tensor& rstd,
                                                          const std::optional<Tensor>& weight,
                                                          const std::optional<Tensor>& seed, double dropout_p,
                                                          bool centred, bool need_weight, bool need_bias) {
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
  const auto weight_acc = parameter(weight, input, dtype, op, "weight");
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

// ---- the fast path --------------------------------------------------------------------------------------------------

size_t acc_size(Dtype dtype) { return dtype == Dtype::f64 ? 8 : 4; }
bool is_acc(Dtype dtype, Dtype of) { return dtype == (of == Dtype::f64 ? Dtype::f64 : Dtype::f32); }

// The scratch of a parameter, or of its gradient, in the accumulation type; and none where it has that already.
size_t wide_size(const DirectNorm& norm) { return piece_bytes(norm.columns * acc_size(norm.dtype)); }
size_t wide_size(const DirectNorm& norm, Dtype dtype, const void* parameter) {
  return !parameter || is_acc(dtype, norm.dtype) ? 0 : wide_size(norm);
}

const void* widened(const DirectNorm& norm, Dtype from, const void* parameter, Pieces& scratch) {
  if (wide_size(norm, from, parameter) == 0) return parameter;
  void* wide = scratch.take<char>(wide_size(norm));
  layer_norm_kernels().widen(norm.dtype, from, norm.columns, parameter, wide);
  return wide;
}

// Statistics in memory: their size, then all means, then the rest.
constexpr size_t kHeader = 64;
const unsigned char* means(const void* statistics) { return static_cast<const unsigned char*>(statistics) + kHeader; }
const unsigned char* rstds(const DirectNorm& norm, const void* statistics) {
  return means(statistics) + norm.rows * acc_size(norm.dtype);
}

// Of the statistics alone.
LayerNormForward forward_arguments(const DirectNorm& norm, const void* input, void* statistics) {
  LayerNormForward args{};
  args.dtype = norm.dtype;
  args.centred = norm.centred;
  args.columns = norm.columns;
  args.input = input;
  args.input_stride = norm.columns;
  args.eps = norm.eps;
  if (!statistics) return args;
  *static_cast<size_t*>(statistics) = statistics_size(norm);
  args.mean = const_cast<unsigned char*>(means(statistics));
  args.rstd = const_cast<unsigned char*>(rstds(norm, statistics));
  return args;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
}

size_t statistics_size(const DirectNorm& norm) { return kHeader + 2 * norm.rows * acc_size(norm.dtype); }

void direct_forward(const DirectNorm& norm, const void* input, const void* residual, const void* weight,
                    const void* bias, void* output, void* sum, void* statistics) {
  const Scratch memory(wide_size(norm, norm.weight_dtype, weight) + wide_size(norm, norm.bias_dtype, bias));
  Pieces scratch(memory.data());
  LayerNormForward args = forward_arguments(norm, input, statistics);
  args.weight = widened(norm, norm.weight_dtype, weight, scratch);
  args.bias = widened(norm, norm.bias_dtype, bias, scratch);
  args.residual = residual;
  args.residual_stride = norm.columns;
  args.output = output;
  args.sum = sum;
  run_forward(args, norm.rows);
}

void direct_backward(const DirectNorm& norm, const void* statistics, const void* grad_output, const void* grad_sum,
                     const void* input, const void* weight, void* grad_input, void* grad_weight, void* grad_bias) {
  const Chunks chunks(norm.rows, norm.columns);
  const size_t size = acc_size(norm.dtype), sums = chunks.workers * sums_size(norm.columns, size);
  // Each gradient of a parameter: its partial sums, and where they are added up.
  const size_t partial = chunks.count == 1 ? 0 : piece_bytes(chunks.count * norm.columns * size);
  const auto parameter_size = [&](Dtype dtype, const void* grad) {
    return grad ? partial + wide_size(norm, dtype, grad) : 0;
  };
  const bool again = !statistics || *static_cast<const size_t*>(statistics) != statistics_size(norm);
  const Scratch memory((again ? piece_bytes(statistics_size(norm)) : 0) + piece_bytes(sums) +
                       wide_size(norm, norm.weight_dtype, weight) + parameter_size(norm.weight_dtype, grad_weight) +
                       parameter_size(norm.bias_dtype, grad_bias));
  Pieces scratch(memory.data());
  if (again) {
    void* found = scratch.take<char>(statistics_size(norm));
    run_forward(forward_arguments(norm, input, found), norm.rows);
    statistics = found;
  }

  LayerNormBackward args{};
  args.dtype = norm.dtype;
  args.centred = norm.centred;
  args.rows = norm.rows;
  args.columns = norm.columns;
  args.grad_output = grad_output;
  args.grad_output_stride = norm.columns;
  args.grad_sum = grad_sum;
  args.grad_sum_stride = norm.columns;
  args.input = input;
  args.input_stride = norm.columns;
  args.mean = means(statistics);
  args.rstd = rstds(norm, statistics);
  args.weight = widened(norm, norm.weight_dtype, weight, scratch);
  args.grad_residual = grad_input;
  args.rows_per_chunk = chunks.rows_per_chunk;
  const auto partial_sums = [&](void* grad, Dtype dtype) -> std::pair<void*, void*> {
    if (!grad) return {nullptr, nullptr};
    void* total = is_acc(dtype, norm.dtype) ? grad : scratch.take<char>(wide_size(norm));
    return {partial ? scratch.take<char>(partial) : total, total};
  };
  const auto [weight_partial, weight_total] = partial_sums(grad_weight, norm.weight_dtype);
  const auto [bias_partial, bias_total] = partial_sums(grad_bias, norm.bias_dtype);
  args.grad_weight_partial = weight_partial;
  args.grad_bias_partial = bias_partial;
  run_backward(args, chunks, scratch.take<char>(sums), weight_total, bias_total);
  const auto narrow = layer_norm_kernels().narrow;
  if (weight_total != grad_weight) narrow(norm.dtype, norm.weight_dtype, norm.columns, weight_total, grad_weight);
  if (bias_total != grad_bias) narrow(norm.dtype, norm.bias_dtype, norm.columns, bias_total, grad_bias);
}

}  // namespace seqkern
