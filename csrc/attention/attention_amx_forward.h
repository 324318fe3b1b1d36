// The forward pass of one block of queries on AMX.
//
// S^T = K Q^T is made a group (32 keys by 32 queries) at a time, weighted, and rounded to bfloat16 in the order that the
// product O^T = V^T P^T wants: two vectors of scores, of consecutive keys, become one row of pairs.
//
//   P = 2^(c s - M),  M an integer per query,  c = scale log2 e
//
// M is only raised when a score exceeds it, which P tells (an entry of 2 or more, one bit in an OR of all entries): no
// maximum is taken of the other groups, and none of this changes the result, for powers of two scale O, the sums and
// waiting P without rounding. A query's M depends on its own scores only. O is divided by the sum of the rounded
// weights, lse is made of the sum before rounding.
#pragma once

#include "attention_amx.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Keys over which a group of queries goes before the next one does: their operands stay in L2.
constexpr int64_t kSuperGroups = 16;
// A key with which M starts gets this exponent, and one that reaches 2^1 raises M.
constexpr float kHeadroom = 8, kNoShift = 1e30f;

struct AmxForwardScratch {
  float* scores[2];
  bf16 *weights[2], *query;
  float *out, *shift, *sum, *rounded_sum;  // shift: -M
  Lanes<float>* lanes;
  int64_t bytes;
  SK_INLINE AmxForwardScratch(const AttentionShape& s, void* memory) {
    Pieces pieces{static_cast<char*>(memory)};
    const int64_t nk = tiles32(s.head_dim), nv = tiles32(s.value_dim);
    for (float*& piece : scores) piece = pieces.take<float>(4 * kSums);
    for (bf16*& piece : weights) piece = pieces.take<bf16>(kKeyGroups * 2 * kTile);
    query = pieces.take<bf16>(kQueryGroups * 2 * nk * kTile);
    out = pieces.take<float>(kQueryGroups * 4 * nv * kSums);
    shift = pieces.take<float>(kAmxQueries);
    sum = pieces.take<float>(kAmxQueries);
    rounded_sum = pieces.take<float>(kAmxQueries);
    lanes = pieces.take<Lanes<float>>(1);
    bytes = pieces.used;
  }
};

// The state of 16 queries' softmax while a run of groups goes on.
struct Half {
  __m512 shift, sum, rounded;
  __m512i any;  // OR of all entries
};

// 16 keys by 16 queries: half a group's lanes of scores become rows of pairs.
template <bool masked>
SK_INLINE void weigh_scores(const float* scores, __m512 c, const __mmask16* seen, Half& h, bf16* weights) {
  __m512 sum0 = h.sum, sum1 = _mm512_setzero_ps(), rounded = h.rounded;
  __m512i any = h.any;
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const float* s = scores + 2 * i * kGroup;
    __m512 a = exp2_rough(_mm512_fmadd_ps(_mm512_load_ps(s), c, h.shift));
    __m512 b = exp2_rough(_mm512_fmadd_ps(_mm512_load_ps(s + kGroup), c, h.shift));
    if constexpr (masked) {
      a = _mm512_maskz_mov_ps(seen[2 * i], a);
      b = _mm512_maskz_mov_ps(seen[2 * i + 1], b);
    }
    sum0 = _mm512_add_ps(sum0, a);
    sum1 = _mm512_add_ps(sum1, b);
    any = _mm512_ternarylogic_epi32(any, _mm512_castps_si512(a), _mm512_castps_si512(b), 0xfe);
    const __m512i row = pair(Rounded(a), Rounded(b));
    rounded = _mm512_dpbf16_ps(rounded, reinterpret_cast<__m512bh>(row), reinterpret_cast<__m512bh>(ones));
    _mm512_store_si512(weights + 32 * i, row);
  }
  h.sum = _mm512_add_ps(sum0, sum1);
  h.rounded = rounded;
  h.any = any;
}

template <class NK, class NV>
class AmxForward {
 public:
  AmxForward(const AttentionForward& p, int64_t query_block, NK nk, NV nv, void* memory)
      : p_(p),
        s_(p.shape),
        band_(p.sequence),
        nk_(nk),
        nv_(nv),
        t_(p.shape, memory),
        packed_(p.shape, p.sequence.keys, false, p.packed),
        q0_(query_block * kAmxQueries),
        queries_(min(kAmxQueries, p.sequence.queries - q0_)),
        groups_((queries_ + kGroup - 1) / kGroup),
        options_(modified(p.shape) || p.shape.dropout.active),
        modified_(modified(p.shape)) {}

  void run() {
    pack_transposed_pairs(p_.query, q0_, queries_, s_.head_dim, nk_, t_.query);
    if (options_) fill_all_lanes(s_, band_, p_.bias, q0_, queries_, t_.lanes);
    start();
    {
      const Tiles tiles;
      multiply_all();
    }
    finish();
  }

 private:
  // Groups of keys [begin, end) for one group of queries; at most kKeyGroups.
  struct Run {
    int64_t group = 0, begin = 0, end = 0;
  };
  struct Pending {
    const bf16 *value, *weights;
    float* out;
    int64_t group, count, done;  // done: of the nv columns of 2 tiles
  };

  void start() {
    // A sink is a key with this score and the value 0.
    const float sink = p_.sinks ? *static_cast<const float*>(p_.sinks) * kLog2e : -kInfinity<float>;
    const float shift = sink == -kInfinity<float> ? kNoShift : -(__builtin_ceilf(sink) + kHeadroom);
    const float weight = sink == -kInfinity<float> ? 0.0f : __builtin_exp2f(sink + shift);
    for (int64_t q = 0; q < kAmxQueries; ++q) {
      t_.shift[q] = shift;
      t_.sum[q] = t_.rounded_sum[q] = weight;
    }
    __builtin_memset(t_.out, 0, static_cast<size_t>(groups_ * 4 * nv_ * kSums) * sizeof(float));
    seen_end_ = 0;
    for (int64_t g = 0; g < groups_; ++g) {
      const Range seen = visible_range(band_, q0_ + g * kGroup, q0_ + min(queries_, (g + 1) * kGroup));
      seen_[g] = {seen.begin / kGroup, tiles32(seen.end)};
      if (seen.begin < seen.end) {
        seen_begin_ = seen_end_ == 0 ? seen_[g].begin : min(seen_begin_, seen_[g].begin);
        seen_end_ = max(seen_end_, seen_[g].end);
      }
    }
  }

  // The next run of groups; false after the last one.
  bool advance(Run& run) const {
    int64_t group = run.group, at = run.end;
    int64_t super = (at > 0 ? at - 1 : seen_begin_) / kSuperGroups * kSuperGroups;
    for (;;) {
      const int64_t begin = max(max(at, super), seen_[group].begin);
      const int64_t end = min(seen_[group].end, super + kSuperGroups);
      if (begin < end) {
        run = {group, begin, min(end, (begin / kKeyGroups + 1) * kKeyGroups)};
        if (!mask_hides_tile(s_, *t_.lanes, run.begin * kGroup, 0, min(run.end * kGroup, band_.keys) - run.begin * kGroup))
          return true;
        at = run.end;
        continue;
      }
      at = 0;
      if (++group < groups_) continue;
      group = 0;
      super += kSuperGroups;
      if (super >= seen_end_) return false;
    }
  }

  SK_INLINE void output(Pending& w, int64_t from, int64_t to) const {
    const bf16* value = w.value + 2 * w.done * kTile;
    for (int64_t g = from; g < to; ++g) {
      const bf16 *v = value + g * 2 * nv_ * kTile, *weights = w.weights + g * 2 * kTile;
      sums_product(v, v + kTile, weights, weights + kTile);
    }
  }
  SK_INLINE void output_begin(const Pending& w) const {
    const float* out = w.out + w.done * 4 * kSums;
    sums_load(out, out + 2 * kSums, 16, kSums);
  }
  SK_INLINE void output_end(Pending& w) const {
    float* out = w.out + w.done * 4 * kSums;
    sums_store(out, out + 2 * kSums, 16, kSums);
    ++w.done;
  }
  SK_INLINE void outputs(Pending& w, int64_t end) const {
    while (w.done < end) {
      output_begin(w);
      output(w, 0, w.count);
      output_end(w);
    }
  }

  template <bool masked>
  SK_INLINE void weigh_group(const float* scores, __m512 c, const GroupMask& mask, Half (&h)[2], bf16* weights) const {
    weigh_scores<masked>(scores, c, mask.seen[0], h[0], weights);
    weigh_scores<masked>(scores + 16, c, mask.seen[1], h[1], weights + kTile);
    weigh_scores<masked>(scores + 16 * kGroup, c, mask.seen[0] + 16, h[0], weights + 256);
    weigh_scores<masked>(scores + 16 * kGroup + 16, c, mask.seen[1] + 16, h[1], weights + kTile + 256);
  }

  SK_INLINE Half load_half(int64_t q) const {
    return {_mm512_load_ps(t_.shift + q), _mm512_load_ps(t_.sum + q), _mm512_load_ps(t_.rounded_sum + q),
            _mm512_setzero_si512()};
  }
  SK_INLINE void store_half(int64_t q, const Half& h) const {
    _mm512_store_ps(t_.shift + q, h.shift);
    _mm512_store_ps(t_.sum + q, h.sum);
    _mm512_store_ps(t_.rounded_sum + q, h.rounded);
  }

  // Raises M where the group's scores ask for it, and scales all that was weighted with the old one.
  __attribute__((noinline)) void raise(const float* scores, __m512 c, const GroupMask* mask, int64_t group,
                                       Half (&h)[2], bf16* weights, int64_t count, const Pending& pending) const {
    for (int half = 0; half < 2; ++half) {
      __m512 top = _mm512_set1_ps(-kInfinity<float>);
      for (int64_t k = 0; k < kGroup; ++k) {
        const __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + k * kGroup + 16 * half), c);
        const __mmask16 seen = mask ? mask->seen[half][k] : static_cast<__mmask16>(0xffff);
        top = _mm512_mask_max_ps(top, seen, x, top);  // of a NaN and a number the number
      }
      const __mmask16 up = _mm512_cmp_ps_mask(_mm512_add_ps(top, h[half].shift), _mm512_set1_ps(1), _CMP_GE_OQ);
      if (up == 0) continue;
      const __m512 next = _mm512_sub_ps(_mm512_set1_ps(-kHeadroom), _mm512_roundscale_ps(top, 0x0a));
      const __m512 one = _mm512_set1_ps(1);
      const __m512 factor = _mm512_mask_scalef_ps(one, up, one, _mm512_sub_ps(next, h[half].shift));
      h[half].shift = _mm512_mask_mov_ps(h[half].shift, up, next);
      h[half].sum = _mm512_mul_ps(h[half].sum, factor);
      h[half].rounded = _mm512_mul_ps(h[half].rounded, factor);
      for (int64_t v = 0; v < 2 * nv_; ++v)
        for (int64_t i = 0; i < 16; ++i) {
          float* out = t_.out + ((group * 2 * nv_ + v) * 2 + half) * kSums + 16 * i;
          _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), factor));
        }
      scale_weights(weights, count, half, factor);
      if (pending.group == group && pending.done < nv_)
        scale_weights(const_cast<bf16*>(pending.weights), pending.count, half, factor);
    }
  }
  static void scale_weights(bf16* weights, int64_t count, int half, __m512 factor) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int64_t g = 0; g < count; ++g)
      for (int64_t i = 0; i < 16; ++i) {
        bf16* row = weights + (2 * g + half) * kTile + 32 * i;
        const __m512i v = _mm512_load_si512(row);
        const __m512 a = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), factor);
        const __m512 b = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(v, high)), factor);
        _mm512_store_si512(row, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                                                _mm512_and_si512(_mm512_castps_si512(b), high)));
      }
  }

  // Values that are not finite were packed as 0: they reach only who gives them a weight.
  __attribute__((noinline)) void add_bad_values(int64_t key_group, int64_t group, const bf16* weights) const {
    for (int64_t k = 0; k < min(kGroup, band_.keys - key_group * kGroup); ++k) {
      const bf16* row = at<bf16>(p_.value, key_group * kGroup + k);
      for (int64_t c = 0; c < s_.value_dim; ++c) {
        if ((row[c].bits & 0x7f80) != 0x7f80) continue;
        const float value = as_float(row[c]);
        for (int64_t q = 0; q < kGroup; ++q) {
          const bf16 weight = weights[q / 16 * kTile + k / 2 * 32 + q % 16 * 2 + k % 2];
          if (weight.bits & 0x7fff)
            t_.out[((group * 2 * nv_ + c / 16) * 2 + q / 16) * kSums + c % 16 * 16 + q % 16] +=
                as_float(weight) * value;
        }
      }
    }
  }
  SK_INLINE static float as_float(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

  // The same with all options: the tile is modified and weighted in place.
  void weigh_options(float* scores, int64_t key_group, int64_t group, const GroupMask* mask, Half (&h)[2],
                     bf16* weights, int64_t count, const Pending& pending) const {
    const int64_t k0 = key_group * kGroup, keys = min(kGroup, band_.keys - k0), first = group * kGroup;
    const Part part{0, keys, first, first + kGroup};
    if (modified_) {
      const __m512 scale = _mm512_set1_ps(static_cast<float>(s_.scale));
      for (int64_t i = 0; i < kGroup * kGroup; i += 16)
        _mm512_store_ps(scores + i, _mm512_mul_ps(_mm512_load_ps(scores + i), scale));
      modify_scores(s_, *t_.lanes, k0, part, scores - first, kGroup);
    }
    const __m512 c = factor();
    raise(scores, c, mask, group, h, weights - count * 2 * kTile, count, pending);
    for (int half = 0; half < 2; ++half) {
      for (int64_t k = 0; k < kGroup; ++k) {
        float* at = scores + k * kGroup + 16 * half;
        __m512 x = exp2_rough(_mm512_fmadd_ps(_mm512_load_ps(at), c, h[half].shift));
        if (mask) x = _mm512_maskz_mov_ps(mask->seen[half][k], x);
        h[half].sum = _mm512_add_ps(h[half].sum, x);
        _mm512_store_ps(at, x);
      }
      h[half].rounded = h[half].sum;
    }
    if (s_.dropout.active) drop(s_.dropout, *t_.lanes, k0, part, scores - first, kGroup);
    for (int half = 0; half < 2; ++half)
      for (int64_t i = 0; i < 16; ++i) {
        const float* at = scores + 2 * i * kGroup + 16 * half;
        _mm512_store_si512(weights + half * kTile + 32 * i,
                           pair(Rounded(_mm512_load_ps(at)), Rounded(_mm512_load_ps(at + kGroup))));
      }
  }

  SK_INLINE __m512 factor() const {
    return _mm512_set1_ps(modified_ ? kLog2e : static_cast<float>(s_.scale * 1.4426950408889634));
  }

  void multiply_all() {
    if (seen_end_ == 0) return;
    const __m512 c = factor();
    const int64_t nk = nk_, nv = nv_;
    Run run, next;
    if (!advance(run)) return;
    Pending pending{nullptr, nullptr, nullptr, -1, 0, nv};
    int current = 0, buffer = 0;
    const auto rows_of = [&](int64_t key_group) { return packed_.key + key_group * 2 * nk * kTile; };
    const auto columns_of = [&](int64_t group) { return t_.query + group * 2 * nk * kTile; };
    score_zero();
    score_products(rows_of(run.begin), columns_of(run.group), nk, 0, nk);
    score_store(t_.scores[0]);
    for (bool running = true; running; run = next) {
      next = run;
      running = advance(next);
      bf16* weights = t_.weights[buffer];
      const int64_t q = run.group * kGroup, count = run.end - run.begin;
      const int64_t lanes = min(kGroup, queries_ - q);
      Half h[2] = {load_half(q), load_half(q + 16)};
      for (int64_t g = 0; g < count; ++g) {
        const int64_t key_group = run.begin + g;
        float *scores = t_.scores[current], *other = t_.scores[current ^ 1];
        bf16* to = weights + g * 2 * kTile;
        const bool inside = g + 1 < count, more = inside || running;
        const bf16* rows = rows_of(inside ? key_group + 1 : next.begin);
        const bf16* columns = columns_of(inside ? run.group : next.group);
        const int64_t outputs_end = max(pending.done, (g + 1) * nv / count);
        const Sight sees = sight(band_, q0_ + q, lanes, key_group * kGroup);
        GroupMask mask;
        if (sees == Sight::all && !options_) {
          const Half before[2] = {h[0], h[1]};
          h[0].any = h[1].any = _mm512_setzero_si512();
          // The products of the next group, and of the last run with the values, go on beside the exponentials.
          if (more) {
            score_zero();
            score_products(rows, columns, nk, 0, (nk + 1) / 2);
          }
          weigh_scores<false>(scores, c, nullptr, h[0], to);
          if (more) {
            score_products(rows, columns, nk, (nk + 1) / 2, nk);
            score_store(other);
          }
          weigh_scores<false>(scores + 16, c, nullptr, h[1], to + kTile);
          const bool one = pending.done < outputs_end;
          if (one) {
            output_begin(pending);
            output(pending, 0, (pending.count + 1) / 2);
          }
          weigh_scores<false>(scores + 16 * kGroup, c, nullptr, h[0], to + 256);
          if (one) {
            output(pending, (pending.count + 1) / 2, pending.count);
            output_end(pending);
          }
          weigh_scores<false>(scores + 16 * kGroup + 16, c, nullptr, h[1], to + kTile + 256);
          outputs(pending, outputs_end);
          if (__builtin_expect(exceeded(h), 0)) {
            h[0] = before[0];
            h[1] = before[1];
            raise(scores, c, nullptr, run.group, h, weights, g, pending);
            weigh_group<false>(scores, c, mask, h, to);
          }
        } else {
          if (more) {
            score_zero();
            score_products(rows, columns, nk, 0, nk);
            score_store(other);
          }
          outputs(pending, outputs_end);
          if (sees != Sight::all) fill_mask(band_, q0_ + q, key_group * kGroup, mask);
          if (options_) {
            weigh_options(scores, key_group, run.group, sees == Sight::all ? nullptr : &mask, h, to, g, pending);
          } else {
            const Half before[2] = {h[0], h[1]};
            h[0].any = h[1].any = _mm512_setzero_si512();
            weigh_group<true>(scores, c, mask, h, to);
            if (exceeded(h)) {
              h[0] = before[0];
              h[1] = before[1];
              raise(scores, c, &mask, run.group, h, weights, g, pending);
              weigh_group<true>(scores, c, mask, h, to);
            }
          }
        }
        if (__builtin_expect(packed_.bad[key_group], 0)) add_bad_values(key_group, run.group, to);
        current ^= 1;
      }
      store_half(q, h[0]);
      store_half(q + 16, h[1]);
      pending = {packed_.value_t + run.begin * 2 * nv * kTile, weights, t_.out + run.group * 4 * nv * kSums, run.group,
                 count, 0};
      buffer ^= 1;
    }
    outputs(pending, nv);
  }
  SK_INLINE static bool exceeded(const Half (&h)[2]) {
    return _mm512_test_epi32_mask(_mm512_or_si512(h[0].any, h[1].any), _mm512_set1_epi32(0x40000000)) != 0;
  }

  void finish() const {
    float* lse = static_cast<float*>(p_.lse) + q0_;
    for (int64_t q = 0; q < queries_; ++q)
      lse[q] = t_.sum[q] == 0 ? -kInfinity<float>
                              : static_cast<float>(__builtin_log(static_cast<double>(t_.sum[q])) -
                                                   0.6931471805599453 * static_cast<double>(t_.shift[q]));
    for (int64_t q = 0; q < queries_; q += 16) {
      const __m512 sum = _mm512_load_ps(t_.rounded_sum + q);
      const __mmask16 any = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      const __m512 inverse = _mm512_maskz_div_ps(any, _mm512_set1_ps(1), sum);
      for (int64_t v = 0; v * 16 < s_.value_dim; ++v) {
        const float* out = t_.out + ((q / kGroup * 2 * nv_ + v) * 2 + q / 16 % 2) * kSums;
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) r[i] = _mm512_castps_si512(_mm512_mul_ps(inverse, _mm512_load_ps(out + 16 * i)));
        transpose16(r);
        const __mmask16 columns = static_cast<__mmask16>(first_bits(min(16, s_.value_dim - 16 * v)));
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i)
          if (q + i < queries_)
            _mm256_mask_storeu_epi16(at<bf16>(p_.out, q0_ + q + i) + 16 * v, columns,
                                     reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(r[i]))));
      }
    }
  }

  const AttentionForward& p_;
  const AttentionShape& s_;
  const AttentionSequence& band_;
  const NK nk_;
  const NV nv_;
  const AmxForwardScratch t_;
  const PackedKeys packed_;
  const int64_t q0_, queries_, groups_;
  const bool options_, modified_;
  Range seen_[kQueryGroups];  // groups of keys that a group of queries sees
  int64_t seen_begin_ = 0, seen_end_ = 0;
};

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
