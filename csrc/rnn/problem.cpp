#include "problem.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace seqkern {
namespace {

template <class A>
void add_bias(A* sum, const void* bias, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<const A*>(bias)[i];
}

Tensors contiguous_list(const Tensors& list) {
  Tensors result;
  for (const Tensor& t : list) result.push_back(as_contiguous(t));
  return result;
}

}  // namespace

void check_like(const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type, const char* op,
                const char* argument) {
  check_cpu(t, op, argument);
  check_type(t, type, op, argument);
  check_dim(t, static_cast<int64_t>(sizes.size()), op, argument);
  int64_t dim = 0;
  for (int64_t size : sizes) check_size(t, dim++, size, op, argument);
}

Cell cell_of(int64_t cell, const char* op) {
  SK_CHECK(cell >= 0 && cell <= 5, op,
           ": cell must be 0 (LSTM), 1 (GRU), 2 (tanh), 3 (relu), 4 (additive) or 5 (interpolated), got ", cell);
  return static_cast<Cell>(cell);
}

RnnProblem::RnnProblem(const RnnArguments& a)
    : op(a.op),
      dtype(dtype_of(a.input, a.op, "input")),
      acc_dtype(dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32),
      operand_dtype(product_kernels_for(dtype).operand_type(dtype)),
      type(a.input.scalar_type()),
      acc(acc_type(dtype)),
      operand(operand_dtype == acc_dtype ? acc : type),
      kernels(rnn_kernels_for(dtype)),
      products(product_kernels_for(dtype)),
      cell(cell_of(a.cell, a.op)),
      input(a.input),
      h0(a.h0) {
  check_cpu(a.input, op, "input");
  check_dim(a.input, 3, op, "input");
  check_dim(a.h0, 3, op, "h0");
  const bool lstm = cell == Cell::lstm;
  steps = a.input.size(0), batch = a.input.size(1), directions = a.h0.size(0), width = a.h0.size(2);
  SK_CHECK(directions == 1 || directions == 2, op, ": h0 must have 1 or 2 directions, got ", directions);
  check_like(a.h0, {directions, batch, width}, type, op, "h0");
  SK_CHECK(a.c0.has_value() == lstm, op, ": c0 is for LSTM, which needs it");
  hidden = width;
  if (lstm) {
    check_dim(*a.c0, 3, op, "c0");
    hidden = a.c0->size(2);
    check_like(*a.c0, {directions, batch, hidden}, type, op, "c0");
  }

  const auto check_list = [&](const Tensors& list, std::initializer_list<int64_t> sizes, ScalarType of,
                              const char* argument, bool required = false) {
    SK_CHECK((list.empty() && !required) || static_cast<int64_t>(list.size()) == directions, op, ": ", argument,
             " must have one tensor for each of ", directions, " directions", required ? "" : " or none", ", got ",
             list.size());
    for (const Tensor& t : list) check_like(t, sizes, of, op, argument);
    return !list.empty();
  };
  const int64_t gates = gate_count(cell);
  gate_columns = checked_product({gates, hidden}, op);
  saved_columns = checked_product({saved_count(cell), hidden}, op);
  has_w_ih = !a.w_ih.empty();
  inputs = has_w_ih ? a.input.size(2) : gate_columns;
  if (!has_w_ih) check_size(a.input, 2, checked_product({directions, gate_columns}, op), op, "input");
  check_list(a.w_ih, {gate_columns, inputs}, type, "w_ih");
  check_list(a.w_hh, {gate_columns, width}, type, "w_hh", true);
  const bool has_b_ih = check_list(a.b_ih, {gate_columns}, type, "b_ih");
  const bool has_b_hh = check_list(a.b_hh, {gate_columns}, type, "b_hh");
  SK_CHECK(has_w_ih ? has_b_ih == has_b_hh : !has_b_ih, op,
           ": b_ih and b_hh must both be given or both be empty; without w_ih, b_ih is part of input");
  has_w_hr = check_list(a.w_hr, {width, hidden}, type, "w_hr");
  SK_CHECK(has_w_hr ? lstm : hidden == width, op, ": h0 of width ", width, " and c0 of width ", hidden,
           " need w_hr, which is for LSTM");
  SK_CHECK(!has_w_hr || width > 0, op, ": w_hr must have rows, got none");
  has_peephole = check_list(a.peephole, {3, hidden}, type, "peephole");
  SK_CHECK(!has_peephole || lstm, op, ": peephole is for LSTM");
  has_norm = check_list(a.norm, {norm_columns(cell, hidden)}, acc, "norm");
  // The sizes that will be allocated, and a little more for padding.
  checked_product({16, directions, std::max<int64_t>(steps, 1), batch, saved_columns + width + inputs + 1024}, op);
  checked_product({16, directions, saved_columns + 1024, width + inputs + 1024}, op);

  const auto list_as = [&](const Tensors& list) {
    Tensors result;
    for (const Tensor& t : list) result.push_back(as_contiguous(as_type(t, acc)));
    return result;
  };
  input = as_contiguous(a.input), h0 = as_contiguous(a.h0);
  if (lstm) c0 = as_contiguous(as_type(*a.c0, acc));
  w_ih = contiguous_list(a.w_ih), w_hh = contiguous_list(a.w_hh), w_hr = contiguous_list(a.w_hr);
  norm = contiguous_list(a.norm);
  peephole = list_as(a.peephole);
  const Tensors input_bias = list_as(a.b_ih), hidden_bias = list_as(a.b_hh);
  for (size_t d = 0; d < hidden_bias.size(); ++d) {
    Tensor sum = zeros(input, {gate_columns}, acc);
    const auto add = [&](const Tensor& b, int64_t count) {
      if (dtype == Dtype::f64) add_bias(static_cast<double*>(sum.mutable_data_ptr()), b.const_data_ptr(), count);
      else add_bias(static_cast<float*>(sum.mutable_data_ptr()), b.const_data_ptr(), count);
    };
    if (has_b_ih) add(input_bias[d], gate_columns);
    add(hidden_bias[d], cell == Cell::gru ? 2 * hidden : gate_columns);
    bias.push_back(sum);
    if (cell == Cell::gru) b_hn.push_back(hidden_bias[d]);
  }

  has_mask = a.recurrent_mask.has_value();
  if (has_mask) {
    check_like(*a.recurrent_mask, {directions, batch, width}, acc, op, "recurrent_mask");
    mask = as_contiguous(*a.recurrent_mask);
  }
  if (a.resets) {
    check_like(*a.resets, {steps, batch}, ScalarType::Bool, op, "resets");
    resets = as_contiguous(*a.resets);
  }
  has_lengths = a.lengths.has_value();
  std::vector<int64_t> lengths(static_cast<size_t>(batch), steps);
  if (has_lengths) {
    check_like(*a.lengths, {batch}, ScalarType::Long, op, "lengths");
    const Tensor given = as_contiguous(*a.lengths);
    for (int64_t b = 0; b < batch; ++b) {
      lengths[b] = static_cast<const int64_t*>(given.const_data_ptr())[b];
      SK_CHECK(lengths[b] >= 0 && lengths[b] <= steps, op, ": lengths must be between 0 and ", steps, ", got ",
               lengths[b]);
    }
  }
  order.resize(static_cast<size_t>(batch));
  std::iota(order.begin(), order.end(), int64_t{0});
  if (has_lengths)
    std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return lengths[x] > lengths[y]; });
  active.resize(static_cast<size_t>(steps));
  starts.resize(static_cast<size_t>(steps + 1));
  int64_t count = batch;
  for (int64_t t = 0; t < steps; ++t) {
    while (count > 0 && lengths[order[count - 1]] <= t) --count;
    active[t] = count;
    starts[t + 1] = starts[t] + count;
  }

  Zoneout zoneout;
  const double p[2] = {a.zoneout_h, a.zoneout_c};
  for (int k = 0; k < 2; ++k) {
    SK_CHECK(p[k] >= 0 && p[k] <= 1, op, ": zoneout must be between 0 and 1, got ", p[k]);
    zoneout.p[k] = k == 1 && !lstm ? 0 : p[k];
    zoneout.active |= zoneout.p[k] > 0;
  }
  if (a.seed) {
    check_cpu(*a.seed, op, "seed");
    check_type(*a.seed, ScalarType::Long, op, "seed");
    SK_CHECK(a.seed->numel() == 1, op, ": seed must have one element, got ", a.seed->numel());
    zoneout.training = true;
    const auto seed = static_cast<uint64_t>(*static_cast<const int64_t*>(a.seed->const_data_ptr()));
    for (int k = 0; k < 2; ++k) zoneout.mask[k] = Dropout::with(zoneout.p[k], seed);
  }
  layer = {.dtype = dtype,
           .cell = cell,
           .steps = steps,
           .batch = batch,
           .inputs = has_w_ih ? inputs : 0,
           .hidden = hidden,
           .width = width,
           .norm = has_norm,
           .project = has_w_hr,
           .eps = a.eps,
           .zoneout = zoneout,
           .order = order.data(),
           .active = active.data(),
           .starts = starts.data(),
           .resets = resets ? static_cast<const uint8_t*>(resets->const_data_ptr()) : nullptr};
}

RnnDirection RnnProblem::direction(int64_t d) const {
  const auto i = static_cast<size_t>(d);
  const auto address = [&](const Tensors& list, int64_t element) -> const void* {
    return list.empty() ? nullptr : at(list[i], element);
  };
  return {.index = d,
          .reverse = is_reverse(d),
          .b_hn = address(b_hn, 2 * hidden),
          .peephole = address(peephole, 0),
          .norm = address(norm, 0),
          .mask = mask ? at(*mask, d * batch * width) : nullptr};
}

}  // namespace seqkern
