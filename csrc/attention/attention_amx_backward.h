// The backward pass of one block of queries on AMX, in the steps that attention.h describes.
//
// S^T = K Q^T and dP^T = V dO^T are made a group (32 keys by 32 queries) at a time. P and dS go to bfloat16 in the two
// orders that the other products want: as rows of keys, for dV += P^T dO and dK += dS^T Q, with the queries i and 16 + i
// of a group beside each other, so that two vectors of a key become one row; and dS as pairs of keys, for dQ^T += K^T
// dS^T. All of a tile of 128 keys by 128 queries is kept, 96 KB: a tile of sums is loaded and stored once for it.
#pragma once

#include "attention_amx.h"

namespace seqkern {
namespace SK_TIER {
namespace {

struct AmxBackwardScratch {
  float *scores[2], *grads[2];
  bf16 *query_t, *grad_out_t, *query, *grad_out;  // operands: (dim, queries) and (queries, dim), pairs
  bf16 *weights, *grad_rows, *grad_pairs;         // of the 128 x 128 tile
  float *grad_query, *lse, *log2_lse, *delta, *grad_lse, *distance, *edge, *derivative, *kept;
  Lanes<float>* lanes;
  int64_t bytes;
  SK_INLINE AmxBackwardScratch(const AttentionShape& s, void* memory) {
    Pieces pieces{static_cast<char*>(memory)};
    const int64_t nk = tiles32(s.head_dim), nv = tiles32(s.value_dim);
    for (int i = 0; i < 2; ++i) {
      scores[i] = pieces.take<float>(4 * kSums);
      grads[i] = pieces.take<float>(4 * kSums);
    }
    query_t = pieces.take<bf16>(kQueryGroups * 2 * nk * kTile);
    grad_out_t = pieces.take<bf16>(kQueryGroups * 2 * nv * kTile);
    query = pieces.take<bf16>(kQueryGroups * 2 * nk * kTile);
    grad_out = pieces.take<bf16>(kQueryGroups * 2 * nv * kTile);
    weights = pieces.take<bf16>(kAmxQueries * kAmxKeys);
    grad_rows = pieces.take<bf16>(kAmxQueries * kAmxKeys);
    grad_pairs = pieces.take<bf16>(kAmxQueries * kAmxKeys);
    grad_query = pieces.take<float>(kQueryGroups * 4 * nk * kSums);
    for (float** piece : {&lse, &log2_lse, &delta, &grad_lse, &distance}) *piece = pieces.take<float>(kAmxQueries);
    edge = pieces.take<float>(4 * kSums);
    derivative = pieces.take<float>(s.softcap != 0 ? 4 * kSums : 0);
    kept = pieces.take<float>(s.dropout.active ? 4 * kSums : 0);
    lanes = pieces.take<Lanes<float>>(1);
    bytes = pieces.used;
  }
};

SK_INLINE bool has_options(const AttentionShape& s) { return modified(s) || s.dropout.active || s.need_slopes; }

inline void amx_begin(const AttentionBackward& p, int64_t query_block, void* memory) {
  const AttentionShape& s = p.shape;
  const AmxBackwardScratch t(s, memory);
  const int64_t q0 = query_block * kAmxQueries, queries = min(kAmxQueries, p.sequence.queries - q0);
  const int64_t nk = tiles32(s.head_dim), nv = tiles32(s.value_dim), groups = tiles32(queries);
  pack_transposed_pairs(p.query, q0, queries, s.head_dim, nk, t.query_t);
  pack_transposed_pairs(p.grad_out, q0, queries, s.value_dim, nv, t.grad_out_t);
  pack_pairs(p.query, q0, queries, s.head_dim, nk, t.query);
  pack_pairs(p.grad_out, q0, queries, s.value_dim, nv, t.grad_out);
  if (has_options(s)) fill_all_lanes(s, p.sequence, p.bias, q0, queries, t.lanes);
  for (int64_t q = 0; q < kAmxQueries; ++q) {
    const float lse = q < queries ? static_cast<const float*>(p.lse)[q0 + q] : -kInfinity<float>;
    const bool sees = lse != -kInfinity<float>;
    Vec<float> sum = {};
    if (sees) {
      const bf16 *out = at<bf16>(p.out, q0 + q), *grad_out = at<bf16>(p.grad_out, q0 + q);
      for (int64_t c = 0; c < s.value_dim; c += W<float>)
        sum += load_upto(out + c, s.value_dim - c) * load_upto(grad_out + c, s.value_dim - c);
    }
    // Padding and queries that see no key: exp(score - inf) = 0.
    t.lse[q] = sees ? lse : kInfinity<float>;
    t.log2_lse[q] = t.lse[q] * kLog2e;
    t.delta[q] = sees ? sum_lanes<float>(sum) : 0.0f;
    t.grad_lse[q] = p.grad_lse && sees ? static_cast<const float*>(p.grad_lse)[q0 + q] : 0.0f;
    t.distance[q] = 0;
  }
  __builtin_memset(t.grad_query, 0, static_cast<size_t>(groups * 4 * nk * kSums) * sizeof(float));
}

// One key and the next, 32 queries: rows of the three operands.
SK_INLINE void store_group_rows(const Rounded (&p)[2][2], const Rounded (&d)[2][2], bf16* weights, bf16* grad_rows,
                                bf16* grad_pairs, int64_t i) {
  for (int j = 0; j < 2; ++j) {
    _mm512_store_si512(weights + 32 * (2 * (i % 8) + j), pair(p[j][0], p[j][1]));
    _mm512_store_si512(grad_rows + 32 * (2 * (i % 8) + j), pair(d[j][0], d[j][1]));
    _mm512_store_si512(grad_pairs + kTile * j + 32 * i, pair(d[0][j], d[1][j]));
  }
}

template <class NK, class NV>
class AmxBackward {
 public:
  AmxBackward(const AttentionBackward& p, int64_t query_block, int64_t key_block, NK nk, NV nv, void* memory)
      : p_(p),
        s_(p.shape),
        band_(p.sequence),
        nk_(nk),
        nv_(nv),
        t_(p.shape, memory),
        packed_(p.shape, p.sequence.keys, true, p.packed),
        q0_(query_block * kAmxQueries),
        queries_(min(kAmxQueries, p.sequence.queries - q0_)),
        k0_(key_block * kAmxKeys),
        keys_(min(kAmxKeys, p.sequence.keys - k0_)) {}

  bool scores() const {
    if (s_.mask != MaskType::none) {
      const Range seen = visible_range(band_, q0_, q0_ + queries_);
      if (mask_hides_tile(s_, *t_.lanes, k0_, max(0, seen.begin - k0_) / kGroup * kGroup, min(keys_, seen.end - k0_)))
        return false;
    }
    struct {
      int64_t key, query;
      Sight sees;
    } groups[kQueryGroups * kKeyGroups];
    int64_t count = 0;
    for (int64_t q = 0; q < kQueryGroups; ++q)
      for (int64_t k = 0; k < kKeyGroups; ++k) {
        const Sight sees = group_sight(k, q);
        if (sees != Sight::none) groups[count++] = {k, q, sees};
      }
    if (count == 0) return true;
    const Tiles tiles;
    const bool options = has_options(s_);
    products(groups[0].key, groups[0].query, 0);
    for (int64_t i = 0; i < count; ++i) {
      const int buffer = static_cast<int>(i % 2);
      const auto& g = groups[i];
      if (i + 1 < count) products(groups[i + 1].key, groups[i + 1].query, buffer ^ 1);
      GroupMask mask;
      if (g.sees == Sight::some) fill_mask(band_, q0_ + g.query * kGroup, k0_ + g.key * kGroup, mask);
      if (options) differentiate_options(g.key, g.query, buffer, g.sees == Sight::some ? &mask : nullptr);
      else if (g.sees == Sight::some) differentiate<true>(g.key, g.query, buffer, mask);
      else differentiate<false>(g.key, g.query, buffer, mask);
    }
    // dQ^T += K^T dS^T
    const int64_t nk = nk_;
    for (int64_t q = 0; q < kQueryGroups; ++q) {
      const Range seen = key_groups(q);
      for (int64_t c = 0; c < nk && seen.begin < seen.end; ++c) {
        float* sums = t_.grad_query + (q * nk + c) * 4 * kSums;
        sums_load(sums, sums + 2 * kSums, 16, kSums);
        for (int64_t k = seen.begin; k < seen.end; ++k) {
          const bf16* key = packed_.key_t + ((k0_ / kGroup + k) * 2 * nk + 2 * c) * kTile;
          const bf16* grads = grad_pairs(k, q);
          sums_product(key, key + kTile, grads, grads + kTile);
        }
        sums_store(sums, sums + 2 * kSums, 16, kSums);
      }
    }
    return true;
  }

  void keys(bool visible, bool first, bool last) const {
    {
      const Tiles tiles;
      for (int64_t k = 0; k * kGroup < keys_; ++k) {
        const Range seen = visible ? query_groups(k) : Range{0, 0};
        add_products(k, seen, first, t_.weights, t_.grad_out, nv_, p_.value_sum);
        add_products(k, seen, first, t_.grad_rows, t_.query, nk_, p_.key_sum);
      }
    }
    if (!last) return;
    write_rows(at<float>(p_.key_sum, k0_), p_.key_sum.stride, keys_, s_.head_dim, static_cast<float>(s_.scale),
               at<bf16>(p_.grad_key, k0_), p_.grad_key.stride);
    write_rows(at<float>(p_.value_sum, k0_), p_.value_sum.stride, keys_, s_.value_dim, 1.0f,
               at<bf16>(p_.grad_value, k0_), p_.grad_value.stride);
  }

 private:
  SK_INLINE Sight group_sight(int64_t k, int64_t q) const {
    return sight(band_, q0_ + q * kGroup, min(kGroup, queries_ - q * kGroup), k0_ + k * kGroup);
  }
  Range key_groups(int64_t q) const {
    return seen_range(kKeyGroups, [&](int64_t k) { return group_sight(k, q); });
  }
  Range query_groups(int64_t k) const {
    return seen_range(kQueryGroups, [&](int64_t q) { return group_sight(k, q); });
  }
  template <class Seen>
  SK_INLINE static Range seen_range(int64_t count, const Seen& seen) {
    Range range{0, 0};
    for (int64_t i = 0; i < count; ++i) {
      if (seen(i) == Sight::none) continue;
      if (range.end == 0) range.begin = i;
      range.end = i + 1;
    }
    return range;
  }
  // The operands' places: tiles of 16 keys x 32 queries, and of 32 keys x 16 queries.
  SK_INLINE static int64_t row_tile(int64_t key_half, int64_t q) { return (key_half * kQueryGroups + q) * kTile; }
  SK_INLINE bf16* grad_pairs(int64_t k, int64_t q) const { return t_.grad_pairs + (k * kQueryGroups + q) * 2 * kTile; }

  SK_INLINE void products(int64_t k, int64_t q, int buffer) const {
    const int64_t nk = nk_, nv = nv_, group = k0_ / kGroup + k;
    score_zero();
    score_products(packed_.key + group * 2 * nk * kTile, t_.query_t + q * 2 * nk * kTile, nk, 0, nk);
    score_store(t_.scores[buffer]);
    score_zero();
    score_products(packed_.value + group * 2 * nv * kTile, t_.grad_out_t + q * 2 * nv * kTile, nv, 0, nv);
    score_store(t_.grads[buffer]);
  }

  // P = 2^(c s - lse log2 e), dS = P (dP - delta + dlse), rounded to the operands' places
  template <bool masked>
  SK_INLINE void differentiate(int64_t k, int64_t q, int buffer, const GroupMask& mask) const {
    const float *scores = t_.scores[buffer], *grads = t_.grads[buffer];
    const int64_t lane = q * kGroup;
    const __m512 c = _mm512_set1_ps(static_cast<float>(s_.scale * 1.4426950408889634));
    __m512 shift[2], delta[2];
    for (int half = 0; half < 2; ++half) {
      shift[half] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_load_ps(t_.log2_lse + lane + 16 * half));
      delta[half] = _mm512_sub_ps(_mm512_load_ps(t_.delta + lane + 16 * half),
                                  _mm512_load_ps(t_.grad_lse + lane + 16 * half));
    }
    bf16* pairs = grad_pairs(k, q);
    for (int64_t i = 0; i < 16; ++i) {
      __m512 p[2][2], d[2][2];
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          const int64_t at = (2 * i + j) * kGroup + 16 * half;
          __m512 x = exp2_rough(_mm512_fmadd_ps(_mm512_load_ps(scores + at), c, shift[half]));
          __m512 y = _mm512_mul_ps(x, _mm512_sub_ps(_mm512_load_ps(grads + at), delta[half]));
          if constexpr (masked) {
            x = _mm512_maskz_mov_ps(mask.seen[half][2 * i + j], x);
            y = _mm512_maskz_mov_ps(mask.seen[half][2 * i + j], y);
          }
          p[j][half] = x;
          d[j][half] = y;
        }
      store_rows(p, d, k, q, i, pairs);
    }
  }
  SK_INLINE void store_rows(const __m512 (&p)[2][2], const __m512 (&d)[2][2], int64_t k, int64_t q, int64_t i,
                            bf16* pairs) const {
    const int64_t row = row_tile(2 * k + i / 8, q);
    store_group_rows({{Rounded(p[0][0]), Rounded(p[0][1])}, {Rounded(p[1][0]), Rounded(p[1][1])}},
                     {{Rounded(d[0][0]), Rounded(d[0][1])}, {Rounded(d[1][0]), Rounded(d[1][1])}}, t_.weights + row,
                     t_.grad_rows + row, pairs, i);
  }

  // The same with all options.
  void differentiate_options(int64_t k, int64_t q, int buffer, const GroupMask* mask) const {
    const int64_t k0 = k0_ + k * kGroup, keys = min(kGroup, band_.keys - k0), first = q * kGroup;
    const Part part{0, keys, first, first + kGroup};
    float *scores = t_.scores[buffer], *grads = t_.grads[buffer];
    const __m512 scale = _mm512_set1_ps(static_cast<float>(s_.scale));
    for (int64_t i = 0; i < kGroup * kGroup; i += 16)
      _mm512_store_ps(scores + i, _mm512_mul_ps(_mm512_load_ps(scores + i), scale));
    if (modified(s_))
      modify_scores(s_, *t_.lanes, k0, part, scores - first, kGroup, s_.softcap != 0 ? t_.derivative - first : nullptr);
    if (s_.dropout.active) {
      drop_factors(s_.dropout, *t_.lanes, k0, part, t_.kept - first, kGroup);
      multiply(part, t_.kept - first, grads - first, kGroup);
    }
    score_gradients<float, 2>(scores, grads, kGroup, kGroup, t_.lse + first, t_.delta + first, t_.grad_lse + first);
    if (s_.dropout.active) multiply(part, t_.kept - first, scores - first, kGroup);
    if (mask) {
      for (int64_t i = 0; i < 2 * kGroup; ++i) {
        const __mmask16 seen = mask->seen[i % 2][i / 2];
        _mm512_store_ps(scores + 16 * i, _mm512_maskz_load_ps(seen, scores + 16 * i));
        _mm512_store_ps(grads + 16 * i, _mm512_maskz_load_ps(seen, grads + 16 * i));
      }
    }
    if (p_.distance) add_distances(*t_.lanes, k0, part, grads - first, kGroup, t_.distance);
    if (p_.grad_mask.data) {
      char* corner = static_cast<char*>(p_.grad_mask.data) + (q0_ * p_.grad_mask.stride + k0) * mask_size(s_.mask);
      write_to_mask(s_.mask, part, queries_, grads - first, kGroup, corner, p_.grad_mask.stride);
    }
    if (s_.softcap != 0) multiply(part, t_.derivative - first, grads - first, kGroup);
    for (int64_t i = 0; i < 16; ++i) {
      __m512 p[2][2], d[2][2];
      for (int j = 0; j < 2; ++j)
        for (int half = 0; half < 2; ++half) {
          p[j][half] = _mm512_load_ps(scores + (2 * i + j) * kGroup + 16 * half);
          d[j][half] = _mm512_load_ps(grads + (2 * i + j) * kGroup + 16 * half);
        }
      store_rows(p, d, k, q, i, grad_pairs(k, q));
    }
  }

  // sums (keys, columns) (+)= rows (keys, queries) times columns (queries, columns), for one group of keys
  void add_products(int64_t k, Range seen, bool first, const bf16* rows, const bf16* columns, int64_t n,
                    const MutableRows& sum) const {
    const int64_t count = keys_ - k * kGroup, stride = sum.stride;
    float* group_sum = at<float>(sum, k0_ + k * kGroup);
    if (seen.begin == seen.end) {
      for (int64_t i = 0; first && i < min(kGroup, count); ++i)
        for (int64_t c = 0; c < 32 * n; c += 16) _mm512_storeu_ps(group_sum + i * stride + c, _mm512_setzero_ps());
      return;
    }
    for (int64_t c = 0; c < n; ++c) {
      float* to = group_sum + 32 * c;
      const bool whole = count >= kGroup;
      if (first || !whole) sums_zero();
      else sums_load(to, to + 16 * stride, stride, 16);
      for (int64_t q = seen.begin; q < seen.end; ++q) {
        const bf16* right = columns + (q * 2 * n + 2 * c) * kTile;
        sums_product(rows + row_tile(2 * k, q), rows + row_tile(2 * k + 1, q), right, right + kTile);
      }
      if (whole) {
        sums_store(to, to + 16 * stride, stride, 16);
        continue;
      }
      // Rows beyond the keys belong to someone else.
      sums_store(t_.edge, t_.edge + 16 * kGroup, kGroup, 16);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t j = 0; j < kGroup; j += 16) {
          const __m512 x = _mm512_load_ps(t_.edge + i * kGroup + j);
          float* at = to + i * stride + j;
          _mm512_storeu_ps(at, first ? x : _mm512_add_ps(_mm512_loadu_ps(at), x));
        }
    }
  }

  const AttentionBackward& p_;
  const AttentionShape& s_;
  const AttentionSequence& band_;
  const NK nk_;
  const NV nv_;
  const AmxBackwardScratch t_;
  const PackedKeys packed_;
  const int64_t q0_, queries_, k0_, keys_;
};

inline void amx_end(const AttentionBackward& p, int64_t query_block, void* memory) {
  const AttentionShape& s = p.shape;
  const AmxBackwardScratch t(s, memory);
  const int64_t q0 = query_block * kAmxQueries, queries = min(kAmxQueries, p.sequence.queries - q0);
  const int64_t nk = tiles32(s.head_dim);
  const __m512 scale = _mm512_set1_ps(static_cast<float>(s.scale));
  for (int64_t q = 0; q < queries; q += 16) {
    for (int64_t c = 0; c * 16 < s.head_dim; ++c) {
      const float* sums = t.grad_query + ((q / kGroup * 2 * nk + c) * 2 + q / 16 % 2) * kSums;
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(_mm512_mul_ps(scale, _mm512_load_ps(sums + 16 * i)));
      transpose16(r);
      const __mmask16 columns = static_cast<__mmask16>(first_bits(min(16, s.head_dim - 16 * c)));
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        if (q + i < queries)
          _mm256_mask_storeu_epi16(at<bf16>(p.grad_query, q0 + q + i) + 16 * c, columns,
                                   reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(r[i]))));
    }
  }
  for (int64_t q = 0; p.distance && q < queries; ++q) static_cast<float*>(p.distance)[q0 + q] = t.distance[q];
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
