// Attention in CUDA C++, host side: checks, results, choice of kernel. The kernels: forward.cuh,
// backward.cuh; for Hopper hopper/forward.cuh,
// hopper/backward.cuh.
//
// Nothing is read back from the device: the kernels read starts, lengths and the seed, and clamp them to the tensors
// they refer to. A call can therefore be captured in a CUDA graph.
#include <algorithm>
#include <string>
#include <tuple>

#include "attention/arguments.h"
#include "attention/limits.h"
#include "launch.h"

namespace seqkern {
namespace {

using std::optional;

constexpr int64_t kFarDiagonal = 1 << 30;  // still fits 32 bits after adding a few lengths

// Whether "auto" takes the Hopper kernels where they serve a call. Only once a GPU run has shown them right and faster.
constexpr bool kAutoHopper = false;

// ---- arguments -----------------------------------------------------------------------------------------------------

optional<Tensor> contiguous_or_none(const optional<Tensor>& t) {
  return t ? optional(as_contiguous(*t)) : std::nullopt;
}
AttentionIntegers integers_of(const optional<Tensor>& t) {
  return {data_or_null(t), t && t->scalar_type() == ScalarType::Long};
}

// A limit of the band. A distance that no pair of positions can reach becomes "far", which is not the same as
// "unlimited".
int limit_of(int64_t diagonal, int64_t distance, int sign) {
  if (distance < 0) return sign * kAttentionFar;
  const int64_t most = int64_t{1} << 60, far = kAttentionFar - 1;
  const int64_t limit = std::clamp(diagonal, -most, most) + sign * std::min(distance, most);
  return static_cast<int>(std::clamp(limit, -far, far));
}

// Raises for dtypes and head dimensions that the kernels do not support.
void check_kernels(const char* op, Dtype dtype, int64_t head_dim, int64_t value_dim) {
  SK_CHECK(dtype != Dtype::f64, op,
           ": the CUDA C++ kernels take float32, bfloat16 and float16, got float64; use_backend(\"triton\") runs it");
  for (const auto& [name, dim] : {std::pair{"query", head_dim}, std::pair{"value", value_dim}}) {
    SK_CHECK(dim >= 1 && dim <= kMostHeadDim, op, ": the CUDA C++ kernels take head dimensions of 1 to ", kMostHeadDim,
             ", got ", dim, " of ", name, "; use_backend(\"reference\") runs any");
  }
}

// Raises if positions would not fit 32 bits.
void check_range(const AttentionArguments& a, const AttentionSizes& s) {
  for (const auto& [name, size] : {std::pair{"sequences", s.sequence_count}, std::pair{"heads", s.heads},
                                   std::pair{"queries", a.max_queries}, std::pair{"keys", a.max_keys}}) {
    SK_CHECK(size < kAttentionFar, a.op, ": the CUDA C++ kernels take fewer than 2^28 ", name, ", got ", size);
    SK_CHECK(size >= 0, a.op, ": the number of ", name, " must not be negative, got ", size);
  }
  checked_product({s.sequence_count, s.heads, s.query_rows}, a.op);
}

// A tensor as the kernels address it. Keeps a copy if the last dimension was not contiguous.
class StridedTensor {
 public:
  explicit StridedTensor(const Tensor& t) : tensor_(with_unit_last_stride(t)) {}

  AttentionTensor read() const {
    return {tensor_.const_data_ptr(), tensor_.stride(0), tensor_.stride(1), tensor_.stride(2)};
  }
  AttentionResult write() const {
    Tensor t = tensor_;
    return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
  }
  // Whether every row starts at a multiple of 16 bytes and consists of whole 16-byte vectors.
  bool vectors() const {
    const int64_t size = static_cast<int64_t>(tensor_.element_size());
    bool aligned = reinterpret_cast<uintptr_t>(tensor_.const_data_ptr()) % 16 == 0 && tensor_.size(3) * size % 16 == 0;
    for (int64_t dim : {0, 1, 2}) aligned = aligned && (tensor_.size(dim) <= 1 || tensor_.stride(dim) * size % 16 == 0);
    return aligned;
  }

 private:
  Tensor tensor_;
};

// The kernels' description of a call, and the tensors that its addresses point into.
class Prepared {
 public:
  AttentionSizes sizes;
  AttentionCuda call{};

  Prepared(const AttentionArguments& a, const optional<Tensor>& sinks)
      : sizes(check_attention(a)),
        query_(a.query),
        key_(a.key),
        value_(a.value),
        query_starts_(contiguous_or_none(a.query_starts)),
        key_starts_(contiguous_or_none(a.key_starts)),
        key_lengths_(contiguous_or_none(a.key_lengths)),
        slopes_(contiguous_or_none(a.alibi_slopes)),
        sinks_(contiguous_or_none(sinks)) {
    check_kernels(a.op, sizes.dtype, sizes.head_dim, sizes.value_dim);
    check_range(a, sizes);
    check_attention_sinks(a, sizes, sinks);
    AttentionCuda& c = call;
    c.query = query_.read();
    c.key = key_.read();
    c.value = value_.read();
    c.vectors = query_.vectors() && key_.vectors() && value_.vectors();
    c.sequences = static_cast<int>(sizes.sequence_count);
    c.heads = static_cast<int>(sizes.heads);
    c.kv_heads = static_cast<int>(sizes.kv_heads);
    c.head_dim = static_cast<int>(sizes.head_dim);
    c.value_dim = static_cast<int>(sizes.value_dim);
    c.query_rows = sizes.query_rows;
    c.key_rows = sizes.key_rows;
    c.max_queries = static_cast<int>(a.max_queries);
    c.max_keys = static_cast<int>(a.max_keys);
    c.query_starts = integers_of(query_starts_);
    c.key_starts = integers_of(key_starts_);
    c.key_lengths = integers_of(key_lengths_);
    c.diagonal = static_cast<int>(std::clamp(a.diagonal, -kFarDiagonal, kFarDiagonal));
    c.low = limit_of(a.diagonal, a.left, -1);
    c.high = limit_of(a.diagonal, a.right, 1);
    c.lower_right = a.lower_right;
    c.scale = static_cast<float>(a.scale);
    c.softcap = static_cast<float>(a.softcap);
    c.slopes = data_or_null<float>(slopes_);
    c.sinks = data_or_null<float>(sinks_);
    c.mask = data_or_null(a.attn_mask);
    c.mask_type = sizes.mask_type;
    std::copy(sizes.mask_strides, sizes.mask_strides + 4, c.mask_strides);
    if (a.dropout_p > 0) {
      const Dropout dropout = Dropout::with(a.dropout_p, 0);  // the seed itself is read on the device
      c.seed = static_cast<const int64_t*>(a.seed->const_data_ptr());
      c.threshold = dropout.threshold;
      c.keep_scale = static_cast<float>(dropout.scale);
    }
  }
  // Whether the call has any score.
  bool scores() const {
    return sizes.heads > 0 && sizes.sequence_count > 0 && call.max_queries > 0 && call.max_keys > 0;
  }

 private:
  StridedTensor query_, key_, value_;
  optional<Tensor> query_starts_, key_starts_, key_lengths_, slopes_, sinks_;
};

// Whether to run the Hopper kernels. `serves` tells whether they support the call.
template <class Serves>
bool takes_hopper(const char* op, const std::string& path, const Serves& serves) {
  SK_CHECK(path == "auto" || path == "mma" || path == "hopper", op, ": path must be auto, mma or hopper, got ", path);
  if (path == "mma" || (path == "auto" && !kAutoHopper)) return false;
  const bool served = serves();
  SK_CHECK(served || path == "auto", op, ": the Hopper kernels do not serve this call; path = mma does");
  return served;
}

// ---- forward -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward(const AttentionArguments& a, const optional<Tensor>& sinks, bool tf32,
                                   const std::string& path) {
  Prepared p(a, sinks);
  const AttentionSizes& s = p.sizes;
  const OnDevice guard(a.query);
  Tensor out = s.rows_tensor(a.query, s.heads, s.query_rows, s.value_dim);
  Tensor lse = empty(a.query, {s.batch, s.heads, s.query_rows}, s.acc);
  if (out.numel() == 0) return {out, lse};
  if (s.sequence_count == 0 || a.max_queries == 0) {  // no row belongs to a sequence: no kernel needed
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -INFINITY);
    return {out, lse};
  }
  const StridedTensor rows(out);
  p.call.tf32 = tf32;
  p.call.vectors = p.call.vectors && rows.vectors();
  const AttentionCall call{a.op, s.dtype, a.query, current_stream(a.query)};
  optional<Tensor> limits;
  if (p.scores() && looks_at_mask(p.call, a.attn_mask)) limits = look_at_mask(call, p.call, *a.attn_mask, false);
  const AttentionForwardCuda f{p.call, rows.write(), static_cast<float*>(lse.mutable_data_ptr())};
  if (takes_hopper(a.op, path, [&] { return hopper_serves_forward(call, f); })) {
    launch_attention_forward_hopper(call, f);
    return {out, lse};
  }
  launch_attention_forward(call, f);
  return {out, lse};
}

// ---- backward ------------------------------------------------------------------------------------------------------

using BackwardResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

BackwardResults backward(const AttentionArguments& a, const Tensor& grad_out, const optional<Tensor>& grad_lse,
                         const Tensor& out, const Tensor& lse, bool need_mask, bool need_slopes, bool tf32,
                         const std::string& path) {
  Prepared p(a, std::nullopt);
  const AttentionSizes& s = p.sizes;
  check_attention_gradients(a, s, grad_out, grad_lse, out, lse, need_mask, need_slopes);
  const OnDevice guard(a.query);
  Tensor grad_query = s.rows_tensor(a.query, s.heads, s.query_rows, s.head_dim);
  Tensor grad_key = s.rows_tensor(a.query, s.kv_heads, s.key_rows, s.head_dim);
  Tensor grad_value = s.rows_tensor(a.query, s.kv_heads, s.key_rows, s.value_dim);
  Tensor grad_mask = empty(a.query, {0}, s.type), grad_distance = empty(a.query, {0}, s.acc);
  if (need_mask) {
    const Tensor& mask = *a.attn_mask;
    grad_mask = empty(a.query, {mask.size(0), mask.size(1), mask.size(2), mask.size(3)}, mask.scalar_type());
  }
  if (need_slopes) grad_distance = empty(a.query, {s.batch, s.heads, s.query_rows}, s.acc);
  if (!p.scores()) {
    for (Tensor* t : {&grad_query, &grad_key, &grad_value, &grad_mask, &grad_distance}) torch::stable::zero_(*t);
    return {grad_query, grad_key, grad_value, grad_mask, grad_distance};
  }
  const StridedTensor gradient(grad_out), result(out), query_rows(grad_query), key_rows(grad_key),
      value_rows(grad_value);
  const Tensor sums = as_contiguous(lse);
  const optional<Tensor> grad_sums = contiguous_or_none(grad_lse);
  Tensor delta = empty(a.query, {s.batch, s.heads, s.query_rows}, s.acc);
  p.call.tf32 = tf32;
  for (const StridedTensor* rows : {&gradient, &result, &query_rows, &key_rows, &value_rows})
    p.call.vectors = p.call.vectors && rows->vectors();

  const AttentionCall call{a.op, s.dtype, a.query, current_stream(a.query)};
  optional<Tensor> limits;
  if (looks_at_mask(p.call, a.attn_mask)) limits = look_at_mask(call, p.call, *a.attn_mask, true);
  AttentionBackwardCuda b{};
  b.call = p.call;
  b.grad_out = gradient.read();
  b.out = result.read();
  b.lse = static_cast<const float*>(sums.const_data_ptr());
  b.grad_lse = data_or_null<float>(grad_sums);
  b.delta = static_cast<float*>(delta.mutable_data_ptr());
  b.grad_query = query_rows.write();
  b.grad_key = key_rows.write();
  b.grad_value = value_rows.write();
  b.grad_distance = need_slopes ? static_cast<float*>(grad_distance.mutable_data_ptr()) : nullptr;
  if (need_mask) {
    b.grad_mask = grad_mask.mutable_data_ptr();
    b.mask_sequences = static_cast<int>(grad_mask.size(0));
    b.mask_heads = static_cast<int>(grad_mask.size(1));
  }
  if (takes_hopper(a.op, path, [&] { return hopper_serves_backward(call, b); })) {
    launch_attention_backward_hopper(call, b);
    return {grad_query, grad_key, grad_value, grad_mask, grad_distance};
  }
  launch_attention_backward(call, b);
  return {grad_query, grad_key, grad_value, grad_mask, grad_distance};
}

// ---- what would run ------------------------------------------------------------------------------------------------

std::string attention_plan(const Tensor& query, int64_t value_dim, bool backward, const std::string& path) {
  const char* op = "attention_plan";
  SK_CHECK(query.dim() > 0, op, ": query must have a head dimension");
  const int64_t head_dim = query.size(query.dim() - 1);
  const Dtype dtype = dtype_of(query, op, "query");
  check_kernels(op, dtype, head_dim, value_dim);
  if (takes_hopper(op, path, [] { return true; })) return "wgmma and TMA, where they serve the call";
  const int most = static_cast<int>(std::max(head_dim, value_dim));
  const OnDevice guard(query);
  std::string plan = "mma.sync in tiles of " +
                     (backward ? attention_backward_tiles(query, dtype, most) : attention_forward_tiles(dtype, most));
  if (backward && cuda_device(query).architecture == 90) plan += " (the Hopper kernels wait for a measured run)";
  return plan;
}

// ---- the ops -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> attention_fwd(const Tensor& query, const Tensor& key, const Tensor& value,
                                         const optional<Tensor>& attn_mask, const optional<Tensor>& query_starts,
                                         const optional<Tensor>& key_starts, const optional<Tensor>& key_lengths,
                                         const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks,
                                         const optional<Tensor>& seed, int64_t max_queries, int64_t max_keys,
                                         int64_t diagonal, bool lower_right, int64_t left, int64_t right, double scale,
                                         double softcap, double dropout_p, bool tf32, const std::string& path) {
  return forward({"attention_fwd", query, key, value, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes,
                  seed, max_queries, max_keys, diagonal, lower_right, left, right, scale, softcap, dropout_p},
                 sinks, tf32, path);
}

BackwardResults attention_bwd(const Tensor& grad_out, const optional<Tensor>& grad_lse, const Tensor& query,
                              const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse,
                              const optional<Tensor>& attn_mask, const optional<Tensor>& query_starts,
                              const optional<Tensor>& key_starts, const optional<Tensor>& key_lengths,
                              const optional<Tensor>& alibi_slopes, const optional<Tensor>& seed, int64_t max_queries,
                              int64_t max_keys, int64_t diagonal, bool lower_right, int64_t left, int64_t right,
                              double scale, double softcap, double dropout_p, bool need_mask, bool need_slopes,
                              bool tf32, const std::string& path) {
  return backward({"attention_bwd", query, key, value, attn_mask, query_starts, key_starts, key_lengths, alibi_slopes,
                   seed, max_queries, max_keys, diagonal, lower_right, left, right, scale, softcap, dropout_p},
                  grad_out, grad_lse, out, lse, need_mask, need_slopes, tf32, path);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern_cuda, SK_CUDA_KEY, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd));
  m.impl("attention_plan", TORCH_BOX(&attention_plan));
}

}  // namespace seqkern
