// The right operands of a recurrent layer's products, host side, and the products with its input.
#pragma once

#include <optional>
#include <vector>

#include "problem.h"
#include "products.h"

namespace seqkern {

// Addresses of the rows of a chunk's tokens.
using TokenRows = std::vector<const void*>;

inline TokenRows input_rows(const RnnProblem& p, int64_t d, int64_t begin, int64_t end) {
  const int64_t width = p.input.size(2), column = p.has_w_ih ? 0 : d * p.gate_columns;
  TokenRows rows;
  p.for_tokens(d, begin, end,
               [&](int64_t t, int64_t b, int64_t) { rows.push_back(at(p.input, (t * p.batch + b) * width + column)); });
  return rows;
}

// The weights w (n, k) as B(k, n); below, as B(n, k).
inline Matrix transposed(const RnnProblem& p, const Tensor& w) {
  return {.dtype = p.dtype,
          .data = w.const_data_ptr(),
          .k_stride = 1,
          .n_stride = w.size(1),
          .depth = w.size(1),
          .columns = w.size(0)};
}
inline Matrix as_stored(const RnnProblem& p, const Tensor& w) {
  return {
      .dtype = p.dtype, .data = w.const_data_ptr(), .k_stride = w.size(1), .depth = w.size(0), .columns = w.size(1)};
}
// Groups the columns by gate: a panel has the gates of W hidden units side by side.
inline Matrix by_gates(const RnnProblem& p, const Tensor& w) {
  Matrix b = transposed(p, w);
  b.groups = gate_count(p.cell);
  return b;
}
// Scattered rows, in the dtype or, with `of_acc`, in the accumulation type.
inline Matrix of_rows(const RnnProblem& p, const TokenRows& rows, int64_t columns, bool of_acc = false) {
  return {.dtype = of_acc ? p.acc_dtype : p.dtype,
          .depth = static_cast<int64_t>(rows.size()),
          .columns = columns,
          .rows = rows.data()};
}

// Whether there are so few tokens that W_ih is packed on the fly.
inline bool few_tokens(const RnnProblem& p) { return p.inputs > 0 && p.steps * p.batch <= kFewRows; }

// zx of a chunk's tokens; without a packed W_ih the chunk is all tokens, which are few.
inline void input_products(const RnnProblem& p, int64_t d, const TokenRows& rows,
                           const std::optional<PackedMatrix>& packed_w_ih, void* zx, int64_t stride) {
  const auto i = static_cast<size_t>(d);
  const void* bias = p.bias.empty() ? nullptr : p.bias[i].const_data_ptr();
  const auto count = static_cast<int64_t>(rows.size());
  if (!p.has_w_ih)
    return gather(p.products, {.dtype = p.dtype,
                               .count = count,
                               .columns = p.gate_columns,
                               .rows = rows.data(),
                               .bias = bias,
                               .out = zx,
                               .out_stride = stride});
  if (packed_w_ih)
    return multiply(p.products, {.rows = count,
                                 .columns = p.gate_columns,
                                 .depth = p.inputs,
                                 .a_type = p.dtype,
                                 .a_rows = rows.data(),
                                 .packed_b = packed_w_ih->data(),
                                 .bias = bias,
                                 .c_type = p.acc_dtype,
                                 .c = zx,
                                 .c_stride = stride});
  const int64_t x_stride = p.products.row_stride(p.dtype, p.inputs);
  Tensor x = empty(p.input, {count, x_stride}, p.acc);
  gather(p.products, {.dtype = p.dtype,
                      .count = count,
                      .columns = p.inputs,
                      .rows = rows.data(),
                      .out = x.mutable_data_ptr(),
                      .out_stride = x_stride});
  multiply_few_rows(p.products, {.b = transposed(p, p.w_ih[i]),
                                 .rows = count,
                                 .a_type = p.acc_dtype,
                                 .a = x.const_data_ptr(),
                                 .a_stride = x_stride,
                                 .bias = bias,
                                 .c = zx,
                                 .c_stride = stride});
}

}  // namespace seqkern
