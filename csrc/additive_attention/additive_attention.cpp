// Additive attention, host side: checks, what is made once for all queries, the division of the work, registration
// under the CPU key.
#include "additive_attention.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "parallel.h"
#include "scratch.h"
#include "tensor.h"

namespace seqkern {
namespace {

constexpr int64_t kKeyBlock = 16;  // keys of an item
// Queries whose probabilities are there at once in the backward pass: all of them, or chunks.
constexpr int64_t kMostQueries = 64, kChunk = 32;

struct Given {
  const Tensor &query, &key, &value, &weight;
  const std::optional<Tensor>&bias, &key_lengths, &mask;
};

// The checked arguments, and what the kernels read of keys and weight, for the time of a call.
class Arguments {
 public:
  // keep_keys: prepares all keys, even for one block of queries.
  Arguments(const char* op, const Given& g, bool keep_keys) : dtype(dtype_of(g.query, op, "query")) {
    for (const auto& [t, name] :
         {std::pair{&g.query, "query"}, std::pair{&g.key, "key"}, std::pair{&g.value, "value"}}) {
      check_cpu(*t, op, name);
      check_dim(*t, 3, op, name);
      check_type(*t, g.query.scalar_type(), op, name);
      check_size(*t, 0, g.query.size(0), op, name);
    }
    const int64_t batch = g.query.size(0), queries = g.query.size(1), channels = g.query.size(2);
    const int64_t keys = g.key.size(1), columns = g.value.size(2);
    check_size(g.key, 2, channels, op, "key");
    check_size(g.value, 1, keys, op, "value");
    const int64_t wide = dtype == Dtype::f64 ? 8 : 4;
    // Every block of memory below is smaller than these.
    for (const int64_t rows : {queries, keys})
      for (const int64_t each : {channels, columns}) checked_product({batch, rows + 64, each + 64, 3 * wide}, op);
    checked_product({batch, kMostQueries, keys + 64, wide}, op);
    query_ = with_unit_last_stride(g.query), key_ = with_unit_last_stride(g.key);
    value_ = with_unit_last_stride(g.value);
    check_cpu(g.weight, op, "weight");
    check_dim(g.weight, 1, op, "weight");
    check_size(g.weight, 0, channels, op, "weight");
    check_type(g.weight, g.query.scalar_type(), op, "weight");
    weight_ = as_contiguous(g.weight);
    of = {.dtype = dtype,
          .batch = batch,
          .queries = queries,
          .keys = keys,
          .channels = channels,
          .value_channels = columns,
          .query = query_->const_data_ptr(),
          .key = key_->const_data_ptr(),
          .value = value_->const_data_ptr(),
          .query_batch = query_->stride(0),
          .query_row = query_->stride(1),
          .key_batch = key_->stride(0),
          .key_row = key_->stride(1),
          .value_batch = value_->stride(0),
          .value_row = value_->stride(1),
          .weight = weight_->const_data_ptr(),
          .bias = nullptr,
          .key_lengths = nullptr,
          .mask = nullptr,
          .mask_is_bool = false,
          .mask_batch = 0,
          .mask_row = 0,
          .mask_column = 0,
          .wide_weight = nullptr,
          .wide_keys = nullptr,
          .forms = nullptr};
    if (g.bias) {
      check_cpu(*g.bias, op, "bias");
      check_dim(*g.bias, 1, op, "bias");
      check_size(*g.bias, 0, channels, op, "bias");
      check_type(*g.bias, g.query.scalar_type(), op, "bias");
      bias_ = as_contiguous(*g.bias);
      of.bias = bias_->const_data_ptr();
    }
    if (g.key_lengths) {
      check_cpu(*g.key_lengths, op, "key_lengths");
      check_dim(*g.key_lengths, 1, op, "key_lengths");
      check_size(*g.key_lengths, 0, batch, op, "key_lengths");
      check_type(*g.key_lengths, ScalarType::Long, op, "key_lengths");
      lengths_ = as_contiguous(*g.key_lengths);
      of.key_lengths = static_cast<const int64_t*>(lengths_->const_data_ptr());
    }
    if (g.mask) {
      check_cpu(*g.mask, op, "mask");
      check_dim(*g.mask, 3, op, "mask");
      check_size(*g.mask, 0, batch, op, "mask");
      check_size(*g.mask, 1, queries, op, "mask");
      check_size(*g.mask, 2, keys, op, "mask");
      of.mask_is_bool = g.mask->scalar_type() == ScalarType::Bool;
      if (!of.mask_is_bool) check_type(*g.mask, acc_type(dtype), op, "mask");
      of.mask = g.mask->const_data_ptr();
      of.mask_batch = g.mask->stride(0), of.mask_row = g.mask->stride(1), of.mask_column = g.mask->stride(2);
    }
    prepare(wide, keep_keys || queries > kernels.query_block(dtype) || batch < torch::stable::get_num_threads());
  }
  Arguments(const Arguments&) = delete;

  // Calls body(b, begin, end, scratch) for the blocks of the queries [first, last) of every sequence.
  template <class Body>
  void for_queries(int64_t first, int64_t last, int64_t scratch_bytes, const Body& body) const {
    const int64_t size = kernels.query_block(dtype), blocks = (last - first + size - 1) / size;
    const double pairs =
        static_cast<double>(of.batch) * static_cast<double>(last - first) * static_cast<double>(of.keys);
    for_small_items(of.batch * blocks, pairs * static_cast<double>(4 * of.channels + of.value_channels), scratch_bytes,
                    [&](int64_t item, void* scratch) {
                      const int64_t begin = first + item % blocks * size;
                      body(item / blocks, begin, std::min(last, begin + size), scratch);
                    });
  }
  template <class Body>
  void for_keys(const Body& body) const {
    const int64_t blocks = (of.keys + kKeyBlock - 1) / kKeyBlock;
    const double rows = static_cast<double>(of.batch) * static_cast<double>(of.keys);
    for_small_items(of.batch * blocks, rows * static_cast<double>(8 * of.channels + of.value_channels), 0,
                    [&](int64_t item, void*) {
                      const int64_t begin = item % blocks * kKeyBlock;
                      body(item / blocks, begin, std::min(of.keys, begin + kKeyBlock));
                    });
  }

  const AdditiveKernels& kernels = additive_kernels();
  Dtype dtype;
  AdditiveProblem of;
  int64_t strips = 0, padded = 0, padded_values = 0, padded_keys = 0;

 private:
  void prepare(int64_t wide, bool keep_keys) {
    const int64_t vector = kernels.vector(dtype);
    const auto up = [&](int64_t n) { return (n + vector - 1) / vector * vector; };
    padded = up(of.channels), padded_values = up(of.value_channels), padded_keys = up(of.keys);
    strips = padded / vector;
    wide_weight_.emplace(2 * padded * wide);
    of.wide_weight = wide_weight_->data();
    kernels.prepare_weight(of);
    if (!keep_keys) return;
    wide_keys_.emplace(of.batch * of.keys * padded * wide);
    forms_.emplace(of.batch * of.keys);
    of.wide_keys = wide_keys_->data(), of.forms = static_cast<uint8_t*>(forms_->data());
    for_keys([&](int64_t b, int64_t begin, int64_t end) { kernels.prepare_keys(of, b, begin, end); });
  }

  std::optional<Tensor> query_, key_, value_, weight_, bias_, lengths_;
  std::optional<Scratch> wide_weight_, wide_keys_, forms_;
};

std::tuple<Tensor, Tensor, Tensor> additive_attention_fwd(const Tensor& query, const Tensor& key, const Tensor& value,
                                                          const Tensor& weight, const std::optional<Tensor>& bias,
                                                          const std::optional<Tensor>& key_lengths,
                                                          const std::optional<Tensor>& mask, bool need_weights) {
  const Arguments a("additive_attention_fwd", {query, key, value, weight, bias, key_lengths, mask}, false);
  const AdditiveProblem& p = a.of;
  Tensor output = empty(query, {p.batch, p.queries, p.value_channels}, query.scalar_type());
  Tensor lse = empty(query, {p.batch, p.queries}, acc_type(p.dtype));
  const std::initializer_list<int64_t> none = {0}, all = {p.batch, p.queries, p.keys};
  Tensor weights = empty(query, need_weights ? all : none, query.scalar_type());
  const AdditiveForward f{.of = p,
                          .output = output.mutable_data_ptr(),
                          .lse = lse.mutable_data_ptr(),
                          .weights = need_weights ? weights.mutable_data_ptr() : nullptr};
  a.for_queries(0, p.queries, a.kernels.forward_scratch(p), [&](int64_t b, int64_t begin, int64_t end, void* scratch) {
    a.kernels.forward(f, b, begin, end, scratch);
  });
  return {output, lse, weights};
}

template <class A>
void add_sequences(const A* sums, int64_t batch, int64_t padded, A* total) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t c = 0; c < padded; ++c) total[c] += sums[b * padded + c];
}

// The sum over the sequences, in the accumulation type; times a factor, or not.
template <class A>
Tensor summed(const Arguments& a, const Tensor& like, const void* sums, const void* factors) {
  Tensor result = empty(like, {a.of.channels}, acc_type(a.dtype));
  std::vector<A> total(static_cast<size_t>(a.padded), A(0));
  add_sequences(static_cast<const A*>(sums), a.of.batch, a.padded, total.data());
  A* const out = static_cast<A*>(result.mutable_data_ptr());
  for (int64_t c = 0; c < a.of.channels; ++c)
    out[c] =
        factors ? total[static_cast<size_t>(c)] * static_cast<const A*>(factors)[c] : total[static_cast<size_t>(c)];
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> additive_attention_bwd(
    const std::optional<Tensor>& grad_output, const std::optional<Tensor>& grad_lse,
    const std::optional<Tensor>& grad_weights, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& key_lengths,
    const std::optional<Tensor>& mask, bool need_mask) {
  const char* const op = "additive_attention_bwd";
  const Arguments a(op, {query, key, value, weight, bias, key_lengths, mask}, true);
  const AdditiveProblem& p = a.of;
  const ScalarType type = query.scalar_type(), acc = acc_type(p.dtype);
  std::optional<Tensor> kept[3];
  const auto given = [&](int index, const std::optional<Tensor>& t, const char* name, ScalarType wanted,
                         std::initializer_list<int64_t> sizes) -> const void* {
    if (!t) return nullptr;
    check_cpu(*t, op, name);
    check_dim(*t, static_cast<int64_t>(sizes.size()), op, name);
    check_type(*t, wanted, op, name);
    int64_t dim = 0;
    for (const int64_t size : sizes) check_size(*t, dim++, size, op, name);
    kept[index] = as_contiguous(*t);
    return kept[index]->const_data_ptr();
  };
  Tensor grad_query = empty(query, {p.batch, p.queries, p.channels}, type);
  Tensor grad_key = empty(query, {p.batch, p.keys, p.channels}, type);
  Tensor grad_value = empty(query, {p.batch, p.keys, p.value_channels}, type);
  const std::initializer_list<int64_t> none = {0}, all = {p.batch, p.queries, p.keys};
  Tensor grad_mask = empty(query, need_mask ? all : none, acc);
  const int64_t wide = p.dtype == Dtype::f64 ? 8 : 4;
  const int64_t chunk = p.queries <= kMostQueries ? p.queries : kChunk, rows = p.batch * chunk;
  const Scratch probabilities(rows * a.padded_keys * wide), grad_scores(rows * a.padded_keys * wide);
  const Scratch wide_queries(rows * 3 * a.padded * wide), tame_queries(rows);
  const bool several = chunk < p.queries;
  const int64_t key_bytes = several ? p.batch * p.keys * a.padded * wide : 0;
  const int64_t value_bytes = several ? p.batch * p.keys * a.padded_values * wide : 0;
  const int64_t column_bytes = p.batch * a.padded * wide;
  const Scratch key_sums(key_bytes), value_sums(value_bytes), weight_sums(column_bytes), query_sums(column_bytes);
  for (const auto& [block, bytes] : {std::pair{&key_sums, key_bytes}, std::pair{&value_sums, value_bytes},
                                     std::pair{&weight_sums, column_bytes}, std::pair{&query_sums, column_bytes}})
    if (bytes) std::memset(block->data(), 0, static_cast<size_t>(bytes));
  AdditiveBackward f{.of = p,
                     .grad_output = given(0, grad_output, "grad_output", type, {p.batch, p.queries, p.value_channels}),
                     .grad_lse = given(1, grad_lse, "grad_lse", acc, {p.batch, p.queries}),
                     .grad_weights = given(2, grad_weights, "grad_weights", type, {p.batch, p.queries, p.keys}),
                     .grad_query = grad_query.mutable_data_ptr(),
                     .grad_key = grad_key.mutable_data_ptr(),
                     .grad_value = grad_value.mutable_data_ptr(),
                     .grad_mask = need_mask ? grad_mask.mutable_data_ptr() : nullptr,
                     .first = 0,
                     .chunk = chunk,
                     .probabilities = probabilities.data(),
                     .grad_scores = grad_scores.data(),
                     .wide_queries = wide_queries.data(),
                     .tame_queries = static_cast<uint8_t*>(tame_queries.data()),
                     .key_sums = key_sums.data(),
                     .value_sums = value_sums.data(),
                     .weight_sums = weight_sums.data(),
                     .query_sums = query_sums.data()};
  const int64_t width = 4 * a.kernels.vector(p.dtype), ranges = (p.value_channels + width - 1) / width;
  const int64_t strips = a.strips + (f.grad_output ? ranges : 0), scratch = a.kernels.backward_scratch(p);
  if (p.queries == 0 || !f.grad_output)
    std::memset(f.grad_value, 0, static_cast<size_t>(grad_value.numel() * size_of(p.dtype)));
  if (p.queries == 0) std::memset(f.grad_key, 0, static_cast<size_t>(grad_key.numel() * size_of(p.dtype)));
  for (f.first = 0; f.first < p.queries; f.first += chunk) {
    const int64_t last = std::min(p.queries, f.first + chunk);
    a.for_queries(f.first, last, scratch, [&](int64_t b, int64_t begin, int64_t end, void* memory) {
      a.kernels.grad_scores(f, b, begin, end, memory);
    });
    const double pairs =
        static_cast<double>(p.batch) * static_cast<double>(last - f.first) * static_cast<double>(p.keys);
    for_small_items(p.batch * strips, pairs * static_cast<double>(6 * p.channels + p.value_channels), scratch,
                    [&](int64_t item, void* memory) {
                      const int64_t b = item / strips, strip = item % strips;
                      if (strip < a.strips) a.kernels.grad_channels(f, b, strip, memory);
                      else a.kernels.grad_values(f, b, strip - a.strips);
                    });
  }
  if (several) a.for_keys([&](int64_t b, int64_t begin, int64_t end) { a.kernels.finish(f, b, begin, end); });
  Tensor grad_weight = p.dtype == Dtype::f64 ? summed<double>(a, query, f.weight_sums, nullptr)
                                             : summed<float>(a, query, f.weight_sums, nullptr);
  Tensor grad_bias = p.dtype == Dtype::f64 ? summed<double>(a, query, f.query_sums, p.wide_weight)
                                           : summed<float>(a, query, f.query_sums, p.wide_weight);
  return {grad_query, grad_key, grad_value, grad_weight, grad_bias, grad_mask};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("additive_attention_fwd", TORCH_BOX(&additive_attention_fwd));
  m.impl("additive_attention_bwd", TORCH_BOX(&additive_attention_bwd));
}

}  // namespace seqkern
