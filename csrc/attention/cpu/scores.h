// The passes over a tile of scores between its products, in the accumulation type: softcap, bias, softmax, dropout, and
// their gradients. Every tier and variant of the attention kernels calls these functions.
//
// A tile is stored transposed: entry (key k, lane q) is tile[k * stride + q]. A lane is one query of one head; Lanes
// holds what the functions need to know of it. They work on a part of a tile, whose lanes are whole vectors. In lanes
// beyond the queries they write finite numbers without meaning. They do not know the band: the caller overwrites hidden
// entries.
#pragma once

#include "philox.h"
#include "tile.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kMaxLanes = 256;

struct Bool {
  uint8_t byte;
};

// Filled as far as the shape's options need it.
template <class A>
struct Lanes {
  alignas(64) A position[kMaxLanes];  // among the keys
  alignas(64) A slope[kMaxLanes];
  alignas(64) uint32_t row_low[kMaxLanes], row_high[kMaxLanes];  // the dropout's row
  const void* mask[kMaxLanes];                                   // element of key 0
  int64_t queries, mask_key_stride;
  bool one_mask;  // all lanes have the same row of the mask
  // Of the mask, from the block's first query on, in blocks of whole cells; null if they are not known.
  const MaskCell* cells;
  int64_t cell_stride;
  SK_INLINE MaskCell cell(int64_t lane, int64_t key) const {
    return cells ? cells[lane / kMaskCell * cell_stride + key / kMaskCell] : MaskCell::mixed;
  }
};

SK_INLINE bool modified(const AttentionShape& s) { return s.softcap != 0 || s.alibi || s.mask != MaskType::none; }

SK_INLINE int64_t mask_size(MaskType type) {
  switch (type) {
    case MaskType::boolean: return 1;
    case MaskType::f64: return 8;
    case MaskType::f32: return 4;
    default: return 2;
  }
}

// Makes lanes [at, at + count) the queries [q0, q0 + count) of head `head`; the last call has the largest `at`.
template <class A>
void fill_lanes(const AttentionShape& shape, const AttentionSequence& s, const AttentionBias& bias, int64_t head,
                int64_t q0, int64_t count, int64_t at, Lanes<A>* lanes) {
  const int64_t end = at + count, padded = (end + 15) / 16 * 16;
  lanes->queries = end;
  lanes->mask_key_stride = bias.mask_key_stride;
  lanes->cells = bias.cells ? bias.cells + q0 / kMaskCell * bias.cell_stride : nullptr;
  lanes->cell_stride = bias.cell_stride;
  lanes->one_mask = bias.mask_row_stride == 0 && (at == 0 || bias.mask_head_stride == 0);
  if (shape.alibi) {
    const A slope = static_cast<const A*>(bias.slopes)[head];
    for (int64_t q = at; q < padded; ++q) {
      lanes->position[q] = q < end ? static_cast<A>(q0 + (q - at) + s.diagonal) : A(0);
      lanes->slope[q] = q < end ? slope : A(0);
    }
  }
  if (shape.mask != MaskType::none) {
    const char* first = static_cast<const char*>(bias.mask);
    const int64_t size = mask_size(shape.mask);
    for (int64_t q = at; q < end; ++q)
      lanes->mask[q] = first + (head * bias.mask_head_stride + (q0 + q - at) * bias.mask_row_stride) * size;
  }
  if (shape.dropout.active) {
    for (int64_t q = at; q < padded; ++q) {
      const auto row = static_cast<uint64_t>(bias.dropout_row + head * bias.dropout_head_stride + q0 + q - at);
      lanes->row_low[q] = static_cast<uint32_t>(row);
      lanes->row_high[q] = static_cast<uint32_t>(row >> 32);
    }
  }
}

// ---- bias ----------------------------------------------------------------------------------------------------------

// A vector of mask elements as a term of the scores; lanes from n on are undefined.
template <class A, class M>
SK_INLINE Vec<A> load_bias(const M* p, int64_t n) {
  n = min(n, W<A>);
  if constexpr (sizeof(M) == 1) {
    typedef uint8_t bytes_t __attribute__((vector_size(W<A>)));
    bytes_t bytes = {};
    if (n == W<A>) __builtin_memcpy(&bytes, p, W<A>);
    else __builtin_memcpy(&bytes, p, static_cast<size_t>(n));
    const IVec<A> seen = __builtin_convertvector(bytes, IVec<A>);
    return seen != 0 ? Vec<A>{} : broadcast<A>(-kInfinity<A>);
  } else if constexpr (sizeof(acc_t<M>) == sizeof(A)) {
    return load_upto(p, n);
  } else {
    typedef float narrow_t __attribute__((vector_size(W<A> * sizeof(float))));
    narrow_t narrow = {};
    __builtin_memcpy(&narrow, p, static_cast<size_t>(n) * sizeof(float));
    return __builtin_convertvector(narrow, Vec<A>);
  }
}
template <class A, class M>
SK_INLINE A one_bias(const M* p) {
  return load_bias<A>(p, 1)[0];
}

// Runs a statement with `M` bound to the element type of a mask for accumulators A.
#define SK_DISPATCH_MASK(type, A, ...)     \
  do {                                     \
    if (type == MaskType::boolean) {       \
      using M = Bool;                      \
      __VA_ARGS__;                         \
    } else if (type == MaskType::f32) {    \
      using M = float;                     \
      __VA_ARGS__;                         \
    } else if constexpr (sizeof(A) == 8) { \
      using M = double;                    \
      __VA_ARGS__;                         \
    } else if (type == MaskType::bf16) {   \
      using M = BFloat16;                  \
      __VA_ARGS__;                         \
    } else {                               \
      using M = Half;                      \
      __VA_ARGS__;                         \
    }                                      \
  } while (0)

template <class M, class A>
void add_mask(const Lanes<A>& lanes, int64_t k0, const Part& part, A* tile, int64_t stride) {
  const int64_t step = lanes.mask_key_stride;
  const auto row = [&](int64_t q) { return static_cast<const M*>(lanes.mask[q]); };
  if (lanes.one_mask) {
    for (int64_t k = part.begin; k < part.end; ++k) {
      if (lanes.cell(0, k0 + k) == MaskCell::seen) continue;
      const Vec<A> bias = broadcast<A>(one_bias<A>(row(0) + (k0 + k) * step));
      for (int64_t q = part.first; q < part.last; q += W<A>)
        store(tile + k * stride + q, load(tile + k * stride + q) + bias);
    }
    return;
  }
  for (int64_t q = part.first; q < part.last; q += W<A>) {
    const int64_t count = min(W<A>, lanes.queries - q);
    if (count <= 0) break;
    for (int64_t k = part.begin; k < part.end; k += W<A>) {
      if (lanes.cell(q, k0 + k) == MaskCell::seen) continue;
      const int64_t keys = min(W<A>, part.end - k);
      Vec<A> bias[W<A>];
      if (step == 1) {
        for (int i = 0; i < W<A>; ++i) bias[i] = i < count ? load_bias<A>(row(q + i) + k0 + k, keys) : Vec<A>{};
        transpose_square<A>(bias);
      } else {
        for (int64_t j = 0; j < keys; ++j) {
          A one[W<A>] = {};
          for (int64_t i = 0; i < count; ++i) one[i] = one_bias<A>(row(q + i) + (k0 + k + j) * step);
          bias[j] = load(one);
        }
      }
      for (int64_t j = 0; j < keys; ++j) {
        A* at = tile + (k + j) * stride + q;
        store(at, load(at) + bias[j]);
      }
    }
  }
}

template <class M, class A>
bool all_hidden(const Lanes<A>& lanes, int64_t k0, int64_t begin, int64_t end) {
  if (lanes.mask_key_stride != 1) return false;
  for (int64_t q = 0; q < (lanes.one_mask ? 1 : lanes.queries); ++q) {
    const M* row = static_cast<const M*>(lanes.mask[q]) + k0;
    for (int64_t k = begin; k < end; k += W<A>) {
      const Vec<A> bias = load_bias<A>(row + k, end - k);
      for (int64_t i = 0; i < min(W<A>, end - k); ++i)
        if (bias[i] != -kInfinity<A>) return false;
    }
  }
  return true;
}

// What the mask does to keys [begin, end) of a tile and lanes [first, last).
template <class A>
SK_INLINE MaskCell cells_of(const Lanes<A>& lanes, int64_t k0, int64_t begin, int64_t end, int64_t first,
                            int64_t last) {
  if (!lanes.cells || begin >= end || first >= last) return MaskCell::mixed;
  const MaskCell found = lanes.cell(first, k0 + begin);
  for (int64_t q = first / kMaskCell; q * kMaskCell < last && found != MaskCell::mixed; ++q)
    for (int64_t k = (k0 + begin) / kMaskCell; k * kMaskCell < k0 + end; ++k)
      if (lanes.cells[q * lanes.cell_stride + k] != found) return MaskCell::mixed;
  return found;
}

// Whether the mask hides keys [begin, end) of a tile from all lanes: then there is nothing to compute.
template <class A>
SK_INLINE bool mask_hides_tile(const AttentionShape& s, const Lanes<A>& lanes, int64_t k0, int64_t begin, int64_t end) {
  if (s.mask == MaskType::none) return false;
  if (lanes.cells) return cells_of(lanes, k0, begin, end, 0, lanes.queries) == MaskCell::hidden;
  bool hidden = false;
  SK_DISPATCH_MASK(s.mask, A, hidden = (all_hidden<M, A>(lanes, k0, begin, end)));
  return hidden;
}

// z = softcap tanh(s / softcap) - slope |position - key| + mask, in place. `k0` is the index of key 0. With a softcap,
// `derivative`, a tile like the scores or null, becomes dz/ds.
template <class A>
void modify_scores(const AttentionShape& s, const Lanes<A>& lanes, int64_t k0, const Part& part, A* tile,
                   int64_t stride, A* derivative = nullptr) {
  if (s.softcap != 0) {
    const Vec<A> cap = broadcast<A>(static_cast<A>(s.softcap)), inverse = broadcast<A>(static_cast<A>(1 / s.softcap));
    for (int64_t k = part.begin; k < part.end; ++k) {
      for (int64_t q = part.first; q < part.last; q += W<A>) {
        const int64_t at = k * stride + q;
        const Vec<A> score = load(tile + at);
        Vec<A> x = score * inverse, slope;
        if (sizeof(A) == 8) x = score / cap;
        else x += inverse * (score - cap * x);  // exact quotient, if multiply-adds are fused
        store(tile + at, cap * tanh<A>(x, slope));
        if (derivative) store(derivative + at, slope);
      }
    }
  }
  if (s.alibi) {
    for (int64_t q = part.first; q < part.last; q += W<A>) {
      const Vec<A> position = load(lanes.position + q), slope = load(lanes.slope + q);
      for (int64_t k = part.begin; k < part.end; ++k) {
        A* at = tile + k * stride + q;
        const Vec<A> ahead = position - static_cast<A>(k0 + k);
        store(at, load(at) - slope * (ahead < A(0) ? -ahead : ahead));
      }
    }
  }
  if (s.mask != MaskType::none) SK_DISPATCH_MASK(s.mask, A, (add_mask<M, A>(lanes, k0, part, tile, stride)));
}

// ---- softmax -------------------------------------------------------------------------------------------------------

// Running maximum of the scores of `NV` vectors of lanes.
template <class A, int NV>
SK_INLINE void update_max(const A* scores, int64_t stride, int64_t keys, A* running) {
  Vec<A> m[NV];
  for (int j = 0; j < NV; ++j) m[j] = load(running + j * W<A>);
  for (int64_t k = 0; k < keys; ++k)
    for (int j = 0; j < NV; ++j) m[j] = vmax(load(scores + k * stride + j * W<A>), m[j]);
  for (int j = 0; j < NV; ++j) store(running + j * W<A>, m[j]);
}

// scores = exp(scores - max), and their sums over the keys.
template <class A, int NV>
SK_INLINE void exponentials(A* scores, int64_t stride, int64_t keys, const A* running, A* sum) {
  Vec<A> m[NV], s[NV];
  for (int j = 0; j < NV; ++j) {
    m[j] = load(running + j * W<A>);
    m[j] = m[j] == -kInfinity<A> ? Vec<A>{} : m[j];
    s[j] = Vec<A>{};
  }
  for (int64_t k = 0; k < keys; ++k) {
    for (int j = 0; j < NV; ++j) {
      A* p = scores + k * stride + j * W<A>;
      const Vec<A> x = exp_nonpositive<A>(load(p) - m[j]);
      store(p, x);
      s[j] += x;
    }
  }
  for (int j = 0; j < NV; ++j) store(sum + j * W<A>, load(sum + j * W<A>) + s[j]);
}

template <class L, class A>
SK_INLINE L log_sum_exp(A most, A sum) {
  return sum == 0 ? -kInfinity<L> : static_cast<L>(static_cast<double>(most) + __builtin_log(static_cast<double>(sum)));
}

// scores = P = exp(scores - lse), grad_scores = dz = P * (dP - delta + dlse). lse comes rounded, with its rounding
// error separately, or null: so a large score minus a large lse has no error.
template <class A, int NV>
SK_INLINE void score_gradients(A* scores, A* grad_scores, int64_t stride, int64_t keys, const A* lse,
                               const A* remainder, const A* delta, const A* grad_lse) {
  Vec<A> l[NV], r[NV], d[NV], g[NV];
  for (int j = 0; j < NV; ++j) {
    l[j] = load(lse + j * W<A>);
    r[j] = remainder ? load(remainder + j * W<A>) : Vec<A>{};
    d[j] = load(delta + j * W<A>);
    g[j] = load(grad_lse + j * W<A>);
  }
  for (int64_t k = 0; k < keys; ++k) {
    for (int j = 0; j < NV; ++j) {
      const int64_t at = k * stride + j * W<A>;
      const Vec<A> probability = exp_nonpositive<A>(load(scores + at) - l[j] - r[j]);
      store(scores + at, probability);
      store(grad_scores + at, probability * (load(grad_scores + at) - d[j] + g[j]));
    }
  }
}

// ---- dropout -------------------------------------------------------------------------------------------------------

// Calls body(k, q, keep) for every key and every vector of lanes of a part. Four consecutive keys share a counter, and
// each lane has its own row: the random words need no shuffle.
template <class A, class Body>
SK_INLINE void for_kept(const Dropout& dropout, const Lanes<A>& lanes, int64_t k0, const Part& part, const Body& body) {
  for (int64_t q = part.first; q < part.last; q += W<float>) {
    vu32 row_low, row_high;
    __builtin_memcpy(&row_low, lanes.row_low + q, sizeof(row_low));
    __builtin_memcpy(&row_high, lanes.row_high + q, sizeof(row_high));
    for (int64_t k = part.begin / 4 * 4; k < part.end; k += 4) {
      vu32 words[4];
      philox(dropout.seed, vu32{} + static_cast<uint32_t>((k0 + k) / 4), row_low, row_high, words);
      for (int64_t i = max(0, part.begin - k); i < min(4, part.end - k); ++i) {
        if constexpr (sizeof(A) == sizeof(uint32_t)) {
          body(k + i, q, words[i] >= dropout.threshold);
        } else {
          uint32_t word[W<float>];
          __builtin_memcpy(word, &words[i], sizeof(word));
          for (int64_t j = 0; j < W<float> && q + j < part.last; j += W<A>) {
            IVec<A> keep;
            for (int n = 0; n < W<A>; ++n) keep[n] = word[j + n] >= dropout.threshold ? -1 : 0;
            body(k + i, q + j, keep);
          }
        }
      }
    }
  }
}

// tile = kept entries times 1 / (1 - p), others 0
template <class A>
void drop(const Dropout& dropout, const Lanes<A>& lanes, int64_t k0, const Part& part, A* tile, int64_t stride) {
  const A scale = static_cast<A>(dropout.scale);
  for_kept<A>(dropout, lanes, k0, part, [&](int64_t k, int64_t q, IVec<A> keep) {
    A* at = tile + k * stride + q;
    store(at, keep ? load(at) * scale : Vec<A>{});
  });
}

// The factors of `drop`; `kept` is a tile like the scores.
template <class A>
void drop_factors(const Dropout& dropout, const Lanes<A>& lanes, int64_t k0, const Part& part, A* kept,
                  int64_t stride) {
  const Vec<A> scale = broadcast<A>(static_cast<A>(dropout.scale));
  for_kept<A>(dropout, lanes, k0, part,
              [&](int64_t k, int64_t q, IVec<A> keep) { store(kept + k * stride + q, keep ? scale : Vec<A>{}); });
}

// tile *= factors; 0 where the factor is 0, whatever the entry.
template <class A>
SK_INLINE void multiply(const Part& part, const A* factors, A* tile, int64_t stride) {
  for (int64_t k = part.begin; k < part.end; ++k) {
    for (int64_t q = part.first; q < part.last; q += W<A>) {
      const int64_t at = k * stride + q;
      const Vec<A> f = load(factors + at);
      store(tile + at, f == A(0) ? Vec<A>{} : load(tile + at) * f);
    }
  }
}

// ---- gradients of the bias -----------------------------------------------------------------------------------------

// distance[q] += sum_k dz[k, q] |position - key|
template <class A>
void add_distances(const Lanes<A>& lanes, int64_t k0, const Part& part, const A* grad_scores, int64_t stride,
                   A* distance) {
  for (int64_t q = part.first; q < part.last; q += W<A>) {
    const Vec<A> position = load(lanes.position + q);
    Vec<A> sum = {};
    for (int64_t k = part.begin; k < part.end; ++k) {
      const Vec<A> ahead = position - static_cast<A>(k0 + k);
      sum += load(grad_scores + k * stride + q) * (ahead < A(0) ? -ahead : ahead);
    }
    store(distance + q, load(distance + q) + sum);
  }
}

// Calls body(q, k, count, dz) with vectors of `count` keys of one lane, for the lanes before `queries`.
template <class A, class Body>
SK_INLINE void for_rows(const Part& part, int64_t queries, const A* tile, int64_t stride, const Body& body) {
  for (int64_t q = part.first; q < min(part.last, queries); q += W<A>) {
    for (int64_t k = part.begin; k < part.end; k += W<A>) {
      const int64_t keys = min(W<A>, part.end - k);
      Vec<A> v[W<A>];
      for (int j = 0; j < W<A>; ++j) v[j] = j < keys ? load(tile + (k + j) * stride + q) : Vec<A>{};
      transpose_square<A>(v);
      for (int64_t i = 0; i < min(W<A>, queries - q); ++i) body(q + i, k, keys, v[i]);
    }
  }
}

// sum[q, k] += dz[k, q]
template <class A>
void add_to_mask(const Part& part, int64_t queries, const A* grad_scores, int64_t stride, A* sum, int64_t sum_stride) {
  for_rows<A>(part, queries, grad_scores, stride, [&](int64_t q, int64_t k, int64_t count, Vec<A> v) {
    A* at = sum + q * sum_stride + k;
    store_upto(at, load_upto(at, count) + v, count);
  });
}

// Stores accumulators as mask elements.
template <class M, class A>
SK_INLINE void store_bias(M* p, Vec<A> v, int64_t n) {
  if constexpr (sizeof(acc_t<M>) == sizeof(A)) {
    store_upto(p, v, n);
  } else {
    for (int64_t i = 0; i < min(n, W<A>); ++i) p[i] = static_cast<M>(v[i]);
  }
}

// grad_mask[q, k] = dz[k, q], from the tile's first query and key on
template <class A>
void write_to_mask(MaskType type, const Part& part, int64_t queries, const A* grad_scores, int64_t stride,
                   void* grad_mask, int64_t mask_stride) {
  SK_DISPATCH_MASK(type, A, {
    for_rows<A>(part, queries, grad_scores, stride, [&](int64_t q, int64_t k, int64_t count, Vec<A> v) {
      if constexpr (sizeof(M) > 1) store_bias<M, A>(static_cast<M*>(grad_mask) + q * mask_stride + k, v, count);
    });
  });
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
