// Attention, host side: boolean masks that are bands.
//
// Query i of a causal, windowed or padded mask sees the keys i + lower <= j <= i + upper of the first few: what the
// options say. Such a mask is read once and dropped: the sequence gets the band, if all of its heads have the same.
// Reading ends at a row whose visible keys are not consecutive. A sequence's result does not depend on those of others.
#include <algorithm>
#include <atomic>
#include <memory>

#include "parallel.h"
#include "problem.h"

namespace seqkern {
namespace {

constexpr int64_t kRows = 32;   // of a work item
constexpr int64_t kChunk = 64;  // bytes that are looked at together

bool all_zero(const unsigned char* bytes) {
  unsigned char any = 0;
  for (int64_t i = 0; i < kChunk; ++i) any |= bytes[i];
  return any == 0;
}

// The keys that a row of a mask shows, if they are consecutive.
bool consecutive(const unsigned char* row, int64_t keys, Range& seen) {
  int64_t begin = 0, end = keys;
  while (end - begin >= kChunk && all_zero(row + begin)) begin += kChunk;
  while (begin < end && row[begin] == 0) ++begin;
  while (end - begin >= kChunk && all_zero(row + end - kChunk)) end -= kChunk;
  while (begin < end && row[end - 1] == 0) --end;
  unsigned char hidden = 0;
  for (int64_t k = begin; k < end; ++k) hidden |= row[k] == 0;
  seen = begin < end ? Range{begin, end} : Range{0, 0};
  return hidden == 0;
}

Range row_of(const AttentionSequence& s, int64_t query) { return visible_range(s, query, query + 1); }

// The band that shows each query what both `s` and its row of the mask show it, if there is one. `step`: 0 if all
// queries have the same row.
bool fit(const Range* rows, int64_t step, AttentionSequence& s) {
  const auto both = [&](int64_t query) {
    const Range band = row_of(s, query), row = rows[query * step];
    return intersection(std::max(band.begin, row.begin), std::min(band.end, row.end), s.keys);
  };
  AttentionSequence found = s;
  found.keys = 0;
  for (int64_t q = 0; q < s.queries; ++q) found.keys = std::max(found.keys, both(q).end);
  found.lower = -s.queries;
  found.upper = found.keys;
  for (int64_t q = 0; q < s.queries; ++q) {
    const Range seen = both(q);
    if (seen.begin == seen.end) continue;
    if (seen.begin > 0) found.lower = seen.begin - q;
    if (seen.end < found.keys) found.upper = seen.end - 1 - q;
  }
  for (int64_t q = 0; q < s.queries; ++q) {
    const Range seen = both(q), fitted = row_of(found, q);
    if (seen.begin != fitted.begin || seen.end != fitted.end) return false;
  }
  s = found;
  return true;
}

bool same(const AttentionSequence& a, const AttentionSequence& b) {
  return a.keys == b.keys && a.lower == b.lower && a.upper == b.upper;
}

}  // namespace

void find_bands(AttentionProblem& p, int64_t queries, int64_t keys) {
  if (p.mask_type != MaskType::boolean || p.mask_strides[3] != 1) return;
  const int64_t heads = p.mask_strides[1] ? p.heads : 1, rows = p.mask_strides[2] ? queries : 1;
  const int64_t matrices = (p.mask_strides[0] ? p.mask->size(0) : 1) * heads, parts = blocks(rows, kRows);
  const auto* data = static_cast<const unsigned char*>(p.mask->const_data_ptr());
  std::vector<Range> seen(static_cast<size_t>(matrices * rows));
  const std::unique_ptr<std::atomic<bool>[]> other(new std::atomic<bool>[static_cast<size_t>(matrices)]());
  const double work = static_cast<double>(seen.size()) * static_cast<double>(keys) / 8;  // vectors of bytes
  for_items(matrices * parts, work, 0, [&](int64_t item, void*) {
    const int64_t matrix = item / parts, first = item % parts * kRows;
    const unsigned char* at = data + matrix / heads * p.mask_strides[0] + matrix % heads * p.mask_strides[1];
    for (int64_t r = first; r < std::min(rows, first + kRows) && !other[matrix].load(std::memory_order_relaxed); ++r)
      if (!consecutive(at + r * p.mask_strides[2], keys, seen[static_cast<size_t>(matrix * rows + r)]))
        other[matrix] = true;
  });
  bool needed = false;
  for (Sequence& s : p.sequences) {
    const int64_t first = (p.mask_strides[0] ? s.index : 0) * heads;
    AttentionSequence bands[2] = {s.band, s.band};
    for (int64_t head = 0; head < heads; ++head) {  // all must be one band
      AttentionSequence& band = bands[head > 0];
      band = s.band;
      s.mask_is_band = !other[first + head] && fit(seen.data() + (first + head) * rows, rows > 1, band) &&
                       (head == 0 || same(bands[0], band));
      if (!s.mask_is_band) break;
    }
    if (s.mask_is_band) s.band = bands[0];
    needed |= !s.mask_is_band;
  }
  if (needed) return;
  p.mask.reset();
  p.mask_type = p.shape.mask = MaskType::none;
}

}  // namespace seqkern
