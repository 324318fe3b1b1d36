// A recurrent decoder that attends in every step, on CPU, host side. A worker has some sequences of the batch, and
// takes all of their steps: no step waits for another worker. Its products have the worker's rows.
//
// What is saved in the accumulation type lies step by step, (steps, batch, .), so that a worker's rows are neighbours.
#include "attention_rnn.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "products.h"
#include "rnn/problem.h"
#include "rnn_cell/rnn_cell.h"
#include "scratch.h"

namespace seqkern {
namespace {

struct Given {
  const Tensor &key, &value, &h;
  const MaybeTensor &c, &feed, &w_feed;
  const Tensor& w_hh;
  const MaybeTensor &b_hh, &w_query, &b_query, &weight, &w_out, &b_out, &key_lengths, &mask;
  double scale;
  int64_t cell, steps;
  bool luong;
};

// A row of step t of sequence b, of a tensor (batch, steps, columns).
struct Steps {
  char* data = nullptr;
  int64_t steps = 0, row_bytes = 0;
  void* at(int64_t b, int64_t t) const { return data + (b * steps + t) * row_bytes; }
};

// Rows of dtype for products, by their addresses.
using Addresses = std::vector<const void*>;

// The checked arguments, and what the kernels read of the keys, for the time of a call.
class Decoder {
 public:
  Decoder(const char* name, const Given& g)
      : op(name), dtype(dtype_of(g.key, op, "key")), cell(cell_of(g.cell, op)), luong(g.luong), steps(g.steps) {
    check_dim(g.key, 3, op, "key");
    check_dim(g.value, 3, op, "value");
    check_dim(g.h, 2, op, "h");
    SK_CHECK(cell == Cell::lstm || cell == Cell::gru, op, ": cell must be LSTM's or GRU's, got ", g.cell);
    batch = g.key.size(0), keys = g.key.size(1), channels = g.key.size(2), columns = g.value.size(2);
    hidden = g.h.size(1), gates = checked_product({gate_count(cell), hidden}, op);
    saved = checked_product({saved_count(cell), hidden}, op);
    SK_CHECK(g.c.has_value() == lstm, op, ": c is for LSTM, which needs it");
    SK_CHECK(g.w_out.has_value() == luong, op, ": w_out is for Luong's order, which needs it");
    SK_CHECK(luong || g.w_feed, op, ": w_feed is needed, for the context");
    SK_CHECK(!g.feed || (luong && g.w_feed), op, ": feed is for Luong's order with w_feed");
    SK_CHECK(g.w_query || (!g.weight && channels == hidden), op,
             ": w_query may be left out only for products of the state with keys of its size");
    SK_CHECK(g.w_query || !g.b_query, op, ": b_query needs w_query");
    if (luong) {
      check_dim(*g.w_out, 2, op, "w_out");
      outputs = g.w_out->size(0);
    }
    if (g.w_feed) fed = luong ? outputs : columns;
    const int64_t most = std::max({gates, saved, columns + hidden, outputs, channels, fed}) + 64;
    for (const int64_t rows : {steps, keys}) checked_product({batch + 1, rows + 64, most, 3 * wide_size}, op);
    checked_product({batch, steps + 64, keys + 64, wide_size}, op);
    checked_product({most, most, wide_size}, op);

    key_ = last(g.key, {batch, keys, channels}, "key"), value_ = last(g.value, {batch, keys, columns}, "value");
    h_ = whole(g.h, {batch, hidden}, "h"), w_hh_ = last(g.w_hh, {gates, hidden}, "w_hh");
    if (g.c) c_ = whole(*g.c, {batch, hidden}, "c");
    if (g.feed) feed_ = whole(*g.feed, {batch, fed}, "feed");
    if (g.w_feed) w_feed_ = last(*g.w_feed, {gates, fed}, "w_feed");
    if (g.w_query) w_query_ = last(*g.w_query, {channels, hidden}, "w_query");
    if (g.w_out) w_out_ = last(*g.w_out, {outputs, columns + hidden}, "w_out");
    if (g.weight) weight_ = whole(*g.weight, {channels}, "weight");
    if (g.b_hh) b_hh_ = as_type(whole(*g.b_hh, {gates}, "b_hh"), acc);
    if (g.b_query) b_query_ = as_type(whole(*g.b_query, {channels}, "b_query"), acc);
    if (g.b_out) b_out_ = as_type(whole(*g.b_out, {outputs}, "b_out"), acc);
    attend = {.of = {.dtype = dtype,
                     .batch = batch,
                     .queries = steps,
                     .keys = keys,
                     .channels = channels,
                     .value_channels = columns,
                     .query = nullptr,
                     .key = key_->const_data_ptr(),
                     .value = value_->const_data_ptr(),
                     .query_batch = 0,
                     .query_row = 0,
                     .key_batch = key_->stride(0),
                     .key_row = key_->stride(1),
                     .value_batch = value_->stride(0),
                     .value_row = value_->stride(1),
                     .weight = data_or_null(weight_),
                     .bias = nullptr,
                     .key_lengths = nullptr,
                     .mask = nullptr,
                     .mask_is_bool = true,
                     .mask_batch = 0,
                     .mask_row = 0,
                     .mask_column = 0,
                     .wide_weight = nullptr,
                     .wide_keys = nullptr,
                     .forms = nullptr},
              .scale = g.scale,
              .probabilities = nullptr,
              .context = nullptr};
    AdditiveProblem& p = attend.of;
    if (g.key_lengths) {
      check_like(*g.key_lengths, {batch}, ScalarType::Long, op, "key_lengths");
      lengths_ = as_contiguous(*g.key_lengths);
      p.key_lengths = static_cast<const int64_t*>(lengths_->const_data_ptr());
    }
    if (g.mask) {
      check_like(*g.mask, {batch, steps, keys}, ScalarType::Bool, op, "mask");
      p.mask = g.mask->const_data_ptr();
      p.mask_batch = g.mask->stride(0), p.mask_row = g.mask->stride(1), p.mask_column = g.mask->stride(2);
    }
    prepare_keys();
  }
  Decoder(const Decoder&) = delete;

  // Calls body(first, count) for each worker's sequences.
  template <class Body>
  void for_workers(const Body& body) const {
    const auto times = [](int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); };
    const double row = times(gates, hidden + fed) + times(outputs, columns + hidden) +
                       (w_query_ ? times(channels, hidden) : 0) + times(keys, 4 * channels + columns);
    const int64_t workers = times(batch, steps) * row < 2 * kGrainWork ? 1 : worker_count(batch);
    for_items_on(workers, workers, 0, [&](int64_t worker, void*) {
      const int64_t begin = batch * worker / workers, end = batch * (worker + 1) / workers;
      body(begin, end - begin);
    });
  }
  int64_t product_scratch() const {
    return std::max(products.multiply_scratch(dtype), products.multiply_scratch(wide));
  }
  Tensor result(std::initializer_list<int64_t> sizes, bool there = true) const {
    return there ? empty(*key_, sizes, type) : empty(*key_, {0}, type);
  }
  Tensor wide_result(std::initializer_list<int64_t> sizes, bool there = true) const {
    return there ? empty(*key_, sizes, acc) : empty(*key_, {0}, acc);
  }
  Steps rows_of(const Tensor& t) const {
    const int64_t width = t.dim() == 3 ? t.size(2) : 0;
    return {static_cast<char*>(const_cast<void*>(t.const_data_ptr())), steps, width * size};
  }
  // Rows of a tensor (batch, columns), in dtype.
  static const void* row_of(const MaybeTensor& t, int64_t b) {
    return t ? static_cast<const char*>(t->const_data_ptr()) + b * t->size(1) * t->element_size() : nullptr;
  }

  const char* op;
  Dtype dtype;
  Cell cell;
  bool luong;
  int64_t steps;
  const Dtype wide = dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  const ScalarType acc = acc_type(dtype);
  const ScalarType type = dtype == Dtype::f64    ? ScalarType::Double
                          : dtype == Dtype::f32  ? ScalarType::Float
                          : dtype == Dtype::bf16 ? ScalarType::BFloat16
                                                 : ScalarType::Half;
  const int64_t size = size_of(dtype), wide_size = size_of(wide);
  const bool lstm = cell == Cell::lstm;
  int64_t batch, keys, channels, columns, hidden, gates, saved, outputs = 0, fed = 0;
  int64_t padded = 0, padded_keys = 0;
  const AttentionRnnKernels& kernels = attention_rnn_kernels();
  const AdditiveKernels& additive = additive_kernels();
  const RnnCellKernels& cells = rnn_cell_kernels();
  const ProductKernels& products = product_kernels_for(dtype);
  Attend attend;
  MaybeTensor key_, value_, h_, c_, feed_, w_feed_, w_hh_, w_query_, w_out_, weight_, b_hh_, b_query_, b_out_, lengths_;

 private:
  Tensor last(const Tensor& t, std::initializer_list<int64_t> sizes, const char* argument) const {
    check_like(t, sizes, type, op, argument);
    return with_unit_last_stride(t);
  }
  Tensor whole(const Tensor& t, std::initializer_list<int64_t> sizes, const char* argument) const {
    check_like(t, sizes, type, op, argument);
    return as_contiguous(t);
  }
  void prepare_keys() {
    const int64_t lanes = additive.vector(dtype);
    padded = (channels + lanes - 1) / lanes * lanes, padded_keys = (keys + lanes - 1) / lanes * lanes;
    if (!weight_) return;
    AdditiveProblem& p = attend.of;
    wide_weight_.emplace(2 * padded * wide_size), wide_keys_.emplace(batch * keys * padded * wide_size);
    forms_.emplace(batch * keys);
    p.wide_weight = wide_weight_->data(), p.wide_keys = wide_keys_->data();
    p.forms = static_cast<uint8_t*>(forms_->data());
    additive.prepare_weight(p);
    const double elements = static_cast<double>(batch * keys) * static_cast<double>(channels);
    for_small_items(batch, 8 * elements, 0, [&](int64_t b, void*) { additive.prepare_keys(p, b, 0, keys); });
  }

  std::optional<Scratch> wide_weight_, wide_keys_, forms_;
};

// A packed right operand: weights W (outputs, inputs), of which columns [first, first + count) count, for y = x W^T or,
// backward, for dx = dy W.
class Weights {
 public:
  Weights(const Decoder& d, const MaybeTensor& w, int64_t first, int64_t count, bool backward) : of_(d) {
    if (!w) return;
    depth_ = backward ? w->size(0) : count, columns_ = backward ? count : w->size(0);
    if (columns_)
      packed_.emplace(pack(d.products, {.dtype = d.dtype,
                                        .data = static_cast<const char*>(w->const_data_ptr()) + first * d.size,
                                        .k_stride = backward ? w->stride(0) : 1,
                                        .n_stride = backward ? 1 : w->stride(0),
                                        .depth = depth_,
                                        .columns = columns_}));
  }
  // c = rows times the weights + bias, or that added to c, in the accumulation type; scratch: of products.
  void rows(const Addresses& a, void* c, int64_t stride, const MaybeTensor& bias, bool accumulate,
            void* scratch) const {
    Product p = product(static_cast<int64_t>(a.size()), of_.dtype, bias);
    p.a_rows = a.data(), p.c_type = of_.wide, p.c = c, p.c_stride = stride, p.accumulate = accumulate;
    run(p, scratch);
  }
  // The same to rows of dtype.
  void rows(const Addresses& a, void* const* c, const MaybeTensor& bias, void* scratch) const {
    Product p = product(static_cast<int64_t>(a.size()), of_.dtype, bias);
    p.a_rows = a.data(), p.c_type = of_.dtype, p.c_rows = c;
    run(p, scratch);
  }
  // A matrix of the accumulation type times the weights.
  void matrix(int64_t count, const void* a, int64_t a_stride, void* c, int64_t stride, bool accumulate,
              void* scratch) const {
    Product p = product(count, of_.wide, std::nullopt);
    p.a = a, p.a_row_stride = a_stride, p.c_type = of_.wide, p.c = c, p.c_stride = stride, p.accumulate = accumulate;
    run(p, scratch);
  }

 private:
  Product product(int64_t rows, Dtype a_type, const MaybeTensor& bias) const {
    return {.rows = rows,
            .columns = columns_,
            .depth = depth_,
            .a_type = a_type,
            .packed_b = packed_ ? packed_->data() : nullptr,
            .bias = data_or_null(bias),
            .c_type = of_.wide};
  }
  void run(Product& p, void* scratch) const {
    if (p.rows == 0 || p.columns == 0 || (p.depth == 0 && p.accumulate)) return;
    const int64_t items = of_.products.cut(p, 1);
    for (int64_t item = 0; item < items; ++item) of_.products.multiply(p, item, scratch);
  }

  const Decoder& of_;
  int64_t depth_ = 0, columns_ = 0;
  std::optional<PackedMatrix> packed_;
};

// What a worker of either pass has: matrices of the accumulation type with a row for each of its sequences.
class Worker {
 public:
  Worker(const Decoder& d, int64_t first, int64_t count) : of(d), begin(first), rows(count), list_(size_t_of(count)) {}
  Worker(const Worker&) = delete;

  static size_t size_t_of(int64_t n) { return static_cast<size_t>(n); }
  // The addresses of rows for which at(b) gives them. They are valid until the next call.
  template <class At>
  const Addresses& addresses(const At& at) {
    for (int64_t r = 0; r < rows; ++r) list_[size_t_of(r)] = at(begin + r);
    return list_;
  }
  void* const* targets(const Steps& s, int64_t t) {
    addresses([&](int64_t b) { return s.at(b, t); });
    return const_cast<void* const*>(list_.data());
  }
  const Addresses& step(const Steps& s, int64_t t) {
    return addresses([&](int64_t b) { return s.at(b, t); });
  }
  // matrix = rows
  void gather(const Addresses& from, int64_t columns, void* to) const {
    of.products.gather(
        {.dtype = of.dtype, .count = rows, .columns = columns, .rows = from.data(), .out = to, .out_stride = columns},
        0, rows);
  }
  void scatter(const void* from, int64_t columns, void* const* to) const {
    of.products.scatter({.source_type = of.wide,
                         .source = from,
                         .source_stride = columns,
                         .dtype = of.dtype,
                         .count = rows,
                         .columns = columns,
                         .rows = to},
                        0, rows);
  }
  Rows rows_of(void* matrix, int64_t columns, const Addresses& from) const {
    return {of.dtype, rows, columns, matrix, columns, from.data()};
  }
  // The part of a tensor (steps, batch, columns) of the accumulation type that is this worker's, at step t.
  char* saved(const Tensor& t, int64_t step) const {
    return static_cast<char*>(const_cast<void*>(t.const_data_ptr())) +
           (step * of.batch + begin) * t.size(2) * of.wide_size;
  }

  const Decoder& of;
  const int64_t begin, rows;

 private:
  Addresses list_;
};

// ---- forward --------------------------------------------------------------------------------------------------------

// h, the contexts, attended states, queries (batch, steps, .) in dtype; weights (batch, steps, keys), cells and
// activated gates (steps, batch, .) in the accumulation type.
struct Outputs {
  Tensor h, c_last, context, attended, query, weights, cells, activated;
};

class Forward {
 public:
  Forward(const Decoder& d, const Tensor& x_gates, const Outputs& out)
      : of(d),
        out(out),
        x(d.rows_of(x_gates)),
        h(d.rows_of(out.h)),
        context(d.rows_of(out.context)),
        attended(d.rows_of(out.attended)),
        query(d.rows_of(out.query)),
        feed(d, d.w_feed_, 0, d.fed, false),
        recurrent(d, d.w_hh_, 0, d.hidden, false),
        project(d, d.w_query_, 0, d.hidden, false),
        of_context(d, d.w_out_, 0, d.columns, false),
        of_state(d, d.w_out_, d.columns, d.hidden, false) {}

  void run(int64_t begin, int64_t rows) const {
    Worker w(of, begin, rows);
    Pieces sizes(nullptr);
    pieces_of(sizes, rows);
    const Scratch scratch(sizes.bytes());
    Pieces pieces(scratch.data());
    const Memory m = pieces_of(pieces, rows);
    if (of.lstm) w.gather(w.addresses([&](int64_t b) { return Decoder::row_of(of.c_, b); }), of.hidden, m.c);
    for (int64_t t = 0; t < of.steps; ++t) step(w, m, t);
    if (!of.lstm) return;
    const int64_t row_bytes = of.hidden * of.size;
    std::vector<void*> last(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r)
      last[static_cast<size_t>(r)] =
          static_cast<char*>(const_cast<void*>(out.c_last.const_data_ptr())) + (begin + r) * row_bytes;
    w.scatter(w.saved(out.cells, of.steps - 1), of.hidden, last.data());
  }

 private:
  struct Memory {
    void *x, *h_gates, *h, *h_new, *c, *output, *attend, *products;
  };
  Memory pieces_of(Pieces& pieces, int64_t rows) const {
    const auto take = [&](int64_t count) -> void* { return pieces.take<char>(count * of.wide_size); };
    return {.x = take(rows * of.gates),
            .h_gates = take(rows * of.gates),
            .h = take(rows * of.hidden),
            .h_new = take(rows * of.hidden),
            .c = take(rows * of.hidden),
            .output = take(rows * of.outputs),
            .attend = pieces.take<char>(of.kernels.attend_scratch(of.attend.of)),
            .products = pieces.take<char>(of.product_scratch())};
  }

  void step(Worker& w, const Memory& m, int64_t t) const {
    const auto before = [&](int64_t b) { return t ? h.at(b, t - 1) : Decoder::row_of(of.h_, b); };
    if (!of.luong) attend(w, m, t, before);
    w.gather(w.step(x, t), of.gates, m.x);
    if (of.w_feed_ && of.fed) {
      const auto fed = [&](int64_t b) -> const void* {
        if (!of.luong) return context.at(b, t);
        return t ? attended.at(b, t - 1) : Decoder::row_of(of.feed_, b);
      };
      feed.rows(w.addresses(fed), m.x, of.gates, std::nullopt, true, m.products);
    }
    recurrent.rows(w.addresses(before), m.h_gates, of.gates, of.b_hh_, false, m.products);
    if (!of.lstm) w.gather(w.addresses(before), of.hidden, m.h);
    const RnnCellForward cell{.dtype = of.wide,
                              .cell = of.cell,
                              .hidden = of.hidden,
                              .x_gates = m.x,
                              .h_gates = m.h_gates,
                              .h = m.h,
                              .c = t && of.lstm ? w.saved(out.cells, t - 1) : m.c,
                              .h_new = m.h_new,
                              .c_new = of.lstm ? w.saved(out.cells, t) : m.c,
                              .activated = w.saved(out.activated, t)};
    of.cells.forward(cell, 0, w.rows);
    w.scatter(m.h_new, of.hidden, w.targets(h, t));
    if (!of.luong) return;
    attend(w, m, t, [&](int64_t b) { return h.at(b, t); });
    of_context.rows(w.step(context, t), m.output, of.outputs, of.b_out_, false, m.products);
    of_state.rows(w.step(h, t), m.output, of.outputs, std::nullopt, true, m.products);
    of.kernels.tanh({of.dtype, w.rows, of.outputs, m.output, of.outputs, nullptr}, w.targets(attended, t));
  }
  template <class At>
  void attend(Worker& w, const Memory& m, int64_t t, const At& state) const {
    if (of.w_query_) {
      std::vector<void*> to(static_cast<size_t>(w.rows));
      for (int64_t r = 0; r < w.rows; ++r) to[static_cast<size_t>(r)] = query.at(w.begin + r, t);
      project.rows(w.addresses(state), to.data(), of.b_query_, m.products);
    } else if (!of.luong) {
      for (int64_t b = w.begin; b < w.begin + w.rows; ++b)
        std::memcpy(query.at(b, t), state(b), static_cast<size_t>(query.row_bytes));
    }
    const Steps& queries = of.w_query_ || !of.luong ? query : h;
    for (int64_t b = w.begin; b < w.begin + w.rows; ++b) of.kernels.attend(of.attend, b, t, queries.at(b, t), m.attend);
  }

  const Decoder& of;
  const Outputs& out;
  const Steps x, h, context, attended, query;
  const Weights feed, recurrent, project, of_context, of_state;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_rnn_fwd(
    const Tensor& x_gates, const Tensor& key, const Tensor& value, const Tensor& h, const MaybeTensor& c,
    const MaybeTensor& feed, const MaybeTensor& w_feed, const Tensor& w_hh, const MaybeTensor& b_hh,
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
    const Forward forward(d, x, out);
    d.for_workers([&](int64_t begin, int64_t rows) { forward.run(begin, rows); });
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

class Backward {
 public:
  Backward(const Decoder& d, const GradAttend& attend, const Saved& saved, const Gradients& out)
      : of(d),
        attention(attend),
        in(saved),
        grads(out),
        h(d.rows_of(saved.h)),
        attended(d.rows_of(saved.attended)),
        query(d.rows_of(saved.query)),
        grad_query(d.rows_of(out.query)),
        feed(d, d.w_feed_, 0, d.fed, true),
        recurrent(d, d.w_hh_, 0, d.hidden, true),
        project(d, d.w_query_, 0, d.hidden, true),
        of_context(d, d.w_out_, 0, d.columns, true),
        of_state(d, d.w_out_, d.columns, d.hidden, true) {}

  void run(int64_t begin, int64_t rows) const {
    Worker w(of, begin, rows);
    Pieces sizes(nullptr);
    pieces_of(sizes, rows);
    const Scratch scratch(sizes.bytes());
    Pieces pieces(scratch.data());
    Memory m = pieces_of(pieces, rows);
    const auto zero = [&](void* to, int64_t columns) {
      std::memset(to, 0, static_cast<size_t>(rows * columns * of.wide_size));
    };
    const auto start = [&](const MaybeTensor& t, void* to) {
      w.gather(w.addresses([&](int64_t b) { return Decoder::row_of(t, b); }), of.hidden, to);
    };
    zero(m.grad_h, of.hidden), zero(m.output, of.outputs);
    start(in.grad_c, m.grad_c);
    if (of.lstm) start(of.c_, m.c);
    for (int64_t t = of.steps - 1; t >= 0; --t) step(w, m, t);
    const auto finish = [&](const void* from, const Tensor& to) {
      const int64_t columns = to.size(1);
      std::vector<void*> addresses(static_cast<size_t>(rows));
      for (int64_t r = 0; r < rows; ++r)
        addresses[static_cast<size_t>(r)] =
            static_cast<char*>(const_cast<void*>(to.const_data_ptr())) + (begin + r) * columns * of.size;
      w.scatter(from, columns, addresses.data());
    };
    finish(m.grad_h, grads.h);
    if (of.lstm) finish(m.grad_c, grads.c);
    if (of.luong && of.w_feed_) finish(m.output, grads.feed);
    for (int64_t b = begin; b < begin + rows; ++b)
      of.kernels.finish(attention, b, queries().data);
  }

 private:
  // `grad_h` and `grad_c` are those of the states after the step; `output` is that of the attended state.
  struct Memory {
    void *x, *h_gates, *h, *c, *grad_h, *grad_h_prev, *grad_c, *grad_c_prev, *context, *output, *attend, *products;
  };
  Memory pieces_of(Pieces& pieces, int64_t rows) const {
    const auto take = [&](int64_t count) -> void* { return pieces.take<char>(rows * count * of.wide_size); };
    return {.x = take(of.gates),
            .h_gates = take(of.gates),
            .h = take(of.hidden),
            .c = take(of.hidden),
            .grad_h = take(of.hidden),
            .grad_h_prev = take(of.hidden),
            .grad_c = take(of.hidden),
            .grad_c_prev = take(of.hidden),
            .context = take(of.columns),
            .output = take(of.outputs),
            .attend = pieces.take<char>(of.kernels.attend_scratch(of.attend.of)),
            .products = pieces.take<char>(of.product_scratch())};
  }
  const Steps& queries() const { return of.w_query_ || !of.luong ? query : h; }

  void step(Worker& w, Memory& m, int64_t t) const {
    const auto add = [&](const MaybeTensor& t_rows, int64_t columns, void* to) {
      if (t_rows) of.kernels.add(w.rows_of(to, columns, w.step(of.rows_of(*t_rows), t)));
    };
    const auto keep = [&](const void* from, const Tensor& to) {
      w.scatter(from, to.size(2), w.targets(of.rows_of(to), t));
    };
    add(in.grad_h, of.hidden, m.grad_h);
    if (of.luong) {
      add(in.grad_attended, of.outputs, m.output);
      of.kernels.grad_tanh(w.rows_of(m.output, of.outputs, w.step(attended, t)));
      keep(m.output, grads.output);
      of_context.matrix(w.rows, m.output, of.outputs, m.context, of.columns, false, m.products);
      of_state.matrix(w.rows, m.output, of.outputs, m.grad_h, of.hidden, true, m.products);
      attend(w, m, t, m.grad_h);
    }
    if (!of.lstm)
      w.gather(w.addresses([&](int64_t b) { return t ? h.at(b, t - 1) : Decoder::row_of(of.h_, b); }), of.hidden, m.h);
    const RnnCellBackward cell{.dtype = of.wide,
                               .cell = of.cell,
                               .hidden = of.hidden,
                               .grad_h = m.grad_h,
                               .grad_c = of.lstm ? m.grad_c : nullptr,
                               .h = m.h,
                               .c = !of.lstm ? nullptr
                                    : t      ? w.saved(in.cells, t - 1)
                                             : m.c,
                               .c_new = of.lstm ? w.saved(in.cells, t) : nullptr,
                               .activated = w.saved(in.activated, t),
                               .grad_x_gates = m.x,
                               .grad_h_gates = m.h_gates,
                               .grad_h_prev = m.grad_h_prev,
                               .grad_c_prev = m.grad_c_prev};
    of.cells.backward(cell, 0, w.rows);
    keep(m.x, grads.x_gates);
    if (!of.lstm) keep(m.h_gates, grads.h_gates);
    recurrent.matrix(w.rows, of.lstm ? m.x : m.h_gates, of.gates, m.grad_h_prev, of.hidden, !of.lstm, m.products);
    if (of.w_feed_) feed.matrix(w.rows, m.x, of.gates, of.luong ? m.output : m.context, of.fed, false, m.products);
    else std::memset(m.output, 0, static_cast<size_t>(w.rows * of.outputs * of.wide_size));
    if (!of.luong) attend(w, m, t, m.grad_h_prev);
    std::swap(m.grad_h, m.grad_h_prev);
    std::swap(m.grad_c, m.grad_c_prev);
  }
  // From the context's gradient: what the state that asked gets.
  void attend(Worker& w, const Memory& m, int64_t t, void* grad_state) const {
    if (in.grad_context) of.kernels.add(w.rows_of(m.context, of.columns, w.step(of.rows_of(*in.grad_context), t)));
    w.scatter(m.context, of.columns, w.targets(of.rows_of(grads.context), t));
    for (int64_t b = w.begin; b < w.begin + w.rows; ++b)
      of.kernels.grad_attend(attention, b, t, queries().at(b, t), m.attend);
    const Addresses& asked = w.step(grad_query, t);
    if (of.w_query_) project.rows(asked, grad_state, of.hidden, std::nullopt, true, m.products);
    else of.kernels.add(w.rows_of(grad_state, of.hidden, asked));
  }

  const Decoder& of;
  const GradAttend& attention;
  const Saved& in;
  const Gradients& grads;
  const Steps h, attended, query, grad_query;
  const Weights feed, recurrent, project, of_context, of_state;
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
    const Tensor& h0, const MaybeTensor& c0, const MaybeTensor& feed, const MaybeTensor& w_feed, const Tensor& w_hh,
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
                      .feed = d.result({B, d.fed}, luong && w_feed),
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
  if (B) {
    const Backward backward(d, attend, saved, out);
    d.for_workers([&](int64_t begin, int64_t rows) { backward.run(begin, rows); });
  }
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
