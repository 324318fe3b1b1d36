// The division of a recurrent layer's work: steps into chunks, rows and hidden units among threads.
#pragma once

#include <algorithm>
#include <optional>

#include "parallel.h"
#include "problem.h"
#include "scratch.h"
#include "team.h"

namespace seqkern {

// Multiply-adds a turn below which another worker on the same rows, with its barrier once a turn, costs more than it
// saves.
constexpr double kGrainTurn = 1 << 14;
// kShareRows: rows of a share, at least. kShareWeights: from so many recurrent weights on, all workers take the same
// rows, unless the state (kShareState) is large: each reads only its part of the weights at every step. kFewWeights:
// with fewer weights, that still do not fit the cache beside everything else, they do so if that fills the register
// tiles better, by kFuller. Measurements: NOTES.md.
constexpr int64_t kShareRows = 6, kShareWeights = int64_t{1} << 21, kShareState = int64_t{1} << 17;
constexpr int64_t kFewWeights = int64_t{1} << 17;
constexpr double kFuller = 1.25;

// The sequence is processed in chunks of steps, unless no product is stored beforehand (RnnInput::every_step): small
// enough that the next pass finds the gates of the last one in cache, and large enough for products at the full rate.
// Chunks depend on the shape alone, so the number of threads changes no sum. Sums for peepholes and norms over the
// steps of a chunk are in the accumulation type, so a chunk must not have too many steps.
constexpr int64_t kChunkElements = int64_t{1} << 19, kChunkRows = 512, kChunkSteps = 32, kSingleSteps = 256;

inline int64_t chunk_steps(const RnnProblem& p) {
  const int64_t rows = std::max(kChunkRows, kChunkElements / std::max<int64_t>(1, p.saved_columns));
  const int64_t most = std::max(kChunkSteps, kSingleSteps / std::max<int64_t>(1, p.batch));
  return std::clamp<int64_t>(std::min(most, rows / std::max<int64_t>(1, p.batch)), 1, std::max<int64_t>(1, p.steps));
}

// Divides a pass through the steps among the threads: every direction has `shares` of the rows, and every share a team
// of `members` workers. By the multiply-adds and panels of one direction's turn.
class Loops {
 public:
  Loops(const RnnProblem& p, const RnnPass& pass) : p_(p), panels_(pass.panels(p.layer)) {
    const int64_t threads = torch::stable::get_num_threads();
    const double turn = static_cast<double>(p.batch) * p.gate_columns * p.width;
    const bool worth_it = turn * p.steps * p.directions >= kGrainWork;
    const int64_t workers = !worth_it ? 1 : threads % p.directions == 0 ? threads / p.directions : threads;
    const int64_t weights = p.gate_columns * p.width,
                  most_shares = std::clamp<int64_t>(p.batch / kShareRows, 1, workers);
    const auto fullness = [&](int64_t rows) {  // of the register tiles of `rows` rows
      const int64_t tile = pass.tile_rows(p.layer);
      return static_cast<double>(rows) / static_cast<double>((rows + tile - 1) / tile * tile);
    };
    const bool large = weights >= kShareWeights && p.batch * p.width <= kShareState;
    const bool fuller =
        weights >= kFewWeights && fullness(p.batch) >= kFuller * fullness((p.batch + most_shares - 1) / most_shares);
    // Each share would have to pack all weights on the fly.
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
  // Whether every thread has a part of a turn.
  bool all_threads() const { return items() >= torch::stable::get_num_threads(); }

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
  std::vector<int64_t> starts_;  // for every share
};

}  // namespace seqkern
