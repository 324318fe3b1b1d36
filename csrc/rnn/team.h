// A team: several workers on the same rows. A turn is cut into blocks of hidden units, and every block needs all blocks
// of the turn before.
//
// A worker takes its own block of each turn, so that its weights stay in its cache, and waits at a barrier until the
// turn is complete. Torch may run the workers one after the other (inside another parallel region), so a worker must
// not wait for one that has not started. It therefore takes over a block that nobody has claimed for a while. After
// that it takes over without waiting, until the other worker appears. A claimed block is on a running thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace seqkern {

class Team {
 public:
  explicit Team(int64_t members) : members_(members), slots_(new Slot[static_cast<size_t>(members + 1)]) {}

  // Calls body(turn, block) for turns 0 ... turns - 1, for block `own` and for blocks that it takes over.
  template <class Body>
  void run(int64_t turns, int64_t own, const Body& body) {
    int64_t patience = kPatience;
    for (int64_t turn = 0; turn < turns; ++turn) {
      if (members_ == 1) {
        body(turn, own);
        continue;
      }
      take(turn, own, body);
      bool alone = false;
      for (int64_t waited = 0; !complete(turn); ++waited) {
        if (waited < patience) {
          pause();
          continue;
        }
        bool took = false;
        for (int64_t block = 0; block < members_ && !took; ++block) took = take(turn, block, body);
        alone |= took;
        if (!took) std::this_thread::yield();
      }
      patience = alone ? 0 : kPatience;
    }
  }

 private:
  static constexpr int64_t kPatience = 2000;
  struct alignas(64) Slot {
    std::atomic<int64_t> value{0};
  };

  template <class Body>
  bool take(int64_t turn, int64_t block, const Body& body) {
    int64_t unclaimed = turn;
    if (!slots_[block].value.compare_exchange_strong(unclaimed, turn + 1, std::memory_order_acq_rel)) return false;
    body(turn, block);
    slots_[members_].value.fetch_add(1, std::memory_order_acq_rel);
    return true;
  }
  bool complete(int64_t turn) const {
    return slots_[members_].value.load(std::memory_order_acquire) >= (turn + 1) * members_;
  }
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  int64_t members_;
  std::unique_ptr<Slot[]> slots_;  // for every block, the turns claimed; then the number of finished blocks
};

}  // namespace seqkern
