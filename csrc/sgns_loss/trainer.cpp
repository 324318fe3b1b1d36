// The trainer of word vectors, host side: checks, and sentences for the workers.
//
// Workers share both matrices and add to them without waiting for each other (Recht et al. 2011): with more than one
// the result depends on who came first. With one it depends on the seed alone.
#include "trainer.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

constexpr int64_t kItemTokens = 1024;

// The buckets of the n-grams of words, each between < and >, of least to most characters: their starts, words + 1, and
// FNV-1a's hash of their bytes, which are signed, as in fastText. letters: UTF-8, uint8, of word w from starts[w] on.
std::tuple<Tensor, Tensor> word_ngrams(const Tensor& letters, const Tensor& starts, int64_t least, int64_t most,
                                       int64_t buckets) {
  const char* const op = "word_ngrams";
  check_cpu(letters, op, "letters"), check_cpu(starts, op, "starts");
  check_dim(letters, 1, op, "letters"), check_dim(starts, 1, op, "starts");
  check_type(letters, ScalarType::Byte, op, "letters"), check_type(starts, ScalarType::Long, op, "starts");
  SK_CHECK(letters.is_contiguous() && starts.is_contiguous() && starts.numel() > 0, op, ": wants contiguous tensors");
  SK_CHECK(1 <= least && least <= most && buckets >= 1 && buckets <= int64_t{1} << 31, op,
           ": n-grams must have 1 <= least <= most characters, and 1 to 2^31 buckets, got ", least, ", ", most, ", ",
           buckets);
  const auto* const at = static_cast<const int64_t*>(starts.const_data_ptr());
  const int64_t words = starts.numel() - 1;
  std::vector<int64_t> bounds = {0}, found;
  std::string word;
  for (int64_t w = 0; w < words; ++w) {
    SK_CHECK(0 <= at[w] && at[w] <= at[w + 1] && at[w + 1] <= letters.numel(), op, ": starts must increase, got ",
             at[w], " and then ", at[w + 1]);
    word.clear();
    word.push_back('<');
    word.append(static_cast<const char*>(letters.const_data_ptr()) + at[w], static_cast<size_t>(at[w + 1] - at[w]));
    word.push_back('>');
    const auto continues = [&](size_t i) { return (word[i] & 0xC0) == 0x80; };  // within a character
    for (size_t i = 0; i < word.size(); ++i) {
      if (continues(i)) continue;
      uint32_t hash = 2166136261u;
      size_t j = i;
      for (int64_t n = 1; j < word.size() && n <= most; ++n) {
        do {
          hash = (hash ^ static_cast<uint32_t>(static_cast<int8_t>(word[j]))) * 16777619u;
          ++j;
        } while (j < word.size() && continues(j));
        if (n >= least && !(n == 1 && (i == 0 || j == word.size())))
          found.push_back(static_cast<int64_t>(hash % static_cast<uint64_t>(buckets)));
      }
    }
    bounds.push_back(static_cast<int64_t>(found.size()));
  }
  const auto tensor = [&](const std::vector<int64_t>& values) {
    Tensor t = empty(starts, {static_cast<int64_t>(values.size())}, ScalarType::Long);
    std::copy(values.begin(), values.end(), static_cast<int64_t*>(t.mutable_data_ptr()));
    return t;
  };
  return {tensor(bounds), tensor(found)};
}

Tensor word2vec_train(Tensor w_in, Tensor w_out, const Tensor& tokens, const Tensor& starts,
                      const std::optional<Tensor>& keep, const Tensor& threshold, const Tensor& alias,
                      const std::optional<Tensor>& row_starts, const std::optional<Tensor>& rows, int64_t first,
                      int64_t last, int64_t window, int64_t negatives, bool cbow, bool shrink, bool parity,
                      int64_t seed, double rate, double last_rate, bool racy, bool wants_loss) {
  const char* const op = "word2vec_train";
  const auto taken = [&](const Tensor& t, int64_t dim, ScalarType type, const char* name) {
    check_cpu(t, op, name);
    check_dim(t, dim, op, name);
    check_type(t, type, op, name);
    SK_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous");
  };
  taken(w_in, 2, ScalarType::Float, "w_in"), taken(w_out, 2, ScalarType::Float, "w_out");
  taken(tokens, 1, ScalarType::Int, "tokens"), taken(starts, 1, ScalarType::Long, "starts");
  taken(threshold, 1, ScalarType::Int, "threshold"), taken(alias, 1, ScalarType::Int, "alias");
  const int64_t words = w_out.size(0), stride = w_out.size(1);
  SK_CHECK(stride % kVectorNumbers == 0, op, ": rows must have a multiple of ", kVectorNumbers, " numbers, got ",
           stride);
  check_size(w_in, 1, stride, op, "w_in");
  check_size(threshold, 0, words, op, "threshold"), check_size(alias, 0, words, op, "alias");
  if (keep) taken(*keep, 1, ScalarType::Int, "keep"), check_size(*keep, 0, words, op, "keep");
  SK_CHECK(row_starts.has_value() == rows.has_value(), op, ": row_starts and rows come together");
  SK_CHECK(window >= 1 && window <= kMostWindow, op, ": window must be 1 to ", kMostWindow, ", got ", window);
  SK_CHECK(negatives >= 0 && negatives <= kMostNegatives, op, ": negatives must be 0 to ", kMostNegatives, ", got ",
           negatives);
  const int64_t sentences = starts.numel() - 1;
  SK_CHECK(first >= 0 && first <= last && last <= sentences, op, ": sentences ", first, " to ", last,
           " must be among the ", sentences);
  // Nothing below reads or writes by an index that is not checked here.
  const auto* const word = static_cast<const int32_t*>(tokens.const_data_ptr());
  const auto* const start = static_cast<const int64_t*>(starts.const_data_ptr());
  const auto* const other = static_cast<const int32_t*>(alias.const_data_ptr());
  int64_t longest = 0;
  for (int64_t s = first; s < last; ++s) {
    SK_CHECK(start[s] >= 0 && start[s] <= start[s + 1] && start[s + 1] <= tokens.numel(), op,
             ": starts must increase, up to the ", tokens.numel(), " tokens, got ", start[s], " and then ",
             start[s + 1]);
    longest = std::max(longest, start[s + 1] - start[s]);
  }
  if (last > first)
    for (int64_t t = start[first]; t < start[last]; ++t)
      SK_CHECK(word[t] >= 0 && word[t] < words, op, ": tokens must be words below ", words, ", got ", word[t]);
  for (int64_t w = 0; w < words; ++w)
    SK_CHECK(other[w] >= 0 && other[w] < words, op, ": alias must have words below ", words, ", got ", other[w]);
  if (!rows) SK_CHECK(w_in.size(0) >= words, op, ": w_in must have a row for each of ", words, " words");
  if (rows) {
    taken(*row_starts, 1, ScalarType::Long, "row_starts"), check_size(*row_starts, 0, words + 1, op, "row_starts");
    taken(*rows, 1, ScalarType::Int, "rows");
    const auto* const at = static_cast<const int64_t*>(row_starts->const_data_ptr());
    const auto* const row = static_cast<const int32_t*>(rows->const_data_ptr());
    SK_CHECK(at[0] == 0 && at[words] == rows->numel(), op, ": row_starts must go from 0 to ", rows->numel());
    for (int64_t w = 0; w < words; ++w)
      SK_CHECK(at[w] < at[w + 1] && at[w + 1] <= rows->numel(), op, ": row_starts must increase, got ", at[w],
               " and then ", at[w + 1]);
    for (int64_t r = 0; r < rows->numel(); ++r)
      SK_CHECK(row[r] >= 0 && row[r] < w_in.size(0), op, ": rows must be below ", w_in.size(0), ", got ", row[r]);
  }
  const WordTraining p{.stride = stride,
                       .w_in = static_cast<float*>(w_in.mutable_data_ptr()),
                       .w_out = static_cast<float*>(w_out.mutable_data_ptr()),
                       .tokens = word,
                       .starts = start,
                       .words = words,
                       .keep = data_or_null<uint32_t>(keep),
                       .threshold = static_cast<const uint32_t*>(threshold.const_data_ptr()),
                       .alias = other,
                       .row_starts = data_or_null<int64_t>(row_starts),
                       .rows = data_or_null<int32_t>(rows),
                       .window = window,
                       .negatives = negatives,
                       .cbow = cbow,
                       .shrink = shrink,
                       .parity = parity,
                       .seed = static_cast<uint64_t>(seed),
                       .rate = static_cast<float>(rate),
                       .last_rate = static_cast<float>(last_rate),
                       .first = first,
                       .last = last,
                       .wants_loss = wants_loss};
  // Sentences of about kItemTokens tokens are an item.
  std::vector<int64_t> items = {first};
  for (int64_t s = first; s < last; ++s)
    if (start[s + 1] - start[items.back()] >= kItemTokens || s + 1 == last) items.push_back(s + 1);
  const auto count = static_cast<int64_t>(items.size()) - 1;
  std::vector<WordLoss> losses(static_cast<size_t>(std::max<int64_t>(count, 0)));
  const TrainerKernels& kernels = trainer_kernels();
  if (count > 0 && stride > 0)
    for_items_on(racy ? worker_count(count) : 1, count, kernels.scratch(p, longest), [&](int64_t item, void* scratch) {
      const auto i = static_cast<size_t>(item);
      kernels.train(p, items[i], items[i + 1], longest, scratch, losses[i]);
    });
  Tensor result = empty(w_out, {3}, ScalarType::Double);
  auto* const total = static_cast<double*>(result.mutable_data_ptr());
  total[0] = total[1] = total[2] = 0;
  for (const WordLoss& loss : losses) {
    total[0] += loss.sum, total[1] += static_cast<double>(loss.pairs), total[2] += static_cast<double>(loss.tokens);
  }
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("word_ngrams", TORCH_BOX(&word_ngrams));
  m.impl("word2vec_train", TORCH_BOX(&word2vec_train));
}

}  // namespace seqkern
