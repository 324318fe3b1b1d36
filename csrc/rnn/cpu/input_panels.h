// Products with the input on vectors: each worker computes those of its own hidden units, in the layout that the loop
// over the steps reads (RnnInput). Of all tokens at once, for shares of so few rows that W_ih at every step would be as
// much to read as W_hh; else in the loop, which needs the inputs of a step as an operand.
#pragma once

#include "few_rows.h"

namespace seqkern {
namespace SK_TIER {
namespace {

// Rows of a share from which on W_ih is read at every step. Not without panels ahead: AVX2 would be up to 13% slower.
constexpr int64_t kEveryStepFrom = kAhead ? 4 : 0;
// Bytes of panels whose weights stay in L2 over all tokens; tokens whose operands do, and bytes of those.
constexpr int64_t kInputBytes = 512 << 10, kInputRows = 96, kStagedBytes = 512 << 10;
template <class A>
int64_t input_rows(int64_t inputs) {
  const int64_t rows = kStagedBytes / (operand_stride<A>(inputs) * static_cast<int64_t>(sizeof(A)));
  return rows > kInputRows ? kInputRows : rows > kGemmRows ? rows : kGemmRows;
}
template <class A>
int64_t input_scratch(int64_t inputs) {
  return input_rows<A>(inputs) * operand_stride<A>(inputs);
}

// Rows of x as an operand, `stride` words apart; row(r) returns row r. In place where they are evenly spaced words, but
// not a multiple of 4 KB apart, since they would collide in the cache; else in `staged`.
template <class A, class Row>
const A* as_input_operand(int64_t rows, int64_t inputs, const Row& row, A* staged, int64_t& stride) {
  using T = std::remove_cv_t<std::remove_pointer_t<decltype(row(0))>>;
  const auto address = [&](int64_t r) { return reinterpret_cast<intptr_t>(row(r)); };
  const intptr_t first = address(0), step = rows > 1 ? address(1) - first : 0, word = sizeof(A);
  bool even =
      std::is_same<T, Number<A>>::value && inputs % kTerms == 0 && step % word == 0 && (rows == 1 || step % 4096 != 0);
  for (int64_t r = 2; r < rows && even; ++r) even = address(r) == first + r * step;
  if (even) {
    stride = step / word;
    return reinterpret_cast<const A*>(first);
  }
  stride = operand_stride<A>(inputs);
  for (int64_t r = 0; r < rows; ++r) as_operand_row(row(r), inputs, staged + r * stride);
  return staged;
}

// Rows of zx, NV vectors wide, in panels panel_stride apart: x W_ih + bias. A panel's weights are stored in parts of TV
// vectors. begin() returns to the first token, next() returns the next token's row of x; bias_of(panel, sums) writes a
// panel's bias.
template <class A, int NV, int TV, class T, class Begin, class Next, class BiasOf>
void panel_input_products(int64_t tokens, int64_t inputs, const Begin& begin, const Next& next, const A* packed,
                          int64_t panel_begin, int64_t panel_end, bool has_bias, const BiasOf& bias_of, A* zx,
                          int64_t panel_stride, A* staged) {
  const int64_t depth = words(inputs), size = depth * NV * W<A>;
  const int64_t most = kInputBytes / (size * static_cast<int64_t>(sizeof(A))), group = most < 1 ? 1 : most;
  alignas(64) A bias[NV * W<A>];
  const int64_t block = input_rows<A>(inputs);
  const T* x[kInputRows];  // of a block of tokens, and then of the next one
  const auto take = [&](int64_t token) {
    const int64_t rows = tokens - token < block ? tokens - token : block;
    for (int64_t r = 0; r < rows; ++r) x[r] = reinterpret_cast<const T*>(next());
    return rows;
  };
  for (int64_t first = panel_begin; first < panel_end; first += group) {
    const int64_t past = panel_end - first < group ? panel_end : first + group;
    begin();
    for (int64_t token = 0, rows = take(0), coming; token < tokens; token += block, rows = coming) {
      int64_t stride, prefetched = 0;
      const A* a = as_input_operand<A>(rows, inputs, [&](int64_t r) { return x[r]; }, staged, stride);
      coming = token + block < tokens ? take(token + block) : 0;
      for (int64_t q = first; q < past; ++q) {
        for (; prefetched < coming * (q + 1 - first) / (past - first); ++prefetched)
          for (int64_t k = 0; k < inputs; k += 64 / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(x[prefetched] + k, 0, 2);
        A* to = zx + q * panel_stride + token * NV * W<A>;
        const A* after = packed + (q + 1 < past ? q + 1 : first) * size;
        for (int64_t part = 0; part < NV / TV; ++part) {  // one by one: the order of sums is that of large products
          const A* weights = packed + q * size + part * depth * TV * W<A>;
          panel_products<A, TV>(rows, 1, depth, a, stride, weights, to + part * TV * W<A>, NV * W<A>, TV * W<A>,
                                part + 1 < NV / TV ? weights + depth * TV * W<A> : after, [](int64_t, int64_t) {});
        }
        if (!has_bias) continue;
        bias_of(q, bias);
        for (int64_t r = 0; r < rows; ++r)
          for (int v = 0; v < NV; ++v) {
            A* sum = to + (r * NV + v) * W<A>;
            store(sum, load(sum) + load(bias + v * W<A>));
          }
      }
    }
  }
}

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
