// Products with the input on matrix tiles (AMX), by panels of hidden units: each worker computes those of its own
// units, in the layout that the loop over the steps reads (RnnInput).
#pragma once

#include "few_rows.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kEveryStepFrom = 0;  // matrix tiles make all tokens' products at once
// Bytes of panels whose weights stay in L2 over all tokens.
constexpr int64_t kInputBytes = 768 << 10;
constexpr int64_t input_stride(int64_t inputs) { return padded_words(inputs) + 16; }
template <class A>
constexpr int64_t input_scratch(int64_t inputs) {
  return 32 * input_stride(inputs);
}

// Rows of zx, NV tiles wide, in panels panel_stride apart: x W_ih + bias, 32 tokens at a time. begin() returns to the
// first token, next() returns the next token's row of x; bias_of(panel, sums) writes a panel's bias. zx has room for
// whole blocks of 32 rows.
template <class A, int NV, int, class T, class Begin, class Next, class BiasOf>
void panel_input_products(int64_t tokens, int64_t inputs, const Begin& begin, const Next& next, const A* packed,
                          int64_t panel_begin, int64_t panel_end, bool has_bias, const BiasOf& bias_of, A* zx,
                          int64_t panel_stride, A* staged) {
  const TileConfiguration configuration;
  const int64_t depth = padded_words(inputs), steps = depth / 16, stride = input_stride(inputs);
  const int64_t size = depth * NV * 16, most = kInputBytes / (size * 4), group = most < 1 ? 1 : most;
  alignas(64) A bias[NV * 16];
  for (int64_t first = panel_begin; first < panel_end; first += group) {
    const int64_t past = panel_end - first < group ? panel_end : first + group;
    begin();
    for (int64_t token = 0; token < tokens; token += 32) {
      const int64_t some = tokens - token < 32 ? tokens - token : 32;
      for (int64_t r = 0; r < some; ++r)
        as_operand_row(reinterpret_cast<const T*>(next()), inputs, staged + r * stride);
      for (int64_t q = first; q < past; ++q) {
        if (has_bias) bias_of(q, bias);
        panel_block<NV>(0, some > 16 ? 16 : 0, steps, staged, stride, packed + q * size,
                        zx + q * panel_stride + token * NV * 16, NV * 16, {has_bias ? bias : nullptr, 0});
      }
    }
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
