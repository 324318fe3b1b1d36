// Attention, host side: the checks.
#include "attention_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace seqkern {
namespace {

// Positions stay far below this: what is larger only says "unlimited", and sums of several cannot overflow.
constexpr int64_t kFar = int64_t{1} << 60;

// The numbers of a contiguous vector of int32 or int64.
std::vector<int64_t> integers(const Tensor& t, const char* op, const char* argument) {
  check_cpu(t, op, argument);
  check_dim(t, 1, op, argument);
  const ScalarType type = t.scalar_type();
  SK_CHECK(type == ScalarType::Int || type == ScalarType::Long, op, ": ", argument,
           " must be int32 or int64, got ScalarType ", static_cast<int>(type));
  const Tensor dense = as_contiguous(t);
  std::vector<int64_t> numbers(static_cast<size_t>(t.size(0)));
  if (type == ScalarType::Long) {
    const auto* data = static_cast<const int64_t*>(dense.const_data_ptr());
    std::copy(data, data + numbers.size(), numbers.begin());
  } else {
    const auto* data = static_cast<const int32_t*>(dense.const_data_ptr());
    std::copy(data, data + numbers.size(), numbers.begin());
  }
  return numbers;
}

// The starts of the sequences that divide `rows` rows, and the end of the last.
std::vector<int64_t> starts(const Tensor& t, int64_t rows, int64_t longest, const char* op, const char* argument) {
  const std::vector<int64_t> at = integers(t, op, argument);
  SK_CHECK(!at.empty(), op, ": ", argument, " must have one number more than there are sequences, got none");
  SK_CHECK(at.front() >= 0 && at.back() <= rows, op, ": ", argument, " must lie between 0 and the ", rows,
           " rows, got ", at.front(), " to ", at.back());
  for (size_t i = 1; i < at.size(); ++i) {
    SK_CHECK(at[i - 1] <= at[i], op, ": ", argument, " must not descend, got ", at[i - 1], " before ", at[i]);
    SK_CHECK(at[i] - at[i - 1] <= longest, op, ": sequence ", i - 1, " of ", argument, " has ", at[i] - at[i - 1],
             " rows, more than the maximum given, ", longest);
  }
  return at;
}

MaskType mask_type(const Tensor& t, ScalarType query_type, const char* op) {
  const ScalarType type = t.scalar_type();
  SK_CHECK(type == ScalarType::Bool || type == ScalarType::Float || type == query_type, op,
           ": attn_mask must be bool, float32 or of the query's dtype, got ScalarType ", static_cast<int>(type));
  switch (type) {
    case ScalarType::Bool: return MaskType::boolean;
    case ScalarType::Double: return MaskType::f64;
    case ScalarType::BFloat16: return MaskType::bf16;
    case ScalarType::Half: return MaskType::f16;
    default: return MaskType::f32;
  }
}

Dropout dropout_of(const AttentionArguments& a) {
  SK_CHECK(a.dropout_p >= 0 && a.dropout_p <= 1, a.op, ": dropout_p must be a probability, between 0 and 1, got ",
           a.dropout_p);
  if (a.dropout_p == 0) return {};
  SK_CHECK(a.seed, a.op, ": dropout_p = ", a.dropout_p, " needs a seed");
  check_cpu(*a.seed, a.op, "seed");
  check_type(*a.seed, ScalarType::Long, a.op, "seed");
  SK_CHECK(a.seed->numel() == 1, a.op, ": seed must have one element, got ", a.seed->numel());
  return Dropout::with(a.dropout_p, static_cast<uint64_t>(*static_cast<const int64_t*>(a.seed->const_data_ptr())));
}

AttentionSequence band(const AttentionArguments& a, int64_t queries, int64_t keys) {
  AttentionSequence s;
  s.queries = queries;
  s.keys = keys;
  s.diagonal = std::clamp(a.diagonal, -kFar, kFar) + (a.lower_right ? keys - queries : 0);
  s.lower = a.left < 0 ? -queries : std::clamp(s.diagonal - std::min(a.left, kFar), -queries, keys);
  s.upper = a.right < 0 ? keys : std::clamp(s.diagonal + std::min(a.right, kFar), -queries, keys);
  return s;
}

void find_sequences(const AttentionArguments& a, Problem& p) {
  SK_CHECK(a.query_starts.has_value() == a.key_starts.has_value(), a.op,
           ": query_starts and key_starts go together, got only one of them");
  p.packed = a.query_starts.has_value();
  std::vector<int64_t> query_starts, key_starts, lengths;
  int64_t count = p.batch;
  if (p.packed) {
    check_size(a.query, 0, 1, a.op, "query");
    query_starts = starts(*a.query_starts, p.query_rows, a.max_queries, a.op, "query_starts");
    key_starts = starts(*a.key_starts, p.key_rows, a.max_keys, a.op, "key_starts");
    SK_CHECK(query_starts.size() == key_starts.size(), a.op, ": query_starts and key_starts must have one size, got ",
             query_starts.size(), " and ", key_starts.size());
    count = static_cast<int64_t>(query_starts.size()) - 1;
  } else {
    SK_CHECK(a.max_queries == p.query_rows && a.max_keys == p.key_rows, a.op,
             ": max_queries and max_keys must be the lengths ", p.query_rows, " and ", p.key_rows, ", got ",
             a.max_queries, " and ", a.max_keys);
  }
  if (a.key_lengths) {
    lengths = integers(*a.key_lengths, a.op, "key_lengths");
    check_size(*a.key_lengths, 0, count, a.op, "key_lengths");
  }
  p.sequences.reserve(static_cast<size_t>(count));
  for (int64_t index = 0; index < count; ++index) {
    const auto i = static_cast<size_t>(index);
    Sequence s{};
    s.index = index;
    s.batch = p.packed ? 0 : index;
    s.query_row = p.packed ? query_starts[i] : 0;
    s.key_row = p.packed ? key_starts[i] : 0;
    s.key_rows = p.packed ? key_starts[i + 1] - s.key_row : p.key_rows;
    const int64_t keys = a.key_lengths ? std::clamp<int64_t>(lengths[i], 0, s.key_rows) : s.key_rows;
    s.band = band(a, p.packed ? query_starts[i + 1] - s.query_row : p.query_rows, keys);
    p.sequences.push_back(s);
  }
}

void check_bias(const AttentionArguments& a, Problem& p) {
  const auto count = static_cast<int64_t>(p.sequences.size());
  p.shape.alibi = a.alibi_slopes.has_value();
  if (a.alibi_slopes) {
    check_cpu(*a.alibi_slopes, a.op, "alibi_slopes");
    check_dim(*a.alibi_slopes, 2, a.op, "alibi_slopes");
    check_type(*a.alibi_slopes, p.acc, a.op, "alibi_slopes");
    check_size(*a.alibi_slopes, 0, count, a.op, "alibi_slopes");
    check_size(*a.alibi_slopes, 1, p.heads, a.op, "alibi_slopes");
    p.slopes = as_contiguous(*a.alibi_slopes);
  }
  if (!a.attn_mask) return;
  check_cpu(*a.attn_mask, a.op, "attn_mask");
  check_dim(*a.attn_mask, 4, a.op, "attn_mask");
  p.shape.mask = mask_type(*a.attn_mask, p.type, a.op);
  p.mask = *a.attn_mask;
  const int64_t full[4] = {count, p.heads, a.max_queries, a.max_keys};
  for (int64_t dim = 0; dim < 4; ++dim) {
    if (p.mask->size(dim) != 1) check_size(*p.mask, dim, full[dim], a.op, "attn_mask");
    p.mask_strides[dim] = p.mask->size(dim) == 1 ? 0 : p.mask->stride(dim);
  }
}

}  // namespace

void Heads::zero(int64_t batch, int64_t head, int64_t begin, int64_t end) const {
  const int64_t bytes = tensor.size(3) * element;
  for (int64_t row = begin; row < end && bytes > 0; ++row) {
    const int64_t count = row_stride * element == bytes ? end - row : 1;
    std::memset(address(batch, head, row), 0, static_cast<size_t>(count * bytes));
    row += count - 1;
  }
}

AttentionBias Problem::bias(const Sequence& s, int64_t head) const {
  AttentionBias b;
  if (slopes) {
    b.slopes = static_cast<const char*>(slopes->const_data_ptr()) + (s.index * heads + head) * slopes->element_size();
  }
  if (mask) {
    b.mask = static_cast<const char*>(mask->const_data_ptr()) +
             (s.index * mask_strides[0] + head * mask_strides[1]) * mask->element_size();
    b.mask_head_stride = mask_strides[1];
    b.mask_row_stride = mask_strides[2];
    b.mask_key_stride = mask_strides[3];
  }
  b.dropout_row = row(s, head);
  b.dropout_head_stride = query_rows;
  return b;
}

Tensor Problem::rows_tensor(const Tensor& like, int64_t head_count, int64_t rows, int64_t dim) const {
  if (!packed) return empty(like, {batch, head_count, rows, dim}, type);
  return torch::stable::transpose(empty(like, {1, rows, head_count, dim}, type), 1, 2);
}

Problem check(const AttentionArguments& a) {
  const char* op = a.op;
  Problem p;
  p.shape = {};
  check_cpu(a.query, op, "query");
  check_dim(a.query, 4, op, "query");
  p.shape.dtype = dtype_of(a.query, op, "query");
  p.type = a.query.scalar_type();
  p.acc = acc_type(p.shape.dtype);
  for (const auto& [name, t] : {std::pair{"key", &a.key}, std::pair{"value", &a.value}}) {
    check_cpu(*t, op, name);
    check_dim(*t, 4, op, name);
    check_type(*t, p.type, op, name);
    check_size(*t, 0, a.query.size(0), op, name);
  }
  p.batch = a.query.size(0);
  p.heads = a.query.size(1);
  p.kv_heads = a.key.size(1);
  check_size(a.value, 1, p.kv_heads, op, "value");
  check_size(a.value, 2, a.key.size(2), op, "value");
  check_size(a.key, 3, a.query.size(3), op, "key");
  SK_CHECK(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0, op, ": the ", p.heads,
           " heads of query must be a multiple of the ", p.kv_heads, " heads of key");
  p.group = p.kv_heads > 0 ? p.heads / p.kv_heads : 0;
  p.query_rows = a.query.size(2);
  p.key_rows = a.key.size(2);
  p.shape.head_dim = a.query.size(3);
  p.shape.value_dim = a.value.size(3);
  p.shape.scale = a.scale;
  SK_CHECK(a.softcap >= 0 && std::isfinite(a.softcap), op, ": softcap must be a finite number >= 0, got ", a.softcap);
  p.shape.softcap = a.softcap;
  p.shape.dropout = dropout_of(a);
  find_sequences(a, p);
  check_bias(a, p);
  return p;
}

}  // namespace seqkern
