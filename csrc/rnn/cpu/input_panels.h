// Products with the input on vectors, by panels of hidden units: each worker computes those of its own units, in the
// layout that the loop over the steps reads (RnnInput).
#pragma once

#include "few_rows.h"

namespace seqkern {
namespace SK_TIER {
namespace {

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

// Where rows of x can be read as an operand: the address of the first one, and the row stride in words; else null. Not
// where they are a multiple of 4 KB apart, since they would collide in the cache.
template <class A, class T>
const A* operand_in_place(const T* const* x, int64_t rows, int64_t inputs, int64_t& stride) {
  if (!std::is_same<T, Number<A>>::value || inputs % kTerms != 0) return nullptr;
  const auto address = [&](int64_t r) { return reinterpret_cast<intptr_t>(x[r]); };
  const intptr_t step = rows > 1 ? address(1) - address(0) : 0, word = sizeof(A);
  for (int64_t r = 2; r < rows; ++r)
    if (address(r) != address(0) + r * step) return nullptr;
  if (step % word != 0 || (rows > 1 && step % 4096 == 0)) return nullptr;
  stride = step / word;
  return reinterpret_cast<const A*>(x[0]);
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
      int64_t stride = operand_stride<A>(inputs), prefetched = 0;
      const A* a = operand_in_place<A>(x, rows, inputs, stride);
      if (!a) {
        for (int64_t r = 0; r < rows; ++r) as_operand_row(x[r], inputs, staged + r * stride);
        a = staged;
      }
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
