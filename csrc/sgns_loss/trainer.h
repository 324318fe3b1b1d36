// Arguments and entry points of the trainer of word vectors. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"

namespace seqkern {

// Rows of vectors: `stride` numbers each, a multiple of kVectorNumbers, zero from the dimension on.
constexpr int64_t kVectorNumbers = 16;
constexpr int64_t kMostNegatives = 63, kMostWindow = 100;

struct WordTraining {
  int64_t stride;
  float *w_in, *w_out;    // rows of words, and of n-grams; rows of words
  const int32_t* tokens;  // words, sentence after sentence
  const int64_t* starts;  // of the sentences, and the end
  int64_t words;
  const uint32_t* keep;  // a word stays in its sentence if a random number is at most that; null: all do
  // A negative: of a random column the column's word below the threshold, else its alias.
  const uint32_t* threshold;
  const int32_t* alias;
  // The rows of w_in whose mean is a word's vector: rows[row_starts[word]] ...; null: the word's own row.
  const int64_t* row_starts;
  const int32_t* rows;
  int64_t window, negatives;
  bool cbow;    // the mean of the words around predicts the middle one; else each of them does
  bool shrink;  // a window's size is drawn from 1 to `window`
  bool parity;  // gradients as in word2vec.c: of a mean undivided, and beyond scores of 6 a sigmoid of 0 or 1
  uint64_t seed;
  float rate, last_rate;  // at the first token of `first`, at the end of `last`; linear between them
  int64_t first, last;    // sentences
  bool wants_loss;
};

struct WordLoss {
  double sum;      // of the pairs' losses, where wanted
  int64_t pairs;   // pairs with a positive, each with its negatives
  int64_t tokens;  // that were left after subsampling
};

struct TrainerKernels {
  int64_t (*scratch)(const WordTraining&, int64_t longest);
  // Sentences [begin, end); longest: the most tokens of a sentence. Adds to `loss`.
  void (*train)(const WordTraining&, int64_t begin, int64_t end, int64_t longest, void* scratch, WordLoss& loss);
};

SK_DECLARE_KERNEL_TABLE(TrainerKernels, trainer_kernels)

}  // namespace seqkern
