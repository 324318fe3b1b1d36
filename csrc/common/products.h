// Matrix products on CPU, and row movement around them: the basis of the ops. Torch-free.
//
//   const ProductKernels& kernels = product_kernels_for(dtype);
//   const PackedMatrix b = pack(kernels, {.dtype = dtype, .data = weight, .k_stride = 1, .n_stride = K, ...});
//   multiply(kernels, {.rows = M, .columns = N, .depth = K, .a = x, ..., .packed_b = b.data(), ...});
//
//   multiply            C = A B + bias, or C += A B, of any sizes; B is packed once, into panels
//   multiply_few_rows   C = A B + bias for at most kFewRows rows; B is packed on the fly, a few panels at a time
//   add_outer           C = A^T B, or C += A^T B, for sums of few terms (kFewTerms); nothing is packed
//   gather, scatter     from scattered rows to a matrix, and back
//   add_columns         sums of columns, in double
//
// They divide the work among torch's threads by the shape alone, and an element of C depends only on its own row of A
// and column of B: the bits are the same on any number of threads and with any other rows. An op with parallel
// workers of its own calls the table's entry points from those.
//
// `kernels` are the active tier's. They convert bfloat16 and float16 to float32 and multiply that; in the tiers
// avx512bf16 and amx they multiply bfloat16 itself (operand_type), with sums in float32. A, B and C have the dtype or
// its accumulation type, acc_t<dtype>; biases have the latter. Strides count elements, memory sizes bytes.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"
#include "scratch.h"

namespace seqkern {

// The most rows of multiply_few_rows: weights that are used once are then not written to memory and read back.
constexpr int64_t kFewRows = 32;
// The most terms for which add_outer is faster than multiply.
constexpr int64_t kFewTerms = 16;

// The right operand of a product, B(k, n) = data[k * k_stride + n * n_stride]. One of the strides is 1.
struct Matrix {
  Dtype dtype;
  const void* data = nullptr;
  int64_t k_stride = 0, n_stride = 1;
  int64_t depth, columns;
  // 1: a panel holds consecutive columns. Otherwise the columns are `groups` equal groups, and a panel holds the same
  // columns of each, one vector wide: the gates of a recurrent cell side by side.
  int64_t groups = 1;
  // Instead of data and k_stride, where n_stride is 1: row k of B; null for zeros.
  const void* const* rows = nullptr;
  // Where n_stride is 1: row k of B is row (first_row + k) % depth of the data.
  int64_t first_row = 0;
};

// C(m, n) = bias[n] + sum over k of A(m, k) B(k, n), or that sum added to C. B is packed as one group.
struct Product {
  int64_t rows, columns, depth;
  Dtype a_type;
  // A(m, k) = a[m * a_row_stride + k * a_k_stride], where one of the strides is 1. Or, where a_k_stride is 1,
  // a_rows[m][k]; a null row is zeros.
  const void* a = nullptr;
  int64_t a_row_stride = 0, a_k_stride = 1;
  const void* const* a_rows = nullptr;
  const void* packed_b;
  const void* bias = nullptr;  // (columns) or null
  Dtype c_type;
  void* c = nullptr;  // row-major; or instead c_rows[m], each row
  int64_t c_stride = 0;
  void* const* c_rows = nullptr;
  bool accumulate = false;
  int64_t block_rows = 0, block_columns = 0;  // of C, of a work item: cut() sets them
};

// C = A B + bias for at most kFewRows rows. A has the accumulation type or operand_type, C the accumulation type.
struct FewRowsProduct {
  Matrix b;
  int64_t rows;
  Dtype a_type;
  const void* a;
  int64_t a_stride;
  const void* bias = nullptr;  // (columns) or null
  void* c;
  int64_t c_stride;
};

// C = A B with packed panels, `times` times: the product of a recurrent layer's steps on its own. A has the elements'
// type or operand_type, C the accumulation type, with room for whole panels.
struct RowsProduct {
  int64_t rows, depth;
  Dtype a_type;
  const void* a;
  int64_t a_stride;
  const void* packed_b;
  void* c = nullptr;
  int64_t c_stride;
  int64_t times = 1;
};
// Columns of a panel, at most; memory of `spin`.
constexpr int64_t kMostPanel = 64, kSpinBytes = 1 << 15;

// C(m, n) = sum over few terms k of A(k, m) B(k, n), or that sum added to C. A has operand_type.
struct OuterProduct {
  int64_t rows, columns, terms;  // A is (terms, rows), B (terms, columns)
  const void* a;
  int64_t a_stride;
  Dtype b_type;
  const void* const* b_rows;  // row k of B; null for zeros
  Dtype c_type;
  void* c;
  int64_t c_stride;
  bool accumulate = false;
};

// Copies scattered rows to a matrix of the accumulation type: out = row * factor + bias.
struct Gather {
  Dtype dtype;
  int64_t count, columns;                // count: number of rows
  const void* const* rows;               // null for zeros
  const void* const* factors = nullptr;  // for each row: (columns) in the accumulation type, or null
  const void* bias = nullptr;            // (columns) or null
  void* out;
  int64_t out_stride;
};

// Copies the rows of a matrix, in the accumulation type or operand_type, to columns [column, column + columns) of
// scattered rows.
struct Scatter {
  Dtype source_type;
  const void* source;
  int64_t source_stride;
  Dtype dtype;
  int64_t count, columns;
  void* const* rows;
  int64_t column = 0;
};

// sums[n] += sum over the rows r of source(r, n).
struct ColumnSums {
  Dtype dtype;
  int64_t rows, columns;
  const void* source;
  int64_t stride;
  double* sums;
};

// The entry points of one tier. Work items may run in any order and in parallel; each worker has scratch of its own.
struct ProductKernels {
  // The type that products of this dtype multiply: the accumulation type, or pairs of bfloat16.
  Dtype (*operand_type)(Dtype dtype);
  // Row stride for operands and accumulators: padded to whole vectors, and not a power of two, whose rows would share a
  // few sets of the cache.
  int64_t (*row_stride)(Dtype dtype, int64_t columns);

  int64_t (*panel_columns)(Dtype dtype);  // of one group
  int64_t (*packed_bytes)(const Matrix&);
  int64_t (*pack_items)(const Matrix&);
  void (*pack)(const Matrix&, void* packed, int64_t item);

  // Cuts C into blocks for `threads` threads; returns the number of blocks.
  int64_t (*cut)(Product&, int64_t threads);
  int64_t (*multiply_scratch)(Dtype a_type);
  void (*multiply)(const Product&, int64_t item, void* scratch);

  int64_t (*few_rows_items)(const FewRowsProduct&);
  int64_t (*few_rows_scratch)(const FewRowsProduct&);
  void (*few_rows)(const FewRowsProduct&, int64_t item, void* scratch);

  int64_t (*rows_scratch)(const RowsProduct&);
  void (*rows)(const RowsProduct&, int64_t panel_begin, int64_t panel_end, void* scratch);

  // Multiply-adds that wait for nothing, `turns` times as many as registers can hold sums; returns how many.
  int64_t (*spin)(Dtype dtype, int64_t turns, void* memory);

  // Each call works on a range of rows (of C or of the matrix), or of columns.
  void (*outer)(const OuterProduct&, int64_t row_begin, int64_t row_end);
  void (*gather)(const Gather&, int64_t row_begin, int64_t row_end);
  void (*scatter)(const Scatter&, int64_t row_begin, int64_t row_end);
  void (*add_columns)(const ColumnSums&, int64_t column_begin, int64_t column_end);
};

SK_DECLARE_KERNEL_TABLE(ProductKernels, product_kernels)
SK_DECLARE_BF16_TABLE(ProductKernels, product_bf16_kernels)

// ---- host side ------------------------------------------------------------------------------------------------------

// The active tier's entry points for a dtype.
const ProductKernels& product_kernels_for(Dtype dtype);

// B in panels that a register tile streams: [panel][k][vectors][W], with zeros beyond the columns. A panel of more
// vectors than a tile is wide is stored as several, each one tile wide.
class PackedMatrix {
 public:
  PackedMatrix() = default;
  explicit PackedMatrix(int64_t bytes) : memory_(bytes) {}
  void* data() const { return memory_.data(); }  // null where nothing is packed

 private:
  Scratch memory_;
};

PackedMatrix pack(const ProductKernels& kernels, const Matrix& b);
void multiply(const ProductKernels& kernels, Product product);
void multiply_few_rows(const ProductKernels& kernels, const FewRowsProduct& product);
void add_outer(const ProductKernels& kernels, const OuterProduct& product);
void gather(const ProductKernels& kernels, const Gather& rows);
void scatter(const ProductKernels& kernels, const Scatter& rows);
void add_columns(const ProductKernels& kernels, const ColumnSums& sums);

}  // namespace seqkern
