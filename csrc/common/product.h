// Arguments of the large products in blocked_gemm.h. Torch-free; host code fills them in.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace seqkern {

// Work items: blocks of C, in elements.
constexpr int64_t kBlockRows = 96, kBlockColumns = 512;

// Copies B(k, n) = source[k * k_stride + n * n_stride] into panels that a micro-tile streams: [panel][k][vectors][W],
// in units (operand.h), zero where a panel reaches beyond the columns. One of the strides is 1. A panel of more
// vectors than a tile is wide is several, one tile wide each.
struct Packing {
  Dtype dtype;
  const void* source;
  int64_t k_stride, n_stride;
  int64_t depth, columns;  // of the source
  // 1: a panel holds consecutive columns. Otherwise the columns are `groups` equal groups, and a panel holds the same W
  // columns of each: the gates of W units side by side.
  int64_t groups;
  void* packed;
  const void* const* rows = nullptr;  // instead of source and k_stride (n_stride is 1): row k of B, null for zeros
  // Where n_stride is 1: row k of B is row (first_row + k) % depth of the source.
  int64_t first_row = 0;
};

// C(m, n) = bias[n] + sum_k A(m, k) B(k, n), or that added to C; with B packed as one group.
struct Product {
  int64_t rows, columns, depth;
  Dtype a_type;
  const void* a;  // A(m, k) = a[m * a_row_stride + k * a_k_stride]; one of the strides is 1
  int64_t a_row_stride, a_k_stride;
  const void* packed_b;
  const void* bias;  // (columns) in the accumulation type, or null
  Dtype c_type;
  void* c;  // row-major
  int64_t c_stride;
  bool accumulate;
  int64_t block_rows, block_columns;    // of C in a work item
  const void* const* a_rows = nullptr;  // instead of a (a_k_stride is 1): row m of A, null for zeros
  void* const* c_rows = nullptr;        // instead of c: row m of C
};

}  // namespace seqkern
