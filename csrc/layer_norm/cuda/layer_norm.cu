// Layer norm and RMS norm on CUDA, host side: checks, allocation, choice of kernel, registration. Both ops mean the
// same as in layer_norm.cpp.
#include <algorithm>
#include <tuple>

#include "backward.cuh"
#include "common/cuda/launch.h"
#include "forward.cuh"
#include "layer_norm/arguments.h"

namespace seqkern {
namespace {

using norm_cuda::Backward;
using norm_cuda::Forward;
using norm_cuda::NormDropout;
using norm_cuda::Reduction;
using std::optional;

// ---- which kernel --------------------------------------------------------------------------------------------------

// Vectors that a thread may hold, largest first. These are the instances of forward_rows and backward_rows: the last
// four for every dtype, the first two for float32 only, whose vectors are half as wide.
constexpr int kVectorCounts[] = {8, 6, 4, 3, 2, 1};
constexpr int most_vectors(Dtype dtype) { return dtype == Dtype::f32 ? 8 : 4; }

constexpr int kWalkByWarp = 1024;  // longest row, in columns, that the two-pass kernels give to one warp
constexpr int kForwardWarps = 4;   // warps of a block when each has a row of its own
constexpr int kForwardWaves = 64;  // limit of blocks a multiprocessor; beyond it the blocks loop over the rows
constexpr int kRowsPerTeam = 128;  // backward: longer sums in float32 would lose digits
constexpr int64_t kMostPartsY = 65535;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int elements_of(Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f16 ? 8 : 4; }
size_t acc_size(Dtype dtype) { return dtype == Dtype::f64 ? 8 : 4; }

struct Plan {
  int vectors = 0;  // vectors a thread holds; 0: the row is read twice
  int team_warps = 1;
  int teams = 1;   // a block
  int blocks = 1;  // a cluster
  int threads() const { return 32 * team_warps * teams; }
};

// Depends on the row alone, never on the number of rows. `teams_of` gives the teams of a block for a number of warps;
// `fits` tells whether the device holds a cluster of that shape.
template <class Teams, class Fits>
Plan plan_of(Dtype dtype, int64_t columns, bool aligned, int most_threads, int most_blocks, const Teams& teams_of,
             const Fits& fits) {
  const int64_t vectors = ceil_div(columns, elements_of(dtype));
  const auto warps_of = [&](int64_t count) { return static_cast<int>(ceil_div(vectors, 32 * count)); };
  Plan plan;
  if (aligned && columns > 0) {
    for (int count : kVectorCounts) {  // the fewest vectors a thread with which one warp is enough
      if (count <= most_vectors(dtype) && warps_of(count) == 1) plan = {count, 1, teams_of(1)};
    }
    if (plan.vectors > 0) return plan;
    int64_t least = 0;
    for (int count : kVectorCounts) {  // the fewest empty vectors, then the fewest threads
      const int warps = warps_of(count);
      if (count > most_vectors(dtype) || 32 * warps > most_threads) continue;
      if (plan.vectors == 0 || int64_t{warps} * count < least) {
        plan = {count, warps, teams_of(warps)};
        least = int64_t{warps} * count;
      }
    }
    if (plan.vectors > 0) return plan;
    for (int blocks = 2; blocks <= most_blocks; blocks *= 2) {
      const int count = most_vectors(dtype), warps = warps_of(int64_t{blocks} * count);
      plan = {count, warps, 1, blocks};
      if (32 * warps <= most_threads && fits(plan)) return plan;
    }
  }
  if (columns <= kWalkByWarp) return {0, 1, teams_of(1)};
  return {0, std::min(most_threads / 32, warps_of(1)), 1};
}

template <class T, template <class, int> class Kernel, class F>
void with_vectors(int vectors, const F& f) {
  switch (vectors) {
    case 1: return f(Kernel<T, 1>::kernel);
    case 2: return f(Kernel<T, 2>::kernel);
    case 3: return f(Kernel<T, 3>::kernel);
    case 4: return f(Kernel<T, 4>::kernel);
    default: break;
  }
  if constexpr (std::is_same_v<T, float>) {
    if (vectors == 6) return f(Kernel<T, 6>::kernel);
    if (vectors == 8) return f(Kernel<T, 8>::kernel);
  }
  SK_CHECK(false, "layer_norm: no kernel of ", vectors, " vectors");
}
template <class T, int U>
struct ForwardRows {
  static constexpr auto kernel = norm_cuda::forward_rows<T, U>;
};
template <class T, int U>
struct BackwardRows {
  static constexpr auto kernel = norm_cuda::backward_rows<T, U>;
};

template <class T, template <class, int> class Kernel>
bool cluster_fits(const char* op, const Plan& plan, size_t shared) {
  bool fits = false;
  with_vectors<T, Kernel>(plan.vectors, [&](auto kernel) {
    const LaunchShape shape{dim3(plan.blocks), dim3(plan.threads()), shared, plan.blocks};
    fits = resident_clusters(op, reinterpret_cast<const void*>(kernel), shape) > 0;
  });
  return fits;
}

// ---- arguments -----------------------------------------------------------------------------------------------------

// Allocated by torch, also in the host executor, which then notices writes past the end.
Tensor allocate(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), type);
}

// A parameter as the kernels read it: contiguous, in the input's dtype or the accumulation type. Others are converted.
optional<Tensor> parameter(const optional<Tensor>& t, const Tensor& input, Dtype dtype, const char* op,
                           const char* argument) {
  if (!t) return std::nullopt;
  check_parameter(*t, input, op, argument);
  if (t->scalar_type() == input.scalar_type() || t->scalar_type() == acc_type(dtype)) return as_contiguous(*t);
  Tensor widened = allocate(input, {input.size(1)}, acc_type(dtype));
  torch::stable::copy_(widened, *t);
  return widened;
}

NormDropout dropout_of(const optional<Tensor>& seed, double p, const Tensor& input, const char* op) {
  check_dropout(seed, p, input, op);
  if (!seed) return {nullptr, 0, 1.0};
  const Dropout dropout = Dropout::with(p, 0);  // the seed itself is read on the device
  return {static_cast<const int64_t*>(seed->const_data_ptr()), dropout.threshold, dropout.scale};
}

// Whether every row starts at a multiple of 16 bytes and consists of whole vectors.
bool in_vectors(Dtype dtype, int64_t columns, std::initializer_list<const void*> pointers,
                std::initializer_list<int64_t> strides) {
  bool aligned = columns % elements_of(dtype) == 0;
  for (const void* p : pointers) aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  for (int64_t stride : strides) aligned = aligned && stride * size_of(dtype) % 16 == 0;
  return aligned;
}

// ---- forward -------------------------------------------------------------------------------------------------------

void run_forward(const char* op, Dtype dtype, Forward& p, const Tensor& input) {
  const OnDevice guard(input);
  const CudaDevice& device = cuda_device(input);
  void* stream = current_stream(input);
  const size_t shared = dtype == Dtype::f64 ? norm_cuda::kTeamBytes<double> : norm_cuda::kTeamBytes<float>;
  const int64_t most = int64_t{kForwardWaves} * device.multiprocessors;
  SK_DISPATCH(dtype, {
    const auto fits = [&](const Plan& plan) { return cluster_fits<T, ForwardRows>(op, plan, shared); };
    const auto teams_of = [](int warps) { return warps == 1 ? kForwardWarps : 1; };
    const Plan plan =
        plan_of(dtype, p.columns, p.aligned, norm_cuda::kForwardThreads, device.max_cluster, teams_of, fits);
    const int64_t groups = std::min(ceil_div(p.rows, plan.teams), std::max<int64_t>(1, most / plan.blocks));
    p.team_warps = plan.team_warps;
    p.blocks = plan.blocks;
    const LaunchShape shape{dim3(static_cast<unsigned>(groups * plan.blocks)), dim3(plan.threads()), shared,
                            plan.blocks};
    if (plan.vectors == 0) {
      launch(op, norm_cuda::forward_walk<T>, shape, stream, p);
    } else {
      with_vectors<T, ForwardRows>(plan.vectors, [&](auto kernel) { launch(op, kernel, shape, stream, p); });
    }
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_fwd(const Tensor& input, const optional<Tensor>& residual,
                                                          const optional<Tensor>& weight, const optional<Tensor>& bias,
                                                          const optional<Tensor>& seed, double eps, double dropout_p,
                                                          bool centred, double weight_offset,
                                                          bool round_before_weight) {
  const char* op = "layer_norm_fwd";
  check_dim(input, 2, op, "input");
  const Dtype dtype = dtype_of(input, op, "input");
  check_memory(input, op, "input");
  const ScalarType acc = acc_type(dtype);
  const int64_t rows = input.size(0), columns = input.size(1);
  const auto w = parameter(weight, input, dtype, op, "weight"), b = parameter(bias, input, dtype, op, "bias");
  const Tensor x = with_unit_last_stride(input);
  const auto r = matrix_beside(residual, input, op, "residual");
  const NormDropout dropout = dropout_of(seed, dropout_p, input, op);
  SK_CHECK(r || dropout.seed == nullptr, op, ": dropout needs a residual");
  SK_CHECK(!centred || !round_before_weight, op, ": round_before_weight is RMS norm's alone");

  Tensor output = allocate(x, {rows, columns}, input.scalar_type());
  Tensor sum = r ? allocate(x, {rows, columns}, input.scalar_type()) : allocate(x, {0}, input.scalar_type());
  Tensor mean = allocate(x, {centred ? rows : 0}, acc), rstd = allocate(x, {rows}, acc);
  if (rows == 0) return {output, sum, mean, rstd};
  Forward p{};
  p.input = x.const_data_ptr();
  p.residual = data_or_null(r);
  p.weight = data_or_null(w);
  p.bias = data_or_null(b);
  p.output = output.mutable_data_ptr();
  p.sum = r ? sum.mutable_data_ptr() : nullptr;
  p.mean = centred ? mean.mutable_data_ptr() : nullptr;
  p.rstd = rstd.mutable_data_ptr();
  p.rows = rows;
  p.columns = columns;
  p.input_stride = x.stride(0);
  p.residual_stride = r ? r->stride(0) : 0;
  p.dropout = dropout;
  p.eps = eps;
  p.weight_offset = weight_offset;
  p.round_before_weight = round_before_weight;
  p.inverse = 1.0 / static_cast<double>(columns);
  p.weight_wide = w && w->scalar_type() == acc;
  p.bias_wide = b && b->scalar_type() == acc;
  p.aligned = in_vectors(dtype, columns, {p.input, p.residual, p.weight, p.bias, p.output, p.sum},
                         {p.input_stride, p.residual_stride});
  run_forward(op, dtype, p, x);
  return {output, sum, mean, rstd};
}

// ---- backward ------------------------------------------------------------------------------------------------------

// Sums for the parameters: `parts` rows of partial sums, or the gradients themselves when there is one part.
struct Sums {
  Tensor grad_weight, grad_bias, weight_parts, bias_parts;

  void divide(Backward& p, const Tensor& like, ScalarType acc, int64_t teams, int64_t most_blocks) {
    const int64_t rounds = std::max<int64_t>(1, ceil_div(p.rows, most_blocks * teams * kRowsPerTeam));
    p.rows_per_part = std::max<int64_t>(1, ceil_div(ceil_div(p.rows, rounds * most_blocks), teams)) * teams;
    p.parts = ceil_div(p.rows, p.rows_per_part);
    const auto parts_of = [&](Tensor& grad, Tensor& parts) -> void* {
      if (grad.numel() == 0) return nullptr;
      parts = p.parts == 1 ? grad : allocate(like, {p.parts, p.columns}, acc);
      return parts.mutable_data_ptr();
    };
    p.weight_parts = parts_of(grad_weight, weight_parts);
    p.bias_parts = parts_of(grad_bias, bias_parts);
  }

  template <class A>
  void reduce(const char* op, const Backward& p, void* stream) {
    const bool weight = grad_weight.numel() > 0, bias = grad_bias.numel() > 0;
    if (p.parts == 1 || (!weight && !bias)) return;  // 0 parts (no rows) go on: the reduction writes zeros
    const Reduction reduction{p.weight_parts,
                              p.bias_parts,
                              weight ? grad_weight.mutable_data_ptr() : nullptr,
                              bias ? grad_bias.mutable_data_ptr() : nullptr,
                              p.parts,
                              p.columns};
    constexpr int kThreads = norm_cuda::kReduceWidth * norm_cuda::kReduceRows;
    const dim3 grid(static_cast<unsigned>(ceil_div(p.columns, norm_cuda::kReduceWidth)), 2);
    launch(op, norm_cuda::reduce_parts<A>, LaunchShape{grid, dim3(kThreads), kThreads * sizeof(A)}, stream, reduction);
  }
};

void run_backward(const char* op, Dtype dtype, Backward& p, Sums& sums, const Tensor& input) {
  const OnDevice guard(input);
  const CudaDevice& device = cuda_device(input);
  void* stream = current_stream(input);
  const ScalarType acc = acc_type(dtype);
  const size_t totals = dtype == Dtype::f64 ? norm_cuda::kTeamBytes<double> : norm_cuda::kTeamBytes<float>;
  const int64_t resident = 2 * int64_t{device.multiprocessors};
  SK_DISPATCH(dtype, {
    const auto fits = [&](const Plan& plan) { return cluster_fits<T, BackwardRows>(op, plan, totals); };
    const auto teams_of = [](int warps) { return std::max(1, norm_cuda::kBackwardThreads / (32 * warps)); };
    const Plan plan =
        plan_of(dtype, p.columns, p.aligned, norm_cuda::kBackwardThreads, device.max_cluster, teams_of, fits);
    p.team_warps = plan.team_warps;
    p.blocks = plan.blocks;
    if (plan.vectors > 0) {
      const int64_t most = std::max<int64_t>(1, resident / plan.blocks);
      sums.divide(p, input, acc, plan.teams, most);
      const size_t shared = totals + (plan.teams > 1 ? plan.teams * p.columns * acc_size(dtype) : 0);
      const int64_t grid = std::min(p.parts, most) * plan.blocks;
      const LaunchShape shape{dim3(static_cast<unsigned>(grid)), dim3(plan.threads()), shared, plan.blocks};
      if (grid > 0) {
        with_vectors<T, BackwardRows>(plan.vectors, [&](auto kernel) { launch(op, kernel, shape, stream, p); });
      }
    } else {
      const bool parameters = sums.grad_weight.numel() > 0 || sums.grad_bias.numel() > 0;
      Tensor shift = allocate(input, {p.mean != nullptr && parameters ? p.rows : 0}, acc);
      p.shift = shift.numel() > 0 ? shift.mutable_data_ptr() : nullptr;
      const int64_t grid = std::min(ceil_div(p.rows, plan.teams), int64_t{kForwardWaves} * device.multiprocessors);
      if (grid > 0) {
        const LaunchShape shape{dim3(static_cast<unsigned>(grid)), dim3(plan.threads()), totals};
        launch(op, norm_cuda::backward_walk<T>, shape, stream, p);
      }
      if (!parameters) return;
      constexpr int kWidth = 32 * norm_cuda::kElements<T>, kWarps = norm_cuda::kColumnsThreads / 32;
      const int64_t wide = ceil_div(p.columns, kWidth);
      const int64_t most = std::clamp<int64_t>(resident / wide, 1, kMostPartsY);
      sums.divide(p, input, acc, kWarps, most);
      if (p.parts > 0) {
        const dim3 blocks(static_cast<unsigned>(wide), static_cast<unsigned>(std::min(p.parts, most)));
        const size_t shared = kWarps * kWidth * sizeof(acc_t<T>);
        launch(op, norm_cuda::backward_columns<T>, LaunchShape{blocks, dim3(norm_cuda::kColumnsThreads), shared},
               stream, p);
      }
    }
    sums.reduce<acc_t<T>>(op, p, stream);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_bwd(const Tensor& grad_output, const optional<Tensor>& grad_sum,
                                                          const Tensor& input, const Tensor& mean, const Tensor& rstd,
                                                          const optional<Tensor>& weight, const optional<Tensor>& seed,
                                                          double dropout_p, bool centred, double weight_offset,
                                                          bool need_weight, bool need_bias) {
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
  const auto w = parameter(weight, input, dtype, op, "weight");
  const NormDropout dropout = dropout_of(seed, dropout_p, input, op);
  const Tensor x = with_unit_last_stride(input);

  Tensor grad_residual = allocate(x, {rows, columns}, input.scalar_type());
  Tensor grad_input =
      dropout.seed ? allocate(x, {rows, columns}, input.scalar_type()) : allocate(x, {0}, input.scalar_type());
  Sums sums;
  sums.grad_weight = allocate(x, {need_weight ? columns : 0}, acc);
  sums.grad_bias = allocate(x, {need_bias ? columns : 0}, acc);
  if (columns == 0) return {grad_residual, grad_input, sums.grad_weight, sums.grad_bias};
  Backward p{};
  p.grad_output = dy.const_data_ptr();
  p.grad_sum = data_or_null(ds);
  p.input = x.const_data_ptr();
  p.mean = centred ? mean_c.const_data_ptr() : nullptr;
  p.rstd = rstd_c.const_data_ptr();
  p.weight = data_or_null(w);
  p.grad_residual = grad_residual.mutable_data_ptr();
  p.grad_input = dropout.seed ? grad_input.mutable_data_ptr() : nullptr;
  p.rows = rows;
  p.columns = columns;
  p.grad_output_stride = dy.stride(0);
  p.grad_sum_stride = ds ? ds->stride(0) : 0;
  p.input_stride = x.stride(0);
  p.dropout = dropout;
  p.weight_offset = weight_offset;
  p.weight_wide = w && w->scalar_type() == acc;
  p.aligned = in_vectors(dtype, columns, {p.grad_output, p.grad_sum, p.input, p.weight, p.grad_residual, p.grad_input},
                         {p.grad_output_stride, p.grad_sum_stride, p.input_stride});
  run_backward(op, dtype, p, sums, x);
  return {grad_residual, grad_input, sums.grad_weight, sums.grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern_cuda, SK_CUDA_KEY, m) {
  m.impl("layer_norm_fwd", TORCH_BOX(&layer_norm_fwd));
  m.impl("layer_norm_bwd", TORCH_BOX(&layer_norm_bwd));
}

}  // namespace seqkern
