// The largest logits of a row and the log of its sum, on CPU. Compiled once per instruction-set tier.
//
// Two passes. The first takes the maximum of each block, or where blocks are few of each of its lanes; the `most`-th
// largest of those is a bound that `most` logits reach. The second sums the exponentials, and offers what reaches the
// bound, in blocks whose maximum does, to a heap of the best so far: a few more than `most` of all tokens, unless many
// are equal. Nothing the size of the row is written but its copy in float32, which stays in the cache.
#include "beam_step/beam_step.h"
#include "scratch.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kBlock = 256;
constexpr float kInfinity = __builtin_inff();

int64_t block_count(int64_t n) { return (n + kBlock - 1) / kBlock; }

bool better(const BeamCandidate& a, const BeamCandidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// A heap whose root is the worst.
void sink(BeamCandidate* heap, int64_t root, int64_t end) {
  const BeamCandidate held = heap[root];
  for (int64_t child; (child = 2 * root + 1) < end; root = child) {
    if (child + 1 < end && better(heap[child], heap[child + 1])) ++child;
    if (!better(held, heap[child])) break;
    heap[root] = heap[child];
  }
  heap[root] = held;
}

class Best {
 public:
  Best(BeamCandidate* heap, int64_t most) : heap_(heap), most_(most) {}
  int64_t count() const { return count_; }
  bool full() const { return count_ == most_; }
  float worst() const { return heap_[0].logit; }
  void offer(BeamCandidate c) {
    if (!full()) {
      heap_[count_++] = c;
      if (full())
        for (int64_t root = count_ / 2; root-- > 0;) sink(heap_, root, count_);
    } else if (better(c, heap_[0])) {
      heap_[0] = c;
      sink(heap_, 0, count_);
    }
  }
  // The best first.
  void sort() {
    if (!full())
      for (int64_t root = count_ / 2; root-- > 0;) sink(heap_, root, count_);
    for (int64_t end = count_ - 1; end > 0; --end) {
      const BeamCandidate last = heap_[0];
      heap_[0] = heap_[end];
      heap_[end] = last;
      sink(heap_, 0, end);
    }
  }

 private:
  BeamCandidate* const heap_;
  const int64_t most_;
  int64_t count_ = 0;
};

struct Row {
  float *z, *maxima;  // whole blocks of logits, minus infinity beyond the end; the maximum of each block
  BeamCandidate* bound;
};

// Logits [i, i + n) in float32, minus infinity beyond.
template <class T>
SK_INLINE vf32 logits_at(const T* logits, int64_t i, int64_t n) {
  if constexpr (sizeof(T) < 8)
    if (n >= W<float>) return load(logits + i);
  vf32 z = broadcast<float>(-kInfinity);
  if constexpr (sizeof(T) == 8) {
    for (int64_t lane = 0; lane < n && lane < W<float>; ++lane) z[lane] = static_cast<float>(logits[i + lane]);
  } else if (n > 0) {
    const vf32 some = load_partial(logits + i, n);
    for (int64_t lane = 0; lane < n; ++lane) z[lane] = some[lane];
  }
  return z;
}

template <class T>
BeamFound find_in(const BeamRow& p, const Row& row) {
  const T* logits = static_cast<const T*>(p.logits);
  const int64_t blocks = block_count(p.classes);
  vi32 bad{};
  float max = -kInfinity;
  const bool by_lane = blocks < 4 * p.most;
  const int64_t parts = by_lane ? blocks * W<float> : blocks;
  Best bound(row.bound, p.most < parts ? p.most : parts);
  for (int64_t block = 0; block < blocks; ++block) {
    vf32 top = broadcast<float>(-kInfinity);
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += W<float>) {
      const vf32 z = logits_at(logits, i, p.classes - i);
      bad |= ~(z < kInfinity);
      store(row.z + i, z);
      top = vmax(z, top);
    }
    row.maxima[block] = max_lanes<float>(top);
    max = row.maxima[block] > max ? row.maxima[block] : max;
    if (by_lane)
      for (int lane = 0; lane < W<float>; ++lane) bound.offer({top[lane], 0});
    else bound.offer({row.maxima[block], 0});
  }
  if (any(bad)) return {false, 0, 0};
  if (max == -kInfinity) return {true, 0, 0};
  const float least = parts >= p.most ? bound.worst() : -kInfinity;
  Best best(p.candidates, p.most);
  double total = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const float* z = row.z + block * kBlock;
    vf32 sum{};
    for (int64_t i = 0; i < kBlock; i += W<float>) sum += exp_nonpositive<float>(load(z + i) - max);
    total += static_cast<double>(sum_lanes<float>(sum));
    if (row.maxima[block] < least || (best.full() && row.maxima[block] <= best.worst())) continue;
    for (int64_t first = 0; first < kBlock; first += W<float>) {
      if (!any(load(z + first) >= least)) continue;
      for (int64_t i = first; i < first + W<float>; ++i)
        if (z[i] >= least && z[i] > -kInfinity) best.offer({z[i], static_cast<int32_t>(block * kBlock + i)});
    }
  }
  best.sort();
  return {true, best.count(), static_cast<double>(max) + __builtin_log(total)};
}

int64_t pieces(void* memory, int64_t classes, int64_t most, Row* row) {
  Pieces take(memory);
  const int64_t blocks = block_count(classes);
  Row cut{};
  cut.z = take.take<float>(blocks * kBlock);
  cut.maxima = take.take<float>(blocks);
  cut.bound = take.take<BeamCandidate>(most);
  if (row) *row = cut;
  return take.bytes();
}

int64_t scratch_bytes(int64_t classes, int64_t most) { return pieces(nullptr, classes, most, nullptr); }

BeamFound find(const BeamRow& p, void* scratch) {
  Row row;
  pieces(scratch, p.classes, p.most, &row);
  BeamFound found{};
  SK_DISPATCH(p.dtype, found = find_in<T>(p, row));
  return found;
}

}  // namespace

const BeamKernels beam_kernels = {scratch_bytes, find};

}  // namespace SK_TIER
}  // namespace seqkern
