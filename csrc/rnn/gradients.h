// From the gradients of the gates to those of inputs and weights, a chunk of steps at a time.
#pragma once

#include "inputs.h"
#include "work.h"

namespace seqkern {

// The gradients of inputs and weights, and the products that add a chunk to them.
struct RnnGradientProducts {
  const RnnProblem& p;
  const bool need_input, need_weights, at_once;  // at_once: there is one chunk, which writes the final gradients
  Tensor input, w_ih, w_hh, w_hr;  // weights: acc, or dtype if at_once; input: dtype if each row is written once
  std::vector<PackedMatrix> packed_w_ih;

  RnnGradientProducts(const RnnProblem& p_, bool need_input_, bool need_weights_)
      : p(p_),
        need_input(need_input_),
        need_weights(need_weights_),
        at_once(chunk_steps(p_) >= p_.steps),
        input(input_tensor()),
        w_ih(sum(need_weights && p.has_w_ih, p.gate_columns, p.inputs)),
        w_hh(sum(need_weights, p.gate_columns, p.width)),
        w_hr(sum(need_weights && p.has_w_hr, p.width, p.hidden)) {
    if (!need_input || !p.has_w_ih || p.empty() || direct_input()) return;
    for (const Tensor& w : p.w_ih) packed_w_ih.push_back(pack(p.products, rows_of(w)));
  }

  // Adds a chunk, from the rows of its tokens: x, the previous step's h (in acc if there is a mask), and the gradients
  // by token in `a`. A direction's first chunk overwrites the sums.
  void add(int64_t d, const TokenRows& x, const TokenRows& h, const RnnBackward& a, bool first) {
    if (need_input) add_input(d, x, a);
    if (!need_weights) return;
    const bool few = static_cast<int64_t>(x.size()) <= kFewTerms && !p.has_w_hr;
    if (few) add_outer_products(d, x, h, a, first);
    else add_products(d, x, h, a, first);
  }

 private:
  // The columns of grad_z that come before the recurrent side's: of n, for a GRU.
  int64_t front() const { return recurrent_part(p.cell) * p.hidden; }
  const void* column(const void* base, int64_t first) const {
    return static_cast<const char*>(base) + first * size_of(p.operand_dtype);
  }
  // The gradients of the raw products with W_hh.
  const void* recurrent(const RnnBackward& a) const { return p.has_norm ? a.grad_zh : column(a.grad_z, front()); }
  Dtype sum_type() const { return at_once ? p.dtype : p.acc_dtype; }
  // Row `row` of direction d's sum.
  void* sum_row(Tensor& sum, int64_t d, int64_t row) const { return at(sum, (d * sum.size(1) + row) * sum.size(2)); }

  // For few tokens.
  void add_outer_products(int64_t d, const TokenRows& x, const TokenRows& h, const RnnBackward& a, bool first) {
    const auto add = [&](const void* source, int64_t columns, const TokenRows& rows, Dtype type, Tensor& sum,
                         int64_t row) {
      add_outer(p.products, {.rows = columns,
                             .columns = sum.size(2),
                             .terms = static_cast<int64_t>(rows.size()),
                             .a = source,
                             .a_stride = a.grad_z_stride,
                             .b_type = type,
                             .b_rows = rows.data(),
                             .c_type = sum_type(),
                             .c = sum_row(sum, d, row),
                             .c_stride = sum.size(2),
                             .accumulate = !first});
    };
    if (p.has_w_ih && front() > 0) add(a.grad_z, front(), x, p.dtype, w_ih, 2 * p.hidden);
    if (p.has_w_ih) add(column(a.grad_z, front()), p.gate_columns - front(), x, p.dtype, w_ih, 0);
    add(recurrent(a), p.gate_columns, h, p.has_mask ? p.acc_dtype : p.dtype, w_hh, 0);
  }
  void add_products(int64_t d, const TokenRows& x, const TokenRows& h, const RnnBackward& a, bool first) {
    const auto tokens = static_cast<int64_t>(x.size());
    const int64_t stride = a.grad_z_stride, H = p.hidden, P = p.width;
    // Adds A^T B to rows of the sum, for `columns` columns of A.
    const auto add = [&](Dtype type, const void* source, int64_t source_stride, int64_t columns,
                         const PackedMatrix& packed, Tensor& sum, int64_t row) {
      multiply(p.products, {.rows = columns,
                            .columns = sum.size(2),
                            .depth = tokens,
                            .a_type = type,
                            .a = source,
                            .a_row_stride = 1,
                            .a_k_stride = source_stride,
                            .packed_b = packed.data(),
                            .c_type = sum_type(),
                            .c = sum_row(sum, d, row),
                            .c_stride = sum.size(2),
                            .accumulate = !first});
    };
    if (p.has_w_ih) {
      const PackedMatrix packed = pack(p.products, of_rows(p, x, p.inputs));
      if (front() > 0) add(p.operand_dtype, a.grad_z, stride, front(), packed, w_ih, 2 * H);
      add(p.operand_dtype, column(a.grad_z, front()), stride, p.gate_columns - front(), packed, w_ih, 0);
    }
    add(p.operand_dtype, recurrent(a), stride, p.gate_columns, pack(p.products, of_rows(p, h, P, p.has_mask)), w_hh, 0);
    if (!p.has_w_hr) return;
    const Matrix h_wide{.dtype = p.acc_dtype, .data = a.h_wide, .k_stride = H, .depth = tokens, .columns = H};
    add(p.acc_dtype, a.grad_h_hat, P, P, pack(p.products, h_wide), w_hr, 0);
  }

  // W_ih with its rows in the order of grad_z's columns: a GRU's begin with those of n.
  Matrix rows_of(const Tensor& w) const {
    Matrix b = as_stored(p, w);
    if (p.cell == Cell::gru) b.first_row = 2 * p.hidden;
    return b;
  }
  Tensor sum(bool needed, int64_t rows, int64_t columns) const {
    if (!needed) return empty(p.input, {0}, p.acc);
    const ScalarType type = at_once ? p.type : p.acc;
    return p.empty() ? zeros(p.input, {p.directions, rows, columns}, type)
                     : empty(p.input, {p.directions, rows, columns}, type);
  }
  bool direct_input() const { return few_tokens(p) && !both(); }
  bool both() const { return p.has_w_ih && p.directions == 2; }
  Tensor input_tensor() const {
    if (!need_input) return empty(p.input, {0}, p.type);
    const int64_t columns = p.input.size(2);
    if (both()) return zeros(p.input, {p.steps, p.batch, columns}, p.acc);
    return p.has_lengths || p.empty() ? zeros(p.input, {p.steps, p.batch, columns}, p.type)
                                      : empty(p.input, {p.steps, p.batch, columns}, p.type);
  }

  void add_input(int64_t d, const TokenRows& x, const RnnBackward& a) {
    const auto i = static_cast<size_t>(d);
    const int64_t columns = p.input.size(2), tokens = static_cast<int64_t>(x.size());
    const auto element = static_cast<int64_t>(p.input.element_size()), own = static_cast<int64_t>(input.element_size());
    std::vector<void*> rows;
    for (const void* row : x) {
      const int64_t offset =
          (static_cast<const char*>(row) - static_cast<const char*>(p.input.const_data_ptr())) / element;
      rows.push_back(static_cast<char*>(input.mutable_data_ptr()) + offset * own);
    }
    const auto scatter_rows = [&](Dtype type, const void* source, int64_t stride, int64_t count, int64_t to) {
      scatter(p.products, {.source_type = type,
                           .source = source,
                           .source_stride = stride,
                           .dtype = p.dtype,
                           .count = tokens,
                           .columns = count,
                           .rows = rows.data(),
                           .column = to});
    };
    if (p.has_w_ih && direct_input()) {
      const int64_t stride = p.products.row_stride(p.dtype, columns);
      Tensor sums = empty(p.input, {tokens, stride}, p.acc);
      multiply_few_rows(p.products, {.b = rows_of(p.w_ih[i]),
                                     .rows = tokens,
                                     .a_type = p.operand_dtype,
                                     .a = a.grad_z,
                                     .a_stride = a.grad_z_stride,
                                     .c = sums.mutable_data_ptr(),
                                     .c_stride = stride});
      return scatter_rows(p.acc_dtype, sums.const_data_ptr(), stride, columns, 0);
    }
    if (p.has_w_ih)
      return multiply(p.products, {.rows = tokens,
                                   .columns = columns,
                                   .depth = p.gate_columns,
                                   .a_type = p.operand_dtype,
                                   .a = a.grad_z,
                                   .a_row_stride = a.grad_z_stride,
                                   .packed_b = packed_w_ih[i].data(),
                                   .c_type = both() ? p.acc_dtype : p.dtype,
                                   .c_stride = columns,
                                   .c_rows = rows.data(),
                                   .accumulate = both()});
    if (front() > 0) scatter_rows(p.operand_dtype, a.grad_z, a.grad_z_stride, front(), 2 * p.hidden);
    scatter_rows(p.operand_dtype, column(a.grad_z, front()), a.grad_z_stride, p.gate_columns - front(), 0);
  }
};

}  // namespace seqkern
