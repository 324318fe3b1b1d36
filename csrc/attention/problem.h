// A checked call of the attention ops: sequences, heads, and the addresses of their rows. Host side.
#pragma once

#include <optional>
#include <vector>

#include "arguments.h"
#include "attention.h"
#include "tensor.h"

namespace seqkern {

// A sequence and its rows: those of index `batch` in dimension 0 (dense), or a range of all rows (packed).
struct Sequence {
  AttentionSequence band;
  int64_t index, batch, query_row, key_row;
  int64_t key_rows;   // key_lengths may hide the last ones
  bool mask_is_band;  // what the mask says is in `band`
};

struct AttentionProblem : AttentionSizes {
  AttentionShape shape;
  std::vector<Sequence> sequences;
  std::optional<Tensor> mask, slopes;
  std::vector<MaskCell> cells;  // of the mask's matrices: `look_at_mask`
  int64_t cell_rows = 0, cell_columns = 0;

  // The index of a head's first row, for tensors with one number a query.
  int64_t row(const Sequence& s, int64_t head) const { return (s.batch * heads + head) * query_rows + s.query_row; }
  AttentionShape shape_of(const Sequence& s) const;
  AttentionBias bias(const Sequence& s, int64_t head) const;
};

// A (batch, heads, rows, columns) tensor whose last dimension is contiguous.
struct Heads {
  Tensor tensor;
  char* data;
  int64_t batch_stride, head_stride, row_stride, element;

  explicit Heads(const Tensor& t)
      : tensor(with_unit_last_stride(t)),
        data(static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()))),
        batch_stride(tensor.stride(0)),
        head_stride(tensor.stride(1)),
        row_stride(tensor.stride(2)),
        element(tensor.element_size()) {}

  char* address(int64_t batch, int64_t head, int64_t row) const {
    return data + (batch * batch_stride + head * head_stride + row * row_stride) * element;
  }
  Rows rows(int64_t batch, int64_t head, int64_t row) const { return {address(batch, head, row), row_stride}; }
  MutableRows mutable_rows(int64_t batch, int64_t head, int64_t row) const {
    return {address(batch, head, row), row_stride};
  }
  void zero(int64_t batch, int64_t head, int64_t begin, int64_t end) const;
};

AttentionProblem check(const AttentionArguments& arguments);

// Brings a mask into rows and looks for bands and at its cells, where that pays: mask_cells.cpp.
void look_at_mask(AttentionProblem& problem, int64_t queries, int64_t keys);
// Makes boolean masks the sequences' bands, where they are bands: mask_bands.cpp.
void find_bands(AttentionProblem& problem, int64_t queries, int64_t keys);

inline int64_t blocks(int64_t length, int64_t block) { return (length + block - 1) / block; }

}  // namespace seqkern
