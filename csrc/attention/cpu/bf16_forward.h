// The forward pass of one query block in bfloat16, on matrix tiles or by bf16 dot products.
//
// S^T = K Q^T is computed a group (32 keys by 32 queries) at a time, weighted, and rounded to bfloat16 in the order of
// the product O^T = V^T P^T: two vectors of scores, of consecutive keys, become one row of pairs.
//
//   P = 2^(c s - M),  M an integer per query,  c = scale log2 e
//
// M is raised only when a score exceeds it. P shows that: an entry of 2 or more, one bit in the OR of all entries. So
// no other group needs a maximum. Raising M does not change the result: O, the sums and pending weights are scaled by
// powers of two, without rounding. A query's M depends only on its own scores. O is divided by the sum of the rounded
// weights, which halves the error where few keys have the weight; lse is made of the sum before rounding.
//
// On tiles, the products of the next group, and those of earlier groups with the values, are interleaved with a group's
// exponentials, so that the tile unit and the vector units work at the same time. Dot products use the same ports as
// the exponentials, so they come first. Measurements: NOTES.md.
#pragma once

#include "bf16_products.h"
#include "forward.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// The size of a group; the groups that are weighted before their products with the values; and the groups of keys that
// one group of queries goes over before the next one does, while their operands stay in L2.
constexpr int64_t kGroup = 32, kRunGroups = 8, kSuperGroups = 16;
constexpr int64_t kQueryGroups = kBlockQ / kGroup;
constexpr int64_t kSums = 256;  // elements of a tile of sums
// The score that sets M gets a weight of at most 2^-8; a score with a weight of 2 or more raises M.
constexpr float kHeadroom = 8, kNoShift = 1e30f;

// A number of tiles, known at compile time or not.
template <int N>
struct Known {
  constexpr operator int64_t() const { return N; }
};
struct Unknown {
  int64_t n;
  operator int64_t() const { return n; }
};

// ---- packed keys and values ----------------------------------------------------------------------------------------

// Of one key head: K as rows, V transposed, both in whole groups. `bad` marks groups in which V is not all finite.
struct PackedForward {
  int64_t key_depth, value_depth;
  BFloat16 *key, *value_t;
  uint8_t* bad;
  int64_t bytes;
  SK_INLINE PackedForward(const AttentionShape& s, int64_t keys, const void* memory)
      : key_depth(tiles(s.head_dim, 32)), value_depth(tiles(s.value_dim, 32)) {
    const int64_t groups = tiles(keys, kGroup);
    key = static_cast<BFloat16*>(const_cast<void*>(memory));
    value_t = key + groups * 2 * key_depth * kTileElements;
    bad = reinterpret_cast<uint8_t*>(value_t + groups * 2 * value_depth * kTileElements);
    bytes = groups * 2 * (key_depth + value_depth) * kTileBytes + (groups + 63) / 64 * 64;
  }
};

// `count` rows as right or left tiles, with zeros up to whole groups.
template <class Pack>
SK_INLINE void pack_groups(const Pack& pack, const Rows& m, int64_t first, int64_t count, int64_t columns,
                           BFloat16* to) {
  pack(m, first, count, columns, to);
  const int64_t depth = tiles(columns, 32), packed = tiles(count, 16);
  if (packed % 2 != 0) __builtin_memset(to + packed * depth * kTileElements, 0, depth * kTileBytes);
}

inline void pack_forward(const AttentionShape& s, int64_t keys, Rows key, Rows value, int64_t key_block, void* packed) {
  const PackedForward to(s, keys, packed);
  const int64_t k0 = key_block * kBlockK, count = min(kBlockK, keys - k0), group = k0 / kGroup;
  pack_groups(pack_rows, key, k0, count, s.head_dim, to.key + group * 2 * to.key_depth * kTileElements);
  pack_transposed(value, k0, count, s.value_dim, 2 * to.value_depth,
                  to.value_t + group * 2 * to.value_depth * kTileElements, to.bad + group);
}

// ---- scratch memory ------------------------------------------------------------------------------------------------

struct ForwardTiles {
  float* scores[2];
  BFloat16 *weights[2], *query;
  float *out, *shift, *sum, *rounded_sum;  // shift: -M; out: tiles of O^T
  Lanes<float>* lanes;
  int64_t bytes;
  SK_INLINE ForwardTiles(const AttentionShape& s, void* memory) {
    Pieces pieces(memory);
    const auto take_tiles = [&](int64_t count) SK_INLINED { return pieces.take<BFloat16>(count * kTileElements); };
    for (float*& piece : scores) piece = pieces.take<float>(kGroup * kGroup);
    for (BFloat16*& piece : weights) piece = take_tiles(kRunGroups * 2);
    query = take_tiles(kQueryGroups * 2 * tiles(s.head_dim, 32));
    out = pieces.take<float>(kQueryGroups * 4 * tiles(s.value_dim, 32) * kSums);
    shift = pieces.take<float>(kBlockQ);
    sum = pieces.take<float>(kBlockQ);
    rounded_sum = pieces.take<float>(kBlockQ);
    lanes = pieces.take<Lanes<float>>(1);
    bytes = pieces.bytes();
  }
};

// ---- visibility ----------------------------------------------------------------------------------------------------

// Which lanes see a key: bit q of seen[half][key].
struct GroupMask {
  __mmask16 seen[2][kGroup];
};

// Whether the queries [q, q + count) see all of the keys [k, k + 32).
SK_INLINE bool all_visible(const AttentionSequence& s, int64_t q, int64_t count, int64_t k) {
  return k >= q + count - 1 + s.lower && k + kGroup - 1 <= q + s.upper && k + kGroup <= s.keys;
}
inline void fill_mask(const AttentionSequence& s, int64_t q, int64_t k, GroupMask& mask) {
  for (int half = 0; half < 2; ++half) {
    for (int64_t i = 0; i < kGroup; ++i) {
      const int64_t key = k + i, first = clamp(key - s.upper - q - 16 * half, 0, 16);
      const int64_t end = key < s.keys ? clamp(key - s.lower - q - 16 * half + 1, 0, 16) : 0;
      mask.seen[half][i] = static_cast<__mmask16>(first_lanes(end) & ~first_lanes(first));
    }
  }
}

// The queries of 32 lanes that a boolean mask lets see each of the keys [k, k + 32): for 16 lanes from `lane` on, bit i
// of a number is key k + i.
SK_INLINE __m512i seen_bits(const Lanes<float>& lanes, int64_t lane, int64_t k, int64_t keys) {
  alignas(64) uint32_t rows[16];
  const __mmask32 there = first_lanes(keys - k);
  for (int64_t i = 0; i < 16; ++i) {
    rows[i] = 0;
    if (lane + i >= lanes.queries) continue;
    const __m256i bytes = _mm256_maskz_loadu_epi8(there, static_cast<const uint8_t*>(lanes.mask[lane + i]) + k);
    rows[i] = _mm256_test_epi8_mask(bytes, bytes);
  }
  return _mm512_load_si512(rows);
}
inline void hide_masked(const Lanes<float>& lanes, int64_t lane, int64_t k, int64_t keys, GroupMask& mask) {
  for (int half = 0; half < 2; ++half) {
    const __m512i bits = seen_bits(lanes, lane + 16 * half, k, keys);
    for (int i = 0; i < kGroup; ++i)
      mask.seen[half][i] &= _mm512_test_epi32_mask(bits, _mm512_set1_epi32(static_cast<int>(1u << i)));
  }
}

// ---- weights -------------------------------------------------------------------------------------------------------

// 2^x with a relative error of 1.5e-7: two degrees more than the weights need, because lse is float32. 2 or more
// exactly where x is 1 or more: the polynomial is 1 at 0 and stays below 2.
SK_INLINE __m512 exp2_exact(__m512 x) {
  const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(1.8671305e-3f), r, _mm512_set1_ps(9.01703e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5799913e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4016444e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931513e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);
}

// Two vectors rounded to bfloat16 and interleaved as pairs: adds half of the last place as an integer, which is right
// for infinity and NaN too.
SK_INLINE __m512i round_pairs(__m512 low, __m512 high) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i a = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_add_epi32(_mm512_castps_si512(high), half));
}

// sum + both numbers of each pair
SK_INLINE __m512 add_pairs(__m512 sum, __m512i pairs) {
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  return _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(pairs), bit_cast<__m512bh>(ones));
}

// Rounds to the nearest bfloat16, as a float, as round_pairs does.
SK_INLINE __m512 round_single(__m512 x) {
  const __m512i u = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// The softmax state of 16 queries over a run of groups.
struct Softmax {
  __m512 shift, sum, rounded;
  __m512i any;  // OR of all entries
};

// 16 keys by 16 queries: half a group's lanes of scores become rows of pairs.
template <bool masked>
SK_INLINE void weigh_scores(const float* scores, __m512 c, const __mmask16* seen, Softmax& h, BFloat16* weights) {
  __m512 sum0 = h.sum, sum1 = _mm512_setzero_ps(), rounded = h.rounded;
  __m512i any = h.any;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const float* s = scores + 2 * i * kGroup;
    __m512 a = exp2_exact(_mm512_fmadd_ps(_mm512_load_ps(s), c, h.shift));
    __m512 b = exp2_exact(_mm512_fmadd_ps(_mm512_load_ps(s + kGroup), c, h.shift));
    if constexpr (masked) {
      a = _mm512_maskz_mov_ps(seen[2 * i], a);
      b = _mm512_maskz_mov_ps(seen[2 * i + 1], b);
    }
    sum0 = _mm512_add_ps(sum0, a);
    sum1 = _mm512_add_ps(sum1, b);
    any = _mm512_ternarylogic_epi32(any, _mm512_castps_si512(a), _mm512_castps_si512(b), 0xfe);
    const __m512i row = round_pairs(a, b);
    rounded = add_pairs(rounded, row);
    _mm512_store_si512(weights + 32 * i, row);
  }
  h.sum = _mm512_add_ps(sum0, sum1);
  h.rounded = rounded;
  h.any = any;
}

template <class NK, class NV>
class Bf16Forward {
 public:
  Bf16Forward(const AttentionForward& p, int64_t query_block, NK nk, NV nv, void* memory)
      : p_(p),
        s_(p.shape),
        band_(p.sequence),
        nk_(nk),
        nv_(nv),
        t_(p.shape, memory),
        packed_(p.shape, p.sequence.keys, p.packed),
        q0_(query_block * kBlockQ),
        queries_(min(kBlockQ, p.sequence.queries - q0_)),
        groups_((queries_ + kGroup - 1) / kGroup),
        mask_alone_(p.bias.cells && p.shape.softcap == 0 && !p.shape.alibi && !p.shape.dropout.active),
        boolean_(mask_alone_ && p.shape.mask == MaskType::boolean),
        options_((modified(p.shape) || p.shape.dropout.active) && !boolean_),
        modified_(modified(p.shape) && !boolean_),
        careful_memory_(static_cast<char*>(memory) + t_.bytes) {}

  void run() {
    pack_groups(pack_columns, p_.query, q0_, queries_, s_.head_dim, t_.query);
    if (options_ || boolean_) fill_lanes(s_, band_, p_.bias, 0, q0_, queries_, 0, t_.lanes);
    start();
    {
      const TileConfiguration configuration;
      multiply_all();
    }
    finish();
  }

 private:
  // Groups of keys [begin, end) for one group of queries; at most kRunGroups.
  struct Run {
    int64_t group = 0, begin = 0, end = 0;
  };
  struct Pending {
    const BFloat16 *value, *weights;
    float* out;
    int64_t group, count, done;  // done: how many of the nv columns of 2 tiles
  };

  void start() {
    // A sink is a key with this score and the value 0.
    const Sink sink = first_sink();
    for (int64_t q = 0; q < kBlockQ; ++q) {
      t_.shift[q] = sink.shift;
      t_.sum[q] = t_.rounded_sum[q] = sink.weight;
    }
    __builtin_memset(t_.out, 0, static_cast<size_t>(groups_ * 4 * nv_ * kSums) * sizeof(float));
    seen_end_ = 0;
    for (int64_t g = 0; g < groups_; ++g) {
      const Range seen = visible_range(band_, q0_ + g * kGroup, q0_ + min(queries_, (g + 1) * kGroup));
      seen_[g] = {seen.begin / kGroup, tiles(seen.end, kGroup)};
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
      int64_t begin = max(max(at, super), seen_[group].begin);
      const int64_t end = min(seen_[group].end, super + kSuperGroups);
      while (begin < end && cell(group, begin) == MaskCell::hidden) ++begin;
      if (begin < end) {
        run = {group, begin, min(end, (begin / kRunGroups + 1) * kRunGroups)};
        for (int64_t k = begin; k < run.end; ++k)
          if (cell(group, k) == MaskCell::hidden) run.end = k;
        if (p_.bias.cells || !mask_hides_tile(s_, *t_.lanes, run.begin * kGroup, 0,
                                              min(run.end * kGroup, band_.keys) - run.begin * kGroup))
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

  SK_INLINE void outputs(Pending& w, int64_t end) const {
    for (; w.done < end; ++w.done)
      out_product(w.value + 2 * w.done * kTileElements, 2 * nv_ * kTileElements, w.weights, w.count,
                  w.out + w.done * 4 * kSums);
  }

  template <bool masked>
  SK_INLINE void weigh_group(const float* scores, __m512 c, const GroupMask& mask, Softmax (&h)[2],
                             BFloat16* weights) const {
    weigh_scores<masked>(scores, c, mask.seen[0], h[0], weights);
    weigh_scores<masked>(scores + 16, c, mask.seen[1], h[1], weights + kTileElements);
    weigh_scores<masked>(scores + 16 * kGroup, c, mask.seen[0] + 16, h[0], weights + 256);
    weigh_scores<masked>(scores + 16 * kGroup + 16, c, mask.seen[1] + 16, h[1], weights + kTileElements + 256);
  }

  // Weighs a group without hidden entries. Beside says what the interleaved products compute: the next group's scores,
  // if there is one, and the pending output columns up to `outputs_end`.
  struct Beside {
    const BFloat16 *rows, *columns;  // of the next group's scores
    float* scores;
    bool more;
    int64_t outputs_end;
  };
#if defined(__AMX_BF16__)
  SK_INLINE void weigh_beside(const Beside& next, Pending& pending, const float* scores, __m512 c, Softmax (&h)[2],
                              BFloat16* weights) const {
    const int64_t nk = nk_;
    if (next.more) {
      scores_begin();
      scores_add(next.rows, next.columns, nk, 0, (nk + 1) / 2);
    }
    weigh_scores<false>(scores, c, nullptr, h[0], weights);
    if (next.more) {
      scores_add(next.rows, next.columns, nk, (nk + 1) / 2, nk);
      scores_end(next.scores);
    }
    weigh_scores<false>(scores + 16, c, nullptr, h[1], weights + kTileElements);
    const bool one = pending.done < next.outputs_end;
    const auto output = [&](int64_t from, int64_t to) {
      const BFloat16* value = pending.value + 2 * pending.done * kTileElements;
      for (int64_t g = from; g < to; ++g)
        out_add(value + g * 2 * nv_ * kTileElements, pending.weights + g * 2 * kTileElements);
    };
    if (one) {
      out_begin(pending.out + pending.done * 4 * kSums);
      output(0, (pending.count + 1) / 2);
    }
    weigh_scores<false>(scores + 16 * kGroup, c, nullptr, h[0], weights + 256);
    if (one) {
      output((pending.count + 1) / 2, pending.count);
      out_end(pending.out + pending.done * 4 * kSums);
      ++pending.done;
    }
    weigh_scores<false>(scores + 16 * kGroup + 16, c, nullptr, h[1], weights + kTileElements + 256);
    outputs(pending, next.outputs_end);
  }
#else
  SK_INLINE void weigh_beside(const Beside& next, Pending& pending, const float* scores, __m512 c, Softmax (&h)[2],
                              BFloat16* weights) const {
    if (next.more) scores_product(next.rows, next.columns, nk_, next.scores);
    weigh_group<false>(scores, c, GroupMask{}, h, weights);
    outputs(pending, next.outputs_end);
  }
#endif

  SK_INLINE Softmax load_half(int64_t q) const {
    return {_mm512_load_ps(t_.shift + q), _mm512_load_ps(t_.sum + q), _mm512_load_ps(t_.rounded_sum + q),
            _mm512_setzero_si512()};
  }
  SK_INLINE void store_half(int64_t q, const Softmax& h) const {
    _mm512_store_ps(t_.shift + q, h.shift);
    _mm512_store_ps(t_.sum + q, h.sum);
    _mm512_store_ps(t_.rounded_sum + q, h.rounded);
  }

  // Raises M where the group's scores require it: exactly where a weight is 2 or more, so that a query's result does
  // not depend on whether its neighbours caused this call. Rescales everything weighted with the old M.
  __attribute__((noinline)) void raise(const float* scores, __m512 c, const GroupMask* mask, int64_t group,
                                       Softmax (&h)[2], BFloat16* weights, int64_t count,
                                       const Pending& pending) const {
    for (int half = 0; half < 2; ++half) {
      __m512 top = _mm512_set1_ps(-kInfinity<float>), over = top;
      for (int64_t k = 0; k < kGroup; ++k) {
        const __m512 s = _mm512_load_ps(scores + k * kGroup + 16 * half);
        const __mmask16 seen = mask ? mask->seen[half][k] : static_cast<__mmask16>(0xffff);
        top = _mm512_mask_max_ps(top, seen, _mm512_mul_ps(s, c), top);  // of NaN and a number, the number
        over = _mm512_mask_max_ps(over, seen, _mm512_fmadd_ps(s, c, h[half].shift), over);
      }
      const __mmask16 up = _mm512_cmp_ps_mask(over, _mm512_set1_ps(1), _CMP_GE_OQ);
      if (up == 0) continue;
      const __m512 next = _mm512_sub_ps(_mm512_set1_ps(-kHeadroom), _mm512_roundscale_ps(top, 0x0a));
      const bool fresh = is_new(h[half]);
      const __m512 one = _mm512_set1_ps(1);
      const __m512 factor = _mm512_mask_scalef_ps(one, up, one, _mm512_sub_ps(next, h[half].shift));
      h[half].shift = _mm512_mask_mov_ps(h[half].shift, up, next);
      h[half].sum = _mm512_mul_ps(h[half].sum, factor);
      h[half].rounded = _mm512_mul_ps(h[half].rounded, factor);
      if (fresh) continue;  // everything is still 0
      for (int64_t v = 0; v < 2 * nv_; ++v)
        for (int64_t i = 0; i < 16; ++i) {
          float* out = t_.out + ((group * 2 * nv_ + v) * 2 + half) * kSums + 16 * i;
          _mm512_store_ps(out, _mm512_mul_ps(_mm512_load_ps(out), factor));
        }
      scale_weights(weights, count, half, factor);
      if (pending.group == group && pending.done < nv_)
        scale_weights(const_cast<BFloat16*>(pending.weights), pending.count, half, factor);
    }
  }
  static void scale_weights(BFloat16* weights, int64_t count, int half, __m512 factor) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    for (int64_t g = 0; g < count; ++g)
      for (int64_t i = 0; i < 16; ++i) {
        BFloat16* row = weights + (2 * g + half) * kTileElements + 32 * i;
        const __m512i v = _mm512_load_si512(row);
        const __m512 a = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)), factor);
        const __m512 b = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(v, high)), factor);
        _mm512_store_si512(row, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16),
                                                _mm512_and_si512(_mm512_castps_si512(b), high)));
      }
  }

  // Values that are not finite were packed as 0. This adds them to the queries that give them a weight.
  __attribute__((noinline)) void add_bad_values(int64_t key_group, int64_t group, const BFloat16* weights) const {
    for (int64_t k = 0; k < min(kGroup, band_.keys - key_group * kGroup); ++k) {
      const BFloat16* row = at<BFloat16>(p_.value, key_group * kGroup + k);
      for (int64_t c = 0; c < s_.value_dim; ++c) {
        if ((row[c].bits & 0x7f80) != 0x7f80) continue;
        const float value = as_float(row[c]);
        for (int64_t q = 0; q < kGroup; ++q) {
          const BFloat16 weight = weights[q / 16 * kTileElements + k / 2 * 32 + q % 16 * 2 + k % 2];
          if (weight.bits & 0x7fff)
            t_.out[((group * 2 * nv_ + c / 16) * 2 + q / 16) * kSums + c % 16 * 16 + q % 16] +=
                as_float(weight) * value;
        }
      }
    }
  }
  SK_INLINE static float as_float(BFloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

  // The same with options: the tile is modified and weighted in place.
  void weigh_options(float* scores, int64_t key_group, int64_t group, const GroupMask* mask, Softmax (&h)[2],
                     BFloat16* weights, int64_t count, const Pending& pending) const {
    const int64_t k0 = key_group * kGroup, keys = min(kGroup, band_.keys - k0), first = group * kGroup;
    const Part part{0, keys, first, first + kGroup};
    if (modified_) {
      const __m512 scale = _mm512_set1_ps(static_cast<float>(s_.scale));
      for (int64_t i = 0; i < kGroup * kGroup; i += 16)
        _mm512_store_ps(scores + i, _mm512_mul_ps(_mm512_load_ps(scores + i), scale));
      modify_scores(s_, *t_.lanes, k0, part, scores - first, kGroup);
    }
    const __m512 c = factor();
    raise(scores, c, mask, group, h, weights - count * 2 * kTileElements, count, pending);
    for (int half = 0; half < 2; ++half) {
      for (int64_t k = 0; k < kGroup; ++k) {
        float* at = scores + k * kGroup + 16 * half;
        __m512 x = exp2_exact(_mm512_fmadd_ps(_mm512_load_ps(at), c, h[half].shift));
        if (mask) x = _mm512_maskz_mov_ps(mask->seen[half][k], x);
        h[half].sum = _mm512_add_ps(h[half].sum, x);
        if (s_.dropout.active) {  // the sum is of all entries, kept or dropped, rounded
          x = round_single(x);
          h[half].rounded = _mm512_add_ps(h[half].rounded, x);
        }
        _mm512_store_ps(at, x);
      }
    }
    if (s_.dropout.active) {
      Dropout unscaled = s_.dropout;  // scaled at the end: else the scale would be rounded with each weight
      unscaled.scale = 1;
      drop(unscaled, *t_.lanes, k0, part, scores - first, kGroup);
    }
    for (int half = 0; half < 2; ++half) {
      for (int64_t i = 0; i < 16; ++i) {
        const float* at = scores + 2 * i * kGroup + 16 * half;
        const __m512i row = round_pairs(_mm512_load_ps(at), _mm512_load_ps(at + kGroup));
        if (!s_.dropout.active) h[half].rounded = add_pairs(h[half].rounded, row);
        _mm512_store_si512(weights + half * kTileElements + 32 * i, row);
      }
    }
  }

  // What the mask does to a group of scores.
  SK_INLINE MaskCell cell(int64_t group, int64_t key_group) const {
    if (s_.mask == MaskType::none) return MaskCell::seen;
    return p_.bias.cells ? t_.lanes->cells[group * t_.lanes->cell_stride + key_group] : MaskCell::mixed;
  }
  // Without options.
  SK_INLINE __m512 plain_factor() const { return _mm512_set1_ps(static_cast<float>(s_.scale * 1.4426950408889634)); }
  SK_INLINE __m512 factor() const {
    return _mm512_set1_ps(modified_ ? kLog2e : static_cast<float>(s_.scale * 1.4426950408889634));
  }

  void multiply_all() {
    if (seen_end_ == 0) return;
    const __m512 c = plain_factor();
    const int64_t nk = nk_, nv = nv_;
    Run run, next;
    if (!advance(run)) return;
    Pending pending{nullptr, nullptr, nullptr, -1, 0, nv};
    int current = 0, buffer = 0;
    const auto rows_of = [&](int64_t key_group) { return packed_.key + key_group * 2 * nk * kTileElements; };
    const auto columns_of = [&](int64_t group) { return t_.query + group * 2 * nk * kTileElements; };
    scores_product(rows_of(run.begin), columns_of(run.group), nk, t_.scores[0]);
    for (bool running = true; running; run = next) {
      next = run;
      running = advance(next);
      BFloat16* weights = t_.weights[buffer];
      const int64_t q = run.group * kGroup, count = run.end - run.begin;
      const int64_t lanes = min(kGroup, queries_ - q);
      Softmax h[2] = {load_half(q), load_half(q + 16)};
      for (int64_t g = 0; g < count; ++g) {
        const int64_t key_group = run.begin + g;
        float *scores = t_.scores[current], *other = t_.scores[current ^ 1];
        BFloat16* to = weights + g * 2 * kTileElements;
        const bool inside = g + 1 < count, more = inside || running;
        const BFloat16* rows = rows_of(inside ? key_group + 1 : next.begin);
        const BFloat16* columns = columns_of(inside ? run.group : next.group);
        const int64_t outputs_end = max(pending.done, (g + 1) * nv / count);
        const bool in_band = all_visible(band_, q0_ + q, lanes, key_group * kGroup);
        const bool unmasked = cell(run.group, key_group) == MaskCell::seen;
        const bool all = in_band && (unmasked || !boolean_), options = options_ && !(mask_alone_ && unmasked);
        GroupMask mask;
        if (all && !options) {
          h[0].any = h[1].any = _mm512_setzero_si512();
          if (is_new(h)) raise(scores, c, nullptr, run.group, h, weights, g, pending);
          const Softmax before[2] = {h[0], h[1]};
          weigh_beside({rows, columns, other, more, outputs_end}, pending, scores, c, h, to);
          if (__builtin_expect(exceeded(h), 0)) {
            h[0] = before[0];
            h[1] = before[1];
            raise(scores, c, nullptr, run.group, h, weights, g, pending);
            weigh_group<false>(scores, c, mask, h, to);
          }
        } else {
          if (more) scores_product(rows, columns, nk, other);
          outputs(pending, outputs_end);
          if (!in_band) fill_mask(band_, q0_ + q, key_group * kGroup, mask);
          else if (!all) __builtin_memset(&mask, 0xff, sizeof(mask));
          if (boolean_ && !unmasked) hide_masked(*t_.lanes, q, key_group * kGroup, band_.keys, mask);
          if (options) {
            weigh_options(scores, key_group, run.group, all ? nullptr : &mask, h, to, g, pending);
          } else {
            h[0].any = h[1].any = _mm512_setzero_si512();
            if (is_new(h)) raise(scores, c, &mask, run.group, h, weights, g, pending);
            const Softmax before[2] = {h[0], h[1]};
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
      pending = {packed_.value_t + run.begin * 2 * nv * kTileElements,
                 weights,
                 t_.out + run.group * 4 * nv * kSums,
                 run.group,
                 count,
                 0};
      buffer ^= 1;
    }
    outputs(pending, nv);
  }
  // Whether no query of the group has met a key yet. Then M will be raised, and weights would be computed twice.
  SK_INLINE static bool is_new(const Softmax (&h)[2]) { return is_new(h[0]) && is_new(h[1]); }
  SK_INLINE static bool is_new(const Softmax& h) {
    return _mm512_cmp_ps_mask(h.shift, _mm512_set1_ps(kNoShift), _CMP_NEQ_UQ) == 0;
  }
  SK_INLINE static bool exceeded(const Softmax (&h)[2]) {
    return _mm512_test_epi32_mask(_mm512_or_si512(h[0].any, h[1].any), _mm512_set1_epi32(0x40000000)) != 0;
  }

  // The initial M and sums with a sink.
  struct Sink {
    float score, shift, weight;
  };
  Sink first_sink() const {
    const float score = p_.sinks ? *static_cast<const float*>(p_.sinks) : -kInfinity<float>;
    if (score == -kInfinity<float>) return {score, kNoShift, 0};
    const float log2 = score * kLog2e, shift = -(__builtin_ceilf(log2) + kHeadroom);
    return {score, shift, __builtin_exp2f(log2 + shift)};
  }

  // Whether a query's M is usable. It is not for scores beyond 2^31, nor below -1e30 (masks of the smallest float); the
  // query's sum shows that.
  bool is_sound(int64_t q) const {
    const float sum = t_.sum[q];
    if (sum > 0 && sum <= 3e38f) return true;
    const Range seen = visible_range(band_, q0_ + q, q0_ + q + 1);
    if (sum != 0 || !boolean_) return sum == 0 && seen.begin == seen.end;
    const auto* row = static_cast<const uint8_t*>(t_.lanes->mask[q]);  // whether it hides them all
    for (int64_t k = seen.begin; k < seen.end; ++k) {
      if (k % kMaskCell == 0)
        while (k + kMaskCell <= seen.end && t_.lanes->cell(q, k) == MaskCell::hidden) k += kMaskCell;
      if (k < seen.end && row[k]) return false;
    }
    return true;
  }

  void finish() const {
    const Sink sink = first_sink();
    bool sound = true;
    for (int64_t q = 0; q < queries_; ++q) sound &= is_sound(q);
    if (!sound) forward_block<BFloat16>(p_, q0_ / kBlockQ, careful_memory_);  // for these rows; the others follow below
    float* lse = static_cast<float*>(p_.lse) + q0_;
    for (int64_t q = 0; q < queries_; ++q) {
      if (!is_sound(q)) continue;
      // No key, or none that counts: lse is the sink's score, or -inf without a sink.
      const bool alone = t_.sum[q] == sink.weight && t_.shift[q] == sink.shift;
      lse[q] = alone ? sink.score
                     : static_cast<float>(__builtin_log(static_cast<double>(t_.sum[q])) -
                                          0.6931471805599453 * static_cast<double>(t_.shift[q]));
    }
    const float scale = s_.dropout.active ? static_cast<float>(s_.dropout.scale) : 1.0f;
    for (int64_t q = 0; q < queries_; q += 16) {
      const __m512 sum = _mm512_load_ps(t_.rounded_sum + q);
      const __mmask16 any = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      const __m512 inverse = _mm512_maskz_div_ps(any, _mm512_set1_ps(scale), sum);
      for (int64_t v = 0; v * 16 < s_.value_dim; ++v) {
        const float* out = t_.out + ((q / kGroup * 2 * nv_ + v) * 2 + q / 16 % 2) * kSums;
        Vec<float> r[16];
        for (int i = 0; i < 16; ++i) r[i] = bit_cast<Vec<float>>(_mm512_mul_ps(inverse, _mm512_load_ps(out + 16 * i)));
        transpose_square<float>(r);
        const __mmask16 columns = static_cast<__mmask16>(first_lanes(min(16, s_.value_dim - 16 * v)));
        for (int64_t i = 0; i < min(16, queries_ - q); ++i)
          if (is_sound(q + i))
            _mm256_mask_storeu_epi16(at<BFloat16>(p_.out, q0_ + q + i) + 16 * v, columns,
                                     bit_cast<__m256i>(_mm512_cvtneps_pbh(bit_cast<__m512>(r[i]))));
      }
    }
  }

  const AttentionForward& p_;
  const AttentionShape& s_;
  const AttentionSequence& band_;
  const NK nk_;
  const NV nv_;
  const ForwardTiles t_;
  const PackedForward packed_;
  const int64_t q0_, queries_, groups_;
  const bool mask_alone_;  // no option but a mask whose cells are known
  const bool boolean_;     // and it is boolean: it hides as the band does
  const bool options_, modified_;
  void* const careful_memory_;
  Range seen_[kQueryGroups];  // the groups of keys that a group of queries sees
  int64_t seen_begin_ = 0, seen_end_ = 0;
};

// Scratch of the tiles, and of the float kernel for rows that need it.
inline int64_t forward_scratch(const AttentionShape& s) {
  return ForwardTiles(s, nullptr).bytes + ForwardScratch<float>(s, nullptr).bytes;
}

inline void forward(const AttentionForward& p, int64_t query_block, void* memory) {
  const auto run = [&](auto key_depth, auto value_depth) {
    Bf16Forward<decltype(key_depth), decltype(value_depth)>(p, query_block, key_depth, value_depth, memory).run();
  };
  const int64_t key_depth = tiles(p.shape.head_dim, 32), value_depth = tiles(p.shape.value_dim, 32);
  if (key_depth == 2 && value_depth == 2) run(Known<2>{}, Known<2>{});
  else if (key_depth == 4 && value_depth == 4) run(Known<4>{}, Known<4>{});
  else run(Unknown{key_depth}, Unknown{value_depth});
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
