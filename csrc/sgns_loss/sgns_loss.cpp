// The loss of negative sampling, host side: checks, which examples took which row, registration under the CPU key.
#include "sgns_loss.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "groups.h"
#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

// The checked arguments, with contiguous tensors that live as long.
class Examples {
 public:
  Examples(const char* op, const Tensor& center, const Tensor& context, const Tensor& negatives, const Tensor& w_in,
           const Tensor& w_out)
      : dtype(dtype_of(w_in, op, "w_in")) {
    check_cpu(w_in, op, "w_in"), check_dim(w_in, 2, op, "w_in");
    check_cpu(w_out, op, "w_out"), check_dim(w_out, 2, op, "w_out");
    check_type(w_out, w_in.scalar_type(), op, "w_out"), check_size(w_out, 1, w_in.size(1), op, "w_out");
    check_dim(center, 1, op, "center"), check_dim(context, 1, op, "context"), check_dim(negatives, 2, op, "negatives");
    count = center.size(0), each = negatives.size(1), columns = w_in.size(1);
    check_size(context, 0, count, op, "context"), check_size(negatives, 0, count, op, "negatives");
    checked_product({count, 1 + each, std::max<int64_t>(columns, 1), 8}, op);
    ins = w_in.size(0), outs = w_out.size(0);
    checked_product({ins, std::max<int64_t>(columns, 1), 8}, op);
    checked_product({outs, std::max<int64_t>(columns, 1), 8}, op);
    in_ = with_unit_last_stride(w_in), out_ = with_unit_last_stride(w_out);
    const auto ids = [&](const Tensor& t, int64_t rows, const char* name, std::optional<Tensor>& kept) {
      check_cpu(t, op, name);
      check_type(t, ScalarType::Long, op, name);
      kept = as_contiguous(t);
      const auto* const id = static_cast<const int64_t*>(kept->const_data_ptr());
      for (int64_t i = 0; i < kept->numel(); ++i)
        SK_CHECK(id[i] >= 0 && id[i] < rows, op, ": ", name, " must be at least 0 and below ", rows, ", got ", id[i]);
      return id;
    };
    of = {.dtype = dtype,
          .negatives = each,
          .columns = columns,
          .w_in = in_->const_data_ptr(),
          .w_out = out_->const_data_ptr(),
          .in_stride = in_->stride(0),
          .out_stride = out_->stride(0),
          .center = ids(center, ins, "center", center_),
          .context = ids(context, outs, "context", context_),
          .negative = ids(negatives, outs, "negatives", negatives_),
          .loss = nullptr,
          .scores = nullptr};
  }
  Examples(const Examples&) = delete;

  template <class Body>
  void for_examples(const Body& body) const {
    const int64_t range = std::max<int64_t>(1, kRangeElements / ((1 + each) * std::max<int64_t>(columns, 1)));
    const double work = static_cast<double>(count) * static_cast<double>(1 + each) * static_cast<double>(columns);
    for_small_items((count + range - 1) / range, work, 0,
                    [&](int64_t item, void*) { body(item * range, std::min(count, (item + 1) * range)); });
  }

  Dtype dtype;
  int64_t count, each, columns, ins, outs;
  SgnsForward of;
  const SgnsKernels& kernels = sgns_kernels();

 private:
  std::optional<Tensor> in_, out_, center_, context_, negatives_;
};

std::tuple<Tensor, Tensor> sgns_loss_fwd(const Tensor& center, const Tensor& context, const Tensor& negatives,
                                         const Tensor& w_in, const Tensor& w_out) {
  Examples a("sgns_loss_fwd", center, context, negatives, w_in, w_out);
  Tensor loss = empty(w_in, {a.count}, acc_type(a.dtype));
  Tensor scores = empty(w_in, {a.count, 1 + a.each}, acc_type(a.dtype));
  a.of.loss = loss.mutable_data_ptr(), a.of.scores = scores.mutable_data_ptr();
  a.for_examples([&](int64_t begin, int64_t end) { a.kernels.forward(a.of, begin, end); });
  return {loss, scores};
}

// The gradient of a matrix: of each distinct row the sum over its entries, or of all rows.
std::tuple<Tensor, Tensor> gradient(const Examples& a, const Tensor& like, const Groups& groups,
                                    const std::vector<int64_t>& sources, const void* source, int64_t stride,
                                    const std::vector<char>& weights, int64_t rows, bool sparse) {
  const auto found = static_cast<int64_t>(groups.keys.size());
  const int64_t row_bytes = a.columns * size_of(a.dtype), wide = a.dtype == Dtype::f64 ? 8 : 4;
  Tensor grad = empty(like, {sparse ? found : rows, a.columns}, like.scalar_type());
  Tensor ids = empty(like, {sparse ? found : 0}, ScalarType::Long);
  char* const to = static_cast<char*>(grad.mutable_data_ptr());
  if (!sparse && rows * row_bytes > 0) std::memset(to, 0, static_cast<size_t>(rows * row_bytes));
  if (sparse && found > 0)
    std::memcpy(ids.mutable_data_ptr(), groups.keys.data(), static_cast<size_t>(found) * sizeof(int64_t));
  const double work = static_cast<double>(sources.size()) * static_cast<double>(a.columns);
  for_small_items(found, work, 0, [&](int64_t item, void*) {
    const auto i = static_cast<size_t>(item);
    const int64_t first = groups.begins[i];
    a.kernels.sum_row({.dtype = a.dtype,
                       .columns = a.columns,
                       .source = source,
                       .stride = stride,
                       .count = groups.begins[i + 1] - first,
                       .rows = sources.data() + first,
                       .weights = weights.data() + first * wide,
                       .to = to + (sparse ? item : groups.keys[i]) * row_bytes});
  });
  return {grad, ids};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sgns_loss_bwd(const Tensor& grad_loss, const Tensor& center,
                                                         const Tensor& context, const Tensor& negatives,
                                                         const Tensor& w_in, const Tensor& w_out, const Tensor& scores,
                                                         bool need_in, bool need_out, bool sparse) {
  const char* const op = "sgns_loss_bwd";
  const Examples a(op, center, context, negatives, w_in, w_out);
  const ScalarType acc = acc_type(a.dtype);
  check_cpu(grad_loss, op, "grad_loss"), check_dim(grad_loss, 1, op, "grad_loss");
  check_size(grad_loss, 0, a.count, op, "grad_loss"), check_type(grad_loss, acc, op, "grad_loss");
  check_cpu(scores, op, "scores"), check_dim(scores, 2, op, "scores"), check_type(scores, acc, op, "scores");
  check_size(scores, 0, a.count, op, "scores"), check_size(scores, 1, 1 + a.each, op, "scores");
  const Tensor upstream = as_contiguous(grad_loss), kept = as_contiguous(scores);
  const int64_t wide = a.dtype == Dtype::f64 ? 8 : 4, each = 1 + a.each, entries = a.count * each;
  std::vector<char> errors(static_cast<size_t>(entries * wide));
  if (entries > 0) std::memcpy(errors.data(), kept.const_data_ptr(), errors.size());
  a.for_examples([&](int64_t begin, int64_t end) {
    a.kernels.grad_scores(a.of, upstream.const_data_ptr(), errors.data(), begin, end);
  });
  const auto output = [&](int64_t entry) {
    const int64_t n = entry / each, k = entry % each;
    return k ? a.of.negative[n * a.each + k - 1] : a.of.context[n];
  };
  // Entries by the row that they give to, each with the other row and its weight.
  const auto by = [&](bool needed, int64_t rows, const auto& to, const auto& from, const void* source, int64_t stride,
                      const Tensor& like) -> std::tuple<Tensor, Tensor> {
    if (!needed) return {empty(like, {0, a.columns}, like.scalar_type()), empty(like, {0}, ScalarType::Long)};
    const Groups groups = grouped(entries, std::max<int64_t>(rows, 1), -1, to);
    std::vector<int64_t> sources;
    std::vector<char> weights(errors.size());
    sources.reserve(groups.tokens.size());
    for (size_t i = 0; i < groups.tokens.size(); ++i) {
      sources.push_back(from(groups.tokens[i]));
      std::memcpy(weights.data() + static_cast<int64_t>(i) * wide, errors.data() + groups.tokens[i] * wide,
                  static_cast<size_t>(wide));
    }
    return gradient(a, like, groups, sources, source, stride, weights, rows, sparse);
  };
  const auto input = [&](int64_t entry) { return a.of.center[entry / each]; };
  const auto [grad_in, in_ids] = by(need_in, a.ins, input, output, a.of.w_out, a.of.out_stride, w_in);
  const auto [grad_out, out_ids] = by(need_out, a.outs, output, input, a.of.w_in, a.of.in_stride, w_out);
  return {grad_in, in_ids, grad_out, out_ids};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("sgns_loss_fwd", TORCH_BOX(&sgns_loss_fwd));
  m.impl("sgns_loss_bwd", TORCH_BOX(&sgns_loss_bwd));
}

}  // namespace seqkern
