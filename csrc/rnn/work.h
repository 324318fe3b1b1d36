// How the work of a recurrent layer is divided: the steps in chunks, and the threads in the loops over the steps.
#pragma once

#include <algorithm>
#include <optional>

#include "parallel.h"
#include "problem.h"
#include "scratch.h"
#include "team.h"

namespace seqkern {

// Multiply-adds below which a second thread costs more than it saves in each turn of a worker that waits for others
// once a turn.
constexpr double kGrainTurn = 1 << 14;
// Rows that a worker takes at least before there are workers on the same rows. And recurrent weights, in elements, from
// which on all work on the same rows, unless these are many: each then reads its own part of the weights at every step,
// not all of them (two cores of Zen 3, B = 64, H = 1024: 0 to 8 % of the time; at H = 512 it costs as much). With fewer
// weights, but more than a cache has room for beside the rest, they do so where tiles are fuller that way by kFuller:
// on these cores LSTM with B = 16 takes 2 to 4 % less time, GRU with B = 12 3 to 5 %.
constexpr int64_t kShareRows = 6, kShareWeights = int64_t{1} << 21, kShareState = int64_t{1} << 17;
constexpr int64_t kFewWeights = int64_t{1} << 17;
constexpr double kFuller = 1.25;

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
    // Who packs on the fly would pack all weights for its own rows.
    const bool together = large || fuller || packs_on_the_fly(p.layer);
    shares_ = p.wide() ? std::clamp<int64_t>(p.batch, 1, workers) : together ? 1 : most_shares;
    if (!p.wide()) {
      const auto most = static_cast<int64_t>(turn / static_cast<double>(shares_) / kGrainTurn);
      members_ = std::clamp<int64_t>(std::min(workers / shares_, most), 1, panels_);
    }
    parallel_ = worth_it;
    const int64_t rows = (p.batch + shares_ - 1) / shares_;
    for (int64_t k = 0; k < shares_; ++k) {
      starts_.push_back(0);
      for (int64_t t = 0; t < p.steps; ++t) {
        const int64_t left = p.active[t] - k;
        starts_.push_back(starts_.back() + (left > 0 ? (left + shares_ - 1) / shares_ : 0));
      }
    }
    state_.emplace(pass.state_bytes(p.layer, rows), p.directions * shares_);
    scratch_.emplace(pass.scratch_bytes(p.layer, rows), workers_of(items()));
  }

  int64_t shares() const { return shares_; }

  // Calls turn(direction, share, turn, panel_begin, panel_end, scratch) for every turn of every share.
  template <class Turn>
  void run(int64_t turns, const Turn& turn) {
    std::vector<Team> teams;
    for (int64_t i = 0; i < p_.directions * shares_; ++i) teams.emplace_back(members_);
    const auto work = [&](int64_t item, int64_t worker) {
      const int64_t team = item / members_, d = team / shares_, k = team % shares_;
      const RnnShare share{.first = k,
                           .stride = shares_,
                           .rows = (p_.batch - k + shares_ - 1) / shares_,
                           .state = state_->piece(team),
                           .starts = starts_.data() + k * (p_.steps + 1)};
      void* scratch = scratch_->piece(worker);
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
  int64_t shares_ = 1, members_ = 1;
  bool parallel_ = false;
  std::optional<Scratch> state_, scratch_;
  std::vector<int64_t> starts_;  // of every share
};

}  // namespace seqkern
