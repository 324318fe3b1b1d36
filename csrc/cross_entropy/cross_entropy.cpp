// Cross-entropy on rows of logits, host side: checks, allocates, divides the rows, registers the ops under the CPU key.
#include "cross_entropy.h"

#include <tuple>
#include <vector>

#include "losses.h"
#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

struct Checked {
  Tensor logits, target;
  std::optional<Tensor> class_weight;
  ScalarType acc;
  LogitRows rows;
};

Checked check(const char* op, const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight,
              double softcap) {
  const Dtype dtype = dtype_of(logits, op, "logits");
  check_cpu(logits, op, "logits");
  check_cpu(target, op, "target");
  check_dim(logits, 2, op, "logits");
  check_dim(target, 1, op, "target");
  check_type(target, ScalarType::Long, op, "target");
  check_size(target, 0, logits.size(0), op, "target");
  Checked c{with_unit_last_stride(logits), as_contiguous(target), {}, acc_type(dtype), {}};
  if (class_weight) {
    check_cpu(*class_weight, op, "class_weight");
    check_dim(*class_weight, 1, op, "class_weight");
    check_size(*class_weight, 0, logits.size(1), op, "class_weight");
    check_type(*class_weight, c.acc, op, "class_weight");
    c.class_weight = as_contiguous(*class_weight);
  }
  c.rows = {.dtype = dtype,
            .classes = logits.size(1),
            .logits = c.logits.const_data_ptr(),
            .stride = c.logits.stride(0),
            .class_weight = data_or_null<>(c.class_weight),
            .softcap = softcap};
  return c;
}

// The targets; -1 where a row is ignored.
template <class A>
std::vector<int64_t> targets_of(const Checked& c, const RowLosses<A>& losses, const char* op) {
  const int64_t* const given = static_cast<const int64_t*>(c.target.const_data_ptr());
  std::vector<int64_t> targets(given, given + c.target.size(0));
  for (int64_t row = 0; row < c.target.size(0); ++row)
    if (!losses.counts(given, row, op)) targets[row] = -1;
  return targets;
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_fwd(const Tensor& logits, const Tensor& target,
                                                     const std::optional<Tensor>& class_weight, int64_t ignore_index,
                                                     double label_smoothing, double z_loss, double softcap) {
  const char* op = "cross_entropy_fwd";
  const Checked c = check(op, logits, target, class_weight, softcap);
  const int64_t count = logits.size(0);
  Tensor loss = empty(logits, {count}, c.acc), max = empty(logits, {count}, c.acc), sum = empty(logits, {count}, c.acc);
  const auto fill = [&](auto number) {
    using A = decltype(number);
    const RowLosses<A> losses({ignore_index, label_smoothing, z_loss, softcap}, c.rows.classes,
                              data_or_null<A>(c.class_weight));
    const std::vector<int64_t> targets = targets_of(c, losses, op);
    A *const of_rows = static_cast<A*>(loss.mutable_data_ptr()), *const tops = static_cast<A*>(max.mutable_data_ptr()),
             *const totals = static_cast<A*>(sum.mutable_data_ptr());
    const Scratch numbers(2 * count * static_cast<int64_t>(sizeof(A)));
    A *const hits = static_cast<A*>(numbers.data()), *const weighted = hits + count;
    const RowSums to{.targets = targets.data(),
                     .max = tops,
                     .sum = totals,
                     .weighted = losses.smooths() ? weighted : nullptr,
                     .hit_logits = hits};
    const auto kernel = cross_entropy_kernels().sums;
    for_ranges(count, c.rows.classes, 0, [&](int64_t begin, int64_t end, void*) {
      kernel(c.rows, to, begin, end);
      for (int64_t row = begin; row < end; ++row) {
        if (targets[row] < 0) of_rows[row] = 0, tops[row] = 0, totals[row] = 1;
        else
          of_rows[row] =
              losses.loss(targets[row], tops[row], totals[row], to.weighted ? weighted[row] : A(0), hits[row]);
      }
    });
  };
  if (c.acc == ScalarType::Double) fill(double{});
  else fill(float{});
  return {loss, max, sum};
}

Tensor cross_entropy_bwd(const std::optional<Tensor>& grad_loss, const std::optional<Tensor>& grad_lse,
                         const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight,
                         const Tensor& max, const Tensor& sum, int64_t ignore_index, double label_smoothing,
                         double z_loss, double softcap) {
  const char* op = "cross_entropy_bwd";
  const Checked c = check(op, logits, target, class_weight, softcap);
  const int64_t count = logits.size(0);
  const auto of_rows = [&](const Tensor& t, const char* name) {
    check_cpu(t, op, name);
    check_dim(t, 1, op, name);
    check_size(t, 0, count, op, name);
    check_type(t, c.acc, op, name);
    return as_contiguous(t);
  };
  std::optional<Tensor> of_loss, of_lse;
  if (grad_loss) of_loss = of_rows(*grad_loss, "grad_loss");
  if (grad_lse) of_lse = of_rows(*grad_lse, "grad_lse");
  const Tensor tops = of_rows(max, "max"), sums = of_rows(sum, "sum");
  Tensor grads = empty(logits, {count, c.rows.classes}, logits.scalar_type());
  const auto fill = [&](auto number) {
    using A = decltype(number);
    const RowLosses<A> losses({ignore_index, label_smoothing, z_loss, softcap}, c.rows.classes,
                              data_or_null<A>(c.class_weight));
    const Scratch numbers(3 * count * static_cast<int64_t>(sizeof(A)));
    A *const p_scale = static_cast<A*>(numbers.data()), *const hit = p_scale + count, *const spread = hit + count;
    const std::vector<int64_t> targets = targets_of(c, losses, op);
    const A *const max_of = static_cast<const A*>(tops.const_data_ptr()), *const sum_of = static_cast<const A*>(
                                                                              sums.const_data_ptr());
    const A *const up = data_or_null<A>(of_loss), *const up_lse = data_or_null<A>(of_lse);
    for (int64_t row = 0; row < count; ++row) {
      if (targets[row] < 0) continue;
      const auto k = losses.coefficients(targets[row], max_of[row], sum_of[row], up ? static_cast<double>(up[row]) : 0,
                                         up_lse ? static_cast<double>(up_lse[row]) : 0);
      p_scale[row] = k.p_scale, hit[row] = k.hit, spread[row] = k.spread;
    }
    const RowGradient to{.targets = targets.data(),
                         .max = max_of,
                         .p_scale = p_scale,
                         .hit = hit,
                         .spread = losses.smooths() ? spread : nullptr,
                         .grads = grads.mutable_data_ptr()};
    const auto kernel = cross_entropy_kernels().gradient;
    for_ranges(count, c.rows.classes, 0, [&](int64_t begin, int64_t end, void*) { kernel(c.rows, to, begin, end); });
  };
  if (c.acc == ScalarType::Double) fill(double{});
  else fill(float{});
  return grads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("cross_entropy_fwd", TORCH_BOX(&cross_entropy_fwd));
  m.impl("cross_entropy_bwd", TORCH_BOX(&cross_entropy_bwd));
}

}  // namespace seqkern
