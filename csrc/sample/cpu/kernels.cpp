// Sampling a token from a row of logits, on CPU. Compiled once per instruction-set tier.
//
// Nothing is sorted but a few hundred candidates. Filters are thresholds on a key: the logit (top-k, top-p), or how far
// a token's information is from the entropy (typical). `select` finds the largest threshold above which enough tokens,
// or enough probability, lie: passes over the row weigh four thresholds at a time, until few keys are left between two
// of them; those are sorted. The token is drawn by the inverse of the distribution function over what is kept, in the
// order of the tokens, from one Philox number of the row's seed and position: it depends on nothing but the row.
//
// Holtzman et al. 2020 (top-p), Fan et al. 2018 (top-k), Meister et al. 2023 (typical), Nguyen et al. 2024 (min-p),
// Keskar et al. 2019 (repetition penalty).
#include "sample/sample.h"
#include "scratch.h"
#include "simd.h"

namespace seqkern {
namespace SK_TIER {
namespace {

constexpr int64_t kBlock = 256;  // tokens whose probabilities are one sum
constexpr int64_t kFew = 192;    // candidates that are sorted
constexpr int kThresholds = 4;
// 9 of 10 equal tokens have a probability of 0.9, however it is rounded.
constexpr double kSlack = 1 - 1e-6;
constexpr float kInfinity = __builtin_inff();

struct Candidate {
  float key;
  int32_t at;
};

int64_t whole_blocks(int64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

// ---- masks and sums
// ---------------------------------------------------------------------------------------------------------

// Adds a vector's lanes to those of a sum in double.
typedef float vf32_half __attribute__((vector_size(SK_VEC_BYTES / 2)));
SK_INLINE void add_wide(vf64 (&sum)[2], vf32 v) {
  vf32_half halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  sum[0] += __builtin_convertvector(halves[0], vf64);
  sum[1] += __builtin_convertvector(halves[1], vf64);
}

// What is left of a row: arrays of whole blocks, where tokens that are left out have a logit of minus infinity and no
// probability. Few tokens are gathered, with their ids.
struct Row {
  int64_t n;
  float *z, *e, *key;  // logits; exp(z - max); scratch
  int32_t* ids;        // null: the ids are 0, 1, ...
  int32_t* id_memory;
  Candidate* candidates;
  float max;
  double total, *blocks;  // of e: the sum of all, and that of each block
  bool current;           // e and its sums are those of z
};

void find_max(Row& row) {
  vf32 top = broadcast<float>(-kInfinity);
  for (int64_t i = 0; i < row.n; i += W<float>) top = vmax(load(row.z + i), top);
  row.max = max_lanes<float>(top);
  row.current = false;
}

// e, its sums over blocks, and its total.
void exponentials(Row& row) {
  if (row.current) return;
  row.current = true;
  row.total = 0;
  for (int64_t first = 0; first < row.n; first += kBlock) {
    vf32 sum{};
    for (int64_t i = first; i < first + kBlock; i += W<float>) {
      const vf32 e = exp_nonpositive<float>(load(row.z + i) - row.max);
      store(row.e + i, e);
      sum += e;
    }
    row.total += row.blocks[first / kBlock] = static_cast<double>(sum_lanes<float>(sum));
  }
}

// ---- selection ----------------------------------------------------------------------------------------------------

// For each threshold the number of keys that are at least as large, and their weight (their number without weights).
struct Weighed {
  double weight[kThresholds];
  int64_t count[kThresholds];
};

// Counts, and adds the weights of, the lanes whose key is at least the threshold.
template <bool Weights>
SK_INLINE void add_above(vf32 key, vf32 threshold, vf32 weight, vi32& count, vf32& sum) {
#if defined(__AVX512F__)
  const __mmask16 above = _mm512_cmp_ps_mask(bit_cast<__m512>(key), bit_cast<__m512>(threshold), _CMP_GE_OQ);
  count = bit_cast<vi32>(
      _mm512_mask_add_epi32(bit_cast<__m512i>(count), above, bit_cast<__m512i>(count), _mm512_set1_epi32(1)));
  if (Weights)
    sum = bit_cast<vf32>(
        _mm512_mask_add_ps(bit_cast<__m512>(sum), above, bit_cast<__m512>(sum), bit_cast<__m512>(weight)));
#else
  const vi32 above = key >= threshold;
  count -= above;
  if (Weights) sum += bit_cast<vf32>(bit_cast<vi32>(weight) & above);
#endif
}

template <bool Weights>
void weigh(const float* keys, const float* weights, int64_t n, const float (&thresholds)[kThresholds], Weighed& out) {
  vi32 counts[kThresholds] = {};
  vf64 totals[kThresholds][2] = {};
  for (int64_t first = 0; first < n; first += kBlock) {
    vf32 sums[kThresholds] = {};
    for (int64_t i = first; i < first + kBlock; i += W<float>) {
      const vf32 key = load(keys + i);
      const vf32 weight = Weights ? load(weights + i) : vf32{};
#pragma GCC unroll 4
      for (int t = 0; t < kThresholds; ++t)
        add_above<Weights>(key, broadcast<float>(thresholds[t]), weight, counts[t], sums[t]);
    }
    if (Weights)
      for (int t = 0; t < kThresholds; ++t) add_wide(totals[t], sums[t]);
  }
  for (int t = 0; t < kThresholds; ++t) {
    out.count[t] = 0;
    for (int lane = 0; lane < W<float>; ++lane) out.count[t] += counts[t][lane];
    out.weight[t] = Weights ? sum_lanes<double>(totals[t][0] + totals[t][1]) : static_cast<double>(out.count[t]);
  }
}

bool before(const Candidate& a, const Candidate& b) { return a.key != b.key ? a.key > b.key : a.at < b.at; }

// Heap sort: larger keys first, and of equal ones the earlier.
void sort(Candidate* c, int64_t n) {
  const auto sink = [&](int64_t root, int64_t end) {
    const Candidate held = c[root];
    for (int64_t child; (child = 2 * root + 1) < end; root = child) {
      if (child + 1 < end && before(c[child], c[child + 1])) ++child;
      if (!before(held, c[child])) break;
      c[root] = c[child];
    }
    c[root] = held;
  };
  for (int64_t root = n / 2; root-- > 0;) sink(root, n);
  for (int64_t end = n - 1; end > 0; --end) {
    const Candidate first = c[0];
    c[0] = c[end];
    c[end] = first;
    sink(0, end);
  }
}

// Keys above `at` are enough but for `needed` of the `ties` equal to it, whose places are in `tied`, in order.
struct Cut {
  float at;
  int64_t needed, ties;
  const Candidate* tied;
};

// The largest keys whose weights reach `target`; at least one. `top`: the largest key, finite.
template <bool Weights>
Cut select(const Row& row, const float* keys, const float* weights, float top, double target) {
  float low = -kInfinity, high = kInfinity, thresholds[kThresholds];
  double at_low = 0, above = 0;  // the weight from `low` on, and from `high` on
  int64_t from_low = row.n, from_high = 0;
  Weighed w;
  const auto narrow = [&] {  // thresholds descend; true where the target lies between two of them
    weigh<Weights>(keys, weights, row.n, thresholds, w);
    for (int t = 0; t < kThresholds; ++t) {
      if (w.weight[t] >= target) {
        low = thresholds[t], at_low = w.weight[t], from_low = w.count[t];
        return true;
      }
      high = thresholds[t], above = w.weight[t], from_high = w.count[t];
    }
    return false;
  };
  for (float distance = 1; distance < 1e30f; distance *= 1 << kThresholds) {
    for (int t = 0; t < kThresholds; ++t) thresholds[t] = top - distance * static_cast<float>(1 << t);
    if (narrow()) break;
  }
  // Around where a straight line between the ends has the target, in a bracket that any outcome makes smaller.
  constexpr float kAround[kThresholds] = {0.15f, 0.03f, -0.03f, -0.15f};
  while (low > -kInfinity && from_low - from_high > kFew) {
    const float end = high < kInfinity ? high : top, width = end - low;
    float guess = static_cast<float>((at_low - target) / (at_low - above));
    guess = guess < 0.2f ? 0.2f : guess > 0.8f ? 0.8f : guess;
    bool between = true;
    for (int t = 0; t < kThresholds; ++t) {
      thresholds[t] = low + width * (guess + kAround[t]);
      between &= low < thresholds[t] && thresholds[t] < high && (t == 0 || thresholds[t] < thresholds[t - 1]);
    }
    if (!between) break;  // neighbours, or nearly: the rest are few different keys
    narrow();
  }
  int64_t found = 0;
  for (int64_t first = 0; first < row.n; first += 4 * W<float>) {
    vi32 some{};
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const vf32 key = load(keys + first + v * W<float>);
      some |= (key >= low) & (key < high);
    }
    if (!any(some)) continue;
    for (int64_t i = first; i < first + 4 * W<float>; ++i)
      if (keys[i] >= low && keys[i] < high && keys[i] > -kInfinity)
        row.candidates[found++] = {keys[i], static_cast<int32_t>(i)};
  }
  if (found == 0) return {-kInfinity, 0, 0, nullptr};  // all keys do not reach the target: none is left out
  sort(row.candidates, found);
  double reached = above;
  int64_t begin = 0;
  while (true) {
    const float key = row.candidates[begin].key;
    int64_t end = begin, needed = 0;
    for (; end < found && row.candidates[end].key == key; ++end) {
      if (reached >= target && (needed > 0 || begin > 0 || from_high > 0)) continue;
      reached += Weights ? static_cast<double>(weights[row.candidates[end].at]) : 1;
      ++needed;
    }
    if (reached >= target || end == found) return {key, needed, end - begin, row.candidates + begin};
    begin = end;
  }
}

// ---- leaving out --------------------------------------------------------------------------------------------------

// Leaves out tokens whose key is below the cut's, and the last of the ties, if only so many as needed are to be kept.
void keep(Row& row, const float* keys, const Cut& cut, bool all_ties) {
  vi32 kept{};
  row.total = 0;
  for (int64_t first = 0; first < row.n; first += kBlock) {
    vf32 sum{};
    for (int64_t i = first; i < first + kBlock; i += W<float>) {
      const vi32 in = load(keys + i) >= cut.at;
      store(row.z + i, in ? load(row.z + i) : broadcast<float>(-kInfinity));
      kept -= in;
      if (!row.current) continue;
      const vf32 e = bit_cast<vf32>(bit_cast<vi32>(load(row.e + i)) & in);
      store(row.e + i, e);
      sum += e;
    }
    if (row.current) row.total += row.blocks[first / kBlock] = static_cast<double>(sum_lanes<float>(sum));
  }
  int64_t left = 0;
  for (int lane = 0; lane < W<float>; ++lane) left += kept[lane];
  if (!all_ties) {
    for (int64_t i = cut.needed; i < cut.ties; ++i) row.z[cut.tied[i].at] = -kInfinity;
    left -= cut.ties - cut.needed;
    row.current &= cut.needed == cut.ties;
  }
  if (16 * left > row.n) return;  // gathering goes token by token
  int64_t n = 0;
  for (int64_t first = 0; first < row.n; first += W<float>) {
    if (!any(load(row.z + first) > -kInfinity)) continue;
    for (int64_t i = first; i < first + W<float>; ++i) {
      if (!(row.z[i] > -kInfinity)) continue;
      row.id_memory[n] = row.ids ? row.ids[i] : static_cast<int32_t>(i);
      row.z[n++] = row.z[i];
    }
  }
  row.ids = row.id_memory;
  row.n = whole_blocks(n);
  for (; n < row.n; ++n) row.z[n] = -kInfinity;
  row.current = false;
}

// Each filter finds row.max, or that is unchanged: the largest logit is always kept, but by `typical`.
void top_k(Row& row, int64_t k, SampleOrder order) {
  if (k <= 0 || k >= row.n) return;
  const Cut cut = select<false>(row, row.z, nullptr, row.max, static_cast<double>(k));
  keep(row, row.z, cut, order != SampleOrder::llama_cpp);
}

void top_p(Row& row, double p) {
  if (p >= 1) return;
  exponentials(row);
  keep(row, row.z, select<true>(row, row.z, row.e, row.max, kSlack * p * row.total), false);
}

void min_p(Row& row, double p) {
  if (p <= 0) return;
  const float at = row.max + static_cast<float>(__builtin_log(p));
  keep(row, row.z, {at < row.max ? at : row.max, 0, 0, nullptr}, true);
}

void typical(Row& row, double p) {
  if (p >= 1) return;
  exponentials(row);
  vf64 moment[2] = {};
  for (int64_t first = 0; first < row.n; first += kBlock) {
    vf32 sum{};
    for (int64_t i = first; i < first + kBlock; i += W<float>) {
      const vf32 e = load(row.e + i), below = load(row.z + i) - row.max;
      sum += e > 0.0f ? e * below : vf32{};
    }
    add_wide(moment, sum);
  }
  const double mean = sum_lanes<double>(moment[0] + moment[1]) / row.total;
  // -log p - entropy = mean - (z - max): the logarithm of the total is in both.
  const float centre = static_cast<float>(mean);
  vf32 top = broadcast<float>(-kInfinity);
  for (int64_t i = 0; i < row.n; i += W<float>) {
    const vf32 from = load(row.z + i) - row.max - centre, key = from > 0.0f ? -from : from;
    store(row.key + i, key);
    top = vmax(key, top);
  }
  keep(row, row.key, select<true>(row, row.key, row.e, max_lanes<float>(top), kSlack * p * row.total), true);
  find_max(row);
}

// ---- the row ------------------------------------------------------------------------------------------------------

// Reads the logits, divided by `temperature`, and finds the largest; false where one is then nan or plus infinity.
template <class T>
bool read(const SampleRow& p, Row& row, float temperature) {
  const T* logits = static_cast<const T*>(p.logits);
  row.n = whole_blocks(p.classes);
  const int64_t whole = p.classes / W<float> * W<float>;
  vi32 bad{};
  vf32 top = broadcast<float>(-kInfinity);
  const auto put = [&](int64_t i, vf32 z) SK_INLINED {
    z = temperature == 1 ? z : z / temperature;
    bad |= ~(z < kInfinity);
    store(row.z + i, z);
    top = vmax(z, top);
  };
  const auto vector = [&](int64_t i, int64_t n) SK_INLINED {
    if constexpr (sizeof(T) == 8) {
      vf32 z = broadcast<float>(-kInfinity);
      for (int64_t lane = 0; lane < n; ++lane) z[lane] = static_cast<float>(logits[i + lane]);
      return z;
    } else {
      if (n == W<float>) return load(logits + i);
      vf32 z = load_partial(logits + i, n);
      for (int64_t lane = n; lane < W<float>; ++lane) z[lane] = -kInfinity;
      return z;
    }
  };
  for (int64_t i = 0; i < whole; i += W<float>) put(i, vector(i, W<float>));
  if (whole < p.classes) put(whole, vector(whole, p.classes - whole));
  for (int64_t i = (p.classes + W<float> - 1) / W<float> * W<float>; i < row.n; ++i) row.z[i] = -kInfinity;
  row.max = max_lanes<float>(top);
  row.current = false;
  return !any(bad);
}

// Of logits as they were read.
double raw_lse(Row& row) {
  exponentials(row);
  return static_cast<double>(row.max) + __builtin_log(row.total);
}

template <class T>
float logit(const SampleRow& p, int64_t token) {
  const T* at = static_cast<const T*>(p.logits) + token;
  if constexpr (sizeof(T) == 8) return static_cast<float>(*at);
  else return load_partial(at, 1)[0];
}

template <class T>
void penalise(const SampleRow& p, Row& row, float temperature) {
  for (int64_t i = 0; i < p.history_length; ++i) {
    const int64_t token = p.history[i];
    if (token < 0 || token >= p.classes) continue;
    const float z = logit<T>(p, token);  // not what it became: a token that is there twice is penalised once
    row.z[token] = (z < 0 ? z * p.repetition_penalty : z / p.repetition_penalty) / temperature;
  }
  find_max(row);
}

void divide_by(Row& row, float temperature) {
  if (temperature == 1) return;
  for (int64_t i = 0; i < row.n; i += W<float>) store(row.z + i, load(row.z + i) / temperature);
}

// The place of the first token at which the sum of probabilities passes u of their total.
int64_t draw(const Row& row, double u) {
  const double target = u * row.total;
  double before = 0, sum = 0;
  int64_t chosen = 0;  // the block: the last one that has a probability, if rounding leaves the target beyond all
  for (int64_t block = 0; block < row.n / kBlock && sum <= target; ++block) {
    if (row.blocks[block] > 0) chosen = block * kBlock, before = sum;
    sum += row.blocks[block];
  }
  int64_t last = chosen;
  for (int64_t i = chosen; i < chosen + kBlock && before <= target; ++i) {
    if (!(row.e[i] > 0)) continue;
    before += static_cast<double>(row.e[i]);
    last = i;
  }
  return last;
}

// What the filters leave, with the logits that tokens are drawn by. At temperature 0 the first of the largest logits.
// False where the temperature makes them infinite.
bool filter(const SampleRow& p, Row& row) {
  if (p.temperature == 0) {
    int64_t at = 0;
    while (row.z[at] != row.max) ++at;
    row.z[0] = row.max, row.id_memory[0] = static_cast<int32_t>(at);
    row.ids = row.id_memory, row.n = whole_blocks(1);
    for (int64_t i = 1; i < row.n; ++i) row.z[i] = -kInfinity;
    row.current = false;
    return true;
  }
  const bool last = p.order == SampleOrder::llama_cpp;
  if (p.order == SampleOrder::vllm) min_p(row, p.min_p);
  top_k(row, p.top_k, p.order);
  if (last) typical(row, p.typical_p);
  top_p(row, p.top_p);
  if (p.order != SampleOrder::vllm) min_p(row, p.min_p);
  if (!last) typical(row, p.typical_p);
  if (last) {
    divide_by(row, p.temperature);
    find_max(row);
  }
  return -kInfinity < row.max && row.max < kInfinity;  // but for a quotient by the temperature
}

template <class T>
SampledToken sample_row(const SampleRow& p, Row row) {
  const bool raw = p.logprob == SampleLogprob::raw;
  const float first = p.order == SampleOrder::llama_cpp || p.temperature == 0 ? 1 : p.temperature;
  if (!read<T>(p, row, raw ? 1 : first)) return {SampleStatus::not_finite, 0, 0};
  double lse = 0;
  if (raw) {
    lse = row.max > -kInfinity ? raw_lse(row) : 0;
    if (!read<T>(p, row, first)) return {SampleStatus::not_finite, 0, 0};
  }
  if (p.repetition_penalty != 1) penalise<T>(p, row, first);
  if (!(row.max < kInfinity)) return {SampleStatus::not_finite, 0, 0};
  if (row.max == -kInfinity) return {SampleStatus::nothing_possible, 0, 0};
  if (!filter(p, row)) return {SampleStatus::not_finite, 0, 0};
  if (p.filtered) {
    for (int64_t i = 0; i < p.classes; ++i) p.filtered[i] = -kInfinity;
    for (int64_t i = 0; i < row.n; ++i)
      if (row.z[i] > -kInfinity) p.filtered[row.ids ? row.ids[i] : i] = row.z[i];
    return {SampleStatus::drawn, 0, 0};
  }
  exponentials(row);
  const int64_t at = draw(row, p.uniform), token = row.ids ? row.ids[at] : at;
  const double logprob =
      raw ? static_cast<double>(logit<T>(p, token)) - lse : __builtin_log(static_cast<double>(row.e[at]) / row.total);
  return {SampleStatus::drawn, token, static_cast<float>(logprob)};
}

int64_t pieces(void* memory, int64_t classes, Row* row) {
  Pieces take(memory);
  const int64_t n = whole_blocks(classes);
  Row cut{};
  cut.z = take.take<float>(n), cut.e = take.take<float>(n), cut.key = take.take<float>(n);
  cut.id_memory = take.take<int32_t>(n);
  cut.blocks = take.take<double>(n / kBlock);
  cut.candidates = take.take<Candidate>(n);
  if (row) *row = cut;
  return take.bytes();
}

int64_t scratch_bytes(int64_t classes) { return pieces(nullptr, classes, nullptr); }

SampledToken sample(const SampleRow& p, void* scratch) {
  Row row;
  pieces(scratch, p.classes, &row);
  SampledToken token{};
  SK_DISPATCH(p.dtype, token = sample_row<T>(p, row));
  return token;
}

}  // namespace

const SampleKernels sample_kernels = {scratch_bytes, sample};

}  // namespace SK_TIER
}  // namespace seqkern
