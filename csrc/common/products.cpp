// Products on CPU, host side: divides the work among threads.
#include "products.h"

#include <algorithm>

#include "parallel.h"

namespace seqkern {
namespace {

// Columns of a work item of add_columns.
constexpr int64_t kSumColumns = 256;
// Multiply-adds that take as long as packing a number.
constexpr int64_t kPackWork = 8;

double product_of(int64_t a, int64_t b, int64_t c = 1) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

}  // namespace

const ProductKernels& product_kernels_for(Dtype dtype) {
  const ProductKernels* bf16 = dtype == Dtype::bf16 ? product_bf16_kernels() : nullptr;
  return bf16 ? *bf16 : product_kernels();
}

PackedMatrix pack(const ProductKernels& kernels, const Matrix& b) {
  PackedMatrix packed(kernels.packed_bytes(b));
  for_small_items(kernels.pack_items(b), product_of(b.depth, b.columns, kPackWork), 0,
                  [&](int64_t item, void*) { kernels.pack(b, packed.data(), item); });
  return packed;
}

void multiply(const ProductKernels& kernels, Product product) {
  const int64_t items = kernels.cut(product, torch::stable::get_num_threads());
  for_runs(items, product_of(product.rows, product.columns, product.depth), kernels.multiply_scratch(product.a_type),
           [&](int64_t item, void* scratch) { kernels.multiply(product, item, scratch); });
}

void multiply_few_rows(const ProductKernels& kernels, const FewRowsProduct& product) {
  for_items(kernels.few_rows_items(product), product_of(product.b.depth, product.b.columns, product.rows + 4),
            kernels.few_rows_scratch(product),
            [&](int64_t item, void* scratch) { kernels.few_rows(product, item, scratch); });
}

void add_outer(const ProductKernels& kernels, const OuterProduct& product) {
  for_ranges(product.rows, product.columns, 0,
             [&](int64_t begin, int64_t end, void*) { kernels.outer(product, begin, end); });
}

void gather(const ProductKernels& kernels, const Gather& rows) {
  for_ranges(rows.count, rows.columns, 0, [&](int64_t begin, int64_t end, void*) { kernels.gather(rows, begin, end); });
}

void scatter(const ProductKernels& kernels, const Scatter& rows) {
  for_ranges(rows.count, rows.columns, 0,
             [&](int64_t begin, int64_t end, void*) { kernels.scatter(rows, begin, end); });
}

void add_columns(const ProductKernels& kernels, const ColumnSums& sums) {
  for_items((sums.columns + kSumColumns - 1) / kSumColumns, product_of(sums.rows, sums.columns), 0,
            [&](int64_t item, void*) {
              kernels.add_columns(sums, item * kSumColumns, std::min(sums.columns, (item + 1) * kSumColumns));
            });
}

}  // namespace seqkern
