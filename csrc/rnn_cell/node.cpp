// The fast path of recurrent cells: two products by torch, and the step.
#include "node.h"

#include <ATen/ops/linear.h>

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<rnn_cell_fwd> forward("rnn_cell_fwd");
const Function<rnn_cell_bwd> backward("rnn_cell_bwd");
constexpr auto none = std::nullopt;
constexpr int64_t kLstm = 0, kGru = 1;

// saved: x_gates, h_gates, h, c (or none), activated, then c_new of an LSTM.
const Rule kCell("RnnCellNode", [](const Call& call) -> variable_list {
  const auto cell = static_cast<int64_t>(call.numbers[0]);
  const bool lstm = cell == kLstm;
  const NativeTensor &h = call.saved[2], &c = call.saved[3], &activated = call.saved[4];
  if (!call.grads[0].defined()) return {};
  const auto [grad_x, grad_h_gates, grad_h, grad_c] =
      backward(stable(call.grads[0]), lstm ? maybe(call.grads[1]) : none, stable(h), maybe(c),
               lstm ? maybe(call.saved[5]) : none, stable(activated), cell);
  const auto needed = [&](size_t n, const Tensor& t) { return call.needs[n] ? native(t) : NativeTensor(); };
  const bool gru = cell == kGru;
  return {needed(0, grad_x), needed(1, gru ? grad_h_gates : grad_x), gru ? needed(2, grad_h) : NativeTensor(),
          lstm ? needed(3, grad_c) : NativeTensor()};
});

// (cell, input, hx, w_ih, w_hh, b_ih, b_hh) -> h, of an LSTM (h, c).
PyObject* step(PyObject* const* arguments, Py_ssize_t) {
  int64_t cell;
  const NativeTensor* input = read(arguments[1]);
  if (!input || input->dim() != 2 || !read_integer(arguments[0], cell)) return nullptr;
  const bool lstm = cell == kLstm;
  PyObject* hx = arguments[2];
  const NativeTensor *h = nullptr, *w_ih = read(arguments[3]), *w_hh = read(arguments[4]);
  NativeTensor c, b_ih, b_hh;
  if (lstm) {
    if (!PyTuple_CheckExact(hx) || PyTuple_GET_SIZE(hx) != 2) return nullptr;
    h = read(PyTuple_GET_ITEM(hx, 0));
    const NativeTensor* found = read(PyTuple_GET_ITEM(hx, 1));
    if (!found) return nullptr;
    c = *found;
  } else {
    h = read(hx);
  }
  if (!h || !w_ih || !w_hh || !read_optional(arguments[5], b_ih) || !read_optional(arguments[6], b_hh)) return nullptr;
  if (w_ih->dim() != 2 || w_hh->dim() != 2) return nullptr;
  const int64_t batch = input->size(0), hidden = w_hh->size(1), gates = (lstm ? 4 : cell == kGru ? 3 : 1) * hidden;
  const auto is = [&](const NativeTensor& t, at::IntArrayRef sizes) {
    return t.sizes() == sizes && t.scalar_type() == input->scalar_type();
  };
  if (!is(*h, {batch, hidden}) || (lstm && !is(c, {batch, hidden}))) return nullptr;
  if (!is(*w_ih, {gates, input->size(1)}) || !is(*w_hh, {gates, hidden})) return nullptr;
  if ((b_ih.defined() && !is(b_ih, {gates})) || (b_hh.defined() && !is(b_hh, {gates}))) return nullptr;

  NativeTensor x_gates, h_gates, h_new, c_new;
  const auto bias = [](const NativeTensor& b) { return b.defined() ? std::optional<NativeTensor>(b) : none; };
  {
    const WithoutPython free;
    x_gates = at::linear(*input, *w_ih, bias(b_ih)), h_gates = at::linear(*h, *w_hh, bias(b_hh));
    const auto [h_result, c_result, activated] = forward(stable(x_gates), stable(h_gates), stable(*h), maybe(c), cell);
    h_new = native(h_result), c_new = native(c_result);
    if (wanted({&x_gates, &h_gates, h, &c})) {
      Record record{.rule = kCell,
                    .inputs = {&x_gates, &h_gates, h, &c},
                    .results = {h_new},
                    .saved = {x_gates, h_gates, *h, c, native(activated)},
                    .saved_results = {},
                    .kept = {},
                    .numbers = {static_cast<double>(cell)}};
      if (lstm) record.results.push_back(c_new), record.saved_results.push_back(1);
      remember(std::move(record));
    }
  }
  return lstm ? tuple({wrap(h_new), wrap(c_new)}) : wrap(h_new);
}

SK_FRONT(rnn_cell, 7, step)

}  // namespace
}  // namespace seqkern::direct
