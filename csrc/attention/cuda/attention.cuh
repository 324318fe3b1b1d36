// What all CUDA C++ attention kernels know of a call: where a sequence lies, which keys a query sees, and how a product
// q.k becomes the score in the exponent. Every path (mma.sync, decode, wgmma) calls these functions, so what the host
// executor tests for one holds for all.
//
// With diag = diagonal, or diagonal + keys - queries for bands aligned lower right:
//
//     query i sees key j        iff  i + low <= j <= i + high  and  j < keys
//     z_ij = softcap tanh(scale q_i.k_j / softcap) - slope |i + diag - j| + mask_ij
//
// The other equations: kernels/attention/attention.py.
#pragma once

#include "attention/mask.h"
#include "common/cuda/device.cuh"

namespace seqkern {

// As a limit: unlimited. The host ensures that no length reaches it; sums of a few such numbers fit 32 bits.
constexpr int kAttentionFar = 1 << 28;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// A (batch, heads, rows, columns) tensor with a contiguous last dimension; strides in elements.
struct AttentionTensor {
  const void* data;
  int64_t batch, head, row;

  template <class T>
  SK_DEVICE const T* at(int64_t b, int64_t h, int64_t r) const {
    return static_cast<const T*>(data) + b * batch + h * head + r * row;
  }
};
// The same for a result.
struct AttentionResult {
  void* data;
  int64_t batch, head, row;

  template <class T>
  SK_DEVICE T* at(int64_t b, int64_t h, int64_t r) const {
    return static_cast<T*>(data) + b * batch + h * head + r * row;
  }
};

// int32 or int64 numbers on the device.
struct AttentionIntegers {
  const void* data;
  bool wide;

  SK_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// For each block of kLimitRows queries (or keys) of a mask, the first and last + 1 key (or query) that it shows to any
// of them; limits.cuh. data null: the mask was not looked at.
constexpr int kLimitRows = 32;
struct AttentionLimits {
  const int* data;
  int heads;                  // of the mask
  int64_t sequence, of_head;  // strides; 0 where the mask is shared
};

// A call. Absent options are null.
struct AttentionCuda {
  AttentionTensor query, key, value;
  // Rows start at multiples of 16 bytes in all tensors of the call: cp.async and TMA may be used. Except in decode,
  // rows are also whole 16-byte vectors.
  bool vectors;
  bool tf32;  // float32: one tf32 product, if torch's flag allows it; else three
  int sequences, heads, kv_heads, head_dim, value_dim;
  int64_t query_rows, key_rows;  // of the tensors: dimension 2
  int max_queries, max_keys;     // of a sequence

  // Packed: starts of each sequence's rows in batch entry 0, S + 1 numbers each. lengths: visible keys of each
  // sequence.
  AttentionIntegers query_starts, key_starts, key_lengths;

  int diagonal, low, high;  // low = -kAttentionFar, high = kAttentionFar: unlimited
  bool lower_right;

  float scale, softcap;  // softcap 0: none
  const float* slopes;   // (sequences, heads)
  const float* sinks;    // (heads), forward only
  const void* mask;      // added to the scores, or boolean: which pairs are visible
  MaskType mask_type;
  int64_t mask_strides[4];  // sequence, head, query, key; 0 where it broadcasts
  AttentionLimits query_limits, key_limits;
  const int64_t* seed;  // of dropout
  uint32_t threshold;
  float keep_scale;  // 1 / (1 - p)

  // Whether scores are just scale q.k with scale > 0, without dropout: then a row's maximum may be taken before
  // scaling.
  __host__ __device__ bool plain() const {
    return softcap == 0 && slopes == nullptr && mask == nullptr && seed == nullptr && scale > 0;
  }
};

// ---- sequences -----------------------------------------------------------------------------------------------------

// A sequence: its rows in the tensors, its number of visible keys, its band.
struct AttentionPlace {
  int64_t batch, query_row, key_row;
  int queries, keys;
  int key_rows;  // keys, including those that key_lengths hides
  int diagonal, low, high;
};

SK_DEVICE int64_t clamp_row(int64_t row, int64_t rows) { return row < 0 ? 0 : row < rows ? row : rows; }

// Clamps starts to the tensors and lengths to the maximum, so every row between them exists.
SK_DEVICE AttentionPlace place_of(const AttentionCuda& p, int64_t s) {
  AttentionPlace at{s, 0, 0, p.max_queries, p.max_keys, p.max_keys, p.diagonal, p.low, p.high};
  if (p.query_starts.data != nullptr) {
    at.batch = 0;
    at.query_row = clamp_row(p.query_starts[s], p.query_rows);
    at.key_row = clamp_row(p.key_starts[s], p.key_rows);
    at.queries =
        static_cast<int>(clamp_row(clamp_row(p.query_starts[s + 1], p.query_rows) - at.query_row, p.max_queries));
    at.key_rows = static_cast<int>(clamp_row(clamp_row(p.key_starts[s + 1], p.key_rows) - at.key_row, p.max_keys));
    at.keys = at.key_rows;
  }
  if (p.key_lengths.data != nullptr) at.keys = static_cast<int>(clamp_row(p.key_lengths[s], at.key_rows));
  if (p.lower_right) {
    const int shift = at.keys - at.queries;
    at.diagonal += shift;
    if (at.low != -kAttentionFar) at.low += shift;
    if (at.high != kAttentionFar) at.high += shift;
  }
  return at;
}

// A query's row number in lse, in delta and for dropout.
SK_DEVICE int64_t row_number(const AttentionCuda& p, const AttentionPlace& at, int64_t head, int query) {
  return (at.batch * p.heads + head) * p.query_rows + at.query_row + query;
}

// ---- bands ---------------------------------------------------------------------------------------------------------

SK_DEVICE bool sees(const AttentionPlace& at, int i, int j) {
  return j < at.keys && j >= i + at.low && j <= i + at.high;
}

// Blocks of the other side, by their first row. A tile sees every pair of blocks in [full, edge), some pairs of blocks
// in [first, min(full, last)) and [edge, last), and nothing else. All but `last` are multiples of the block size.
struct AttentionRange {
  int first, full, edge, last;
};

// Blocks of `block` keys for queries [query0, query0 + rows).
SK_DEVICE AttentionRange key_range(const AttentionPlace& at, int query0, int rows, int block) {
  const int end = min(query0 + rows, at.queries);
  AttentionRange r;
  r.last = query0 < at.queries ? min(at.keys, max(0, end + at.high)) : 0;
  r.edge = min(at.keys, max(0, query0 + 1 + at.high)) / block * block;
  r.first = min(r.last, max(0, query0 + at.low)) / block * block;
  r.full = (min(r.last, max(0, end - 1 + at.low)) + block - 1) / block * block;
  r.edge = max(r.edge, r.full);
  return r;
}

// Blocks of `block` queries for keys [key0, key0 + rows).
SK_DEVICE AttentionRange query_range(const AttentionPlace& at, int key0, int rows, int block) {
  const int end = min(key0 + rows, at.keys);
  const int all = key0 < at.keys ? at.queries : 0;
  AttentionRange r;
  r.last = min(all, max(0, end - at.low));
  r.edge = min(all, max(0, key0 + 1 - at.low)) / block * block;
  r.first = min(r.last, max(0, key0 - at.high)) / block * block;
  r.full = (min(r.last, max(0, end - 1 - at.high)) + block - 1) / block * block;
  r.edge = max(r.edge, r.full);
  return r;
}

// A range within the limits of rows [row0, row0 + rows) of heads [head, head + heads) of sequence s.
SK_DEVICE AttentionRange narrowed(AttentionRange r, const AttentionLimits& limits, int64_t s, int head, int heads,
                                  int row0, int rows, int end, int block) {
  if (limits.data == nullptr || row0 >= end) return r;
  int first = kAttentionFar, last = 0;
  const int final = (min(row0 + rows, end) - 1) / kLimitRows;
#pragma unroll 1
  for (int h = head; h < head + heads; ++h) {
    const int* const of = limits.data + s * limits.sequence + h * limits.of_head;
#pragma unroll 1
    for (int n = row0 / kLimitRows; n <= final; ++n) {
      first = min(first, of[2 * n]);
      last = max(last, of[2 * n + 1]);
    }
  }
  const int start = min(first, last) / block * block;
  r.first = max(r.first, start);
  r.full = max(r.full, start);
  r.last = min(r.last, last);
  r.edge = max(r.full, min(r.edge, (last + block - 1) / block * block));
  return r;
}

// ---- scores --------------------------------------------------------------------------------------------------------

// What the options need of a head of a sequence: the start of its mask, and its slope.
struct AttentionHead {
  const char* mask;
  float slope;
};
SK_DEVICE int64_t mask_size(MaskType type) { return type == MaskType::boolean ? 1 : type == MaskType::f32 ? 4 : 2; }
SK_DEVICE AttentionHead head_of(const AttentionCuda& p, int64_t s, int64_t head) {
  AttentionHead h{nullptr, 0};
  if (p.mask != nullptr) {
    h.mask =
        static_cast<const char*>(p.mask) + (s * p.mask_strides[0] + head * p.mask_strides[1]) * mask_size(p.mask_type);
  }
  if (p.slopes != nullptr) h.slope = p.slopes[s * p.heads + head];
  return h;
}

// The mask's term of score (i, j), which must lie within the mask. Additive masks are used unscaled: the most negative
// finite number stays finite, and a row that has nothing else becomes uniform.
template <MaskType kType>
SK_DEVICE float mask_value(const AttentionCuda& p, const AttentionHead& head, int i, int j) {
  const int64_t at = i * p.mask_strides[2] + j * p.mask_strides[3];
  if constexpr (kType == MaskType::boolean) {
    return reinterpret_cast<const uint8_t*>(head.mask)[at] != 0 ? 0.0f : -INFINITY;
  } else if constexpr (kType == MaskType::f32) {
    return reinterpret_cast<const float*>(head.mask)[at];
  } else if constexpr (kType == MaskType::bf16) {
    return widen(reinterpret_cast<const BFloat16*>(head.mask)[at]);
  } else {
    return widen(reinterpret_cast<const Half*>(head.mask)[at]);
  }
}
SK_DEVICE float mask_value(const AttentionCuda& p, const AttentionHead& head, int i, int j) {
  switch (p.mask_type) {
    case MaskType::boolean: return mask_value<MaskType::boolean>(p, head, i, j);
    case MaskType::f32: return mask_value<MaskType::f32>(p, head, i, j);
    case MaskType::bf16: return mask_value<MaskType::bf16>(p, head, i, j);
    default: return mask_value<MaskType::f16>(p, head, i, j);
  }
}

// tanh, correct to a few last places, also for small x: a polynomial below 0.625 (Cephes; Moshier 1989), above it 1 - 2
// / (e^2x + 1).
SK_DEVICE float attention_tanh(float x) {
  const float a = fabsf(x), square = x * x;
  float p = fmaf(-5.70498872745e-3f, square, 2.06390887954e-2f);
  p = fmaf(p, square, -5.37397155531e-2f);
  p = fmaf(p, square, 1.33314422036e-1f);
  p = fmaf(p, square, -3.33332819422e-1f);
  const float large = 1.0f - 2.0f * reciprocal(exp2f(a * (2.0f * kLog2e)) + 1.0f);
  return a < 0.625f ? fmaf(x * square, p, x) : x < 0 ? -large : large;
}

// The softcapped score of scale q.k. `bent` receives its tanh; 1 - bent^2 is the derivative.
SK_DEVICE float softcapped(const AttentionCuda& p, float z, float* bent) {
  *bent = attention_tanh(z * (1.0f / p.softcap));
  return *bent * p.softcap;
}
SK_DEVICE float distance_of(const AttentionPlace& at, int i, int j) {
  return static_cast<float>(abs(i + at.diagonal - j));
}

// z of a visible pair, in natural units, from its product q.k. bent: 0 without softcap.
SK_DEVICE float biased(const AttentionCuda& p, const AttentionHead& head, const AttentionPlace& at, float product,
                       int i, int j, float* bent) {
  float z = product * p.scale;
  *bent = 0;
  if (p.softcap != 0) z = softcapped(p, z, bent);
  if (p.slopes != nullptr) z -= head.slope * distance_of(at, i, j);
  if (p.mask != nullptr) z += mask_value(p, head, i, j);
  return z;
}

// The four random words of keys 4 (j / 4) ... + 3 of a row (row_number). Key j is kept if word j % 4 >= the threshold.
SK_DEVICE uint4 dropout_words(uint64_t seed, int64_t row, int j) { return philox(seed, row, j); }

// lse, or +inf for a row that sees nothing, so that e^(z - lse) is 0 and not NaN.
SK_DEVICE float lse_or_infinity(float lse) { return lse == -INFINITY ? INFINITY : lse; }

}  // namespace seqkern
