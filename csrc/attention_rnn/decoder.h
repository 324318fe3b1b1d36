// A recurrent decoder's checked arguments, its turns, and what they are made of: products of rows with the weights, and
// rows between dtype and the accumulation type. Host side.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "attention_rnn.h"
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
      : op(name),
        dtype(dtype_of(g.key, op, "key")),
        type(g.key.scalar_type()),
        cell(cell_of(g.cell, op)),
        luong(g.luong),
        steps(g.steps) {
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
  ScalarType type;
  Cell cell;
  bool luong;
  int64_t steps;
  const Dtype wide = dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  const ScalarType acc = acc_type(dtype);
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

// Every product's weights, of one pass.
struct AllWeights {
  Weights feed, recurrent, project, of_context, of_state;
  AllWeights(const Decoder& d, bool backward)
      : feed(d, d.w_feed_, 0, d.fed, backward),
        recurrent(d, d.w_hh_, 0, d.hidden, backward),
        project(d, d.w_query_, 0, d.hidden, backward),
        of_context(d, d.w_out_, 0, d.columns, backward),
        of_state(d, d.w_out_, d.columns, d.hidden, backward) {}
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

}  // namespace
}  // namespace seqkern
