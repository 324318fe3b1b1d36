// A recurrent decoder that attends in every step, on CPU, host side.
//
// A step is cut into turns, which need all of the turn before: products with the weights, of which every worker has its
// own columns, and with them its own part of the weights in cache, for all rows; and between them what belongs to rows
// (the cell, attention), of which every worker has its own. The workers of a share of the rows are a team (rnn/team.h).
//
// What is saved in the accumulation type lies step by step, (steps, batch, .), so that rows of a step are neighbours.
#include "attention_rnn.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "products.h"
#include "rnn/problem.h"
#include "rnn/team.h"
#include "rnn_cell/rnn_cell.h"
#include "scratch.h"

namespace seqkern {
namespace {

struct Given {
  const Tensor &key, &value, &h;
  const MaybeTensor &c, &feed;
  const Tensor &w_feed, &w_hh;
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

struct Range {
  int64_t begin, rows;
};
// What a worker does of a turn: `all` are the rows of its share, for products; `own` those that are its own.
struct Part {
  Range all, own;
  int64_t index;
  void* scratch;
};

// A share has so many rows, at least; and more where there are so many weights that what each worker reads of them in a
// step, all of them or its part, decides. Another worker is worth so many multiply-adds a step. Measurements: NOTES.md.
constexpr int64_t kShareRows = 16, kLargeShareRows = 64, kLarge = int64_t{1} << 21;
constexpr double kGrainStep = 1 << 18;

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
    SK_CHECK(!g.feed || luong, op, ": feed is for Luong's order");
    SK_CHECK(g.w_query || (!g.weight && channels == hidden), op,
             ": w_query may be left out only for products of the state with keys of its size");
    SK_CHECK(g.w_query || !g.b_query, op, ": b_query needs w_query");
    if (luong) {
      check_dim(*g.w_out, 2, op, "w_out");
      outputs = g.w_out->size(0);
    }
    fed = luong ? outputs : columns;
    const int64_t most = std::max({gates, saved, columns + hidden, outputs, channels, fed}) + 64;
    for (const int64_t rows : {steps, keys}) checked_product({batch + 1, rows + 64, most, 3 * wide_size}, op);
    checked_product({batch, steps + 64, keys + 64, wide_size}, op);
    checked_product({most, most, wide_size}, op);

    key_ = last(g.key, {batch, keys, channels}, "key"), value_ = last(g.value, {batch, keys, columns}, "value");
    h_ = whole(g.h, {batch, hidden}, "h"), w_hh_ = last(g.w_hh, {gates, hidden}, "w_hh");
    if (g.c) c_ = whole(*g.c, {batch, hidden}, "c");
    if (g.feed) feed_ = whole(*g.feed, {batch, fed}, "feed");
    w_feed_ = last(g.w_feed, {gates, fed}, "w_feed");
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
    const int64_t threads = torch::stable::get_num_threads();
    const int64_t weights = gates * (hidden + fed) + outputs * (columns + hidden) + (w_query_ ? channels * hidden : 0);
    shares = std::clamp<int64_t>(batch / (weights < kLarge ? kShareRows : kLargeShareRows), 1, threads);
    const auto workers = static_cast<int64_t>(work() / kGrainStep / static_cast<double>(shares));
    members = std::clamp<int64_t>(workers, 1, threads / shares);
  }
  Decoder(const Decoder&) = delete;

  // Multiply-adds of a step.
  double work() const {
    const auto times = [](int64_t a, int64_t b) { return static_cast<double>(a) * static_cast<double>(b); };
    const double row = times(gates, hidden + fed) + times(outputs, columns + hidden) +
                       (w_query_ ? times(channels, hidden) : 0) + times(keys, 4 * channels + columns);
    return static_cast<double>(batch) * row;
  }
  // Calls turn(part, number) for the turns of every share of the rows, and each part of them.
  template <class Turn>
  void for_turns(int64_t turns, int64_t scratch_bytes, const Turn& turn) const {
    std::vector<Team> teams;
    for (int64_t i = 0; i < shares; ++i) teams.emplace_back(members);
    const int64_t items = shares * members;
    const Scratch scratch(scratch_bytes, worker_count(items));
    parallel_workers(items, [&](WorkQueue& queue, int64_t worker) {
      for (int64_t item; queue.take(item);) {
        const int64_t share = item / members, first = batch * share / shares, last = batch * (share + 1) / shares;
        teams[static_cast<size_t>(share)].run(turns, item % members, [&](int64_t number, int64_t block) {
          const int64_t begin = first + (last - first) * block / members;
          const int64_t end = first + (last - first) * (block + 1) / members;
          turn(Part{{first, last - first}, {begin, end - begin}, block, scratch.piece(worker)}, number);
        });
      }
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
  int64_t shares = 1, members = 1;  // of the rows; workers of each
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
// backward, for dx = dy W. Its columns are cut into a piece for each worker of a team.
class Weights {
 public:
  Weights(const Decoder& d, const MaybeTensor& w, int64_t first, int64_t count, bool backward) : of_(d) {
    if (!w) return;
    depth_ = backward ? w->size(0) : count, columns_ = backward ? count : w->size(0);
    const int64_t k_stride = backward ? w->stride(0) : 1, n_stride = backward ? 1 : w->stride(0);
    const int64_t panels = (columns_ + kPanelColumns - 1) / kPanelColumns;
    for (int64_t piece = 0; piece < d.members; ++piece) {
      const int64_t begin = panels * piece / d.members * kPanelColumns;
      const int64_t end = std::min(columns_, panels * (piece + 1) / d.members * kPanelColumns);
      const char* const data = static_cast<const char*>(w->const_data_ptr()) + (first + begin * n_stride) * d.size;
      const Matrix b{.dtype = d.dtype,
                     .data = data,
                     .k_stride = k_stride,
                     .n_stride = n_stride,
                     .depth = depth_,
                     .columns = std::max<int64_t>(end - begin, 0)};
      pieces_.push_back({begin, b.columns, b.columns ? pack(d.products, b) : PackedMatrix()});
    }
  }
  // A part's columns of C = rows times the weights + bias, or of that added to C; C is a matrix of the accumulation
  // type of all rows of the batch.
  void rows(const Part& part, const Addresses& a, void* c, const MaybeTensor& bias, bool accumulate) const {
    Product p{.rows = part.all.rows,
              .columns = 0,
              .depth = depth_,
              .a_type = of_.dtype,
              .packed_b = nullptr,
              .c_type = of_.wide};
    p.a_rows = a.data();
    to_matrix(p, part, c, bias, accumulate);
  }
  // The same to rows of dtype.
  void rows(const Part& part, const Addresses& a, const Steps& to, int64_t t, const MaybeTensor& bias) const {
    if (pieces_.empty()) return;
    const Piece& piece = pieces_[static_cast<size_t>(part.index)];
    std::vector<void*> targets(static_cast<size_t>(part.all.rows));
    for (int64_t r = 0; r < part.all.rows; ++r)
      targets[static_cast<size_t>(r)] = static_cast<char*>(to.at(part.all.begin + r, t)) + piece.begin * of_.size;
    Product p{.rows = part.all.rows,
              .columns = piece.columns,
              .depth = depth_,
              .a_type = of_.dtype,
              .packed_b = piece.packed.data(),
              .c_type = of_.dtype};
    p.a_rows = a.data(), p.c_rows = targets.data(), p.bias = bias_at(bias, piece.begin);
    run(p, part.scratch);
  }
  // The same of a matrix of the accumulation type.
  void matrix(const Part& part, const void* a, void* c, bool accumulate) const {
    Product p{.rows = part.all.rows,
              .columns = 0,
              .depth = depth_,
              .a_type = of_.wide,
              .packed_b = nullptr,
              .c_type = of_.wide};
    p.a = static_cast<const char*>(a) + part.all.begin * depth_ * of_.wide_size, p.a_row_stride = depth_;
    to_matrix(p, part, c, std::nullopt, accumulate);
  }

 private:
  static constexpr int64_t kPanelColumns = 64;  // whole panels in every tier
  struct Piece {
    int64_t begin, columns;
    PackedMatrix packed;
  };
  const void* bias_at(const MaybeTensor& bias, int64_t column) const {
    return bias ? static_cast<const char*>(bias->const_data_ptr()) + column * of_.wide_size : nullptr;
  }
  void to_matrix(Product& p, const Part& part, void* c, const MaybeTensor& bias, bool accumulate) const {
    if (pieces_.empty()) return;
    const Piece& piece = pieces_[static_cast<size_t>(part.index)];
    p.columns = piece.columns, p.packed_b = piece.packed.data(), p.bias = bias_at(bias, piece.begin);
    p.c = static_cast<char*>(c) + (part.all.begin * columns_ + piece.begin) * of_.wide_size, p.c_stride = columns_;
    p.accumulate = accumulate;
    run(p, part.scratch);
  }
  void run(Product& p, void* scratch) const {
    if (p.rows == 0 || p.columns == 0 || (p.depth == 0 && p.accumulate)) return;
    const int64_t items = of_.products.cut(p, 1);
    for (int64_t item = 0; item < items; ++item) of_.products.multiply(p, item, scratch);
  }

  const Decoder& of_;
  int64_t depth_ = 0, columns_ = 0;
  std::vector<Piece> pieces_;
};

// Moves rows between matrices of the accumulation type, of all rows of the batch, and rows of dtype.
class Mover {
 public:
  Mover(const Decoder& d, const Range& range) : of_(d), range_(range), list_(static_cast<size_t>(range.rows)) {}

  // The addresses of rows for which at(b) gives them. They are valid until the next call.
  template <class At>
  const Addresses& addresses(const At& at) {
    for (int64_t r = 0; r < range_.rows; ++r) list_[static_cast<size_t>(r)] = at(range_.begin + r);
    return list_;
  }
  const Addresses& step(const Steps& s, int64_t t) {
    return addresses([&](int64_t b) { return s.at(b, t); });
  }
  // Of a tensor (batch, columns) in dtype.
  const Addresses& rows(const MaybeTensor& t) {
    return addresses([&](int64_t b) { return Decoder::row_of(t, b); });
  }
  void* const* targets(const Addresses& rows) const { return const_cast<void* const*>(rows.data()); }
  char* row(void* matrix, int64_t columns) const {
    return static_cast<char*>(matrix) + range_.begin * columns * of_.wide_size;
  }

  void gather(const Addresses& from, int64_t columns, void* matrix) const {
    of_.products.gather({.dtype = of_.dtype,
                         .count = range_.rows,
                         .columns = columns,
                         .rows = from.data(),
                         .out = row(matrix, columns),
                         .out_stride = columns},
                        0, range_.rows);
  }
  void scatter(void* matrix, int64_t columns, const Addresses& to) const {
    of_.products.scatter({.source_type = of_.wide,
                          .source = row(matrix, columns),
                          .source_stride = columns,
                          .dtype = of_.dtype,
                          .count = range_.rows,
                          .columns = columns,
                          .rows = targets(to)},
                         0, range_.rows);
  }
  Rows both(void* matrix, int64_t columns, const Addresses& rows) const {
    return {of_.dtype, range_.rows, columns, row(matrix, columns), columns, rows.data()};
  }
  void add(const Addresses& from, int64_t columns, void* matrix) const { of_.kernels.add(both(matrix, columns, from)); }
  void zero(void* matrix, int64_t columns) const {
    std::memset(row(matrix, columns), 0, static_cast<size_t>(range_.rows * columns * of_.wide_size));
  }
  // The rows of step t of a tensor (steps, batch, columns) in the accumulation type.
  char* saved(const Tensor& s, int64_t t) const {
    return static_cast<char*>(const_cast<void*>(s.const_data_ptr())) +
           (t * of_.batch + range_.begin) * s.size(2) * of_.wide_size;
  }

 private:
  const Decoder& of_;
  const Range range_;
  Addresses list_;
};

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
        feed(d, d.w_feed_, 0, d.fed, false),
        recurrent(d, d.w_hh_, 0, d.hidden, false),
        project(d, d.w_query_, 0, d.hidden, false),
        of_context(d, d.w_out_, 0, d.columns, false),
        of_state(d, d.w_out_, d.columns, d.hidden, false) {
    Pieces sizes(nullptr);
    pieces_of(sizes);
    memory_.emplace(sizes.bytes());
    Pieces pieces(memory_->data());
    m = pieces_of(pieces);
  }

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
  Memory pieces_of(Pieces& pieces) const {
    const auto take = [&](int64_t columns) -> void* { return pieces.take<char>(of.batch * columns * of.wide_size); };
    return {.x = take(of.gates),
            .h_gates = take(of.gates),
            .h = take(of.hidden),
            .h_new = take(of.hidden),
            .c = take(of.hidden),
            .output = take(of.outputs)};
  }
  const void* before(int64_t b, int64_t t) const { return t ? h.at(b, t - 1) : Decoder::row_of(of.h_, b); }
  const void* asking(int64_t b, int64_t t) const { return of.luong ? h.at(b, t) : before(b, t); }

  void ask(const Part& part, int64_t t) const {
    Mover all(of, part.all);
    project.rows(part, all.addresses([&](int64_t b) { return asking(b, t); }), query, t, of.b_query_);
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
    feed.rows(part, all.addresses(fed), m.x, std::nullopt, false);
    recurrent.rows(part, all.addresses([&](int64_t b) { return before(b, t); }), m.h_gates, of.b_hh_, false);
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
    of_context.rows(part, all.step(context, t), m.output, of.b_out_, false);
    of_state.rows(part, all.step(h, t), m.output, std::nullopt, true);
  }
  void activate(const Part& part, int64_t t) const {
    Mover own(of, part.own);
    of.kernels.tanh(own.both(m.output, of.outputs, own.step(attended, t)), own.targets(own.step(attended, t)));
  }

  const Decoder& of;
  const Outputs& out;
  const Steps x, h, context, attended, query;
  const Weights feed, recurrent, project, of_context, of_state;
  std::optional<Scratch> memory_;
  Memory m{};
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
        feed(d, d.w_feed_, 0, d.fed, true),
        recurrent(d, d.w_hh_, 0, d.hidden, true),
        project(d, d.w_query_, 0, d.hidden, true),
        of_context(d, d.w_out_, 0, d.columns, true),
        of_state(d, d.w_out_, d.columns, d.hidden, true) {
    Pieces sizes(nullptr);
    pieces_of(sizes);
    memory_.emplace(sizes.bytes());
    Pieces pieces(memory_->data());
    m = pieces_of(pieces);
  }

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
  Memory pieces_of(Pieces& pieces) const {
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
    of_context.matrix(part, m.output, m.context, false);
    of_state.matrix(part, m.output, m.grad_h[t % 2], true);
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
    project.rows(part, all.step(grad_query, t), asked(t), std::nullopt, true);
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
    recurrent.matrix(part, of.lstm ? m.x : m.h_gates, grad_before(m.grad_h, t), !of.lstm);
    feed.matrix(part, m.x, of.luong ? m.output : m.context, false);
  }

  const Decoder& of;
  const GradAttend& attention;
  const Saved& in;
  const Gradients& out;
  const Steps h, attended, query, grad_query;
  const Weights feed, recurrent, project, of_context, of_state;
  std::optional<Scratch> memory_;
  Memory m{};
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
