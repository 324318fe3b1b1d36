// The fast path of attention without mask, slopes, sinks or dropout, of sequences of one length or of their own, and of
// a step of decoding.
#include "node.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<attention_fwd> forward("attention_fwd");
const Function<attention_bwd> backward("attention_bwd");
constexpr auto none = std::nullopt;

// Whole numbers that a node keeps as double.
constexpr int64_t kLargest = int64_t{1} << 52;

// saved: query, key, value, lse, lengths where there are any, then out; numbers: diagonal, left, right, scale, softcap.
const Rule kAttention("AttentionNode", [](const Call& call) -> variable_list {
  const NativeTensor &query = call.saved[0], &key = call.saved[1], &grad = call.grads[0], &out = call.saved.back();
  if (grad.sizes() != out.sizes() || grad.scalar_type() != out.scalar_type()) return {};
  const NativeTensor lengths = call.saved.size() > 5 ? call.saved[4] : NativeTensor();
  const auto number = [&](size_t n) { return static_cast<int64_t>(call.numbers[n]); };
  const auto [grad_query, grad_key, grad_value, unused, unused_too] =
      backward(stable(grad), none, stable(query), stable(key), stable(call.saved[2]), stable(out),
               stable(call.saved[3]), none, none, none, maybe(lengths), none, none, query.size(2), key.size(2),
               number(0), false, number(1), number(2), call.numbers[3], call.numbers[4], 0.0, false, false);
  const auto needed = [&](size_t n, const Tensor& t) { return call.needs[n] ? native(t) : NativeTensor(); };
  return {needed(0, grad_query), needed(1, grad_key), needed(2, grad_value)};
});

// How many keys each sequence of a batch has, or undefined.
bool read_lengths(PyObject* object, int64_t batch, NativeTensor& lengths) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  lengths = THPVariable_Unpack(object);
  return usual(lengths) && (lengths.scalar_type() == at::kLong || lengths.scalar_type() == at::kInt) &&
         lengths.dim() == 1 && lengths.size(0) == batch && lengths.is_contiguous();
}

// A side of a window: none, or a number from -1 (none) on.
bool read_side(PyObject* object, int64_t& side) {
  side = -1;
  return object == Py_None || (read_integer(object, side) && -1 <= side && side < kLargest);
}

bool read_window(PyObject* object, int64_t& left, int64_t& right) {
  left = right = -1;
  if (object == Py_None) return true;
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 2 && read_side(PyTuple_GET_ITEM(object, 0), left) &&
         read_side(PyTuple_GET_ITEM(object, 1), right);
}

// (query, key, value, causal, at the lower right, window, scale, softcap, one key head for each query head, lengths of
// the keys) -> output.
PyObject* attention(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor *query = read(arguments[0]), *key = read(arguments[1]), *value = read(arguments[2]);
  bool causal, lower_right, equal_heads;
  if (!query || !key || !value || query->dim() != 4 || key->dim() != 4 || value->dim() != 4) return nullptr;
  if (query->scalar_type() != key->scalar_type() || query->scalar_type() != value->scalar_type()) return nullptr;
  if (!read_flag(arguments[3], causal) || !read_flag(arguments[4], lower_right) ||
      !read_flag(arguments[8], equal_heads))
    return nullptr;
  if (query->size(0) != key->size(0) || key->size(0) != value->size(0) || key->size(1) != value->size(1))
    return nullptr;
  if (equal_heads ? query->size(1) != key->size(1) : query->size(1) % key->size(1) != 0) return nullptr;
  NativeTensor lengths;
  if (!read_lengths(arguments[9], query->size(0), lengths)) return nullptr;
  const int64_t queries = query->size(2), keys = key->size(2);
  int64_t left, right;
  if (!read_window(arguments[5], left, right)) return nullptr;
  if (causal) right = 0;
  const int64_t diagonal = lower_right && (causal || arguments[5] != Py_None) ? keys - queries : 0;
  double scale = 1 / std::sqrt(static_cast<double>(query->size(3))), softcap = 0;
  if (arguments[6] != Py_None && !(read_number(arguments[6], scale) && std::abs(scale) <= 3.4e38)) return nullptr;
  if (arguments[7] != Py_None && !read_number(arguments[7], softcap)) return nullptr;
  if (softcap != 0 && !(1e-30 <= softcap && softcap <= 3.4e38)) return nullptr;

  NativeTensor out, lse;
  {
    const WithoutPython free;
    const auto results = forward(stable(*query), stable(*key), stable(*value), none, none, none, maybe(lengths), none,
                                 none, none, queries, keys, diagonal, false, left, right, scale, softcap, 0.0);
    out = native(std::get<0>(results)), lse = native(std::get<1>(results));
  }
  if (wanted({query, key, value})) {
    variable_list saved{*query, *key, *value, lse};
    if (lengths.defined()) saved.push_back(lengths);
    remember({.rule = kAttention,
              .inputs = {query, key, value},
              .results = {out},
              .saved = std::move(saved),
              .saved_results = {0},
              .kept = {},
              .numbers = {static_cast<double>(diagonal), static_cast<double>(left), static_cast<double>(right), scale,
                          softcap}});
  }
  return wrap(out);
}

SK_FRONT(attention, 10, attention)

// ---- self-attention of a layer --------------------------------------------------------------------------------------

const Function<self_attention_fwd> self_forward("self_attention_fwd");
const Function<self_attention_bwd> self_backward("self_attention_bwd");

// Queries, keys and values as one product wrote them, (B, N, (H + 2 Hk) D) or tokens first, (N, B, ...); the output and
// its gradient are (B, N, H D) or (N, B, H D). Each is seen as (B, heads, N, D), where it lies.
struct Packing {
  int64_t heads, kv_heads, head_dim;
  bool batch_first;
  NativeTensor view(const NativeTensor& t, int64_t first_head, int64_t count) const {
    const int64_t width = t.size(2);
    const int64_t batch = t.size(batch_first ? 0 : 1), tokens = t.size(batch_first ? 1 : 0);
    return in_strides(t, {batch, count, tokens, head_dim},
                      {batch_first ? tokens * width : width, head_dim, batch_first ? width : batch * width, 1},
                      first_head * head_dim);
  }
  NativeTensor query(const NativeTensor& t) const { return view(t, 0, heads); }
  NativeTensor key(const NativeTensor& t) const { return view(t, heads, kv_heads); }
  NativeTensor value(const NativeTensor& t) const { return view(t, heads + kv_heads, kv_heads); }
};

// saved: the product, lse, lengths where there are any, then the output; numbers: heads, key heads, batch first, left,
// right, scale.
const Rule kSelfAttention("SelfAttentionNode", [](const Call& call) -> variable_list {
  const NativeTensor &both = call.saved[0], &out = call.saved.back();
  const NativeTensor grad = call.grads[0].contiguous();
  const NativeTensor lengths = call.saved.size() > 3 ? call.saved[2] : NativeTensor();
  const auto number = [&](size_t n) { return static_cast<int64_t>(call.numbers[n]); };
  const int64_t heads = number(0), kv_heads = number(1);
  const Packing packing{heads, kv_heads, both.size(2) / (heads + 2 * kv_heads), number(2) != 0};
  if (!both.is_contiguous() || !out.is_contiguous() || grad.sizes() != out.sizes() ||
      out.size(2) != heads * packing.head_dim || both.size(2) != (heads + 2 * kv_heads) * packing.head_dim ||
      both.size(0) != out.size(0) || both.size(1) != out.size(1))
    return {};
  const NativeTensor found = at::detail::empty_cpu(both.sizes(), both.scalar_type());
  self_backward(stable(packing.query(grad)), stable(packing.query(both)), stable(packing.key(both)),
                stable(packing.value(both)), stable(packing.query(out)), stable(call.saved[1]), maybe(lengths),
                stable(packing.query(found)), stable(packing.key(found)), stable(packing.value(found)), number(3),
                number(4), call.numbers[5]);
  return {found};
});

// (product, heads, key heads, batch first, causal, window, lengths) -> output.
PyObject* self_attention(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor* both = read(arguments[0]);
  Packing packing{};
  bool causal;
  int64_t left, right;
  if (!both || both->dim() != 3 || !both->is_contiguous() || !read_integer(arguments[1], packing.heads) ||
      !read_integer(arguments[2], packing.kv_heads) || !read_flag(arguments[3], packing.batch_first) ||
      !read_flag(arguments[4], causal) || !read_window(arguments[5], left, right))
    return nullptr;
  const int64_t heads = packing.heads, kv_heads = packing.kv_heads;
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0 || both->size(2) % (heads + 2 * kv_heads) != 0) return nullptr;
  packing.head_dim = both->size(2) / (heads + 2 * kv_heads);
  NativeTensor lengths;
  if (!read_lengths(arguments[6], both->size(packing.batch_first ? 0 : 1), lengths)) return nullptr;
  if (causal) right = 0;
  const double scale = 1 / std::sqrt(static_cast<double>(packing.head_dim));

  NativeTensor out, lse;
  {
    const WithoutPython free;
    out = at::detail::empty_cpu({both->size(0), both->size(1), heads * packing.head_dim}, both->scalar_type());
    lse = native(self_forward(stable(packing.query(*both)), stable(packing.key(*both)), stable(packing.value(*both)),
                              maybe(lengths), stable(packing.query(out)), left, right, scale));
  }
  if (wanted({both})) {
    variable_list saved{*both, lse};
    if (lengths.defined()) saved.push_back(lengths);
    remember({.rule = kSelfAttention,
              .inputs = {both},
              .results = {out},
              .saved = std::move(saved),
              .saved_results = {0},
              .kept = {},
              .numbers = {static_cast<double>(heads), static_cast<double>(kv_heads),
                          static_cast<double>(packing.batch_first), static_cast<double>(left),
                          static_cast<double>(right), scale}});
  }
  return wrap(out);
}

SK_FRONT(self_attention, 7, self_attention)

// ---- decoding -------------------------------------------------------------------------------------------------------

bool same_memory(const NativeTensor& a, const NativeTensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// Writes the new rows of every sequence and head where its cache ends.
void append(const NativeTensor& rows, const NativeTensor& cache, const int64_t* lengths) {
  const int64_t heads = rows.size(1), count = rows.size(2), room = cache.size(2);
  const int64_t bytes = rows.size(3) * static_cast<int64_t>(rows.element_size());
  const char* const from = static_cast<const char*>(rows.const_data_ptr());
  char* const to = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t size = static_cast<int64_t>(rows.element_size());
  for (int64_t b = 0; b < rows.size(0); ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + ((b * heads + h) * room + lengths[b] + i) * bytes,
                    from + (b * rows.stride(0) + h * rows.stride(1) + i * rows.stride(2)) * size, bytes);
  if (!cache.is_inference()) cache.unsafeGetTensorImpl()->bump_version();
}

// (query, key cache, value cache, lengths, key, value, window, scale) -> output.
PyObject* attention_decode(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor* found[5];
  constexpr int kTensors[5] = {0, 1, 2, 4, 5};
  for (int n = 0; n < 5; ++n) {
    found[n] = read(arguments[kTensors[n]]);
    if (!found[n] || found[n]->dim() != 4 || found[n]->scalar_type() != found[0]->scalar_type()) return nullptr;
  }
  const NativeTensor &query = *found[0], &keys = *found[1], &values = *found[2], &key = *found[3], &value = *found[4];
  if (!THPVariable_CheckExact(arguments[3])) return nullptr;
  const NativeTensor& lengths = THPVariable_Unpack(arguments[3]);
  const int64_t batch = query.size(0), heads = keys.size(1), room = keys.size(2), count = key.size(2);
  if (!usual(lengths) || lengths.scalar_type() != at::kLong || lengths.dim() != 1 || lengths.size(0) != batch ||
      !lengths.is_contiguous())
    return nullptr;
  if (!keys.is_contiguous() || !values.is_contiguous() || key.stride(3) != 1 || value.stride(3) != 1) return nullptr;
  const auto fits = [&](const NativeTensor& t, int64_t rows, int64_t dim) {
    return t.size(0) == batch && t.size(1) == heads && t.size(2) == rows && t.size(3) == dim;
  };
  if (query.size(1) % heads != 0 || !fits(keys, room, query.size(3)) || !fits(values, room, value.size(3)) ||
      !fits(key, count, query.size(3)) || !fits(value, count, value.size(3)))
    return nullptr;
  for (const NativeTensor* t : {&query, &key, &value})
    if (same_memory(*t, keys) || same_memory(*t, values)) return nullptr;
  if (wanted({&query, &keys, &values, &key, &value})) return nullptr;
  int64_t left = -1, right = 0;
  PyObject* window = arguments[6];
  if (window != Py_None) {
    if (!PyTuple_CheckExact(window) || PyTuple_GET_SIZE(window) != 2) return nullptr;
    if (!read_side(PyTuple_GET_ITEM(window, 0), left) || !read_integer(PyTuple_GET_ITEM(window, 1), right) ||
        right != 0)
      return nullptr;
  }
  double scale = 1 / std::sqrt(static_cast<double>(query.size(3)));
  if (arguments[7] != Py_None && !(read_number(arguments[7], scale) && std::abs(scale) <= 3.4e38)) return nullptr;

  const int64_t* const begins = lengths.const_data_ptr<int64_t>();
  if (!std::all_of(begins, begins + batch, [&](int64_t n) { return 0 <= n && n <= room - count; })) return nullptr;
  NativeTensor out;
  {
    const WithoutPython free;
    const NativeTensor ends = at::detail::empty_cpu({batch}, at::kLong);
    std::transform(begins, begins + batch, ends.mutable_data_ptr<int64_t>(), [&](int64_t n) { return n + count; });
    append(key, keys, begins);
    append(value, values, begins);
    out = native(std::get<0>(forward(stable(query), stable(keys), stable(values), none, none, none, maybe(ends), none,
                                     none, none, query.size(2), room, 0, true, left, 0, scale, 0.0, 0.0)));
  }
  return wrap(out);
}

SK_FRONT(attention_decode, 8, attention_decode)

}  // namespace
}  // namespace seqkern::direct
