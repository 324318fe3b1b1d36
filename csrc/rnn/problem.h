// A checked recurrent layer: its sizes, its inputs as the kernels read them, and the order of its rows.
#pragma once

#include <cstring>
#include <optional>
#include <vector>

#include "rnn.h"
#include "tensor.h"

namespace seqkern {

using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

// The arguments that forward and backward share, unchecked.
struct RnnArguments {
  const char* op;
  const Tensor &input, &h0;
  const MaybeTensor& c0;
  const Tensors &w_ih, &w_hh, &b_ih, &b_hh, &w_hr, &peephole, &norm;
  const MaybeTensor &lengths, &resets, &recurrent_mask, &seed;
  double zoneout_h, zoneout_c, eps;
  int64_t cell;
};

// The second direction of a layer visits the last step first.
inline bool is_reverse(int64_t direction) { return direction == 1; }

struct RnnProblem {
  const char* op;
  Dtype dtype, acc_dtype, operand_dtype;
  ScalarType type, acc, operand;
  const RnnKernels& kernels;
  const ProductKernels& products;
  Cell cell;
  int64_t steps, batch, inputs, hidden, width, directions;
  int64_t gate_columns, saved_columns;  // of each direction
  bool has_w_ih, has_peephole, has_norm, has_mask, has_w_hr, has_lengths;
  // All contiguous. c0, bias, b_hn, peephole and mask in the accumulation type.
  Tensor input, h0;
  MaybeTensor c0, mask, resets;
  Tensors w_ih, w_hh, w_hr, bias, b_hn, peephole, norm;  // bias: all but b_hn, in one

  RnnLayer layer;
  std::vector<int64_t> order, active, starts;

  explicit RnnProblem(const RnnArguments& a);
  RnnProblem(const RnnProblem&) = delete;

  bool empty() const { return steps == 0 || batch == 0 || hidden == 0 || width == 0; }
  bool wide() const { return has_norm || has_w_hr; }
  RnnDirection direction(int64_t d) const;

  // Calls f(t, row, place) for the tokens of steps [begin, end) of direction d, in order.
  template <class F>
  void for_tokens(int64_t d, int64_t begin, int64_t end, const F& f) const {
    const int64_t first = is_reverse(d) ? steps - end : begin;
    for (int64_t t = first; t < first + end - begin; ++t)
      for (int64_t g = 0; g < active[t]; ++g) f(t, order[g], g);
  }
  int64_t token_count(int64_t d, int64_t begin, int64_t end) const {
    return is_reverse(d) ? starts[steps - begin] - starts[steps - end] : starts[end] - starts[begin];
  }
};

void check_like(const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type, const char* op,
                const char* argument);
Cell cell_of(int64_t cell, const char* op);

inline Tensor as_type(const Tensor& t, ScalarType type) {
  return t.scalar_type() == type ? t : torch::stable::to(t, type);
}
// A contiguous copy, which may be written to or returned.
inline Tensor as_type_copy(const Tensor& t, ScalarType type) {
  if (t.scalar_type() == type && t.is_contiguous()) {
    Tensor copy = empty(t, t.sizes(), type);
    if (t.numel() > 0) std::memcpy(copy.mutable_data_ptr(), t.const_data_ptr(), t.numel() * t.element_size());
    return copy;
  }
  return torch::stable::to(t, type, std::nullopt, std::nullopt, std::nullopt, false, /*copy=*/true,
                           torch::headeronly::MemoryFormat::Contiguous);
}
inline Tensor zeros(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType type) {
  Tensor t = empty(like, sizes, type);
  if (t.numel() > 0) std::memset(t.mutable_data_ptr(), 0, t.numel() * t.element_size());
  return t;
}

inline const char* at(const Tensor& t, int64_t element) {
  return static_cast<const char*>(t.const_data_ptr()) + element * static_cast<int64_t>(t.element_size());
}
inline char* at(Tensor& t, int64_t element) {
  return static_cast<char*>(t.mutable_data_ptr()) + element * static_cast<int64_t>(t.element_size());
}

}  // namespace seqkern
