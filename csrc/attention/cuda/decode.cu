// Split-KV decode on CUDA, host side: checks, plan, launches, registration.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "attention/limits.h"
#include "common/cuda/launch.h"
#include "decode.cuh"

namespace seqkern {
namespace {

using attention_decode::Decode;
using std::optional;

constexpr const char* kOp = "attention_decode";

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- the plan ------------------------------------------------------------------------------------------------------

// The number of splits of the keys, from shapes alone, by FlashAttention-3's rule (Shah et al. 2024,
// hopper/heuristics.h): the fewest within 85% of the best use of the last wave of blocks. A multiprocessor needs two
// blocks to keep its memory busy. Always counts 132 multiprocessors, so that all devices give the same bits.
constexpr int64_t kMultiprocessors = 132, kPlaces = 2 * kMultiprocessors, kMostSplits = 128;

int64_t splits_of(int64_t blocks, int64_t key_tiles) {
  if (blocks == 0 || key_tiles <= 4 || 10 * blocks >= 8 * kPlaces) return 1;
  const int64_t limit = std::min(key_tiles, kMostSplits);
  const auto use_of = [&](int64_t splits) {
    const double waves = static_cast<double>(blocks * splits) / kPlaces;
    return waves / std::ceil(waves);
  };
  double best = 0;
  for (int64_t splits = 1; splits <= limit; ++splits) best = std::max(best, use_of(splits));
  const int64_t least = std::min(limit, ceil_div(kMultiprocessors, blocks));
  for (int64_t splits = least; splits < limit; ++splits) {
    if (use_of(splits) >= 0.85 * best) return splits;
  }
  return limit;
}

// Instances of decode_kernel: three buckets of head dims by three dtypes.
template <class F>
void with_columns(int64_t columns, const F& f) {
  if (columns <= 64) return f(std::integral_constant<int, 64>{});
  if (columns <= 128) return f(std::integral_constant<int, 128>{});
  return f(std::integral_constant<int, 256>{});
}
template <class F>
void with_type(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f32: return f(float{});
    case Dtype::bf16: return f(BFloat16{});
    case Dtype::f16: return f(Half{});
    default: break;
  }
  SK_CHECK(false, kOp, ": query must be float32, bfloat16 or float16, got float64");
}

// ---- arguments -----------------------------------------------------------------------------------------------------

void check_matrix(const Tensor& t, const Tensor& query, const char* argument, int64_t batch, int64_t heads,
                  int64_t rows, int64_t columns) {
  check_beside(t, query, kOp, argument, "query");
  check_dim(t, 4, kOp, argument);
  check_type(t, query.scalar_type(), kOp, argument);
  const int64_t sizes[] = {batch, heads, rows, columns};
  for (int64_t d = 0; d < 4; ++d) check_size(t, d, sizes[d], kOp, argument);
}

// The cache is written in place: a copy would not do, and rows that share memory would have several writers.
void check_cache(const Tensor& t, const char* argument) {
  SK_CHECK(unit_last_stride(t), kOp, ": ", argument, "'s last dimension must be contiguous, got stride ", t.stride(3));
  for (int64_t d = 0; d < 3; ++d) {
    SK_CHECK(t.size(d) <= 1 || t.stride(d) != 0, kOp, ": ", argument,
             " must have memory of its own for every row, got stride 0 in dimension ", d);
  }
}

Tensor integers(const Tensor& t, const Tensor& query, const char* argument) {
  check_beside(t, query, kOp, argument, "query");
  const ScalarType type = t.scalar_type();
  SK_CHECK(type == ScalarType::Int || type == ScalarType::Long, kOp, ": ", argument,
           " must be int32 or int64, got ScalarType ", static_cast<int>(type));
  return as_contiguous(t);
}

optional<Tensor> floats(const optional<Tensor>& t, const Tensor& query, std::initializer_list<int64_t> sizes,
                        const char* argument) {
  if (!t) return std::nullopt;
  check_beside(*t, query, kOp, argument, "query");
  check_dim(*t, static_cast<int64_t>(sizes.size()), kOp, argument);
  check_type(*t, ScalarType::Float, kOp, argument);
  int64_t d = 0;
  for (int64_t size : sizes) check_size(*t, d++, size, kOp, argument);
  return as_contiguous(*t);
}

AttentionTensor tensor_of(const Tensor& t) { return {t.const_data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

// Whether every row starts at a multiple of 16 bytes.
bool in_vectors(const Tensor& t) {
  const int64_t size = t.scalar_type() == ScalarType::Float ? 4 : 2;
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < 3; ++d) aligned = aligned && (t.size(d) <= 1 || t.stride(d) * size % 16 == 0);
  return aligned;
}

// A side of the band as the kernels take it; -1 is unlimited.
int limit_of(int64_t side) {
  return static_cast<int>(side < 0 ? kAttentionFar : std::min<int64_t>(side, kAttentionFar - 1));
}

// Allocated by torch, also in the host executor, which then notices writes past the end.
Tensor allocate(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), type);
}

// ---- the op --------------------------------------------------------------------------------------------------------

void run(Dtype dtype, Decode& p, int64_t splits, const Tensor& query) {
  const OnDevice guard(query);
  void* stream = current_stream(query);
  const AttentionCuda& call = p.call;
  const int64_t group_rows = int64_t{call.heads} / call.kv_heads * call.max_queries;
  const int64_t rows = int64_t{call.sequences} * call.heads * call.max_queries;
  with_type(dtype, [&](auto type) {
    using T = decltype(type);
    with_columns(std::max(call.head_dim, call.value_dim), [&](auto columns) {
      constexpr int kDim = decltype(columns)::value;
      using Shape = attention_decode::Shape<T, kDim>;
      const int most = Shape::Tile::kRowBytes > 512 ? 2 : 4;  // tiles of rows whose queries fit beside the ring
      p.tiles = group_rows <= 16 ? 1 : group_rows <= 32 ? 2 : most;
      p.row_blocks = static_cast<int>(ceil_div(group_rows, int64_t{p.tiles} * attention_decode::kRows));
      const int64_t blocks = checked_product({call.sequences, call.kv_heads, p.row_blocks}, kOp);
      const int64_t key_tiles = ceil_div(call.max_keys, Shape::kKeys);
      if (splits == 0) splits = splits_of(blocks, key_tiles);
      p.splits = static_cast<int>(std::min(splits, std::max<int64_t>(1, key_tiles)));
      const int64_t grid = checked_product({blocks, p.splits}, kOp);
      SK_CHECK(grid < INT32_MAX && rows < INT32_MAX, kOp, ": ", grid, " blocks are more than a grid has");
      Tensor partial = allocate(query, {p.splits > 1 ? rows : 0, p.splits, call.value_dim}, ScalarType::Float);
      Tensor extent = allocate(query, {p.splits > 1 ? rows : 0, p.splits, 2}, ScalarType::Float);
      if (p.splits > 1) {
        p.partial = static_cast<float*>(partial.mutable_data_ptr());
        p.extent = static_cast<float*>(extent.mutable_data_ptr());
      }
      const size_t shared = attention_decode::shared_bytes<T, kDim>(p.tiles, p.pages != nullptr);
      launch(kOp, attention_decode::decode_kernel<T, kDim>,
             LaunchShape{dim3(static_cast<unsigned>(grid)), dim3(attention_decode::kThreads), shared}, stream, p);
      if (p.splits > 1) {
        const int threads = attention_decode::kThreads, keys = Shape::kKeys;
        launch(kOp, attention_decode::combine_kernel<T>,
               LaunchShape{dim3(static_cast<unsigned>(rows)), dim3(static_cast<unsigned>(threads))}, stream, p, keys);
      }
    });
  });
}

std::tuple<Tensor, Tensor> attention_decode_op(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                                               const Tensor& cache_lengths, const optional<Tensor>& key,
                                               const optional<Tensor>& value, const optional<Tensor>& page_table,
                                               const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks,
                                               int64_t left, int64_t right, double scale, double softcap, bool tf32,
                                               int64_t splits) {
  check_dim(query, 4, kOp, "query");
  const Dtype dtype = dtype_of(query, kOp, "query");
  SK_CHECK(dtype != Dtype::f64, kOp, ": query must be float32, bfloat16 or float16, got float64");
  check_memory(query, kOp, "query");
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), head_dim = query.size(3);
  check_dim(key_cache, 4, kOp, "key_cache");
  check_dim(value_cache, 4, kOp, "value_cache");
  const int64_t kv_heads = key_cache.size(1), page_size = key_cache.size(2), value_dim = value_cache.size(3);
  const int64_t pages = page_table ? key_cache.size(0) : batch;
  check_matrix(key_cache, query, "key_cache", pages, kv_heads, page_size, head_dim);
  check_matrix(value_cache, query, "value_cache", pages, kv_heads, page_size, value_dim);
  check_cache(key_cache, "key_cache");
  check_cache(value_cache, "value_cache");
  SK_CHECK(queries >= 1 && queries <= kMostDecodeQueries, kOp, ": query must have 1 to ", kMostDecodeQueries,
           " tokens, got ", queries);
  SK_CHECK(head_dim <= kMostHeadDim && value_dim <= kMostHeadDim, kOp, ": head dimensions must be at most ",
           kMostHeadDim, ", got ", head_dim, " and ", value_dim);
  SK_CHECK(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, kOp, ": the ", heads,
           " heads of query must be a multiple of the ", kv_heads, " of key_cache");
  SK_CHECK(heads > 0 || !key, kOp, ": query must have heads where there are new rows, got 0 heads");
  const Tensor lengths = integers(cache_lengths, query, "cache_lengths");
  check_dim(lengths, 1, kOp, "cache_lengths");
  check_size(lengths, 0, batch, kOp, "cache_lengths");
  SK_CHECK(key.has_value() == value.has_value(), kOp, ": key and value go together, got only one of them");
  optional<Tensor> new_key, new_value;
  if (key) {
    check_dim(*key, 4, kOp, "key");
    check_matrix(*key, query, "key", batch, kv_heads, key->size(2), head_dim);
    check_matrix(*value, query, "value", batch, kv_heads, key->size(2), value_dim);
    new_key = with_unit_last_stride(*key);
    new_value = with_unit_last_stride(*value);
  }
  int64_t room = page_size;
  if (page_table) {
    check_beside(*page_table, query, kOp, "page_table", "query");
    check_dim(*page_table, 2, kOp, "page_table");
    check_type(*page_table, ScalarType::Int, kOp, "page_table");
    check_size(*page_table, 0, batch, kOp, "page_table");
    room = checked_product({page_table->size(1), page_size}, kOp);
    if (pages == 0) room = 0;  // whatever the table says
  }
  const Tensor table = page_table ? with_unit_last_stride(*page_table) : query;  // query: never read
  const auto slopes = floats(alibi_slopes, query, {batch, heads}, "alibi_slopes");
  const auto sink = floats(sinks, query, {heads}, "sinks");
  const int64_t appended = key ? key->size(2) : 0;
  SK_CHECK(
      room < kAttentionFar && appended < kAttentionFar && batch < INT32_MAX && heads < INT32_MAX && pages < INT32_MAX,
      kOp, ": sizes must be below 2^28 keys and 2^31 sequences, heads and pages");
  SK_CHECK(splits >= 0, kOp, ": splits must be a number of splits, or 0 for the rule's, got ", splits);

  const Tensor q = with_unit_last_stride(query);
  Tensor out = allocate(q, {batch, heads, queries, value_dim}, query.scalar_type());
  Tensor lse = allocate(q, {batch, heads, queries}, ScalarType::Float);
  if (batch == 0 || heads == 0) return {out, lse};
  Decode p{};
  AttentionCuda& call = p.call;
  call.query = tensor_of(q);
  call.vectors = in_vectors(q) && in_vectors(key_cache) && in_vectors(value_cache) &&
                 (!key || (in_vectors(*new_key) && in_vectors(*new_value)));
  call.tf32 = tf32;
  call.sequences = static_cast<int>(batch);
  call.heads = static_cast<int>(heads);
  call.kv_heads = static_cast<int>(kv_heads);
  call.head_dim = static_cast<int>(head_dim);
  call.value_dim = static_cast<int>(value_dim);
  call.query_rows = queries;
  call.key_rows = room;
  call.max_queries = static_cast<int>(queries);
  call.max_keys = static_cast<int>(room);
  call.key_lengths = {lengths.const_data_ptr(), lengths.scalar_type() == ScalarType::Long};
  call.low = -limit_of(left);
  call.high = limit_of(right);
  call.lower_right = true;
  call.scale = static_cast<float>(scale);
  call.softcap = static_cast<float>(softcap);
  call.slopes = slopes ? static_cast<const float*>(slopes->const_data_ptr()) : nullptr;
  call.sinks = sink ? static_cast<const float*>(sink->const_data_ptr()) : nullptr;
  p.key_cache = {key_cache.mutable_data_ptr(), key_cache.stride(0), key_cache.stride(1), key_cache.stride(2)};
  p.value_cache = {value_cache.mutable_data_ptr(), value_cache.stride(0), value_cache.stride(1), value_cache.stride(2)};
  if (key) {
    p.new_key = tensor_of(*new_key);
    p.new_value = tensor_of(*new_value);
    p.appended = static_cast<int>(appended);
  }
  if (page_table && room > 0) {
    p.pages = static_cast<const int32_t*>(table.const_data_ptr());
    p.pages_row = table.stride(0);
    p.page_size = static_cast<int>(page_size);
    p.page_count = static_cast<int>(pages);
  }
  p.out = out.mutable_data_ptr();
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  run(dtype, p, splits, q);
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern_cuda, SK_CUDA_KEY, m) { m.impl("attention_decode", TORCH_BOX(&attention_decode_op)); }

}  // namespace seqkern
