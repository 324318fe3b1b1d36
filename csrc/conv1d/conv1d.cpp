// A convolution over the rows of sequences, host side: checks, windows, products, registration under the CPU key.
//
// Windows are rows of the library's products, given by their addresses: a window of neighbouring rows is read where it
// lies; one with gaps, or over an edge, is copied. With y = W * x:
//
//   dx[p] = sum over k of W[k]^T dy[(p + left - k dilation) / stride]    windows of dy, taps in reverse
//   dW[k] = sum over t of dy[t] x[t stride + k dilation - left]^T        dy's rows times the windows of x
#include "conv1d.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "products.h"
#include "sequences_tensor.h"
#include "tensor.h"

namespace seqkern {
namespace {

constexpr int64_t kChunkWindows = 256;  // of a work item
constexpr int64_t kChunkTerms = 512;    // windows that the gradient of the weight takes at once

int64_t blocks(int64_t size, int64_t block) { return (size + block - 1) / block; }

// The checked arguments, and tensors that live as long.
class Arguments {
 public:
  Arguments(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& lengths, int64_t stride,
            int64_t left, int64_t right, int64_t dilation)
      : dtype(dtype_of(x, op, "x")),
        sequences(op, lengths, std::nullopt, checked_batch(op, x), x.size(1), x.size(2)),
        columns(x.size(2)),
        filters(checked_filters(op, weight)),
        width(weight.size(1)),
        stride(stride),
        left(left),
        right(right),
        dilation(dilation),
        size(size_of(dtype)) {
    check_cpu(x, op, "x");
    check_cpu(weight, op, "weight");
    check_type(weight, x.scalar_type(), op, "weight");
    check_size(weight, 2, columns, op, "weight");
    SK_CHECK(width >= 1, op, ": weight must have windows of 1 row at least, got ", width);
    for (const auto& [value, least, name] : {std::tuple{stride, 1, "stride"}, std::tuple{dilation, 1, "dilation"},
                                             std::tuple{left, 0, "left"}, std::tuple{right, 0, "right"}})
      SK_CHECK(least <= value && value <= std::numeric_limits<int32_t>::max(), op, ": ", name, " must be at least ",
               least, " and below 2^31, got ", value);
    checked_product({std::max<int64_t>(filters, 1), width, std::max<int64_t>(columns, 1), 8}, op);
    checked_product({width, std::max({columns, filters, int64_t{1}}), kChunkTerms, 8}, op);
    checked_product({width, dilation}, op);
    // A row's window lies in one piece.
    const bool dense = unit_last_stride(x) && (x.stride(1) == columns || x.size(1) <= 1);
    x_ = dense ? x : torch::stable::contiguous(x);
    weight_ = as_contiguous(weight);
  }
  Arguments(const Arguments&) = delete;

  // Rows of y of a sequence of `length` rows.
  int64_t outputs_of(int64_t length) const {
    const int64_t room = length + left + right - dilation * (width - 1) - 1;
    return length == 0 || room < 0 ? 0 : room / stride + 1;
  }
  int64_t outputs() const { return outputs_of(sequences.in.rows); }
  int64_t outputs(int64_t b) const { return outputs_of(sequences.in.length(b)); }
  const char* row(int64_t b, int64_t t) const {
    return static_cast<const char*>(x_->const_data_ptr()) + (b * x_->stride(0) + t * columns) * size;
  }
  const char* weight() const { return static_cast<const char*>(weight_->const_data_ptr()); }

  Dtype dtype;
  CheckedSequences sequences;
  int64_t columns, filters, width, stride, left, right, dilation, size;

 private:
  static int64_t checked_batch(const char* op, const Tensor& x) {
    check_dim(x, 3, op, "x");
    return x.size(0);
  }
  static int64_t checked_filters(const char* op, const Tensor& weight) {
    check_dim(weight, 3, op, "weight");
    return weight.size(0);
  }
  std::optional<Tensor> x_, weight_;
};

// Rows of one kind, (batch, rows, numbers): x, or y's gradient. Rows outside a sequence are zeros.
struct Rows {
  const char* data;
  int64_t batch_bytes, row_bytes;
  // Row `place` of a sequence of `count` rows, or null.
  const char* at(int64_t b, int64_t place, int64_t count) const {
    return place < 0 || place >= count ? nullptr : data + b * batch_bytes + place * row_bytes;
  }
};

// The address of a window of `width` rows, whose row k is given by at(k); it is copied where it is not in one piece.
template <class At>
const void* window_of(int64_t width, int64_t row_bytes, char* copy, const At& at) {
  const char* const first = at(0);
  bool whole = first != nullptr;
  for (int64_t k = 1; k < width && whole; ++k) whole = at(k) == first + k * row_bytes;
  if (whole) return first;
  for (int64_t k = 0; k < width; ++k) {
    if (const char* const row = at(k)) std::memcpy(copy + k * row_bytes, row, static_cast<size_t>(row_bytes));
    else std::memset(copy + k * row_bytes, 0, static_cast<size_t>(row_bytes));
  }
  return copy;
}

// Rows of a product: result row n is the product of the window that `window(n, copy)` gives, and goes to `target(n)`.
template <class Window, class Target>
void multiply_windows(const char* op, Dtype dtype, const ProductKernels& products, const PackedMatrix& packed,
                      int64_t count, int64_t depth, int64_t columns, const void* bias, const Window& window,
                      const Target& target) {
  const int64_t pointers = piece_bytes(kChunkWindows * static_cast<int64_t>(sizeof(void*)));
  const int64_t copies = piece_bytes(checked_product({kChunkWindows, depth, size_of(dtype)}, op));
  const double work = static_cast<double>(count) * static_cast<double>(depth) * static_cast<double>(columns);
  for_small_items(blocks(count, kChunkWindows), work, 2 * pointers + copies + products.multiply_scratch(dtype),
                  [&](int64_t item, void* memory) {
                    const void** const rows = static_cast<const void**>(memory);
                    void** const results = reinterpret_cast<void**>(static_cast<char*>(memory) + pointers);
                    char* const copy = static_cast<char*>(memory) + 2 * pointers;
                    const int64_t first = item * kChunkWindows, some = std::min(kChunkWindows, count - first);
                    for (int64_t n = 0; n < some; ++n) {
                      rows[n] = window(first + n, copy + n * depth * size_of(dtype));
                      results[n] = target(first + n);
                    }
                    Product product{.rows = some,
                                    .columns = columns,
                                    .depth = depth,
                                    .a_type = dtype,
                                    .a_rows = rows,
                                    .packed_b = packed.data(),
                                    .bias = bias,
                                    .c_type = dtype,
                                    .c_rows = results};
                    const int64_t items = products.cut(product, 1);
                    for (int64_t i = 0; i < items; ++i) products.multiply(product, i, copy + copies);
                  });
}

// Where things are of all sequences together: the first of each, and a search for the sequence of a number.
class Numbered {
 public:
  template <class Count>
  Numbered(int64_t batch, const Count& count) : begins(static_cast<size_t>(batch) + 1, 0) {
    for (int64_t b = 0; b < batch; ++b) begins[b + 1] = begins[b] + count(b);
  }
  int64_t total() const { return begins.back(); }
  // (sequence, place in it)
  std::pair<int64_t, int64_t> at(int64_t n) const {
    const int64_t b = std::upper_bound(begins.begin(), begins.end(), n) - begins.begin() - 1;
    return {b, n - begins[b]};
  }
  std::vector<int64_t> begins;
};

Tensor conv1d_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& lengths, int64_t stride, int64_t left, int64_t right, int64_t dilation) {
  const char* const op = "conv1d_fwd";
  const Arguments a(op, x, weight, lengths, stride, left, right, dilation);
  const int64_t batch = a.sequences.in.batch, outputs = a.outputs(), depth = a.width * a.columns;
  const ScalarType acc = acc_type(a.dtype);
  std::optional<Tensor> wide_bias;
  if (bias) {
    check_cpu(*bias, op, "bias");
    check_dim(*bias, 1, op, "bias");
    check_size(*bias, 0, a.filters, op, "bias");
    check_type(*bias, acc, op, "bias");
    wide_bias = as_contiguous(*bias);
  }
  checked_product({batch, outputs, std::max<int64_t>(a.filters, 1), 8}, op);
  Tensor y = empty(x, {batch, outputs, a.filters}, x.scalar_type());
  char* const target = static_cast<char*>(y.mutable_data_ptr());
  const int64_t row_bytes = a.filters * a.size;
  if (row_bytes == 0) return y;
  const Numbered windows(batch, [&](int64_t b) { return a.outputs(b); });
  for (int64_t b = 0; b < batch; ++b)  // rows behind a sequence
    if (a.outputs(b) < outputs)
      std::memset(target + (b * outputs + a.outputs(b)) * row_bytes, 0,
                  static_cast<size_t>((outputs - a.outputs(b)) * row_bytes));
  if (windows.total() == 0) return y;
  const ProductKernels& products = product_kernels_for(a.dtype);
  const PackedMatrix packed = pack(
      products,
      {.dtype = a.dtype, .data = a.weight(), .k_stride = 1, .n_stride = depth, .depth = depth, .columns = a.filters});
  const Rows rows{a.row(0, 0), a.row(1, 0) - a.row(0, 0), a.columns * a.size};
  multiply_windows(
      op, a.dtype, products, packed, windows.total(), depth, a.filters,
      wide_bias ? wide_bias->const_data_ptr() : nullptr,
      [&](int64_t n, char* copy) {
        const auto [b, t] = windows.at(n);
        const int64_t first = t * a.stride - a.left, length = a.sequences.in.length(b);
        return window_of(a.width, rows.row_bytes, copy,
                         [&, b = b](int64_t k) { return rows.at(b, first + k * a.dilation, length); });
      },
      [&](int64_t n) {
        const auto [b, t] = windows.at(n);
        return target + (b * outputs + t) * row_bytes;
      });
  return y;
}

// dx, of which rows outside the sequences are zero.
void gradient_of_x(const char* op, const Arguments& a, const ProductKernels& products, const Rows& upstream,
                   char* target) {
  const int64_t batch = a.sequences.in.batch, rows = a.sequences.in.rows, depth = a.width * a.filters;
  const int64_t row_bytes = a.columns * a.size;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = a.sequences.in.length(b);
    if (length < rows && row_bytes > 0)
      std::memset(target + (b * rows + length) * row_bytes, 0, static_cast<size_t>((rows - length) * row_bytes));
  }
  // Row (k, c) of the product's right operand: filter c of tap width - 1 - k.
  std::vector<const void*> taps(static_cast<size_t>(depth));
  for (int64_t k = 0; k < a.width; ++k)
    for (int64_t c = 0; c < a.filters; ++c)
      taps[k * a.filters + c] = a.weight() + (c * a.width + a.width - 1 - k) * row_bytes;
  const PackedMatrix packed =
      pack(products, {.dtype = a.dtype, .depth = depth, .columns = a.columns, .rows = taps.data()});
  const Numbered places(batch, [&](int64_t b) { return a.sequences.in.length(b); });
  multiply_windows(
      op, a.dtype, products, packed, places.total(), depth, a.columns, nullptr,
      [&](int64_t n, char* copy) {
        const auto [b, p] = places.at(n);
        const int64_t outputs = a.outputs(b), last = p + a.left - (a.width - 1) * a.dilation;
        return window_of(a.width, upstream.row_bytes, copy, [&, b = b](int64_t k) -> const char* {
          const int64_t place = last + k * a.dilation;
          return place < 0 || place % a.stride ? nullptr : upstream.at(b, place / a.stride, outputs);
        });
      },
      [&](int64_t n) {
        const auto [b, p] = places.at(n);
        return target + (b * rows + p) * row_bytes;
      });
}

// dW, in the accumulation type, and the bias's gradient, in double. The windows are divided into groups by their number
// alone; a group adds up its own, in chunks, and the groups are added in order.
template <class A>
class WeightGradient {
 public:
  WeightGradient(const char* op, const Arguments& arguments, const ProductKernels& products, const Rows& upstream)
      : a_(arguments),
        products_(products),
        upstream_(upstream),
        rows_{a_.row(0, 0), a_.row(1, 0) - a_.row(0, 0), a_.columns * a_.size},
        windows_(a_.sequences.in.batch, [&](int64_t b) { return a_.outputs(b); }),
        depth_(a_.width * a_.columns),
        numbers_(a_.filters * depth_) {
    const int64_t most = std::max<int64_t>(1, kGroupNumbers / std::max<int64_t>(1, numbers_));
    groups_ = std::clamp<int64_t>(blocks(windows_.total(), kChunkTerms), 1, std::min(kGroups, most));
    whole_ = blocks(windows_.total(), groups_);
    matrix_ = {.dtype = a_.dtype, .depth = kChunkTerms, .columns = depth_, .rows = nullptr};
    pointer_bytes_ = piece_bytes(kChunkTerms * static_cast<int64_t>(sizeof(void*)));
    output_bytes_ = piece_bytes(checked_product({kChunkTerms, a_.filters, a_.size}, op));
    copy_bytes_ = piece_bytes(checked_product({kChunkTerms, depth_, a_.size}, op));
    checked_product({groups_, numbers_, 8}, op);
  }

  void run(A* target, double* of_bias) const {
    const Scratch partial(groups_ > 1 ? groups_ * numbers_ * static_cast<int64_t>(sizeof(A)) : 0);
    std::vector<double> sums(static_cast<size_t>(groups_ * a_.filters), 0.0);
    const auto place = [&](int64_t group) {
      return groups_ > 1 ? static_cast<A*>(partial.data()) + group * numbers_ : target;
    };
    const int64_t packed = piece_bytes(products_.packed_bytes(matrix_));
    const int64_t scratch =
        pointer_bytes_ + output_bytes_ + copy_bytes_ + packed + products_.multiply_scratch(a_.dtype);
    const double work = static_cast<double>(windows_.total()) * static_cast<double>(numbers_);
    for_small_items(groups_, work, scratch, [&](int64_t group, void* memory) {
      const int64_t end = std::min(windows_.total(), (group + 1) * whole_);
      if (group * whole_ >= end) std::fill(place(group), place(group) + numbers_, A(0));
      for (int64_t first = group * whole_; first < end; first += kChunkTerms)
        add(first, std::min(kChunkTerms, end - first), first > group * whole_, place(group),
            sums.data() + group * a_.filters, static_cast<char*>(memory));
    });
    for (int64_t group = 0; group < groups_; ++group)
      for (int64_t c = 0; c < a_.filters; ++c) of_bias[c] += sums[group * a_.filters + c];
    if (groups_ == 1) return;
    torch::stable::parallel_for(0, numbers_, 1 << 14, [&](int64_t begin, int64_t end) {
      std::copy(place(0) + begin, place(0) + end, target + begin);
      for (int64_t group = 1; group < groups_; ++group)
        for (int64_t i = begin; i < end; ++i) target[i] += place(group)[i];
    });
  }

 private:
  static constexpr int64_t kGroups = 16, kGroupNumbers = 1 << 24;

  // Adds the windows first, ..., first + some - 1, or begins with them.
  void add(int64_t first, int64_t some, bool accumulate, A* target, double* of_bias, char* memory) const {
    const void** const taken = reinterpret_cast<const void**>(memory);
    char* const outputs = memory + pointer_bytes_;
    char* const copies = outputs + output_bytes_;
    char* const packed = copies + copy_bytes_;
    for (int64_t n = 0; n < some; ++n) {
      const auto [b, t] = windows_.at(first + n);
      const int64_t place = t * a_.stride - a_.left, length = a_.sequences.in.length(b);
      std::memcpy(outputs + n * upstream_.row_bytes, upstream_.at(b, t, t + 1),
                  static_cast<size_t>(upstream_.row_bytes));
      taken[n] = window_of(a_.width, rows_.row_bytes, copies + n * depth_ * a_.size,
                           [&, b = b](int64_t k) { return rows_.at(b, place + k * a_.dilation, length); });
    }
    products_.add_columns({.dtype = a_.dtype,
                           .rows = some,
                           .columns = a_.filters,
                           .source = outputs,
                           .stride = a_.filters,
                           .sums = of_bias},
                          0, a_.filters);
    if (depth_ == 0) return;
    Matrix windows = matrix_;
    windows.depth = some, windows.rows = taken;
    for (int64_t item = 0, items = products_.pack_items(windows); item < items; ++item)
      products_.pack(windows, packed, item);
    Product product{.rows = a_.filters,
                    .columns = depth_,
                    .depth = some,
                    .a_type = a_.dtype,
                    .a = outputs,
                    .a_row_stride = 1,
                    .a_k_stride = a_.filters,
                    .packed_b = packed,
                    .c_type = sizeof(A) == 8 ? Dtype::f64 : Dtype::f32,
                    .c = target,
                    .c_stride = depth_,
                    .accumulate = accumulate};
    char* const scratch = packed + piece_bytes(products_.packed_bytes(matrix_));
    for (int64_t item = 0, items = products_.cut(product, 1); item < items; ++item)
      products_.multiply(product, item, scratch);
  }

  const Arguments& a_;
  const ProductKernels& products_;
  Rows upstream_, rows_;
  Numbered windows_;
  int64_t depth_, numbers_, groups_, whole_;
  Matrix matrix_;
  int64_t pointer_bytes_, output_bytes_, copy_bytes_;
};

std::tuple<Tensor, Tensor, Tensor> conv1d_bwd(const Tensor& grad_output, const Tensor& x, const Tensor& weight,
                                              const std::optional<Tensor>& lengths, int64_t stride, int64_t left,
                                              int64_t right, int64_t dilation, bool need_x, bool need_weight) {
  const char* const op = "conv1d_bwd";
  const Arguments a(op, x, weight, lengths, stride, left, right, dilation);
  const int64_t batch = a.sequences.in.batch;
  check_cpu(grad_output, op, "grad_output");
  check_dim(grad_output, 3, op, "grad_output");
  check_type(grad_output, x.scalar_type(), op, "grad_output");
  check_size(grad_output, 0, batch, op, "grad_output");
  check_size(grad_output, 1, a.outputs(), op, "grad_output");
  check_size(grad_output, 2, a.filters, op, "grad_output");
  const Tensor dy = as_contiguous(grad_output);
  const Rows upstream{static_cast<const char*>(dy.const_data_ptr()), a.outputs() * a.filters * a.size,
                      a.filters * a.size};
  const std::initializer_list<int64_t> none = {0}, rows = {batch, a.sequences.in.rows, a.columns};
  const std::initializer_list<int64_t> taps = {a.filters, a.width, a.columns}, filters = {a.filters};
  Tensor grad_x = empty(x, need_x ? rows : none, x.scalar_type());
  Tensor grad_weight = empty(x, need_weight ? taps : none, acc_type(a.dtype));
  Tensor grad_bias = empty(x, need_weight ? filters : none, ScalarType::Double);
  const ProductKernels& products = product_kernels_for(a.dtype);
  if (need_x && grad_x.numel() > 0) {
    if (a.filters == 0) std::memset(grad_x.mutable_data_ptr(), 0, static_cast<size_t>(grad_x.numel() * a.size));
    else gradient_of_x(op, a, products, upstream, static_cast<char*>(grad_x.mutable_data_ptr()));
  }
  if (need_weight && a.filters > 0) {
    double* const of_bias = static_cast<double*>(grad_bias.mutable_data_ptr());
    std::fill(of_bias, of_bias + a.filters, 0.0);
    void* const target = grad_weight.mutable_data_ptr();
    if (a.dtype == Dtype::f64)
      WeightGradient<double>(op, a, products, upstream).run(static_cast<double*>(target), of_bias);
    else WeightGradient<float>(op, a, products, upstream).run(static_cast<float*>(target), of_bias);
  }
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("conv1d_fwd", TORCH_BOX(&conv1d_fwd));
  m.impl("conv1d_bwd", TORCH_BOX(&conv1d_bwd));
}

}  // namespace seqkern
