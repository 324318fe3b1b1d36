// What a mask hides, host side: whether it is looked at, and the memory of what was found.
#include <algorithm>

#include "limits.cuh"

namespace seqkern {
namespace {

using attention_limits::Arguments;
using attention_limits::kWarps;

constexpr int64_t kFewRows = 32;  // queries, or keys, that are not worth a launch

AttentionLimits fill(const AttentionCall& call, const AttentionCuda& c, const Tensor& mask, bool queries, int* data) {
  const int blocks = ((queries ? c.max_queries : c.max_keys) + kLimitRows - 1) / kLimitRows;
  const int sequences = static_cast<int>(mask.size(0)), heads = static_cast<int>(mask.size(1));
  AttentionLimits limits{data, heads, sequences > 1 ? int64_t{heads} * blocks * 2 : 0,
                         heads > 1 ? int64_t{blocks} * 2 : 0};
  LaunchShape shape{dim3(static_cast<unsigned>(int64_t{sequences} * heads * blocks)), dim3(32 * kWarps),
                    2 * kWarps * sizeof(int)};
  launch(call.op, attention_limits::mask_limits_kernel, shape, call.stream, Arguments{c, limits, data, queries});
  return limits;
}

}  // namespace

bool looks_at_mask(const AttentionCuda& c, const std::optional<Tensor>& mask) {
  if (!mask || c.max_queries <= kFewRows || c.max_keys <= kFewRows) return false;
  int64_t numbers = 1, scores = int64_t{c.sequences} * c.heads;
  for (int d = 0; d < 4; ++d) numbers *= c.mask_strides[d] != 0 || d < 2 ? mask->size(d) : 1;
  scores *= int64_t{c.max_queries} * c.max_keys;
  const int64_t blocks = (std::max(c.max_queries, c.max_keys) + kLimitRows - 1) / kLimitRows;
  return (c.mask_type == MaskType::boolean || numbers * 4 <= scores) &&
         mask->size(0) * mask->size(1) * blocks <= INT32_MAX;
}

Tensor look_at_mask(const AttentionCall& call, AttentionCuda& c, const Tensor& mask, bool keys) {
  const auto blocks = [](int64_t rows) { return (rows + kLimitRows - 1) / kLimitRows; };
  const int64_t masks = mask.size(0) * mask.size(1) * 2;
  const int64_t of_queries = masks * blocks(c.max_queries), of_keys = keys ? masks * blocks(c.max_keys) : 0;
  Tensor found = empty(mask, {of_queries + of_keys}, ScalarType::Int);
  int* const data = static_cast<int*>(found.mutable_data_ptr());
  const AttentionCuda plain = c;  // without limits
  c.query_limits = fill(call, plain, mask, true, data);
  if (keys) c.key_limits = fill(call, plain, mask, false, data + of_queries);
  return found;
}

}  // namespace seqkern
