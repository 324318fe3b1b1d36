// Embeddings, host side: checks, which tokens took which row, the division of the work, registration under the CPU key.
#include "embedding.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "groups.h"
#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

struct Given {
  const Tensor &ids, &weight;
  const std::optional<Tensor>&table, &places;
  int64_t start, period;
  double scale;
  bool normed;
  const std::optional<Tensor>&norm_weight, &norm_bias;
  double eps;
  const std::optional<Tensor>& seed;
  double dropout_p;
};

// The checked arguments, with contiguous tensors that live as long.
class Tokens {
 public:
  Tokens(const char* op, const Given& g) : count(g.ids.dim() == 1 ? g.ids.size(0) : 0) {
    const Dtype dtype = dtype_of(g.weight, op, "weight");
    check_cpu(g.ids, op, "ids");
    check_dim(g.ids, 1, op, "ids");
    check_type(g.ids, ScalarType::Long, op, "ids");
    check_cpu(g.weight, op, "weight");
    check_dim(g.weight, 2, op, "weight");
    const int64_t classes = g.weight.size(0), columns = g.weight.size(1);
    checked_product({count, std::max<int64_t>(columns, 1), 8}, op);
    checked_product({classes, std::max<int64_t>(columns, 1), 8}, op);
    ids_ = as_contiguous(g.ids);
    weight_ = with_unit_last_stride(g.weight);
    rows = {.dtype = dtype,
            .columns = columns,
            .ids = static_cast<const int64_t*>(ids_->const_data_ptr()),
            .weight = weight_->const_data_ptr(),
            .weight_stride = weight_->stride(0),
            .table = nullptr,
            .table_stride = 0,
            .table_wide = false,
            .places = nullptr,
            .start = g.start,
            .period = g.period,
            .scale = g.scale,
            .normed = g.normed,
            .norm_weight = nullptr,
            .norm_bias = nullptr,
            .eps = g.eps,
            .dropout = {}};
    for (int64_t i = 0; i < count; ++i)
      SK_CHECK(0 <= rows.ids[i] && rows.ids[i] < classes, op, ": ids must be at least 0 and below ", classes,
               ", weight's rows, got ", rows.ids[i], " for token ", i);
    if (g.table) {
      check_cpu(*g.table, op, "positions");
      check_dim(*g.table, 2, op, "positions");
      check_size(*g.table, 1, columns, op, "positions");
      rows.table_wide = g.table->scalar_type() != g.weight.scalar_type();
      if (rows.table_wide) check_type(*g.table, acc_type(dtype), op, "positions");
      table_ = with_unit_last_stride(*g.table);
      rows.table = table_->const_data_ptr();
      rows.table_stride = table_->stride(0);
      places = g.table->size(0);
      if (g.places) {
        check_cpu(*g.places, op, "offset");
        check_dim(*g.places, 1, op, "offset");
        check_type(*g.places, ScalarType::Long, op, "offset");
        check_size(*g.places, 0, count, op, "offset");
        places_ = as_contiguous(*g.places);
        rows.places = static_cast<const int64_t*>(places_->const_data_ptr());
      } else {
        SK_CHECK(count == 0 || g.period > 0, op, ": period must be at least 1, got ", g.period);
      }
      for (int64_t i = 0; i < (rows.places ? count : std::min(count, g.period)); ++i)
        SK_CHECK(0 <= rows.place(i) && rows.place(i) < places, op, ": positions has ", places,
                 " rows, but the position of token ", i, " is ", rows.place(i));
    }
    for (const auto& [t, name, kept, data] :
         {std::tuple{&g.norm_weight, "norm's weight", &norm_weight_, &rows.norm_weight},
          std::tuple{&g.norm_bias, "norm's bias", &norm_bias_, &rows.norm_bias}}) {
      if (!*t) continue;
      check_cpu(**t, op, name);
      check_dim(**t, 1, op, name);
      check_size(**t, 0, columns, op, name);
      check_type(**t, g.weight.scalar_type(), op, name);
      *kept = as_contiguous(**t);
      *data = (*kept)->const_data_ptr();
    }
    SK_CHECK(g.seed.has_value() == (g.dropout_p > 0), op, ": seed must be given exactly with dropout_p > 0, got ",
             g.dropout_p);
    SK_CHECK(0 <= g.dropout_p && g.dropout_p <= 1, op, ": dropout_p must be between 0 and 1, got ", g.dropout_p);
    if (g.seed) {
      check_cpu(*g.seed, op, "seed");
      check_type(*g.seed, ScalarType::Long, op, "seed");
      SK_CHECK(g.seed->numel() == 1, op, ": seed must have one element, got ", g.seed->numel());
      rows.dropout = Dropout::with(
          g.dropout_p, static_cast<uint64_t>(*static_cast<const int64_t*>(as_contiguous(*g.seed).const_data_ptr())));
    }
  }

  // Calls body(begin, end, scratch) for blocks of tokens.
  template <class Body>
  void for_blocks(const Body& body) const {
    const int64_t blocks = (count + kEmbeddingBlock - 1) / kEmbeddingBlock;
    for_items(blocks, 16.0 * static_cast<double>(count) * static_cast<double>(rows.columns),
              embedding_kernels().scratch_bytes(rows.dtype, rows.columns), [&](int64_t block, void* scratch) {
                body(block * kEmbeddingBlock, std::min(count, (block + 1) * kEmbeddingBlock), scratch);
              });
  }

  EmbeddingRows rows;
  int64_t count, places = 0;

 private:
  std::optional<Tensor> ids_, weight_, table_, places_, norm_weight_, norm_bias_;
};

std::tuple<Tensor, Tensor, Tensor> embedding_fwd(const Tensor& ids, const Tensor& weight,
                                                 const std::optional<Tensor>& table,
                                                 const std::optional<Tensor>& places, int64_t start, int64_t period,
                                                 double scale, bool normed, const std::optional<Tensor>& norm_weight,
                                                 const std::optional<Tensor>& norm_bias, double eps,
                                                 const std::optional<Tensor>& seed, double dropout_p) {
  const char* const op = "embedding_fwd";
  const Tokens tokens(
      op, {ids, weight, table, places, start, period, scale, normed, norm_weight, norm_bias, eps, seed, dropout_p});
  const ScalarType acc = acc_type(tokens.rows.dtype);
  Tensor output = empty(weight, {tokens.count, tokens.rows.columns}, weight.scalar_type());
  Tensor mean = empty(weight, {normed ? tokens.count : 0}, acc), rstd = empty(weight, {normed ? tokens.count : 0}, acc);
  const EmbeddingForward args{.of = tokens.rows,
                              .output = output.mutable_data_ptr(),
                              .mean = mean.mutable_data_ptr(),
                              .rstd = rstd.mutable_data_ptr()};
  const auto forward = embedding_kernels().forward;
  tokens.for_blocks([&](int64_t begin, int64_t end, void* scratch) { forward(args, begin, end, scratch); });
  return {output, mean, rstd};
}

// Bytes of a gradient below which a second thread costs more than it saves.
constexpr int64_t kGrainBytes = 1 << 18;

// Sums of tokens' gradients, a row of the target for each number: all of them, or the groups' alone.
struct Sums {
  EmbeddingSum of;
  const Groups& groups;
  char* target;
  int64_t rows;  // of the target
  bool dense;

  void run() const {
    const int64_t bytes = of.columns * size_of(of.target_type);
    const auto sum = embedding_kernels().sum;
    const auto group = [&](int64_t n, int64_t row) {
      const int64_t first = groups.begins[n];
      sum(of, groups.tokens.data() + first, groups.begins[n + 1] - first, target + row * bytes);
    };
    torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrainBytes / (bytes + 1)),
                                [&](int64_t begin, int64_t end) {
                                  if (!dense) {
                                    for (int64_t n = begin; n < end; ++n) group(n, n);
                                    return;
                                  }
                                  auto at = std::lower_bound(groups.keys.begin(), groups.keys.end(), begin);
                                  for (int64_t row = begin; row < end;) {
                                    const int64_t next = at == groups.keys.end() ? end : std::min(end, *at);
                                    std::memset(target + row * bytes, 0, static_cast<size_t>((next - row) * bytes));
                                    if (next == end) break;
                                    group(at - groups.keys.begin(), next);
                                    row = next + 1, ++at;
                                  }
                                });
  }
};

template <class A>
void add_blocks(const A* blocks, int64_t count, int64_t columns, A* total) {
  std::fill(total, total + columns, A(0));
  for (int64_t block = 0; block < count; ++block)
    for (int64_t c = 0; c < columns; ++c) total[c] += blocks[block * columns + c];
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> embedding_bwd(
    const Tensor& grad_output, const Tensor& ids, const Tensor& weight, const std::optional<Tensor>& table,
    const std::optional<Tensor>& places, int64_t start, int64_t period, double scale, bool normed,
    const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& mean, const std::optional<Tensor>& rstd,
    const std::optional<Tensor>& seed, double dropout_p, int64_t padding_idx, bool need_weight, bool sparse,
    bool need_table, bool need_norm) {
  const char* const op = "embedding_bwd";
  const Tokens tokens(
      op, {ids, weight, table, places, start, period, scale, normed, norm_weight, std::nullopt, 0, seed, dropout_p});
  const int64_t count = tokens.count, columns = tokens.rows.columns;
  const ScalarType acc = acc_type(tokens.rows.dtype);
  check_cpu(grad_output, op, "grad_output");
  check_dim(grad_output, 2, op, "grad_output");
  check_type(grad_output, weight.scalar_type(), op, "grad_output");
  check_size(grad_output, 0, count, op, "grad_output");
  check_size(grad_output, 1, columns, op, "grad_output");
  const Tensor dy = as_contiguous(grad_output);
  std::optional<Tensor> means, rstds;
  if (normed) {
    SK_CHECK(mean && rstd, op, ": mean and rstd must be given where normed");
    for (const auto& [t, name, kept] : {std::tuple{&*mean, "mean", &means}, std::tuple{&*rstd, "rstd", &rstds}}) {
      check_cpu(*t, op, name);
      check_dim(*t, 1, op, name);
      check_size(*t, 0, count, op, name);
      check_type(*t, acc, op, name);
      *kept = as_contiguous(*t);
    }
  }
  const bool changed = normed || tokens.rows.dropout.active;  // between the output and the sum
  const int64_t blocks = (count + kEmbeddingBlock - 1) / kEmbeddingBlock;
  const Dtype acc_dtype = tokens.rows.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  const Scratch grads(changed ? checked_product({count, columns, size_of(acc_dtype)}, op) : 0);
  const bool of_norm = normed && need_norm;
  const Scratch partial(of_norm ? checked_product({2, blocks, columns, size_of(acc_dtype)}, op) : 0);
  Tensor grad_norm_weight = empty(weight, {of_norm ? columns : 0}, acc);
  Tensor grad_norm_bias = empty(weight, {of_norm ? columns : 0}, acc);
  if (changed) {
    char* const biases = static_cast<char*>(partial.data()) + blocks * columns * size_of(acc_dtype);
    const EmbeddingBackward args{.of = tokens.rows,
                                 .grad_output = dy.const_data_ptr(),
                                 .mean = means ? means->const_data_ptr() : nullptr,
                                 .rstd = rstds ? rstds->const_data_ptr() : nullptr,
                                 .grad = grads.data(),
                                 .norm_weights = of_norm ? partial.data() : nullptr,
                                 .norm_biases = of_norm ? biases : nullptr};
    const auto backward = embedding_kernels().backward;
    tokens.for_blocks([&](int64_t begin, int64_t end, void* scratch) { backward(args, begin, end, scratch); });
    if (of_norm) {
      const auto add = [&](auto zero) {
        using A = decltype(zero);
        add_blocks(static_cast<const A*>(args.norm_weights), blocks, columns,
                   static_cast<A*>(grad_norm_weight.mutable_data_ptr()));
        add_blocks(static_cast<const A*>(args.norm_biases), blocks, columns,
                   static_cast<A*>(grad_norm_bias.mutable_data_ptr()));
      };
      if (acc_dtype == Dtype::f64) add(double{});
      else add(float{});
    }
  }
  EmbeddingSum sum{.source_type = changed ? acc_dtype : tokens.rows.dtype,
                   .target_type = tokens.rows.dtype,
                   .columns = columns,
                   .source = changed ? grads.data() : dy.const_data_ptr(),
                   .factor = scale};
  const int64_t classes = weight.size(0);
  Groups of_ids;
  if (need_weight) of_ids = grouped(count, classes, padding_idx, [&](int64_t i) { return tokens.rows.ids[i]; });
  const auto distinct = static_cast<int64_t>(of_ids.keys.size());
  const int64_t weight_rows = !need_weight ? 0 : sparse ? distinct : classes;
  Tensor grad_weight = empty(weight, {weight_rows, columns}, weight.scalar_type());
  Tensor rows = empty(weight, {sparse ? distinct : 0}, ScalarType::Long);
  if (sparse && distinct > 0)
    std::memcpy(rows.mutable_data_ptr(), of_ids.keys.data(), static_cast<size_t>(distinct) * sizeof(int64_t));
  if (need_weight) Sums{sum, of_ids, static_cast<char*>(grad_weight.mutable_data_ptr()), weight_rows, !sparse}.run();

  const bool of_table = need_table && table;
  Tensor grad_table = empty(weight, {of_table ? tokens.places : 0, columns}, weight.scalar_type());
  if (of_table) {
    SK_CHECK(!tokens.rows.table_wide, op, ": positions must have weight's dtype where their gradient is wanted");
    const Groups of_places = grouped(count, tokens.places, -1, [&](int64_t i) { return tokens.rows.place(i); });
    sum.factor = 1;
    Sums{sum, of_places, static_cast<char*>(grad_table.mutable_data_ptr()), tokens.places, true}.run();
  }
  return {grad_weight, rows, grad_table, grad_norm_weight, grad_norm_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("embedding_fwd", TORCH_BOX(&embedding_fwd));
  m.impl("embedding_bwd", TORCH_BOX(&embedding_bwd));
}

}  // namespace seqkern
