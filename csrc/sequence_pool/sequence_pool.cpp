// Pooling over sequences, host side: checks, the division of the work, registration under the CPU key.
#include "sequence_pool.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "parallel.h"
#include "sequences_tensor.h"
#include "tensor.h"

namespace seqkern {
namespace {

PoolSequences pooled(const char* op, Dtype dtype, const Sequences& in, int64_t columns, int64_t kind,
                     int64_t reversed) {
  SK_CHECK(0 <= kind && kind <= 6, op, ": kind must be between 0 and 6, got ", kind);
  SK_CHECK(0 <= reversed && reversed <= columns, op, ": reversed must be between 0 and ", columns, ", got ", reversed);
  return {.dtype = dtype, .kind = static_cast<PoolKind>(kind), .in = in, .columns = columns, .reversed = reversed};
}

bool extreme(int64_t kind) {
  return kind == static_cast<int64_t>(PoolKind::max) || kind == static_cast<int64_t>(PoolKind::min);
}

std::tuple<Tensor, Tensor> sequence_pool_fwd(const Tensor& x, const std::optional<Tensor>& lengths,
                                             const std::optional<Tensor>& starts, int64_t kind, int64_t reversed) {
  const char* const op = "sequence_pool_fwd";
  const Dtype dtype = dtype_of(x, op, "x");
  check_cpu(x, op, "x");
  check_dim(x, starts ? 2 : 3, op, "x");
  const int64_t batch = CheckedSequences::batch_of(x, starts);
  const int64_t rows = x.size(starts ? 0 : 1), columns = x.size(starts ? 1 : 2);
  const CheckedSequences s(op, lengths, starts, batch, rows, columns);
  const Tensor from = with_unit_last_stride(x);
  Tensor output = empty(x, {batch, columns}, x.scalar_type());
  const std::initializer_list<int64_t> none = {0}, all = {batch, columns};
  Tensor index = empty(x, extreme(kind) ? all : none, ScalarType::Int);
  const PoolForward f{.of = pooled(op, dtype, s.in, columns, kind, reversed),
                      .x = from.const_data_ptr(),
                      .x_batch = starts ? 0 : from.stride(0),
                      .x_row = from.stride(starts ? 0 : 1),
                      .output = output.mutable_data_ptr(),
                      .index = extreme(kind) ? static_cast<int32_t*>(index.mutable_data_ptr()) : nullptr};
  const PoolKernels& kernels = pool_kernels();
  const int64_t width = kernels.columns(dtype), strips = (columns + width - 1) / width;
  const PoolKind pool = f.of.kind;
  const double read = static_cast<double>(pool == PoolKind::first || pool == PoolKind::last ? batch : s.total + batch);
  const double work = read * static_cast<double>(columns) * (pool == PoolKind::logsumexp ? 16 : 2);
  for_small_items(batch * strips, work, 0, [&](int64_t item, void*) {
    const int64_t begin = item % strips * width;
    kernels.forward(f, item / strips, begin, std::min(columns, begin + width));
  });
  return {output, index};
}

Tensor sequence_pool_bwd(const Tensor& grad_output, const std::optional<Tensor>& x, const std::optional<Tensor>& output,
                         const std::optional<Tensor>& index, const std::optional<Tensor>& lengths,
                         const std::optional<Tensor>& starts, int64_t rows, int64_t kind, int64_t reversed) {
  const char* const op = "sequence_pool_bwd";
  const Dtype dtype = dtype_of(grad_output, op, "grad_output");
  check_cpu(grad_output, op, "grad_output");
  check_dim(grad_output, 2, op, "grad_output");
  SK_CHECK(rows >= 0, op, ": rows must not be negative, got ", rows);
  const int64_t batch = grad_output.size(0), columns = grad_output.size(1);
  const CheckedSequences s(op, lengths, starts, batch, rows, columns);
  const Tensor upstream = as_contiguous(grad_output);
  std::optional<Tensor> from, of_all, at;
  if (kind == static_cast<int64_t>(PoolKind::logsumexp)) {
    SK_CHECK(x && output, op, ": logsumexp needs x and output");
    check_cpu(*x, op, "x");
    check_dim(*x, starts ? 2 : 3, op, "x");
    check_type(*x, grad_output.scalar_type(), op, "x");
    if (!starts) check_size(*x, 0, batch, op, "x");
    check_size(*x, starts ? 0 : 1, rows, op, "x");
    check_size(*x, starts ? 1 : 2, columns, op, "x");
    check_cpu(*output, op, "output");
    check_dim(*output, 2, op, "output");
    check_type(*output, grad_output.scalar_type(), op, "output");
    check_size(*output, 0, batch, op, "output");
    check_size(*output, 1, columns, op, "output");
    from = with_unit_last_stride(*x);
    of_all = as_contiguous(*output);
  }
  if (extreme(kind)) {
    SK_CHECK(index, op, ": max and min need index");
    check_cpu(*index, op, "index");
    check_dim(*index, 2, op, "index");
    check_type(*index, ScalarType::Int, op, "index");
    check_size(*index, 0, batch, op, "index");
    check_size(*index, 1, columns, op, "index");
    at = as_contiguous(*index);
  }
  Tensor grad = starts ? empty(grad_output, {rows, columns}, grad_output.scalar_type())
                       : empty(grad_output, {batch, rows, columns}, grad_output.scalar_type());
  const PoolBackward f{.of = pooled(op, dtype, s.in, columns, kind, reversed),
                       .grad_output = upstream.const_data_ptr(),
                       .x = from ? from->const_data_ptr() : nullptr,
                       .output = of_all ? of_all->const_data_ptr() : nullptr,
                       .x_batch = from && !starts ? from->stride(0) : 0,
                       .x_row = from ? from->stride(starts ? 0 : 1) : 0,
                       .index = at ? static_cast<const int32_t*>(at->const_data_ptr()) : nullptr,
                       .grad = grad.mutable_data_ptr()};
  const PoolKernels& kernels = pool_kernels();
  const int64_t most = starts ? s.longest : rows, blocks = (most + kPoolRows - 1) / kPoolRows;
  for_small_items(batch * blocks,
                  4.0 * static_cast<double>(starts ? rows : batch * rows) * static_cast<double>(columns), 0,
                  [&](int64_t item, void*) {
                    const int64_t b = item / blocks, begin = item % blocks * kPoolRows;
                    const int64_t end = std::min(starts ? s.in.length(b) : rows, begin + kPoolRows);
                    if (begin < end) kernels.backward(f, b, begin, end);
                  });
  if (starts) {  // rows of no sequence
    const int64_t bytes = columns * size_of(dtype);
    const auto zero = [&](int64_t begin, int64_t end) {
      if (begin < end && bytes > 0)
        std::memset(static_cast<char*>(f.grad) + begin * bytes, 0, static_cast<size_t>((end - begin) * bytes));
    };
    zero(0, s.in.starts[0]);
    zero(s.in.starts[batch], rows);
  }
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("sequence_pool_fwd", TORCH_BOX(&sequence_pool_fwd));
  m.impl("sequence_pool_bwd", TORCH_BOX(&sequence_pool_bwd));
}

}  // namespace seqkern
