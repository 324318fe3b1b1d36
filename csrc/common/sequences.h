// Sequences of rows: padded to one length, or packed one after another. Torch-free.
#pragma once

#include <cstdint>

namespace seqkern {

struct Sequences {
  int64_t batch;
  int64_t rows;                      // of a padded sequence, or of all packed ones
  const int64_t* lengths = nullptr;  // (batch), of padded sequences; null: all rows
  const int64_t* starts = nullptr;   // (batch + 1), where packed sequences begin and end; or null

  int64_t length(int64_t b) const {
    if (starts) return starts[b + 1] - starts[b];
    if (!lengths) return rows;
    return lengths[b] < 0 ? 0 : lengths[b] > rows ? rows : lengths[b];
  }
  // The address of a sequence's first row in a tensor of these strides, in elements.
  int64_t begin(int64_t b, int64_t batch_stride, int64_t row_stride) const {
    return starts ? starts[b] * row_stride : b * batch_stride;
  }
};

}  // namespace seqkern
