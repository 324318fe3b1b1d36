// What a warpgroup's thread does with its part of a block of scores between two products: options, band, powers of two,
// dropout. d[4 n + e] is the score of row lane / 4 + 8 (e / 2) of its warp and key 8 n + 2 (lane % 4) + e % 2.
//
// Plain scores are unscaled products q.k; the exponent's multiply-add scales them. With options they are in natural
// units: masks hold the most negative finite number, which times log2(e) would be -inf.
#pragma once

#include "attention/cuda/attention.cuh"
#include "attention/cuda/schedule.cuh"

namespace seqkern {
namespace attention_hopper {

// S of a block becomes P, relative to the rows' new maximum. `factor` receives the factors of the earlier sums.
template <int kKeys, bool kOptions>
SK_DEVICE void softmax(float (&s)[kKeys / 2], float (&top)[2], float (&sum)[2], float (&factor)[2], float scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = s[2 * r];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) most = fmaxf(most, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    most = fmaxf(most, top[r]);
    const float base = most == -INFINITY ? 0.0f : kOptions ? most : most * scale;
    const auto power = [&](float z) { return power_of_two(kOptions ? (z - base) * kLog2e : fmaf(z, scale, -base)); };
    factor[r] = power(top[r]);
    top[r] = most;
    float left = 0, right = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
      s[4 * n + 2 * r] = power(s[4 * n + 2 * r]);
      s[4 * n + 2 * r + 1] = power(s[4 * n + 2 * r + 1]);
      left += s[4 * n + 2 * r];
      right += s[4 * n + 2 * r + 1];
    }
    sum[r] = fmaf(sum[r], factor[r], left + right);
  }
}

// Calls f(score, query, key) for a thread's scores of a block. query0: the warpgroup's first query; key0: the block's
// first key.
template <int kKeys, class F>
SK_DEVICE void for_scores(float (&s)[kKeys / 2], int query0, int key0, const F& f) {
  const int thread = unknown(static_cast<int>(threadIdx.x)) % 128, lane = thread % 32;
  const int query = query0 + thread / 32 * 16 + lane / 4, key = key0 + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kKeys / 2; ++n) f(s[n], query + n / 2 % 2 * 8, key + n / 4 * 8 + n % 2);
}

template <int kKeys>
SK_DEVICE void hide(float (&s)[kKeys / 2], const AttentionPlace& at, int query0, int key0) {
  for_scores<kKeys>(s, query0, key0, [&](float& z, int i, int j) {
    if (!sees(at, i, j)) z = -INFINITY;
  });
}

// ---- options -------------------------------------------------------------------------------------------------------

template <int kKeys, MaskType kType>
SK_DEVICE void add_mask(float (&s)[kKeys / 2], const AttentionCuda& call, const AttentionHead& head,
                        const AttentionPlace& at, int query0, int key0) {
  // Pairs outside the mask are hidden or not stored: any element of it will do.
  for_scores<kKeys>(s, query0, key0, [&](float& z, int i, int j) {
    z += mask_value<kType>(call, head, min(i, at.queries - 1), min(j, at.keys - 1));
  });
}

// `biased` for all scores, one branch an option.
template <int kKeys>
SK_DEVICE void bias(float (&s)[kKeys / 2], const AttentionCuda& call, const AttentionTile& tile,
                    const AttentionPlace& at, int query0, int key0) {
#pragma unroll
  for (int n = 0; n < kKeys / 2; ++n) s[n] *= call.scale;
  if (call.softcap != 0) {
#pragma unroll
    for (int n = 0; n < kKeys / 2; ++n) {
      float bent;
      s[n] = softcapped(call, s[n], &bent);
    }
  }
  if (call.slopes == nullptr && call.mask == nullptr) return;
  const AttentionHead head = head_of(call, unknown(tile.sequence), tile.head);
  if (call.slopes != nullptr) {
    for_scores<kKeys>(s, query0, key0, [&](float& z, int i, int j) { z -= head.slope * distance_of(at, i, j); });
  }
  if (call.mask == nullptr) return;
  switch (call.mask_type) {
    case MaskType::boolean: add_mask<kKeys, MaskType::boolean>(s, call, head, at, query0, key0); break;
    case MaskType::f32: add_mask<kKeys, MaskType::f32>(s, call, head, at, query0, key0); break;
    case MaskType::bf16: add_mask<kKeys, MaskType::bf16>(s, call, head, at, query0, key0); break;
    default: add_mask<kKeys, MaskType::f16>(s, call, head, at, query0, key0); break;
  }
}

// Sets powers that dropout drops to 0. Lanes 2 q and 2 q + 1 need the same counters, each one half of their words: the
// even lane computes those of its first row, the odd lane those of its second.
template <int kKeys>
SK_DEVICE void drop(float (&s)[kKeys / 2], const AttentionCuda& call, int64_t first_row, int key0) {
  const int thread = unknown(static_cast<int>(threadIdx.x)) % 128, lane = thread % 32;
  const bool odd = lane % 2 != 0;
  const int64_t row = first_row + thread / 32 * 16 + lane / 4 + (odd ? 8 : 0);
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n) {
    const uint4 words = dropout_words(seed, row, key0 + 8 * n + lane % 4 / 2 * 4);
    const uint32_t other0 = __shfl_xor_sync(~0u, odd ? words.x : words.z, 1);
    const uint32_t other1 = __shfl_xor_sync(~0u, odd ? words.y : words.w, 1);
    if ((odd ? other0 : words.x) < call.threshold) s[4 * n] = 0;
    if ((odd ? other1 : words.y) < call.threshold) s[4 * n + 1] = 0;
    if ((odd ? words.z : other0) < call.threshold) s[4 * n + 2] = 0;
    if ((odd ? words.w : other1) < call.threshold) s[4 * n + 3] = 0;
  }
}

}  // namespace attention_hopper
}  // namespace seqkern
