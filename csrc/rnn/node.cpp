// The fast path of recurrent layers without options of seqkern's own.
#include "node.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<rnn_fwd> forward("rnn_fwd");
const Function<rnn_bwd> backward("rnn_bwd");
constexpr auto none = std::nullopt;
constexpr int64_t kLstm = 0;
constexpr double kEps = 1e-5;  // of layer norms, which are not here

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
  const auto results = backward(maybe(call.grads[0]), maybe(call.grads[1]), cell == kLstm ? maybe(call.grads[2]) : none,
                                none, stable(input), stable(h0), maybe(c0), w.list(0), w.list(1), w.list(2), w.list(3),
                                w.list(4), List(), List(), none, none, none, none, 0.0, 0.0, kEps, cell, stable(output),
                                stable(cells), stable(gates), nothing, call.needs[0], need_weights);
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
              List(), none, none, none, none, 0.0, 0.0, kEps, cell, keep);
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
    if (!t || t->scalar_type() != given->scalar_type() ||
        t->dim() != (n % each < 2 || (projected && n % each == each - 1) ? 2 : 1))
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

SK_FRONT(rnn, 7, network)

}  // namespace
}  // namespace seqkern::direct
