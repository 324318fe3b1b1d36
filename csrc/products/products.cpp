// The shared products (common/products.h) on their own, for `python -m benchmarks products` and tests: no op of the
// library is made of these.
#include "products.h"

#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

// The right operand: two-dimensional, one of its strides 1.
Matrix matrix_of(const Tensor& b, const char* op) {
  const Dtype dtype = dtype_of(b, op, "b");
  check_cpu(b, op, "b");
  check_dim(b, 2, op, "b");
  const bool rows = b.stride(1) == 1 || b.size(1) == 1, columns = b.stride(0) == 1 || b.size(0) == 1;
  SK_CHECK(rows || columns, op, ": b must have rows or columns that are contiguous, got strides ", b.stride(0), " and ",
           b.stride(1));
  return {.dtype = dtype,
          .data = b.const_data_ptr(),
          .k_stride = rows ? b.stride(0) : 1,
          .n_stride = rows ? 1 : b.stride(1),
          .depth = b.size(0),
          .columns = b.size(1)};
}

void check_left(const Tensor& a, const char* op) {
  check_cpu(a, op, "a");
  check_dim(a, 2, op, "a");
}

// That `packed` is what products_pack gives for a B of this depth and so many columns.
void check_packed(const Tensor& packed, const ProductKernels& kernels, Dtype dtype, int64_t depth, int64_t columns,
                  const char* op) {
  check_cpu(packed, op, "packed");
  check_type(packed, ScalarType::Byte, op, "packed");
  check_dim(packed, 1, op, "packed");
  SK_CHECK(columns > 0 && columns < int64_t{1} << 31 && depth < int64_t{1} << 31, op,
           ": columns must be between 1 and 2^31 - 1, got ", columns);
  check_size(packed, 0, kernels.packed_bytes({.dtype = dtype, .depth = depth, .columns = columns}), op, "packed");
}

Tensor products_pack(const Tensor& b) {
  const Matrix matrix = matrix_of(b, "products_pack");
  const ProductKernels& kernels = product_kernels_for(matrix.dtype);
  Tensor packed = empty(b, {kernels.packed_bytes(matrix)}, ScalarType::Byte);
  for_items(kernels.pack_items(matrix), static_cast<double>(b.numel()), 0,
            [&](int64_t item, void*) { kernels.pack(matrix, packed.mutable_data_ptr(), item); });
  return packed;
}

Tensor products_multiply(const Tensor& a, const Tensor& packed, int64_t columns) {
  const char* op = "products_multiply";
  const Dtype dtype = dtype_of(a, op, "a");
  check_left(a, op);
  SK_CHECK(a.stride(1) == 1 || a.stride(0) == 1, op, ": a must have rows or columns that are contiguous");
  const ProductKernels& kernels = product_kernels_for(dtype);
  check_packed(packed, kernels, dtype, a.size(1), columns, op);
  Tensor c = empty(a, {a.size(0), columns}, a.scalar_type());
  multiply(kernels, {.rows = a.size(0),
                     .columns = columns,
                     .depth = a.size(1),
                     .a_type = dtype,
                     .a = a.const_data_ptr(),
                     .a_row_stride = a.stride(0),
                     .a_k_stride = a.stride(1),
                     .packed_b = packed.const_data_ptr(),
                     .c_type = dtype,
                     .c = c.mutable_data_ptr(),
                     .c_stride = columns});
  return c;
}

Tensor products_rows(const Tensor& a, const Tensor& packed, int64_t columns, int64_t times) {
  const char* op = "products_rows";
  const Dtype dtype = dtype_of(a, op, "a");
  check_left(a, op);
  SK_CHECK(a.stride(1) == 1, op, ": a must have contiguous rows");
  SK_CHECK(a.size(1) >= 1, op, ": a must have at least 1 column");
  SK_CHECK(times >= 1, op, ": times must be at least 1, got ", times);
  const ProductKernels& kernels = product_kernels_for(dtype);
  check_packed(packed, kernels, dtype, a.size(1), columns, op);
  const int64_t width = kernels.panel_columns(dtype), panels = (columns + width - 1) / width;
  RowsProduct product{.rows = a.size(0),
                      .depth = a.size(1),
                      .a_type = dtype,
                      .a = a.const_data_ptr(),
                      .a_stride = a.stride(0),
                      .packed_b = packed.const_data_ptr(),
                      .c_stride = kernels.row_stride(dtype, columns + kMostPanel),
                      .times = times};
  Tensor c = empty(a, {a.size(0), product.c_stride}, acc_type(dtype));
  product.c = c.mutable_data_ptr();
  const int64_t threads = worker_count(panels);
  for_items_on(threads, threads, kernels.rows_scratch(product), [&](int64_t item, void* scratch) {
    kernels.rows(product, item * panels / threads, (item + 1) * panels / threads, scratch);
  });
  return torch::stable::narrow(c, 1, 0, columns);
}

Tensor products_few_rows(const Tensor& a, const Tensor& b) {
  const char* op = "products_few_rows";
  const Matrix matrix = matrix_of(b, op);
  check_left(a, op);
  check_size(a, 1, matrix.depth, op, "a");
  SK_CHECK(a.stride(1) == 1, op, ": a must have contiguous rows");
  SK_CHECK(a.size(1) >= 1, op, ": a must have at least 1 column");
  SK_CHECK(a.size(0) <= kFewRows, op, ": a must have at most ", kFewRows, " rows, got ", a.size(0));
  const ProductKernels& kernels = product_kernels_for(matrix.dtype);
  check_type(a, kernels.operand_type(matrix.dtype) == Dtype::bf16 ? b.scalar_type() : acc_type(matrix.dtype), op, "a");
  Tensor c = empty(a, {a.size(0), matrix.columns}, acc_type(matrix.dtype));
  multiply_few_rows(kernels, {.b = matrix,
                              .rows = a.size(0),
                              .a_type = dtype_of(a, op, "a"),
                              .a = a.const_data_ptr(),
                              .a_stride = a.stride(0),
                              .c = c.mutable_data_ptr(),
                              .c_stride = matrix.columns});
  return c;
}

int64_t products_peak(const Tensor& like, int64_t turns) {
  const char* op = "products_peak";
  const Dtype dtype = dtype_of(like, op, "like");
  SK_CHECK(turns >= 1, op, ": turns must be at least 1, got ", turns);
  const ProductKernels& kernels = product_kernels_for(dtype);
  const int64_t threads = torch::stable::get_num_threads();
  int64_t each = 0;
  for_items_on(threads, threads, kSpinBytes, [&](int64_t item, void* scratch) {
    const int64_t done = kernels.spin(dtype, turns, scratch);
    if (item == 0) each = done;
  });
  return each * threads;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("products_pack", TORCH_BOX(&products_pack));
  m.impl("products_multiply", TORCH_BOX(&products_multiply));
  m.impl("products_rows", TORCH_BOX(&products_rows));
  m.impl("products_few_rows", TORCH_BOX(&products_few_rows));
  m.impl("products_peak", TORCH_BOX(&products_peak));
}

}  // namespace seqkern
