// Attention, host side: the checks.
#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace seqkern {
namespace {

// Positions stay far below this: a larger one only means "unlimited", and sums of several cannot overflow.
constexpr int64_t kFar = int64_t{1} << 60;

// The elements of a vector of int32 or int64.
std::vector<int64_t> integers(const Tensor& t) {
  const Tensor dense = as_contiguous(t);
  std::vector<int64_t> numbers(static_cast<size_t>(t.size(0)));
  if (t.scalar_type() == ScalarType::Long) {
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
  const std::vector<int64_t> at = integers(t);
  SK_CHECK(at.front() >= 0 && at.back() <= rows, op, ": ", argument, " must lie between 0 and the ", rows,
           " rows, got ", at.front(), " to ", at.back());
  for (size_t i = 1; i < at.size(); ++i) {
    SK_CHECK(at[i - 1] <= at[i], op, ": ", argument, " must not descend, got ", at[i - 1], " before ", at[i]);
    SK_CHECK(at[i] - at[i - 1] <= longest, op, ": sequence ", i - 1, " of ", argument, " has ", at[i] - at[i - 1],
             " rows, more than the maximum given, ", longest);
  }
  return at;
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

void find_sequences(const AttentionArguments& a, AttentionProblem& p) {
  std::vector<int64_t> query_starts, key_starts, lengths;
  if (p.packed) {
    query_starts = starts(*a.query_starts, p.query_rows, a.max_queries, a.op, "query_starts");
    key_starts = starts(*a.key_starts, p.key_rows, a.max_keys, a.op, "key_starts");
  }
  if (a.key_lengths) lengths = integers(*a.key_lengths);
  p.sequences.reserve(static_cast<size_t>(p.sequence_count));
  for (int64_t index = 0; index < p.sequence_count; ++index) {
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

}  // namespace

void Heads::zero(int64_t batch, int64_t head, int64_t begin, int64_t end) const {
  const int64_t bytes = tensor.size(3) * element;
  for (int64_t row = begin; row < end && bytes > 0; ++row) {
    const int64_t count = row_stride * element == bytes ? end - row : 1;
    std::memset(address(batch, head, row), 0, static_cast<size_t>(count * bytes));
    row += count - 1;
  }
}

AttentionShape AttentionProblem::shape_of(const Sequence& s) const {
  AttentionShape own = shape;
  if (s.mask_is_band) own.mask = MaskType::none;
  return own;
}

AttentionBias AttentionProblem::bias(const Sequence& s, int64_t head) const {
  AttentionBias b;
  if (slopes) {
    b.slopes = static_cast<const char*>(slopes->const_data_ptr()) + (s.index * heads + head) * slopes->element_size();
  }
  if (mask && !s.mask_is_band) {
    b.mask = static_cast<const char*>(mask->const_data_ptr()) +
             (s.index * mask_strides[0] + head * mask_strides[1]) * mask->element_size();
    b.mask_head_stride = mask_strides[1];
    b.mask_row_stride = mask_strides[2];
    b.mask_key_stride = mask_strides[3];
  }
  if (!cells.empty() && !s.mask_is_band) {
    const int64_t heads_of_mask = mask_strides[1] ? heads : 1;
    const int64_t matrix = (mask_strides[0] ? s.index : 0) * heads_of_mask + (mask_strides[1] ? head : 0);
    b.cells = cells.data() + matrix * cell_rows * cell_columns;
    b.cell_stride = cell_rows == 1 ? 0 : cell_columns;
  }
  b.dropout_row = row(s, head);
  b.dropout_head_stride = query_rows;
  return b;
}

AttentionProblem check(const AttentionArguments& a) {
  check_cpu(a.query, a.op, "query");
  AttentionProblem p{check_attention(a), {}, {}, a.attn_mask, {}};
  p.shape.dtype = p.dtype;
  p.shape.head_dim = p.head_dim;
  p.shape.value_dim = p.value_dim;
  p.shape.scale = a.scale;
  p.shape.softcap = a.softcap;
  p.shape.alibi = a.alibi_slopes.has_value();
  p.shape.mask = p.mask_type;
  if (a.dropout_p > 0)
    p.shape.dropout =
        Dropout::with(a.dropout_p, static_cast<uint64_t>(*static_cast<const int64_t*>(a.seed->const_data_ptr())));
  if (a.alibi_slopes) p.slopes = as_contiguous(*a.alibi_slopes);
  find_sequences(a, p);
  if (p.mask) look_at_mask(p, a.max_queries, a.max_keys);
  return p;
}

}  // namespace seqkern
