// A step of beam search, host side: checks, the beams' candidates, the best of them, registration under the CPU key.
#include "beam_step.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "scratch.h"
#include "tensor.h"

namespace seqkern {
namespace {

// Logits below which a second thread costs more than it saves.
constexpr int64_t kGrainLogits = 1 << 14;

struct Continuation {
  double score;
  int64_t beam;
  int64_t token;
};

bool before(const Continuation& a, const Continuation& b) {
  if (a.score != b.score) return a.score > b.score;
  return a.beam != b.beam ? a.beam < b.beam : a.token < b.token;
}

std::tuple<Tensor, Tensor, Tensor> beam_step(const Tensor& logits, const Tensor& scores, int64_t candidates) {
  const char* const op = "beam_step";
  const Dtype dtype = dtype_of(logits, op, "logits");
  check_cpu(logits, op, "logits");
  check_dim(logits, 3, op, "logits");
  const int64_t batch = logits.size(0), beams = logits.size(1), classes = logits.size(2);
  check_cpu(scores, op, "scores");
  check_dim(scores, 2, op, "scores");
  check_size(scores, 0, batch, op, "scores");
  check_size(scores, 1, beams, op, "scores");
  check_type(scores, ScalarType::Float, op, "scores");
  SK_CHECK(candidates >= 1, op, ": candidates must be at least 1, got ", candidates);
  const int64_t rows = checked_product({batch, beams}, op);
  SK_CHECK(rows == 0 || classes > 0, op, ": logits must have a class at least, got shape (", batch, ", ", beams,
           ", 0)");
  SK_CHECK(classes <= std::numeric_limits<int32_t>::max() / 2, op, ": logits must have fewer than 2^30 classes, got ",
           classes);
  Tensor best = empty(logits, {batch, candidates}, ScalarType::Float);
  Tensor from = empty(logits, {batch, candidates}, ScalarType::Long);
  Tensor token = empty(logits, {batch, candidates}, ScalarType::Long);
  const Tensor z = as_contiguous(logits), given = as_contiguous(scores);
  const float* const score = static_cast<const float*>(given.const_data_ptr());
  for (int64_t row = 0; row < rows; ++row)
    SK_CHECK(score[row] < std::numeric_limits<float>::infinity(), op, ": scores must not be nan or infinity, but ",
             score[row], " is that of beam ", row % beams, " of row ", row / beams);
  const int64_t most = std::min(candidates, classes);
  const BeamKernels& kernels = beam_kernels();
  std::vector<BeamCandidate> each(static_cast<size_t>(checked_product({rows, most}, op)));
  std::vector<BeamFound> found(static_cast<size_t>(rows));
  const auto search = [&](int64_t begin, int64_t end) {
    const Scratch scratch(kernels.scratch_bytes(classes, most));
    for (int64_t row = begin; row < end; ++row) {
      found[row] = {true, 0, 0};
      if (std::isinf(score[row])) continue;  // nothing goes on from here
      const char* const at = static_cast<const char*>(z.const_data_ptr()) + row * classes * size_of(dtype);
      found[row] = kernels.find({dtype, at, classes, most, each.data() + row * most}, scratch.data());
    }
  };
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kGrainLogits / classes), search);
  for (int64_t row = 0; row < rows; ++row)
    SK_CHECK(found[row].finite, op, ": logits must not be nan or infinite, but those of beam ", row % beams, " of row ",
             row / beams, " are");
  std::vector<Continuation> all;
  all.reserve(static_cast<size_t>(beams * most));
  for (int64_t b = 0; b < batch; ++b) {
    all.clear();
    for (int64_t beam = 0; beam < beams; ++beam) {
      const int64_t row = b * beams + beam;
      for (int64_t i = 0; i < found[row].count; ++i) {
        const BeamCandidate& c = each[row * most + i];
        all.push_back({static_cast<double>(score[row]) + (static_cast<double>(c.logit) - found[row].lse), beam,
                       int64_t{c.token}});
      }
    }
    const int64_t count = std::min<int64_t>(candidates, static_cast<int64_t>(all.size()));
    std::partial_sort(all.begin(), all.begin() + count, all.end(), before);
    for (int64_t i = 0; i < candidates; ++i) {
      const bool there = i < count;
      static_cast<float*>(best.mutable_data_ptr())[b * candidates + i] =
          there ? static_cast<float>(all[i].score) : -std::numeric_limits<float>::infinity();
      static_cast<int64_t*>(from.mutable_data_ptr())[b * candidates + i] = there ? all[i].beam : 0;
      static_cast<int64_t*>(token.mutable_data_ptr())[b * candidates + i] = there ? all[i].token : 0;
    }
  }
  return {best, from, token};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) { m.impl("beam_step", TORCH_BOX(&beam_step)); }

}  // namespace seqkern
