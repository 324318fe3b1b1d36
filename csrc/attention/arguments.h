// Checks of the attention ops' arguments that are the same on either device, and read no tensor data. Host side.
#pragma once

#include <cmath>
#include <optional>
#include <utility>

#include "dropout.h"
#include "mask.h"
#include "tensor.h"

namespace seqkern {

// The arguments that forward and backward share, unchecked.
struct AttentionArguments {
  const char* op;
  const Tensor &query, &key, &value;
  const std::optional<Tensor>&attn_mask, &query_starts, &key_starts, &key_lengths, &alibi_slopes, &seed;
  int64_t max_queries, max_keys, diagonal;
  bool lower_right;
  int64_t left, right;
  double scale, softcap, dropout_p;

  // Checks device and number of dimensions.
  void check(const Tensor& t, int64_t dim, const char* argument) const {
    check_beside(t, query, op, argument, "query");
    check_dim(t, dim, op, argument);
  }
  void check(const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type, const char* argument) const {
    check(t, static_cast<int64_t>(sizes.size()), argument);
    check_type(t, type, op, argument);
    int64_t dim = 0;
    for (int64_t size : sizes) check_size(t, dim++, size, op, argument);
  }
  void check_integers(const Tensor& t, const char* argument) const {
    check(t, 1, argument);
    const ScalarType type = t.scalar_type();
    SK_CHECK(type == ScalarType::Int || type == ScalarType::Long, op, ": ", argument,
             " must be int32 or int64, got ScalarType ", static_cast<int>(type));
  }
};

struct AttentionSizes {
  Dtype dtype;
  ScalarType type, acc;
  int64_t batch, heads, kv_heads, group;  // group: query heads per key head
  int64_t query_rows, key_rows;           // the tensors' dimension 2
  int64_t head_dim, value_dim;
  bool packed;  // several sequences in the rows of one batch, stored as (rows, heads, dim)
  int64_t sequence_count;
  MaskType mask_type;
  int64_t mask_strides[4];  // 0 where it broadcasts

  // Uninitialised, (batch, heads, rows, dim): contiguous, or a view of (rows, heads, dim) for packed sequences.
  Tensor rows_tensor(const Tensor& like, int64_t head_count, int64_t rows, int64_t dim) const {
    if (!packed) return empty(like, {batch, head_count, rows, dim}, type);
    return torch::stable::transpose(empty(like, {1, rows, head_count, dim}, type), 1, 2);
  }
};

inline MaskType mask_type_of(const Tensor& t, ScalarType query_type, const char* op) {
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

inline void check_attention_bias(const AttentionArguments& a, AttentionSizes& s) {
  if (a.alibi_slopes) a.check(*a.alibi_slopes, {s.sequence_count, s.heads}, s.acc, "alibi_slopes");
  s.mask_type = MaskType::none;
  if (!a.attn_mask) return;
  const Tensor& mask = *a.attn_mask;
  a.check(mask, 4, "attn_mask");
  s.mask_type = mask_type_of(mask, s.type, a.op);
  const int64_t full[4] = {s.sequence_count, s.heads, a.max_queries, a.max_keys};
  for (int64_t dim = 0; dim < 4; ++dim) {
    if (mask.size(dim) != 1) check_size(mask, dim, full[dim], a.op, "attn_mask");
    s.mask_strides[dim] = mask.size(dim) == 1 ? 0 : mask.stride(dim);
  }
}

inline AttentionSizes check_attention(const AttentionArguments& a) {
  const char* op = a.op;
  AttentionSizes s{};
  a.check(a.query, 4, "query");
  s.dtype = dtype_of(a.query, op, "query");
  s.type = a.query.scalar_type();
  s.acc = acc_type(s.dtype);
  for (const auto& [name, t] : {std::pair{"key", &a.key}, std::pair{"value", &a.value}}) {
    a.check(*t, 4, name);
    check_type(*t, s.type, op, name);
    check_size(*t, 0, a.query.size(0), op, name);
  }
  s.batch = a.query.size(0);
  s.heads = a.query.size(1);
  s.kv_heads = a.key.size(1);
  check_size(a.value, 1, s.kv_heads, op, "value");
  check_size(a.value, 2, a.key.size(2), op, "value");
  check_size(a.key, 3, a.query.size(3), op, "key");
  SK_CHECK(s.kv_heads > 0 ? s.heads % s.kv_heads == 0 : s.heads == 0, op, ": the ", s.heads,
           " heads of query must be a multiple of the ", s.kv_heads, " heads of key");
  s.group = s.kv_heads > 0 ? s.heads / s.kv_heads : 0;
  s.query_rows = a.query.size(2);
  s.key_rows = a.key.size(2);
  s.head_dim = a.query.size(3);
  s.value_dim = a.value.size(3);
  SK_CHECK(a.softcap >= 0 && std::isfinite(a.softcap), op, ": softcap must be a finite number >= 0, got ", a.softcap);

  SK_CHECK(a.dropout_p >= 0 && a.dropout_p <= 1, op, ": dropout_p must be a probability, between 0 and 1, got ",
           a.dropout_p);
  SK_CHECK(a.seed || !(a.dropout_p > 0), op, ": dropout_p = ", a.dropout_p, " needs a seed");
  if (a.seed) {  // even without dropout: a seed on another device would select that device's kernels
    a.check(*a.seed, a.seed->dim(), "seed");
    check_type(*a.seed, ScalarType::Long, op, "seed");
    SK_CHECK(a.seed->numel() == 1, op, ": seed must have one element, got ", a.seed->numel());
  }

  SK_CHECK(a.query_starts.has_value() == a.key_starts.has_value(), op,
           ": query_starts and key_starts go together, got only one of them");
  s.packed = a.query_starts.has_value();
  s.sequence_count = s.batch;
  if (s.packed) {
    check_size(a.query, 0, 1, op, "query");
    a.check_integers(*a.query_starts, "query_starts");
    a.check_integers(*a.key_starts, "key_starts");
    SK_CHECK(a.query_starts->size(0) > 0, op,
             ": query_starts must have one number more than there are sequences, got none");
    check_size(*a.key_starts, 0, a.query_starts->size(0), op, "key_starts");
    s.sequence_count = a.query_starts->size(0) - 1;
  } else {
    SK_CHECK(a.max_queries == s.query_rows && a.max_keys == s.key_rows, op,
             ": max_queries and max_keys must be the lengths ", s.query_rows, " and ", s.key_rows, ", got ",
             a.max_queries, " and ", a.max_keys);
  }
  if (a.key_lengths) {
    a.check_integers(*a.key_lengths, "key_lengths");
    check_size(*a.key_lengths, 0, s.sequence_count, op, "key_lengths");
  }
  check_attention_bias(a, s);
  return s;
}

inline void check_attention_sinks(const AttentionArguments& a, const AttentionSizes& s,
                                  const std::optional<Tensor>& sinks) {
  if (sinks) a.check(*sinks, {s.heads}, s.acc, "sinks");
}

// The arguments of the backward pass alone.
inline void check_attention_gradients(const AttentionArguments& a, const AttentionSizes& s, const Tensor& grad_out,
                                      const std::optional<Tensor>& grad_lse, const Tensor& out, const Tensor& lse,
                                      bool need_mask, bool need_slopes) {
  a.check(grad_out, {s.batch, s.heads, s.query_rows, s.value_dim}, s.type, "grad_out");
  a.check(out, {s.batch, s.heads, s.query_rows, s.value_dim}, s.type, "out");
  a.check(lse, {s.batch, s.heads, s.query_rows}, s.acc, "lse");
  if (grad_lse) a.check(*grad_lse, {s.batch, s.heads, s.query_rows}, s.acc, "grad_lse");
  SK_CHECK(!need_slopes || a.alibi_slopes, a.op, ": need_slopes without alibi_slopes");
  if (!need_mask) return;
  SK_CHECK(s.mask_type != MaskType::none && s.mask_type != MaskType::boolean, a.op,
           ": need_mask without a mask of floating-point numbers");
  check_size(*a.attn_mask, 2, a.max_queries, a.op, "attn_mask");
  check_size(*a.attn_mask, 3, a.max_keys, a.op, "attn_mask");
}

}  // namespace seqkern
