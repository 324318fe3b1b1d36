// A convolution and its maximum over time, host side: checks, the products, registration under the CPU key.
//
// The windows of all sequences are rows of one product, in chunks whose results stay in the cache. A row is read where
// its window lies in x; windows of sequences shorter than the filters are copied, with zeros behind them.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "conv1d.h"
#include "parallel.h"
#include "products.h"
#include "sequences_tensor.h"
#include "tensor.h"

namespace seqkern {
namespace {

constexpr int64_t kChunkWindows = 256;  // of a work item, if filters are few enough
constexpr int64_t kChunkNumbers = 1 << 16;

// The checked arguments, and tensors that live as long.
class Arguments {
 public:
  Arguments(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& lengths,
            const std::optional<Tensor>& starts)
      : sequences(op, lengths, starts, CheckedSequences::batch_of(x, starts), checked_rows(op, x, starts),
                  x.size(starts ? 1 : 2)) {
    const Dtype dtype = dtype_of(x, op, "x");
    check_cpu(x, op, "x");
    check_cpu(weight, op, "weight");
    check_dim(weight, 3, op, "weight");
    check_type(weight, x.scalar_type(), op, "weight");
    const int64_t columns = x.size(starts ? 1 : 2), filters = weight.size(0), width = weight.size(1);
    check_size(weight, 2, columns, op, "weight");
    SK_CHECK(width >= 1, op, ": weight must have windows of 1 row at least, got ", width);
    checked_product({sequences.in.batch + 1, std::max<int64_t>(filters, 1), 8}, op);
    checked_product({std::max<int64_t>(filters, 1), width, std::max<int64_t>(columns, 1), 8}, op);
    checked_product({sequences.in.batch + 1, width, std::max<int64_t>(columns, 1), 8}, op);
    // A window's rows lie one after another.
    const int64_t row = x.stride(starts ? 0 : 1);
    x_ = unit_last_stride(x) && (row == columns || x.size(starts ? 0 : 1) <= 1) ? x : torch::stable::contiguous(x);
    weight_ = as_contiguous(weight);
    of = {.dtype = dtype,
          .in = sequences.in,
          .columns = columns,
          .width = width,
          .filters = filters,
          .x = x_->const_data_ptr(),
          .x_batch = starts ? 0 : x_->stride(0),
          .x_row = columns};
  }

  const void* weight() const { return weight_->const_data_ptr(); }

  CheckedSequences sequences;
  MaxConvolution of;

 private:
  static int64_t checked_rows(const char* op, const Tensor& x, const std::optional<Tensor>& starts) {
    check_dim(x, starts ? 2 : 3, op, "x");
    return x.size(starts ? 0 : 1);
  }
  std::optional<Tensor> x_, weight_;
};

// A work item: consecutive windows of consecutive sequences.
struct Chunk {
  int64_t b, first;      // where it begins
  int64_t last, behind;  // its last sequence, and one behind its last window there
};

std::vector<Chunk> chunks_of(const MaxConvolution& p) {
  const int64_t most = std::clamp<int64_t>(kChunkNumbers / std::max<int64_t>(p.filters, 1), 16, kChunkWindows);
  std::vector<Chunk> chunks;
  int64_t room = 0;
  for (int64_t b = 0; b < p.in.batch; ++b) {
    const int64_t windows = p.windows(b);
    if (windows <= room) {  // a sequence of one chunk
      chunks.back().last = b, chunks.back().behind = windows;
      room -= windows;
      continue;
    }
    if (windows <= most) {
      chunks.push_back({b, 0, b, windows});
      room = most - windows;
      continue;
    }
    chunks.push_back({b, 0, b, windows});  // a long one has its own, and goes through it in parts
    room = 0;
  }
  return chunks;
}

std::tuple<Tensor, Tensor, Tensor> conv1d_max_fwd(const Tensor& x, const Tensor& weight,
                                                  const std::optional<Tensor>& bias,
                                                  const std::optional<Tensor>& lengths,
                                                  const std::optional<Tensor>& starts, int64_t activation) {
  const char* const op = "conv1d_max_fwd";
  const Arguments a(op, x, weight, lengths, starts);
  const MaxConvolution& p = a.of;
  SK_CHECK(0 <= activation && activation <= 3, op, ": activation must be between 0 and 3, got ", activation);
  const ScalarType acc = acc_type(p.dtype);
  std::optional<Tensor> wide_bias;
  if (bias) {
    check_cpu(*bias, op, "bias");
    check_dim(*bias, 1, op, "bias");
    check_size(*bias, 0, p.filters, op, "bias");
    check_type(*bias, acc, op, "bias");
    wide_bias = as_contiguous(*bias);
  }
  Tensor output = empty(x, {p.in.batch, p.filters}, x.scalar_type());
  Tensor z = empty(x, {p.in.batch, p.filters}, acc), index = empty(x, {p.in.batch, p.filters}, ScalarType::Int);
  const Dtype acc_dtype = p.dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32;
  const int64_t depth = p.width * p.columns, size = size_of(p.dtype), wide = size_of(acc_dtype);
  const MaxConvolutionKernels& kernels = max_convolution_kernels();
  if (p.in.batch > 0 && p.filters > 0) {
    const ProductKernels& products = product_kernels_for(p.dtype);
    const PackedMatrix packed = pack(
        products,
        {.dtype = p.dtype, .data = a.weight(), .k_stride = 1, .n_stride = depth, .depth = depth, .columns = p.filters});
    const std::vector<Chunk> chunks = chunks_of(p);
    const int64_t most = std::clamp<int64_t>(kChunkNumbers / p.filters, 16, kChunkWindows);
    // Where the windows of a chunk are; its products; a short sequence's window with its zeros.
    const int64_t pointer_bytes = piece_bytes(most * static_cast<int64_t>(sizeof(void*)));
    const int64_t stride = products.row_stride(acc_dtype, p.filters);
    const int64_t product_bytes = piece_bytes(checked_product({most, stride, wide}, op));
    const int64_t short_bytes = piece_bytes(checked_product({most, depth, size}, op));
    const int64_t scratch = products.multiply_scratch(p.dtype);
    const double work = static_cast<double>(a.sequences.total + p.in.batch) * static_cast<double>(p.filters) *
                        static_cast<double>(depth);
    for_small_items(static_cast<int64_t>(chunks.size()), work, pointer_bytes + product_bytes + short_bytes + scratch,
                    [&](int64_t item, void* memory) {
                      const void** const rows = static_cast<const void**>(memory);
                      char* const results = static_cast<char*>(memory) + pointer_bytes;
                      char* const copies = results + product_bytes;
                      const Chunk& chunk = chunks[item];
                      const auto multiply = [&](int64_t count) {
                        Product product{.rows = count,
                                        .columns = p.filters,
                                        .depth = depth,
                                        .a_type = p.dtype,
                                        .a_rows = rows,
                                        .packed_b = packed.data(),
                                        .c_type = acc_dtype,
                                        .c = results,
                                        .c_stride = stride};
                        const int64_t items = products.cut(product, 1);
                        for (int64_t i = 0; i < items; ++i) products.multiply(product, i, copies + short_bytes);
                      };
                      const auto largest = [&](int64_t b, int64_t row, int64_t count, int64_t first) {
                        kernels.largest({.acc = acc_dtype,
                                         .filters = p.filters,
                                         .count = count,
                                         .first = first,
                                         .products = results + row * stride * wide,
                                         .stride = stride,
                                         .best = static_cast<char*>(z.mutable_data_ptr()) + b * p.filters * wide,
                                         .index = static_cast<int32_t*>(index.mutable_data_ptr()) + b * p.filters,
                                         .merge = first > 0});
                      };
                      const auto window = [&](int64_t b, int64_t t, int64_t row) {
                        const char* const at =
                            static_cast<const char*>(p.x) + (p.in.begin(b, p.x_batch, p.x_row) + t * p.columns) * size;
                        const int64_t length = p.in.length(b);
                        if (length >= p.width) return static_cast<const void*>(at);
                        char* const copy = copies + row * depth * size;
                        const int64_t bytes = length * p.columns * size;
                        if (bytes) std::memcpy(copy, at, static_cast<size_t>(bytes));
                        std::memset(copy + bytes, 0, static_cast<size_t>(depth * size - bytes));
                        return static_cast<const void*>(copy);
                      };
                      if (chunk.behind > most) {
                        for (int64_t t = 0; t < chunk.behind; t += most) {
                          const int64_t count = std::min(most, chunk.behind - t);
                          for (int64_t i = 0; i < count; ++i) rows[i] = window(chunk.b, t + i, i);
                          multiply(count);
                          largest(chunk.b, 0, count, t);
                        }
                        return;
                      }
                      int64_t count = 0;
                      for (int64_t b = chunk.b; b <= chunk.last; ++b)
                        for (int64_t t = 0; t < p.windows(b); ++t, ++count) rows[count] = window(b, t, count);
                      multiply(count);
                      count = 0;
                      for (int64_t b = chunk.b; b <= chunk.last; ++b)
                        largest(b, count, p.windows(b), 0), count += p.windows(b);
                    });
  }
  const MaxOutputs outputs{.dtype = p.dtype,
                           .activation = static_cast<MaxActivation>(activation),
                           .batch = p.in.batch,
                           .filters = p.filters,
                           .bias = wide_bias ? wide_bias->const_data_ptr() : nullptr,
                           .z = z.mutable_data_ptr(),
                           .output = output.mutable_data_ptr()};
  for_ranges(p.in.batch, p.filters, 0,
             [&](int64_t begin, int64_t end, void*) { kernels.outputs(outputs, begin, end); });
  return {output, z, index};
}

std::tuple<Tensor, Tensor, Tensor> conv1d_max_bwd(const Tensor& grad_output, const Tensor& x, const Tensor& weight,
                                                  const std::optional<Tensor>& lengths,
                                                  const std::optional<Tensor>& starts, const Tensor& z,
                                                  const Tensor& index, int64_t activation, bool need_x,
                                                  bool need_weight) {
  const char* const op = "conv1d_max_bwd";
  const Arguments a(op, x, weight, lengths, starts);
  const MaxConvolution& p = a.of;
  SK_CHECK(0 <= activation && activation <= 3, op, ": activation must be between 0 and 3, got ", activation);
  const ScalarType acc = acc_type(p.dtype);
  for (const auto& [t, name, type] : {std::tuple{&grad_output, "grad_output", x.scalar_type()},
                                      std::tuple{&z, "z", acc}, std::tuple{&index, "index", ScalarType::Int}}) {
    check_cpu(*t, op, name);
    check_dim(*t, 2, op, name);
    check_type(*t, type, op, name);
    check_size(*t, 0, p.in.batch, op, name);
    check_size(*t, 1, p.filters, op, name);
  }
  const Tensor upstream = as_contiguous(grad_output), kept = as_contiguous(z), at = as_contiguous(index);
  const int32_t* const windows = static_cast<const int32_t*>(at.const_data_ptr());
  for (int64_t b = 0; b < p.in.batch; ++b)
    for (int64_t c = 0; c < p.filters; ++c)
      SK_CHECK(0 <= windows[b * p.filters + c] && windows[b * p.filters + c] < p.windows(b), op,
               ": index must be a window of its sequence, got ", windows[b * p.filters + c]);
  const int64_t rows = p.in.rows;
  const std::initializer_list<int64_t> none = {0}, padded = {p.in.batch, rows, p.columns}, packed = {rows, p.columns};
  Tensor grad_x = empty(x, need_x ? (starts ? packed : padded) : none, x.scalar_type());
  const std::initializer_list<int64_t> weights = {p.filters, p.width, p.columns};
  Tensor grad_weight = empty(x, need_weight ? weights : none, x.scalar_type());
  Tensor slopes = empty(x, {p.in.batch, p.filters}, acc);
  const MaxBackward m{.of = p,
                      .activation = static_cast<MaxActivation>(activation),
                      .grad_output = upstream.const_data_ptr(),
                      .z = kept.const_data_ptr(),
                      .index = windows,
                      .weight = a.weight(),
                      .slopes = slopes.mutable_data_ptr(),
                      .grad_x = need_x ? grad_x.mutable_data_ptr() : nullptr,
                      .grad_weight = need_weight ? grad_weight.mutable_data_ptr() : nullptr};
  const MaxConvolutionKernels& kernels = max_convolution_kernels();
  for_ranges(p.in.batch, p.filters, 0, [&](int64_t begin, int64_t end, void*) { kernels.slopes(m, begin, end); });
  const double work =
      static_cast<double>(p.in.batch) * static_cast<double>(p.filters) * static_cast<double>(p.width * p.columns);
  const int64_t scratch = kernels.scratch(p);
  if (need_x) {
    for_small_items(p.in.batch, work + static_cast<double>(grad_x.numel()), scratch,
                    [&](int64_t b, void* memory) { kernels.grad_x(m, b, memory); });
    if (starts) {  // rows of no sequence
      const int64_t bytes = p.columns * size_of(p.dtype);
      const auto zero = [&](int64_t begin, int64_t end) {
        if (begin < end && bytes > 0)
          std::memset(static_cast<char*>(m.grad_x) + begin * bytes, 0, static_cast<size_t>((end - begin) * bytes));
      };
      zero(0, p.in.starts[0]);
      zero(p.in.starts[p.in.batch], rows);
    }
  }
  if (need_weight)
    for_small_items((p.filters + kMaxFilters - 1) / kMaxFilters, work, scratch, [&](int64_t item, void* memory) {
      const int64_t begin = item * kMaxFilters;
      kernels.grad_weight(m, begin, std::min(p.filters, begin + kMaxFilters), memory);
    });
  return {grad_x, grad_weight, slopes};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("conv1d_max_fwd", TORCH_BOX(&conv1d_max_fwd));
  m.impl("conv1d_max_bwd", TORCH_BOX(&conv1d_max_bwd));
}

}  // namespace seqkern
