// The fast path of recurrent layers and cells without options of seqkern's own.
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "direct_node.h"
#include "rnn_ops.h"

namespace seqkern::direct {
namespace {

const Function<rnn_fwd> forward("rnn_fwd");
const Function<rnn_bwd> backward("rnn_bwd");
const Function<rnn_cell_fwd> cell_forward("rnn_cell_fwd");
const Function<rnn_cell_bwd> cell_backward("rnn_cell_bwd");
constexpr auto none = std::nullopt;
constexpr int64_t kLstm = 0, kGru = 1;
constexpr double kEps = 1e-5;  // of layer norms, which are not here

// ---- layers ---------------------------------------------------------------------------------------------------------

// A layer's weights of each direction by kind; those that are not there have none.
struct Weights {
  static constexpr size_t kKinds = 5;
  std::vector<NativeTensor> of[kKinds];  // w_ih, w_hh, b_ih, b_hh, w_hr

  List list(size_t kind) const {
    List tensors;
    for (const NativeTensor& t : of[kind]) tensors.push_back(stable(t));
    return tensors;
  }
};

// A node's weights by kind, and the index of each kind's first among the inputs.
Weights split(const Call& call, std::vector<size_t>& first) {
  Weights weights;
  const auto directions = static_cast<size_t>(call.saved[1].size(0));
  size_t next = 3;
  for (size_t kind = 0; kind < Weights::kKinds; ++kind) {
    first.push_back(next);
    const bool there = kind < 2 || (kind < 4 ? call.numbers[1] != 0 : call.numbers[2] != 0);
    for (size_t d = 0; there && d < directions; ++d) weights.of[kind].push_back(call.saved[next++]);
  }
  return weights;
}

// numbers: cell, then whether there are biases and a projection.
// saved: input, h0, c0 (or none), the weights kind by kind, cells, gates; then output.
const Rule kRnn("RnnNode", [](const Call& call) -> variable_list {
  std::vector<size_t> first;
  const Weights w = split(call, first);
  const size_t inputs = call.needs.size();
  const NativeTensor &input = call.saved[0], &h0 = call.saved[1], &c0 = call.saved[2];
  const NativeTensor &cells = call.saved[inputs], &gates = call.saved[inputs + 1], &output = call.saved[inputs + 2];
  const auto cell = static_cast<int64_t>(call.numbers[0]);
  const bool need_weights = std::any_of(call.needs.begin() + 3, call.needs.end(), [](bool need) { return need; });
  const Tensor nothing = stable(at::empty({0}, cells.options()));
  const auto results = backward(
      maybe(call.grads[0]), maybe(call.grads[1]), cell == kLstm ? maybe(call.grads[2]) : none, none, stable(input),
      stable(h0), maybe(c0), w.list(0), w.list(1), w.list(2), w.list(3), w.list(4), List(), List(), none, none, none,
      none, 0.0, 0.0, kEps, cell, false, stable(output), stable(cells), stable(gates), nothing, call.needs[0], need_weights);
  variable_list found(inputs);
  if (call.needs[0]) found[0] = native(std::get<0>(results));
  if (call.needs[1]) found[1] = native(std::get<1>(results));
  if (call.needs[2]) found[2] = native(std::get<2>(results));
  const NativeTensor stacked[] = {native(std::get<3>(results)), native(std::get<4>(results)),
                                  native(std::get<5>(results)), native(std::get<6>(results)),
                                  native(std::get<7>(results))};
  for (size_t kind = 0; kind < Weights::kKinds; ++kind) {
    const auto directions = w.of[kind].size();
    for (size_t d = 0; d < directions; ++d) {
      const size_t n = first[kind] + d;
      if (!call.needs[n]) continue;
      if (directions == 1) {  // nothing else holds it
        found[n] = stacked[kind];
        found[n].unsafeGetTensorImpl()->set_sizes_contiguous(w.of[kind][d].sizes());
      } else {
        found[n] = stacked[kind].select(0, static_cast<int64_t>(d));
      }
    }
  }
  return found;
});

// One layer: output, h_n and, of an LSTM, c_n. With history where it is wanted.
variable_list layer(const NativeTensor& input, const NativeTensor& h0, const NativeTensor& c0, const Weights& w,
                    int64_t cell) {
  std::vector<const NativeTensor*> inputs{&input, &h0, &c0};
  for (const auto& kind : w.of)
    for (const NativeTensor& t : kind) inputs.push_back(&t);
  const bool keep = wanted(inputs);
  const auto [output, h_n, c_n, cells, gates, products] =
      forward(stable(input), stable(h0), maybe(c0), w.list(0), w.list(1), w.list(2), w.list(3), w.list(4), List(),
              List(), none, none, none, none, 0.0, 0.0, kEps, cell, false, keep);
  variable_list results{native(output), native(h_n)};
  if (cell == kLstm) results.push_back(native(c_n));
  if (!keep) return results;
  Record record{.rule = kRnn,
                .inputs = std::move(inputs),
                .results = results,
                .saved = {},
                .saved_results = {0},
                .kept = {},
                .numbers = {static_cast<double>(cell), static_cast<double>(!w.of[2].empty()),
                            static_cast<double>(!w.of[4].empty())}};
  for (const NativeTensor* t : record.inputs) record.saved.push_back(*t);
  record.saved.push_back(native(cells));
  record.saved.push_back(native(gates));
  remember(std::move(record));
  return results;
}

// The states of one layer: rows of a tensor of all.
NativeTensor rows(const NativeTensor& states, int64_t layer, int64_t layers, int64_t directions) {
  return layers == 1 || !states.defined() ? states : states.narrow(0, layer * directions, directions);
}

// (cell, input, hx or None, list of weights, layers, bidirectional, batch_first)
// -> (output, h_n), of an LSTM (output, (h_n, c_n)).
PyObject* network(PyObject* const* arguments, Py_ssize_t) {
  int64_t cell, layers;
  bool bidirectional, batch_first;
  const NativeTensor* given = read(arguments[1]);
  if (!given || given->dim() != 3 || !read_integer(arguments[0], cell) || !read_integer(arguments[4], layers) ||
      !read_flag(arguments[5], bidirectional) || !read_flag(arguments[6], batch_first))
    return nullptr;
  const bool lstm = cell == kLstm;
  PyObject *hx = arguments[2], *list = arguments[3];
  if (!PyList_CheckExact(list) || layers < 1) return nullptr;
  const int64_t directions = bidirectional ? 2 : 1, cells = layers * directions, count = PyList_GET_SIZE(list);
  const int64_t each = count / cells;
  if (count % cells != 0 || each < 2 || each > (lstm ? 5 : 4) || (!lstm && each % 2 != 0)) return nullptr;
  const bool bias = each >= 4, projected = each % 2 != 0;
  std::vector<NativeTensor> weights;
  weights.reserve(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) {
    const NativeTensor* t = read(PyList_GET_ITEM(list, n));
    if (!t || t->scalar_type() != given->scalar_type() || t->dim() != (n % each < 2 || (projected && n % each == each - 1) ? 2 : 1))
      return nullptr;
    weights.push_back(*t);
  }
  const int64_t batch = given->size(batch_first ? 0 : 1);
  const int64_t width = weights[1].size(1), hidden = projected ? weights[static_cast<size_t>(each - 1)].size(1) : width;
  if (projected && !(0 < width && width < hidden)) return nullptr;

  NativeTensor h0, c0;
  const auto read_state = [&](PyObject* object, int64_t columns, NativeTensor& state) {
    const NativeTensor* t = read(object);
    if (!t || t->scalar_type() != given->scalar_type() || t->sizes() != at::IntArrayRef({cells, batch, columns}))
      return false;
    state = *t;
    return true;
  };
  if (hx == Py_None) {
    h0 = at::zeros({cells, batch, width}, given->options().requires_grad(false));
    if (lstm) c0 = at::zeros({cells, batch, hidden}, given->options().requires_grad(false));
  } else if (lstm) {
    if (!PyTuple_CheckExact(hx) || PyTuple_GET_SIZE(hx) != 2) return nullptr;
    if (!read_state(PyTuple_GET_ITEM(hx, 0), width, h0) || !read_state(PyTuple_GET_ITEM(hx, 1), hidden, c0))
      return nullptr;
  } else if (!read_state(hx, width, h0)) {
    return nullptr;
  }

  NativeTensor x;
  std::vector<variable_list> states(lstm ? 2 : 1);
  {
    const WithoutPython free;
    x = batch_first ? given->transpose(0, 1) : *given;
    for (int64_t n = 0; n < layers; ++n) {
      Weights w;
      for (int64_t d = 0; d < directions; ++d) {
        const auto first = weights.begin() + (n * directions + d) * each;
        for (int64_t k = 0; k < (bias ? 4 : 2); ++k) w.of[k].push_back(first[k]);
        if (projected) w.of[4].push_back(first[each - 1]);
      }
      const variable_list results = layer(x, rows(h0, n, layers, directions), rows(c0, n, layers, directions), w, cell);
      x = results[0];
      for (size_t k = 0; k < states.size(); ++k) states[k].push_back(results[k + 1]);
    }
    if (batch_first) x = x.transpose(0, 1);
    for (variable_list& each_state : states)
      if (layers > 1) each_state = {at::cat(each_state)};
  }
  if (!lstm) return tuple({wrap(x), wrap(states[0][0])});
  return tuple({wrap(x), tuple({wrap(states[0][0]), wrap(states[1][0])})});
}

// ---- cells ----------------------------------------------------------------------------------------------------------

// saved: x_gates, h_gates, h, c (or none), activated, then c_new of an LSTM.
const Rule kCell("RnnCellNode", [](const Call& call) -> variable_list {
  const auto cell = static_cast<int64_t>(call.numbers[0]);
  const bool lstm = cell == kLstm;
  const NativeTensor &h = call.saved[2], &c = call.saved[3], &activated = call.saved[4];
  if (!call.grads[0].defined()) return {};
  const auto [grad_x, grad_h_gates, grad_h, grad_c] =
      cell_backward(stable(call.grads[0]), lstm ? maybe(call.grads[1]) : none, stable(h), maybe(c),
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
    const auto [h_result, c_result, activated] =
        cell_forward(stable(x_gates), stable(h_gates), stable(*h), maybe(c), cell);
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

SK_FRONT(rnn, 7, network)
SK_FRONT(rnn_cell, 7, step)

}  // namespace
}  // namespace seqkern::direct
