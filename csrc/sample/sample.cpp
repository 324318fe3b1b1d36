// Sampling tokens, host side: checks, the rows' parameters, the division of the rows, registration under the CPU key.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

// A number for all rows, or one for each.
template <class T>
class PerRow {
 public:
  PerRow(T of_all, const std::optional<Tensor>& t, const char* op, const char* name, ScalarType type, int64_t rows)
      : of_all_(of_all) {
    if (!t) return;
    check_cpu(*t, op, name);
    check_dim(*t, 1, op, name);
    check_type(*t, type, op, name);
    check_size(*t, 0, rows, op, name);
    kept_ = as_contiguous(*t);
    data_ = static_cast<const T*>(kept_->const_data_ptr());
  }
  bool same() const { return data_ == nullptr; }
  T operator[](int64_t row) const { return data_ ? data_[row] : of_all_; }

 private:
  const T of_all_;
  std::optional<Tensor> kept_;
  const T* data_ = nullptr;
};

// The options as the schemas have them, less logits, seeds and positions.
struct Options {
  double temperature;
  const std::optional<Tensor>& temperatures;
  int64_t top_k;
  const std::optional<Tensor>& top_ks;
  double top_p;
  const std::optional<Tensor>& top_ps;
  double min_p;
  const std::optional<Tensor>& min_ps;
  double typical_p;
  const std::optional<Tensor>& typical_ps;
  double repetition_penalty;
  const std::optional<Tensor>& repetition_penalties;
  const std::optional<Tensor>& history;
  int64_t history_length;
  const std::optional<Tensor>& history_lengths;
  int64_t order;
};

struct Draws {
  int64_t seed;
  const std::optional<Tensor>& seeds;
  int64_t position;
  const std::optional<Tensor>& positions;
  int64_t logprob;
};

// Temperatures below are 0: quotients by them would be infinite.
constexpr double kGreedy = 1e-30;
// From one seed another one for each row: seed + row (2^64 / golden ratio).
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// A number in (0, 1) for a seed and a position, by Philox4x32 with 7 rounds, as csrc/common/philox.h: the first two
// words of the counter (position low, position high, stream, 0) under the key seed.
double uniform(uint64_t seed, uint64_t position) {
  constexpr uint32_t kStream = 0x53414d50;  // beside the masks of dropout
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), kStream, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t{c[0]} * 0xD2511F53u, b = uint64_t{c[2]} * 0xCD9E8D57u;
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = (uint64_t{c[0]} << 21) | (c[1] >> 11);
  return (static_cast<double>(bits) + 0.5) * 0x1p-53;
}

// Tokens, or without draws the filtered logits.
std::tuple<Tensor, Tensor> run(const Tensor& logits, const Options& o, const Draws* draws) {
  const char* const op = draws ? "sample" : "filter_logits";
  const Dtype dtype = dtype_of(logits, op, "logits");
  check_cpu(logits, op, "logits");
  check_dim(logits, 2, op, "logits");
  const int64_t rows = logits.size(0), classes = logits.size(1), logprob = draws ? draws->logprob : 0;
  SK_CHECK(rows == 0 || classes > 0, op, ": logits must have a class at least, got shape (", rows, ", 0)");
  SK_CHECK(classes <= std::numeric_limits<int32_t>::max() / 2, op, ": logits must have fewer than 2^30 classes, got ",
           classes);
  SK_CHECK(0 <= o.order && o.order <= 2, op, ": order must be 0 (transformers), 1 (vllm) or 2 (llama.cpp), got ",
           o.order);
  SK_CHECK(0 <= logprob && logprob <= 2, op, ": logprob must be 0 (none), 1 (processed) or 2 (raw), got ", logprob);
  const PerRow<double> temperature(o.temperature, o.temperatures, op, "temperature", ScalarType::Double, rows),
      top_p(o.top_p, o.top_ps, op, "top_p", ScalarType::Double, rows),
      min_p(o.min_p, o.min_ps, op, "min_p", ScalarType::Double, rows),
      typical_p(o.typical_p, o.typical_ps, op, "typical_p", ScalarType::Double, rows),
      penalty(o.repetition_penalty, o.repetition_penalties, op, "repetition_penalty", ScalarType::Double, rows);
  const PerRow<int64_t> top_k(o.top_k, o.top_ks, op, "top_k", ScalarType::Long, rows),
      lengths(o.history_length, o.history_lengths, op, "history_lengths", ScalarType::Long, rows);
  for (int64_t row = 0; row < rows; ++row) {
    const auto check = [&](bool fits, const char* name, const char* expected, double got) {
      SK_CHECK(fits, op, ": ", name, " must be ", expected, ", got ", got, " in row ", row);
    };
    const auto in_unit = [](double x) { return 0 <= x && x <= 1; };
    check(temperature[row] >= 0 && std::isfinite(temperature[row]), "temperature", "at least 0", temperature[row]);
    check(top_k[row] >= 0, "top_k", "at least 0", static_cast<double>(top_k[row]));
    check(in_unit(top_p[row]), "top_p", "at least 0 and at most 1", top_p[row]);
    check(in_unit(min_p[row]), "min_p", "at least 0 and at most 1", min_p[row]);
    check(in_unit(typical_p[row]) && typical_p[row] > 0, "typical_p", "above 0 and at most 1", typical_p[row]);
    check(penalty[row] > 0 && std::isfinite(penalty[row]), "repetition_penalty", "above 0", penalty[row]);
  }
  std::optional<Tensor> tokens;
  if (o.history) {
    check_cpu(*o.history, op, "history");
    check_dim(*o.history, 2, op, "history");
    check_type(*o.history, ScalarType::Long, op, "history");
    check_size(*o.history, 0, rows, op, "history");
    tokens = with_unit_last_stride(*o.history);
  }
  const int64_t longest = tokens ? tokens->size(1) : 0;
  std::optional<PerRow<int64_t>> seeds, positions;
  if (draws) {
    seeds.emplace(draws->seed, draws->seeds, op, "seed", ScalarType::Long, rows);
    positions.emplace(draws->position, draws->positions, op, "position", ScalarType::Long, rows);
  }
  const Tensor z = with_unit_last_stride(logits);
  Tensor token = empty(logits, {draws ? rows : 0}, ScalarType::Long);
  Tensor numbers = draws ? empty(logits, {logprob ? rows : 0}, ScalarType::Float)
                         : empty(logits, {rows, classes}, ScalarType::Float);
  int64_t* const found = static_cast<int64_t*>(token.mutable_data_ptr());
  float* const of_found = static_cast<float*>(numbers.mutable_data_ptr());
  const SampleKernels& kernels = sample_kernels();
  std::vector<SampleStatus> statuses(static_cast<size_t>(rows));
  const auto uniform_of = [&](int64_t row) {
    const uint64_t seed = static_cast<uint64_t>((*seeds)[row]);
    return uniform(seeds->same() ? seed + kGolden * static_cast<uint64_t>(row) : seed,
                   static_cast<uint64_t>((*positions)[row]));
  };
  const double work = 64.0 * static_cast<double>(rows) * static_cast<double>(classes);
  for_items(rows, work, kernels.scratch_bytes(classes), [&](int64_t row, void* scratch) {
    const SampledToken drawn = kernels.sample(
        {
            .dtype = dtype,
            .logits = static_cast<const char*>(z.const_data_ptr()) + row * z.stride(0) * size_of(dtype),
            .classes = classes,
            .order = static_cast<SampleOrder>(o.order),
            .logprob = static_cast<SampleLogprob>(logprob),
            .temperature = temperature[row] < kGreedy ? 0 : static_cast<float>(temperature[row]),
            .top_k = top_k[row],
            .top_p = top_p[row],
            .min_p = min_p[row],
            .typical_p = typical_p[row],
            .repetition_penalty = tokens ? static_cast<float>(penalty[row]) : 1.0f,
            .history =
                tokens ? static_cast<const int64_t*>(tokens->const_data_ptr()) + row * tokens->stride(0) : nullptr,
            .history_length = std::max<int64_t>(0, std::min(longest, lengths[row])),
            .uniform = draws ? uniform_of(row) : 0,
            .filtered = draws ? nullptr : of_found + row * classes,
        },
        scratch);
    statuses[row] = drawn.status;
    if (draws) found[row] = drawn.token;
    if (logprob) of_found[row] = drawn.logprob;
  });
  for (int64_t row = 0; row < rows; ++row) {
    SK_CHECK(statuses[row] != SampleStatus::not_finite, op,
             ": logits, penalised and divided by the temperature, must not be nan or infinite, but row ", row, " is");
    SK_CHECK(statuses[row] != SampleStatus::nothing_possible, op, ": all logits of row ", row,
             " are minus infinity: no token is possible");
  }
  return {token, numbers};
}

std::tuple<Tensor, Tensor> sample(
    const Tensor& logits, int64_t seed, const std::optional<Tensor>& seeds, int64_t position,
    const std::optional<Tensor>& positions, double temperature, const std::optional<Tensor>& temperatures,
    int64_t top_k, const std::optional<Tensor>& top_ks, double top_p, const std::optional<Tensor>& top_ps, double min_p,
    const std::optional<Tensor>& min_ps, double typical_p, const std::optional<Tensor>& typical_ps,
    double repetition_penalty, const std::optional<Tensor>& repetition_penalties, const std::optional<Tensor>& history,
    int64_t history_length, const std::optional<Tensor>& history_lengths, int64_t order, int64_t logprob) {
  const Draws draws{seed, seeds, position, positions, logprob};
  return run(logits,
             {temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps, typical_p, typical_ps,
              repetition_penalty, repetition_penalties, history, history_length, history_lengths, order},
             &draws);
}

Tensor filter_logits(const Tensor& logits, double temperature, const std::optional<Tensor>& temperatures, int64_t top_k,
                     const std::optional<Tensor>& top_ks, double top_p, const std::optional<Tensor>& top_ps,
                     double min_p, const std::optional<Tensor>& min_ps, double typical_p,
                     const std::optional<Tensor>& typical_ps, double repetition_penalty,
                     const std::optional<Tensor>& repetition_penalties, const std::optional<Tensor>& history,
                     int64_t history_length, const std::optional<Tensor>& history_lengths, int64_t order) {
  return std::get<1>(run(logits,
                         {temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps, typical_p, typical_ps,
                          repetition_penalty, repetition_penalties, history, history_length, history_lengths, order},
                         nullptr));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("filter_logits", TORCH_BOX(&filter_logits));
}

}  // namespace seqkern
