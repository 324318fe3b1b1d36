// How the work of a recurrent layer is divided: items and ranges among threads, products and their packing, the steps
// in chunks, and the threads in the loops over the steps.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "rnn_problem.h"
#include "rnn_team.h"

namespace seqkern {

// Multiply-adds below which a second thread costs more than it saves: in all, and in each turn of a worker that waits
// for others once a turn.
constexpr double kGrainWork = 1 << 18, kGrainTurn = 1 << 14;
constexpr int64_t kGrainElements = 4096;
// Columns of an item when columns are summed.
constexpr int64_t kSumColumns = 256;
// Rows that a worker takes at least before there are workers on the same rows. And recurrent weights, in elements, from
// which on all work on the same rows, unless these are many: each then reads its own part of the weights at every step,
// not all of them (two cores of Zen 3, B = 64, H = 1024: 0 to 8 % of the time; at H = 512 it costs as much). With fewer
// weights, but more than a cache has room for beside the rest, they do so where tiles are fuller that way by kFuller:
// on these cores LSTM with B = 16 takes 2 to 4 % less time, GRU with B = 12 3 to 5 %.
constexpr int64_t kShareRows = 6, kShareWeights = int64_t{1} << 21, kShareState = int64_t{1} << 17;
constexpr int64_t kFewWeights = int64_t{1} << 17;
constexpr double kFuller = 1.25;

// Calls body(item, scratch) for every item, on as many threads as the work is worth. Each thread has its own scratch.
template <class Body>
void for_items(int64_t items, double work, const Tensor& like, int64_t scratch_size, ScalarType scratch_type,
               const Body& body) {
  if (items <= 0) return;
  const int64_t workers =
      work / static_cast<double>(items) * worker_count(items) < kGrainWork ? 1 : worker_count(items);
  Tensor scratch = empty(like, {workers, scratch_size}, scratch_type);
  char* base = static_cast<char*>(scratch.mutable_data_ptr());
  const int64_t bytes = scratch_size * static_cast<int64_t>(scratch.element_size());
  if (workers == 1) {
    for (int64_t item = 0; item < items; ++item) body(item, static_cast<void*>(base));
    return;
  }
  parallel_workers(items, [&](WorkQueue& queue, int64_t worker) {
    int64_t item;
    while (queue.take(item)) body(item, static_cast<void*>(base + worker * bytes));
  });
}

// Calls body(begin, end, scratch) for ranges of rows.
template <class Body>
void for_ranges(int64_t rows, int64_t columns, const Tensor& like, int64_t scratch_size, ScalarType scratch_type,
                const Body& body) {
  const int64_t range = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, columns));
  for_items((rows + range - 1) / range, 32.0 * static_cast<double>(rows) * static_cast<double>(columns), like,
            scratch_size, scratch_type,
            [&](int64_t item, void* scratch) { body(item * range, std::min(rows, (item + 1) * range), scratch); });
}

// B(k, n) = source[k * k_stride + n * n_stride], or where `rows` lie; first_row is that of Packing.
struct Source {
  const void* data;
  int64_t depth, k_stride, n_stride;
  const void* const* rows = nullptr;
  int64_t first_row = 0;
};

inline Packing packing_of(const RnnProblem& p, const Source& source, int64_t columns, int64_t groups, bool of_acc,
                          void* packed) {
  return {of_acc ? p.acc_dtype : p.dtype,
          source.data,
          source.k_stride,
          source.n_stride,
          source.depth,
          columns,
          groups,
          packed,
          source.rows,
          source.first_row};
}

inline Tensor pack(const RnnProblem& p, const Source& source, int64_t columns, int64_t groups = 1,
                   bool of_acc = false) {
  const Dtype type = of_acc ? p.acc_dtype : p.dtype;
  Tensor packed = empty(p.input, {p.kernels.packed_size(type, source.depth, columns, groups)}, p.acc);
  const Packing packing = packing_of(p, source, columns, groups, of_acc, packed.mutable_data_ptr());
  for_items(p.kernels.pack_items(packing), static_cast<double>(source.depth) * columns, p.input, 0, p.acc,
            [&](int64_t item, void*) { p.kernels.pack(packing, item); });
  return packed;
}

// C = A B + bias, or C += A B.
inline void multiply(const RnnProblem& p, Product product) {
  const RnnKernels& kernels = p.kernels;
  const int64_t items = kernels.cut(product, torch::stable::get_num_threads());
  for_items(items, static_cast<double>(product.rows) * product.columns * product.depth, p.input,
            kernels.multiply_scratch(p.dtype), p.acc,
            [&](int64_t item, void* scratch) { kernels.multiply(product, item, scratch); });
}

// sum[c] += the sum of column c.
inline void add_columns(const RnnProblem& p, Dtype type, int64_t rows, int64_t columns, const void* source,
                        int64_t stride, double* sum) {
  const int64_t range = kSumColumns;
  for_items((columns + range - 1) / range, static_cast<double>(rows) * static_cast<double>(columns), p.input, 0, p.acc,
            [&](int64_t item, void*) {
              p.kernels.add_columns(type, rows, item * range, std::min(columns, (item + 1) * range), source, stride,
                                    sum);
            });
}

// The sequence is worked through in chunks of steps, each small enough that what one pass over its gates leaves in
// cache the next pass finds there, and large enough for the products to run at full rate. By the shape alone: the
// number of threads changes no sum. Those for peepholes and norms over the steps of a chunk are in the accumulation
// type: hence not too many steps.
constexpr int64_t kChunkElements = int64_t{1} << 19, kChunkRows = 512, kChunkSteps = 32, kSingleSteps = 256;

inline int64_t chunk_steps(const RnnProblem& p) {
  const int64_t rows = std::max(kChunkRows, kChunkElements / std::max<int64_t>(1, p.saved_columns));
  const int64_t most = std::max(kChunkSteps, kSingleSteps / std::max<int64_t>(1, p.batch));
  return std::clamp<int64_t>(std::min(most, rows / std::max<int64_t>(1, p.batch)), 1, std::max<int64_t>(1, p.steps));
}

// How the threads divide a pass through the steps: every direction has `shares` of the rows, and on each work
// `members`. By turns of one direction: their multiply-adds and their panels.
class Loops {
 public:
  Loops(const RnnProblem& p, const RnnPass& pass) : p_(p), panels_(pass.panels(p.layer)) {
    const int64_t threads = torch::stable::get_num_threads();
    const double turn = static_cast<double>(p.batch) * p.gate_columns * p.width;
    const bool worth_it = turn * p.steps * p.directions >= kGrainWork;
    const int64_t workers = !worth_it ? 1 : threads % p.directions == 0 ? threads / p.directions : threads;
    const int64_t weights = p.gate_columns * p.width,
                  most_shares = std::clamp<int64_t>(p.batch / kShareRows, 1, workers);
    const auto fullness = [&](int64_t rows) {  // of the tiles of so many rows
      const int64_t tile = pass.tile_rows(p.layer);
      return static_cast<double>(rows) / static_cast<double>((rows + tile - 1) / tile * tile);
    };
    const bool large = weights >= kShareWeights && p.batch * p.width <= kShareState;
    const bool fuller =
        weights >= kFewWeights && fullness(p.batch) >= kFuller * fullness((p.batch + most_shares - 1) / most_shares);
    // Who packs on the way would pack all weights for its own rows.
    const bool together = large || fuller || packs_on_the_way(p.layer);
    shares_ = p.wide() ? std::clamp<int64_t>(p.batch, 1, workers) : together ? 1 : most_shares;
    if (!p.wide()) {
      const auto most = static_cast<int64_t>(turn / static_cast<double>(shares_) / kGrainTurn);
      members_ = std::clamp<int64_t>(std::min(workers / shares_, most), 1, panels_);
    }
    parallel_ = worth_it;
    const int64_t rows = (p.batch + shares_ - 1) / shares_;
    state_size_ = (pass.state_size(p.layer, rows) + 15) / 16 * 16;
    scratch_size_ = (pass.scratch_size(p.layer, rows) + 15) / 16 * 16;
    for (int64_t k = 0; k < shares_; ++k) {
      starts_.push_back(0);
      for (int64_t t = 0; t < p.steps; ++t) {
        const int64_t left = p.active[t] - k;
        starts_.push_back(starts_.back() + (left > 0 ? (left + shares_ - 1) / shares_ : 0));
      }
    }
    state_ = empty(p.input, {checked_product({p.directions, shares_, state_size_}, p.op)}, p.acc);
    scratch_ = empty(p.input, {checked_product({workers_of(items()), scratch_size_}, p.op)}, p.acc);
  }

  int64_t shares() const { return shares_; }

  // Calls turn(direction, share, turn, panel_begin, panel_end, scratch) for every turn of every share.
  template <class Turn>
  void run(int64_t turns, const Turn& turn) {
    std::vector<Team> teams;
    for (int64_t i = 0; i < p_.directions * shares_; ++i) teams.emplace_back(members_);
    const auto work = [&](int64_t item, int64_t worker) {
      const int64_t team = item / members_, d = team / shares_, k = team % shares_;
      const RnnShare share{k, shares_, (p_.batch - k + shares_ - 1) / shares_, at(*state_, team * state_size_),
                           starts_.data() + k * (p_.steps + 1)};
      void* scratch = at(*scratch_, worker * scratch_size_);
      teams[static_cast<size_t>(team)].run(turns, item % members_, [&](int64_t number, int64_t block) {
        turn(d, share, number, block * panels_ / members_, (block + 1) * panels_ / members_, scratch);
      });
    };
    if (workers_of(items()) == 1) {
      for (int64_t item = 0; item < items(); ++item) work(item, 0);
      return;
    }
    parallel_workers(items(), [&](WorkQueue& queue, int64_t worker) {
      for (int64_t item; queue.take(item);) work(item, worker);
    });
  }

 private:
  int64_t items() const { return p_.directions * shares_ * members_; }
  int64_t workers_of(int64_t items) const { return parallel_ ? worker_count(items) : 1; }

  const RnnProblem& p_;
  const int64_t panels_;
  int64_t shares_ = 1, members_ = 1, state_size_ = 0, scratch_size_ = 0;
  bool parallel_ = false;
  MaybeTensor state_, scratch_;
  std::vector<int64_t> starts_;  // of every share
};

}  // namespace seqkern
