// The products' entry points (products.h), for the dtypes of a translation unit: all of them (products.cpp), or
// bfloat16 with operands of pairs (products_bf16.cpp).
#pragma once

#include "few_rows.h"
#include "row_products.h"
#if defined(SK_TILES)
#include "tile_gemm.h"
#endif

namespace seqkern {
namespace SK_TIER {
namespace {

Dtype operand_type(Dtype dtype) {
  if (kTerms > 1) return Dtype::bf16;
  return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
}

int64_t row_stride(Dtype dtype, int64_t columns) {
  SK_BY_ACC(dtype, padded_stride<A>(columns) + (kOperandEnd > kPad<A> ? kOperandEnd - kPad<A> : 0));
}

int64_t panel_columns_of(Dtype dtype) { SK_BY_ACC(dtype, kPanel<A>); }
int64_t packed_bytes(const Matrix& b) {
  SK_BY_ACC(b.dtype, padded_words(b.depth) * panel_count<A>(b.columns, b.groups) * panel_width<A>(b.groups) *
                         static_cast<int64_t>(sizeof(A)));
}
int64_t pack_items(const Matrix& b) { SK_BY_ACC(b.dtype, pack_item_count<A>(b)); }
void pack(const Matrix& b, void* packed, int64_t item) { SK_BY_TYPE(b.dtype, pack_item<T>(b, packed, item)); }

#if defined(SK_TILES)
int64_t cut(Product& p, int64_t threads) { return cut_for_tiles(p, threads); }
int64_t multiply_scratch(Dtype) { return kTileScratch * static_cast<int64_t>(sizeof(float)); }
void multiply(const Product& p, int64_t item, void* scratch) {
  multiply_tiles_item(p, item, static_cast<float*>(scratch));
}
#else
// Smaller blocks where there are few of them, so that the threads end together (NOTES.md). Rows of a transposed A are
// read by lines: not fewer than two.
int64_t cut(Product& p, int64_t threads) {
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  const auto items = [&] { return blocks(p.rows, p.block_rows) * blocks(p.columns, p.block_columns); };
  p.block_rows = kBlockRows, p.block_columns = kBlockColumns;
  const int64_t least = p.a_k_stride == 1 ? kBlockRows / 4 : kBlockRows / 2;
  while (p.block_rows > least && items() < 32 * threads) p.block_rows /= 2;
  return items();
}
int64_t multiply_scratch(Dtype dtype) { SK_BY_ACC(dtype, (kStagedA + kBlockC<A>)*static_cast<int64_t>(sizeof(A))); }
void multiply(const Product& p, int64_t item, void* scratch) {
  SK_BY_ACC(p.a_type, multiply_item(p, item, static_cast<A*>(scratch)));
}
#endif

int64_t few_rows_item_count(const FewRowsProduct& p) { SK_BY_ACC(p.b.dtype, few_rows_items<A>(p)); }
int64_t few_rows_scratch_bytes(const FewRowsProduct& p) {
  SK_BY_ACC(p.b.dtype, few_rows_scratch<A>(p) * static_cast<int64_t>(sizeof(A)));
}
void few_rows(const FewRowsProduct& p, int64_t item, void* scratch) {
  SK_BY_ACC(p.b.dtype, few_rows_item(p, item, static_cast<A*>(scratch)));
}

int64_t rows_scratch_bytes(const RowsProduct& p) {
  SK_BY_ACC(p.a_type, p.rows * operand_stride<A>(p.depth) * static_cast<int64_t>(sizeof(A)));
}
void rows(const RowsProduct& p, int64_t begin, int64_t end, void* scratch) {
  SK_BY_ACC(p.a_type, rows_product(p, begin, end, static_cast<A*>(scratch)));
}
int64_t spin_of(Dtype dtype, int64_t turns, void* memory) { SK_BY_ACC(dtype, spin(turns, static_cast<A*>(memory))); }

void outer(const OuterProduct& p, int64_t begin, int64_t end) { SK_BY_TYPE(p.b_type, outer_rows<T>(p, begin, end)); }
void gather(const Gather& p, int64_t begin, int64_t end) { SK_BY_TYPE(p.dtype, gather_rows<T>(p, begin, end)); }
void scatter(const Scatter& p, int64_t begin, int64_t end) { SK_BY_TYPE(p.dtype, scatter_rows<T>(p, begin, end)); }
void add_columns(const ColumnSums& p, int64_t begin, int64_t end) {
  SK_BY_TYPE(p.dtype, add_column_range<T>(p, begin, end));
}

constexpr ProductKernels kProductKernels = {
    .operand_type = operand_type,
    .row_stride = row_stride,
    .panel_columns = panel_columns_of,
    .packed_bytes = packed_bytes,
    .pack_items = pack_items,
    .pack = pack,
    .cut = cut,
    .multiply_scratch = multiply_scratch,
    .multiply = multiply,
    .few_rows_items = few_rows_item_count,
    .few_rows_scratch = few_rows_scratch_bytes,
    .few_rows = few_rows,
    .rows_scratch = rows_scratch_bytes,
    .rows = rows,
    .spin = spin_of,
    .outer = outer,
    .gather = gather,
    .scatter = scatter,
    .add_columns = add_columns,
};

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
