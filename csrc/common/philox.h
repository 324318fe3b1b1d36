// Counter-based random numbers for dropout: Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"; 7 rounds pass BigCrush). Nothing is stored: the mask is a function of the seed and the position,
// the same on every backend, tier and number of threads.
//
// Element (row, column) takes word column % 4 of the counter (column / 4, row low, row high, 0) under the key
// (seed low, seed high), and is kept when the word is at least `threshold`: seqkern/reference/dropout.py says the same.
#pragma once

#include "dropout.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// The low and high words of the product of every lane with m.
SK_INLINE void multiply_wide(vu32 a, uint32_t m, vu32& low, vu32& high) {
#if defined(__x86_64__)
  typedef uint64_t vu64 __attribute__((vector_size(SK_VEC_BYTES)));
  const vu64 shifted = bit_cast<vu64>(a) >> 32;
  const vu64 factor = vu64{} + m;
#if defined(__AVX512F__)
  const vu64 even = bit_cast<vu64>(_mm512_mul_epu32(bit_cast<__m512i>(a), bit_cast<__m512i>(factor)));
  const vu64 odd = bit_cast<vu64>(_mm512_mul_epu32(bit_cast<__m512i>(shifted), bit_cast<__m512i>(factor)));
#elif defined(__AVX2__)
  const vu64 even = bit_cast<vu64>(_mm256_mul_epu32(bit_cast<__m256i>(a), bit_cast<__m256i>(factor)));
  const vu64 odd = bit_cast<vu64>(_mm256_mul_epu32(bit_cast<__m256i>(shifted), bit_cast<__m256i>(factor)));
#else
  const vu64 even = bit_cast<vu64>(_mm_mul_epu32(bit_cast<__m128i>(a), bit_cast<__m128i>(factor)));
  const vu64 odd = bit_cast<vu64>(_mm_mul_epu32(bit_cast<__m128i>(shifted), bit_cast<__m128i>(factor)));
#endif
  low = bit_cast<vu32>((even & 0xffffffffu) | (odd << 32));
  high = bit_cast<vu32>((even >> 32) | (odd & ~uint64_t{0xffffffffu}));
#else
  for (int i = 0; i < W<float>; ++i) {
    const uint64_t product = uint64_t{a[i]} * m;
    low[i] = static_cast<uint32_t>(product);
    high[i] = static_cast<uint32_t>(product >> 32);
  }
#endif
}

// The four words of a counter per lane: (c0, c1, c2, 0).
SK_INLINE void philox(uint64_t seed, vu32 c0, vu32 c1, vu32 c2, vu32 (&words)[4]) {
  constexpr int kRounds = 7;
  vu32 c3 = {};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    vu32 low0, high0, low1, high1;
    multiply_wide(c0, 0xD2511F53u, low0, high0);
    multiply_wide(c2, 0xCD9E8D57u, low1, high1);
    c0 = high1 ^ c1 ^ k0;
    c2 = high0 ^ c3 ^ k1;
    c1 = low1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

// The words of the elements [first, first + 4 W) of a row, in order; `first` is a multiple of 4.
SK_INLINE void philox_words(uint64_t seed, int64_t row, int64_t first, uint32_t* words) {
  constexpr int lanes = W<float>;
  const vu32 lane = constant_lanes<vu32, lanes>([](int i) { return i; });
  vu32 c[4];
  philox(seed, lane + static_cast<uint32_t>(first / 4), vu32{} + static_cast<uint32_t>(row),
         vu32{} + static_cast<uint32_t>(static_cast<uint64_t>(row) >> 32), c);
  const vu32 c0 = c[0], c1 = c[1], c2 = c[2], c3 = c[3];
  // Lane i of the four vectors holds words 0 to 3 of counter i: two rounds of interleaving put them next to each other.
  const vi32 lower = constant_lanes<vi32, lanes>([](int i) { return i / 2 + (i % 2) * lanes; });
  const vi32 upper = lower + lanes / 2;
  const vu32 even_low = __builtin_shuffle(c0, c2, lower), even_high = __builtin_shuffle(c0, c2, upper);
  const vu32 odd_low = __builtin_shuffle(c1, c3, lower), odd_high = __builtin_shuffle(c1, c3, upper);
  const vu32 ordered[4] = {__builtin_shuffle(even_low, odd_low, lower), __builtin_shuffle(even_low, odd_low, upper),
                           __builtin_shuffle(even_high, odd_high, lower),
                           __builtin_shuffle(even_high, odd_high, upper)};
  __builtin_memcpy(words, ordered, sizeof(ordered));
}

// Dropout of one row, from left to right, a vector at a time; columns are multiples of W<A>.
template <class A>
class DropoutRow {
 public:
  SK_INLINE void begin(const Dropout& dropout, int64_t row) {
    dropout_ = &dropout;
    row_ = row;
    end_ = 0;
  }
  // All ones for elements that are kept.
  SK_INLINE IVec<A> kept(int64_t column) {
    if (column >= end_) {
      first_ = column / kBlock * kBlock;
      end_ = first_ + kBlock;
      philox_words(dropout_->seed, row_, first_, words_);
    }
    typedef uint32_t words_t __attribute__((vector_size(W<A> * sizeof(uint32_t))));
    words_t word;
    __builtin_memcpy(&word, words_ + (column - first_), sizeof(word));
    return __builtin_convertvector(word >= dropout_->threshold, IVec<A>);
  }
  // Scales the elements that are kept; the rest is zero.
  SK_INLINE Vec<A> apply(Vec<A> v, int64_t column) { return kept(column) ? rounded(v * A(dropout_->scale)) : Vec<A>{}; }

 private:
  static constexpr int64_t kBlock = 4 * W<float>;
  const Dropout* dropout_ = nullptr;
  int64_t row_ = 0, first_ = 0, end_ = 0;
  uint32_t words_[kBlock];
};

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
