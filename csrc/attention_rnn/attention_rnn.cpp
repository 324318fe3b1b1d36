// A recurrent decoder that attends in every step, on CPU, host side.
//
// A step is cut into turns, which need all of the turn before: products with the weights, of which every worker has its
// own columns, and with them its own part of the weights in cache, for all rows; and between them what belongs to rows
// (the cell, attention), of which every worker has its own. The workers of a share of the rows are a team (rnn/team.h).
//
// What is saved in the accumulation type lies step by step, (steps, batch, .), so that rows of a step are neighbours.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "decoder.h"

namespace seqkern {
namespace {

// ---- forward --------------------------------------------------------------------------------------------------------

// h, the contexts, attended states, queries (batch, steps, .) in dtype; weights (batch, steps, keys), cells and
// activated gates (steps, batch, .) in the accumulation type.
struct Outputs {
  Tensor h, c_last, context, attended, query, weights, cells, activated;
};

// A step's turns, in Bahdanau's order: query, attend, gates, cell; in Luong's: gates, cell, query, attend, output.
// Those of columns are query, gates and output.
class Forward {
 public:
  Forward(const Decoder& d, const Tensor& x_gates, const Outputs& results)
      : of(d),
        out(results),
        x(d.rows_of(x_gates)),
        h(d.rows_of(out.h)),
        context(d.rows_of(out.context)),
        attended(d.rows_of(out.attended)),
        query(d.rows_of(out.query)),
        w(d, false),
        memory_(bytes()),
        m(pieces_of(Pieces(memory_.data()))) {}

  void run() {
    using Turn = void (Forward::*)(const Part&, int64_t) const;
    std::vector<Turn> turns;
    if (of.luong) turns = {&Forward::gates, &Forward::cell};
    if (of.w_query_) turns.push_back(&Forward::ask);
    turns.push_back(&Forward::attend);
    if (of.luong) turns.insert(turns.end(), {&Forward::output, &Forward::activate});
    else turns.insert(turns.end(), {&Forward::gates, &Forward::cell});
    const auto count = static_cast<int64_t>(turns.size());
    of.for_turns(of.steps * count, std::max(of.product_scratch(), of.kernels.attend_scratch(of.attend.of)),
                 [&](const Part& part, int64_t number) {
                   (this->*turns[static_cast<size_t>(number % count)])(part, number / count);
                 });
  }

 private:
  struct Memory {
    void *x, *h_gates, *h, *h_new, *c, *output;
  };
  Memory pieces_of(Pieces&& pieces) const {
    const auto take = [&](int64_t columns) -> void* { return pieces.take<char>(of.batch * columns * of.wide_size); };
    return {.x = take(of.gates),
            .h_gates = take(of.gates),
            .h = take(of.hidden),
            .h_new = take(of.hidden),
            .c = take(of.hidden),
            .output = take(of.outputs)};
  }
  int64_t bytes() const {
    Pieces sizes(nullptr);
    pieces_of(std::move(sizes));
    return sizes.bytes();
  }
  const void* before(int64_t b, int64_t t) const { return t ? h.at(b, t - 1) : Decoder::row_of(of.h_, b); }
  const void* asking(int64_t b, int64_t t) const { return of.luong ? h.at(b, t) : before(b, t); }

  void ask(const Part& part, int64_t t) const {
    Mover all(of, part.all);
    w.project.rows(part, all.addresses([&](int64_t b) { return asking(b, t); }), query, t, of.b_query_);
  }
  void attend(const Part& part, int64_t t) const {
    const bool asks = of.w_query_.has_value();
    for (int64_t b = part.own.begin; b < part.own.begin + part.own.rows; ++b) {
      if (!asks && !of.luong) std::memcpy(query.at(b, t), asking(b, t), static_cast<size_t>(query.row_bytes));
      of.kernels.attend(of.attend, b, t, asks || !of.luong ? query.at(b, t) : h.at(b, t), part.scratch);
    }
  }
  void gates(const Part& part, int64_t t) const {
    Mover all(of, part.all);
    const auto fed = [&](int64_t b) -> const void* {
      if (!of.luong) return context.at(b, t);
      return t ? attended.at(b, t - 1) : Decoder::row_of(of.feed_, b);
    };
    w.feed.rows(part, all.addresses(fed), m.x, std::nullopt, false);
    w.recurrent.rows(part, all.addresses([&](int64_t b) { return before(b, t); }), m.h_gates, of.b_hh_, false);
  }
  void cell(const Part& part, int64_t t) const {
    Mover own(of, part.own);
    own.add(own.step(x, t), of.gates, m.x);
    if (!of.lstm) own.gather(own.addresses([&](int64_t b) { return before(b, t); }), of.hidden, m.h);
    if (of.lstm && t == 0) own.gather(own.rows(of.c_), of.hidden, m.c);
    const RnnCellForward step{.dtype = of.wide,
                              .cell = of.cell,
                              .hidden = of.hidden,
                              .x_gates = own.row(m.x, of.gates),
                              .h_gates = own.row(m.h_gates, of.gates),
                              .h = own.row(m.h, of.hidden),
                              .c = t && of.lstm ? own.saved(out.cells, t - 1) : own.row(m.c, of.hidden),
                              .h_new = own.row(m.h_new, of.hidden),
                              .c_new = of.lstm ? own.saved(out.cells, t) : own.row(m.c, of.hidden),
                              .activated = own.saved(out.activated, t)};
    of.cells.forward(step, 0, part.own.rows);
    own.scatter(m.h_new, of.hidden, own.step(h, t));
    if (of.lstm && t == of.steps - 1) {
      const MaybeTensor last = out.c_last;
      of.products.scatter({.source_type = of.wide,
                           .source = step.c_new,
                           .source_stride = of.hidden,
                           .dtype = of.dtype,
                           .count = part.own.rows,
                           .columns = of.hidden,
                           .rows = own.targets(own.rows(last))},
                          0, part.own.rows);
    }
  }
  void output(const Part& part, int64_t t) const {
    Mover all(of, part.all);
    w.of_context.rows(part, all.step(context, t), m.output, of.b_out_, false);
    w.of_state.rows(part, all.step(h, t), m.output, std::nullopt, true);
  }
  void activate(const Part& part, int64_t t) const {
    Mover own(of, part.own);
    of.kernels.tanh(own.both(m.output, of.outputs, own.step(attended, t)), own.targets(own.step(attended, t)));
  }

  const Decoder& of;
  const Outputs& out;
  const Steps x, h, context, attended, query;
  const AllWeights w;
  const Scratch memory_;
  const Memory m;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_rnn_fwd(
    const Tensor& x_gates, const Tensor& key, const Tensor& value, const Tensor& h, const MaybeTensor& c,
    const MaybeTensor& feed, const Tensor& w_feed, const Tensor& w_hh, const MaybeTensor& b_hh,
    const MaybeTensor& w_query, const MaybeTensor& b_query, const MaybeTensor& weight, const MaybeTensor& w_out,
    const MaybeTensor& b_out, const MaybeTensor& key_lengths, const MaybeTensor& mask, double scale, int64_t cell,
    bool luong) {
  const char* const op = "attention_rnn_fwd";
  check_dim(x_gates, 3, op, "x_gates");
  Decoder d(op, {key, value, h, c, feed, w_feed, w_hh, b_hh, w_query, b_query, weight, w_out, b_out, key_lengths, mask,
                 scale, cell, x_gates.size(1), luong});
  check_like(x_gates, {d.batch, d.steps, d.gates}, d.type, op, "x_gates");
  const Tensor x = as_contiguous(x_gates);
  const int64_t B = d.batch, T = d.steps;
  const Outputs out{.h = d.result({B, T, d.hidden}),
                    .c_last = d.result({B, d.hidden}, d.lstm),
                    .context = d.result({B, T, d.columns}),
                    .attended = d.result({B, T, d.outputs}, luong),
                    .query = d.result({B, T, d.channels}, w_query || !luong),
                    .weights = d.wide_result({B, T, d.keys}),
                    .cells = d.wide_result({T, B, d.hidden}, d.lstm),
                    .activated = d.wide_result({T, B, d.saved})};
  if (T == 0 && d.lstm && d.c_->numel())
    std::memcpy(const_cast<void*>(out.c_last.const_data_ptr()), d.c_->const_data_ptr(),
                static_cast<size_t>(d.c_->numel() * d.size));
  if (B && T) {
    d.attend.probabilities = const_cast<void*>(out.weights.const_data_ptr());
    d.attend.context = const_cast<void*>(out.context.const_data_ptr());
    Forward(d, x, out).run();
  }
  return {out.h, out.c_last, out.context, out.attended, out.query, out.weights, out.cells, out.activated};
}

// ---- backward -------------------------------------------------------------------------------------------------------

// What came out of the forward pass, as Outputs, and the gradients of it; each of those may be absent.
struct Saved {
  Tensor h, attended, query, weights, cells, activated;
  MaybeTensor grad_h, grad_c, grad_context, grad_attended, grad_weights;
};

// Gradients in dtype, those of (batch, steps, .) before they are summed over the steps; query's and output's are those
// of the products' results. context: what the contexts' gradients sum up to.
struct Gradients {
  Tensor x_gates, h_gates, key, value, h, c, feed, query, output, context;
};

// A step's turns, in Luong's order: output's gradient, its products, attention, the query's product, cell, gates'
// products; in Bahdanau's: cell, gates' products, attention, the query's product.
class Backward {
 public:
  Backward(const Decoder& d, const GradAttend& attend, const Saved& saved, const Gradients& results)
      : of(d),
        attention(attend),
        in(saved),
        out(results),
        h(d.rows_of(saved.h)),
        attended(d.rows_of(saved.attended)),
        query(d.w_query_ || !d.luong ? d.rows_of(saved.query) : h),
        grad_query(d.rows_of(out.query)),
        w(d, true),
        memory_(bytes()),
        m(pieces_of(Pieces(memory_.data()))) {}

  void run() {
    using Turn = void (Backward::*)(const Part&, int64_t) const;
    std::vector<Turn> turns;
    if (of.luong) turns = {&Backward::output, &Backward::output_products};
    else turns = {&Backward::cell, &Backward::gate_products};
    turns.push_back(&Backward::attend);
    if (of.w_query_) turns.push_back(&Backward::query_products);
    if (of.luong) turns.insert(turns.end(), {&Backward::cell, &Backward::gate_products});
    const auto count = static_cast<int64_t>(turns.size()), last = of.steps * count + 1;
    const int64_t scratch = std::max(of.product_scratch(), of.kernels.attend_scratch(of.attend.of));
    of.for_turns(last + 1, scratch, [&](const Part& part, int64_t number) {
      if (number == 0) return begin(part);
      if (number == last) return end(part);
      (this->*turns[static_cast<size_t>((number - 1) % count)])(part, of.steps - 1 - (number - 1) / count);
    });
  }

 private:
  // grad_h[t % 2] and grad_c[t % 2] are those of the states after step t; output is the attended state's.
  struct Memory {
    void *x, *h_gates, *h, *c, *grad_h[2], *grad_c[2], *context, *output;
  };
  Memory pieces_of(Pieces&& pieces) const {
    const auto take = [&](int64_t columns) -> void* { return pieces.take<char>(of.batch * columns * of.wide_size); };
    return {.x = take(of.gates),
            .h_gates = take(of.gates),
            .h = take(of.hidden),
            .c = take(of.hidden),
            .grad_h = {take(of.hidden), take(of.hidden)},
            .grad_c = {take(of.hidden), take(of.hidden)},
            .context = take(of.columns),
            .output = take(of.outputs)};
  }
  int64_t bytes() const {
    Pieces sizes(nullptr);
    pieces_of(std::move(sizes));
    return sizes.bytes();
  }
  // Of the state that step t begins with.
  void* grad_before(void* const (&states)[2], int64_t t) const { return states[(t + 1) % 2]; }

  void begin(const Part& part) const {
    Mover own(of, part.own);
    own.zero(grad_before(m.grad_h, of.steps), of.hidden);
    own.gather(own.rows(in.grad_c), of.hidden, grad_before(m.grad_c, of.steps));
    own.zero(m.output, of.outputs);
    if (of.lstm) own.gather(own.rows(of.c_), of.hidden, m.c);
  }
  void end(const Part& part) const {
    Mover own(of, part.own);
    own.scatter(grad_before(m.grad_h, 0), of.hidden, own.rows(out.h));
    if (of.lstm) own.scatter(grad_before(m.grad_c, 0), of.hidden, own.rows(out.c));
    if (of.luong) own.scatter(m.output, of.fed, own.rows(out.feed));
    for (int64_t b = part.own.begin; b < part.own.begin + part.own.rows; ++b)
      of.kernels.finish(attention, b, query.data);
  }
  void output(const Part& part, int64_t t) const {
    Mover own(of, part.own);
    if (in.grad_attended) own.add(own.step(of.rows_of(*in.grad_attended), t), of.outputs, m.output);
    of.kernels.grad_tanh(own.both(m.output, of.outputs, own.step(attended, t)));
    own.scatter(m.output, of.outputs, own.step(of.rows_of(out.output), t));
    if (in.grad_h) own.add(own.step(of.rows_of(*in.grad_h), t), of.hidden, m.grad_h[t % 2]);
  }
  void output_products(const Part& part, int64_t t) const {
    w.of_context.matrix(part, m.output, m.context, false);
    w.of_state.matrix(part, m.output, m.grad_h[t % 2], true);
  }
  // From the context's gradient to the query's, and without a product further to the state's.
  void attend(const Part& part, int64_t t) const {
    Mover own(of, part.own);
    if (in.grad_context) own.add(own.step(of.rows_of(*in.grad_context), t), of.columns, m.context);
    own.scatter(m.context, of.columns, own.step(of.rows_of(out.context), t));
    for (int64_t b = part.own.begin; b < part.own.begin + part.own.rows; ++b)
      of.kernels.grad_attend(attention, b, t, query.at(b, t), part.scratch);
    if (!of.w_query_) own.add(own.step(grad_query, t), of.hidden, asked(t));
  }
  void query_products(const Part& part, int64_t t) const {
    Mover all(of, part.all);
    w.project.rows(part, all.step(grad_query, t), asked(t), std::nullopt, true);
  }
  // The gradient of the state that attention of step t was asked with.
  void* asked(int64_t t) const { return of.luong ? m.grad_h[t % 2] : grad_before(m.grad_h, t); }

  void cell(const Part& part, int64_t t) const {
    Mover own(of, part.own);
    if (in.grad_h && !of.luong) own.add(own.step(of.rows_of(*in.grad_h), t), of.hidden, m.grad_h[t % 2]);
    if (!of.lstm)
      own.gather(own.addresses([&](int64_t b) { return t ? h.at(b, t - 1) : Decoder::row_of(of.h_, b); }), of.hidden,
                 m.h);
    const RnnCellBackward step{.dtype = of.wide,
                               .cell = of.cell,
                               .hidden = of.hidden,
                               .grad_h = own.row(m.grad_h[t % 2], of.hidden),
                               .grad_c = of.lstm ? own.row(m.grad_c[t % 2], of.hidden) : nullptr,
                               .h = own.row(m.h, of.hidden),
                               .c = !of.lstm ? nullptr
                                    : t      ? own.saved(in.cells, t - 1)
                                             : own.row(m.c, of.hidden),
                               .c_new = of.lstm ? own.saved(in.cells, t) : nullptr,
                               .activated = own.saved(in.activated, t),
                               .grad_x_gates = own.row(m.x, of.gates),
                               .grad_h_gates = own.row(m.h_gates, of.gates),
                               .grad_h_prev = own.row(grad_before(m.grad_h, t), of.hidden),
                               .grad_c_prev = own.row(grad_before(m.grad_c, t), of.hidden)};
    of.cells.backward(step, 0, part.own.rows);
    own.scatter(m.x, of.gates, own.step(of.rows_of(out.x_gates), t));
    if (!of.lstm) own.scatter(m.h_gates, of.gates, own.step(of.rows_of(out.h_gates), t));
  }
  void gate_products(const Part& part, int64_t t) const {
    w.recurrent.matrix(part, of.lstm ? m.x : m.h_gates, grad_before(m.grad_h, t), !of.lstm);
    w.feed.matrix(part, m.x, of.luong ? m.output : m.context, false);
  }

  const Decoder& of;
  const GradAttend& attention;
  const Saved& in;
  const Gradients& out;
  const Steps h, attended, query, grad_query;
  const AllWeights w;
  const Scratch memory_;
  const Memory m;
};

template <class A>
void sum_sequences(const void* sums, int64_t batch, int64_t stride, int64_t columns, void* total) {
  const A* from = static_cast<const A*>(sums);
  A* const to = static_cast<A*>(total);
  for (int64_t c = 0; c < columns; ++c) to[c] = 0;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t c = 0; c < columns; ++c) to[c] += from[b * stride + c];
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_rnn_bwd(
    const MaybeTensor& grad_h, const MaybeTensor& grad_c, const MaybeTensor& grad_context,
    const MaybeTensor& grad_attended, const MaybeTensor& grad_weights, const Tensor& key, const Tensor& value,
    const Tensor& h0, const MaybeTensor& c0, const MaybeTensor& feed, const Tensor& w_feed, const Tensor& w_hh,
    const MaybeTensor& w_query, const MaybeTensor& weight, const MaybeTensor& w_out, const MaybeTensor& key_lengths,
    const MaybeTensor& mask, double scale, int64_t cell, bool luong, const Tensor& h, const Tensor& attended,
    const Tensor& query, const Tensor& weights, const Tensor& cells, const Tensor& activated) {
  const char* const op = "attention_rnn_bwd";
  check_dim(h, 3, op, "h");
  const MaybeTensor none;
  Decoder d(op, {key, value, h0, c0, feed, w_feed, w_hh, none, w_query, none, weight, w_out, none, key_lengths, mask,
                 scale, cell, h.size(1), luong});
  const int64_t B = d.batch, T = d.steps;
  const auto taken = [&](const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type, const char* name,
                         bool there = true) {
    if (!there) return t;
    check_like(t, sizes, type, op, name);
    return as_contiguous(t);
  };
  const auto maybe = [&](const MaybeTensor& t, std::initializer_list<int64_t> sizes, ScalarType type,
                         const char* name) -> MaybeTensor {
    if (!t) return std::nullopt;
    return taken(*t, sizes, type, name);
  };
  const bool asks = w_query || !luong;
  const Saved saved{.h = taken(h, {B, T, d.hidden}, d.type, "h"),
                    .attended = taken(attended, {B, T, d.outputs}, d.type, "attended", luong),
                    .query = taken(query, {B, T, d.channels}, d.type, "query", asks),
                    .weights = taken(weights, {B, T, d.keys}, d.acc, "weights"),
                    .cells = taken(cells, {T, B, d.hidden}, d.acc, "cells", d.lstm),
                    .activated = taken(activated, {T, B, d.saved}, d.acc, "activated"),
                    .grad_h = maybe(grad_h, {B, T, d.hidden}, d.type, "grad_h"),
                    .grad_c = maybe(grad_c, {B, d.hidden}, d.type, "grad_c"),
                    .grad_context = maybe(grad_context, {B, T, d.columns}, d.type, "grad_context"),
                    .grad_attended = maybe(grad_attended, {B, T, d.outputs}, d.type, "grad_attended"),
                    .grad_weights = maybe(grad_weights, {B, T, d.keys}, d.acc, "grad_weights")};
  const Gradients out{.x_gates = d.result({B, T, d.gates}),
                      .h_gates = d.result({B, T, d.gates}, !d.lstm),
                      .key = d.result({B, d.keys, d.channels}),
                      .value = d.result({B, d.keys, d.columns}),
                      .h = d.result({B, d.hidden}),
                      .c = d.result({B, d.hidden}, d.lstm),
                      .feed = d.result({B, d.fed}, luong),
                      .query = d.result({B, T, d.channels}),
                      .output = d.result({B, T, d.outputs}, luong),
                      .context = d.result({B, T, d.columns})};
  Tensor grad_weight = d.wide_result({d.channels}, weight.has_value());
  const auto address = [](const Tensor& t) { return const_cast<void*>(t.const_data_ptr()); };
  const int64_t pair_bytes = B * T * d.padded_keys * d.wide_size;
  const int64_t sum_bytes = weight ? B * d.keys * d.padded * d.wide_size : 0;
  const int64_t weight_bytes = weight ? B * d.padded * d.wide_size : 0;
  const Scratch probabilities(pair_bytes), grad_scores(pair_bytes), key_sums(sum_bytes), weight_sums(weight_bytes);
  if (sum_bytes) std::memset(key_sums.data(), 0, static_cast<size_t>(sum_bytes));
  if (weight_bytes) std::memset(weight_sums.data(), 0, static_cast<size_t>(weight_bytes));
  d.attend.probabilities = address(saved.weights);
  const GradAttend attend{.of = d.attend,
                          .grad_context = address(out.context),
                          .grad_probabilities = data_or_null(saved.grad_weights),
                          .grad_query = address(out.query),
                          .grad_key = address(out.key),
                          .grad_value = address(out.value),
                          .padded_probabilities = probabilities.data(),
                          .grad_scores = grad_scores.data(),
                          .key_sums = key_sums.data(),
                          .weight_sums = weight_sums.data()};
  if (B) Backward(d, attend, saved, out).run();
  if (weight) {
    if (d.dtype == Dtype::f64) sum_sequences<double>(weight_sums.data(), B, d.padded, d.channels, address(grad_weight));
    else sum_sequences<float>(weight_sums.data(), B, d.padded, d.channels, address(grad_weight));
  }
  return {out.x_gates, out.h_gates, out.key, out.value, out.h, out.c, out.feed, out.query, out.output, grad_weight};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("attention_rnn_fwd", TORCH_BOX(&attention_rnn_fwd));
  m.impl("attention_rnn_bwd", TORCH_BOX(&attention_rnn_bwd));
}

}  // namespace seqkern
