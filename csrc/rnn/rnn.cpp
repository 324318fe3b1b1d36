// Recurrent networks, host side: checks, allocation, division of the work, registration under the CPU key.
#include "rnn.h"

#include <algorithm>
#include <tuple>

#include "parallel.h"
#include "tensor.h"

namespace seqkern {
namespace {

// Multiply-adds below which a second thread costs more than it saves.
constexpr double kGrainWork = 1 << 18;
constexpr int64_t kGrainElements = 4096;

// ---- checks ---------------------------------------------------------------------------------------------------------
void check_like(const Tensor& t, std::initializer_list<int64_t> sizes, ScalarType type, const char* op,
                const char* argument) {
  check_cpu(t, op, argument);
  check_type(t, type, op, argument);
  check_dim(t, static_cast<int64_t>(sizes.size()), op, argument);
  int64_t dim = 0;
  for (int64_t size : sizes) check_size(t, dim++, size, op, argument);
}

Tensor as_type(const Tensor& t, ScalarType type) { return t.scalar_type() == type ? t : torch::stable::to(t, type); }

// A contiguous tensor of its own, to be written to.
Tensor as_type_copy(const Tensor& t, ScalarType type) {
  return torch::stable::to(t, type, std::nullopt, std::nullopt, std::nullopt, false, /*copy=*/true,
                           torch::headeronly::MemoryFormat::Contiguous);
}

// The sizes of a layer, and its inputs as the kernels read them.
struct Layer {
  Dtype dtype, acc_dtype;
  ScalarType type, acc;
  int64_t steps, batch, inputs, hidden;
  Tensor input, h0, c0, w_ih, w_hh;  // contiguous; c0 in the accumulation type

  Layer(const Tensor& input_, const Tensor& h0_, const Tensor& c0_, const Tensor& w_ih_, const Tensor& w_hh_,
        const char* op)
      : dtype(dtype_of(input_, op, "input")),
        acc_dtype(dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32),
        type(input_.scalar_type()),
        acc(acc_type(dtype)) {
    check_dim(input_, 3, op, "input");
    check_dim(h0_, 2, op, "h0");
    steps = input_.size(0), batch = input_.size(1), inputs = input_.size(2), hidden = h0_.size(1);
    check_like(h0_, {batch, hidden}, type, op, "h0");
    check_like(c0_, {batch, hidden}, type, op, "c0");
    const int64_t gates = checked_product({4, hidden}, op);
    check_like(w_ih_, {gates, inputs}, type, op, "w_ih");
    check_like(w_hh_, {gates, hidden}, type, op, "w_hh");
    checked_product({steps, batch, gates}, op);
    input = as_contiguous(input_), h0 = as_contiguous(h0_), c0 = as_contiguous(as_type(c0_, acc));
    w_ih = as_contiguous(w_ih_), w_hh = as_contiguous(w_hh_);
  }
};

// ---- work -----------------------------------------------------------------------------------------------------------
// Calls body(item, scratch) for every item, on as many threads as the work is worth. Each thread has its own scratch.
template <class Body>
void for_items(int64_t items, double work, const Tensor& like, int64_t scratch_size, ScalarType scratch_type,
               const Body& body) {
  if (items <= 0) return;
  const int64_t workers =
      work / static_cast<double>(items) * worker_count(items) < kGrainWork ? 1 : worker_count(items);
  Tensor scratch = empty(like, {workers, scratch_size}, scratch_type);
  char* base = static_cast<char*>(scratch.mutable_data_ptr());
  const int64_t bytes = scratch_size * static_cast<int64_t>(scratch.element_size());
  if (workers == 1) {
    for (int64_t item = 0; item < items; ++item) body(item, static_cast<void*>(base));
    return;
  }
  parallel_workers(items, [&](WorkQueue& queue, int64_t worker) {
    int64_t item;
    while (queue.take(item)) body(item, static_cast<void*>(base + worker * bytes));
  });
}

// B(k, n) = source[k * k_stride + n * n_stride] of one or two sources, one below the other.
struct Source {
  const void* data;
  int64_t depth, k_stride, n_stride;
};

Tensor pack(const Layer& l, std::initializer_list<Source> sources, int64_t columns, int64_t groups) {
  const RnnKernels& kernels = rnn_kernels();
  int64_t depth = 0, begin = 0;
  for (const Source& source : sources) depth += source.depth;
  Tensor packed = empty(l.input, {kernels.packed_size(l.dtype, depth, columns, groups)}, l.acc);
  for (const Source& source : sources) {
    const Packing packing{l.dtype, source.data, source.k_stride,           source.n_stride, source.depth,
                          columns, groups,      packed.mutable_data_ptr(), depth,           begin};
    for_items(kernels.pack_items(packing), static_cast<double>(source.depth) * columns, l.input, 0, l.acc,
              [&](int64_t item, void*) { kernels.pack(packing, item); });
    begin += source.depth;
  }
  return packed;
}

// C = A B + bias, or C += A B: `rows` and `depth` of A, whose element (m, k) is a[m * row_stride + k * k_stride].
struct Matrix {
  const void* data;
  Dtype dtype;
  int64_t row_stride, k_stride;
};

void multiply(const Layer& l, int64_t rows, int64_t columns, int64_t depth, const Matrix& a, const Tensor& packed_b,
              const std::optional<Tensor>& bias, Dtype c_type, void* c, bool accumulate) {
  const RnnKernels& kernels = rnn_kernels();
  const auto blocks = [](int64_t size, int64_t block) { return (size + block - 1) / block; };
  const int64_t threads = torch::stable::get_num_threads();
  const auto items = [&](int64_t block_rows) { return blocks(rows, block_rows) * blocks(columns, kBlockColumns); };
  // Smaller blocks where there are few, so that the threads end together.
  int64_t block_rows = kBlockRows;
  while (block_rows > kBlockRows / 4 && items(block_rows) < 8 * threads) block_rows /= 2;
  const Product product{rows,
                        columns,
                        depth,
                        a.dtype,
                        a.data,
                        a.row_stride,
                        a.k_stride,
                        packed_b.const_data_ptr(),
                        bias ? bias->const_data_ptr() : nullptr,
                        c_type,
                        c,
                        accumulate,
                        block_rows};
  for_items(items(block_rows), static_cast<double>(rows) * columns * depth, l.input, kernels.multiply_scratch(l.dtype),
            l.acc, [&](int64_t item, void* scratch) { kernels.multiply(product, item, scratch); });
}

// The rows of the batch are independent sequences: each thread runs its share through the steps.
template <class Body>
void for_rows(const Layer& l, int64_t steps, const Body& body) {
  const double work = static_cast<double>(steps) * l.batch * l.hidden * l.hidden * 4;
  const int64_t shares = worker_count(l.batch), rows = (l.batch + shares - 1) / shares;
  for_items(
      shares, work, l.input, rnn_kernels().lstm_scratch(l.dtype, rows, l.hidden), l.acc,
      [&](int64_t share, void* scratch) { body(share * l.batch / shares, (share + 1) * l.batch / shares, scratch); });
}

// ---- LSTM -----------------------------------------------------------------------------------------------------------
// The sequence is worked through in chunks of steps, each small enough that what one pass over its gates leaves in
// cache the next pass finds there, and large enough for the products to run at full rate. By the shape alone: the
// number of threads changes no sum.
constexpr int64_t kChunkElements = int64_t{1} << 19, kChunkRows = 256;

int64_t chunk_steps(const Layer& l) {
  const int64_t rows = std::max(kChunkRows, kChunkElements / std::max<int64_t>(1, 4 * l.hidden));
  return std::clamp<int64_t>(rows / std::max<int64_t>(1, l.batch), 1, std::max<int64_t>(1, l.steps));
}

const char* at(const Tensor& t, int64_t element) {
  return static_cast<const char*>(t.const_data_ptr()) + element * static_cast<int64_t>(t.element_size());
}
char* at(Tensor& t, int64_t element) {
  return static_cast<char*>(t.mutable_data_ptr()) + element * static_cast<int64_t>(t.element_size());
}

std::tuple<Tensor, Tensor, Tensor> lstm_fwd(const Tensor& input, const Tensor& h0, const Tensor& c0, const Tensor& w_ih,
                                            const Tensor& w_hh, const std::optional<Tensor>& b_ih,
                                            const std::optional<Tensor>& b_hh, bool reverse) {
  const char* op = "lstm_fwd";
  const Layer l(input, h0, c0, w_ih, w_hh, op);
  const int64_t steps = l.steps, batch = l.batch, hidden = l.hidden, gate_columns = 4 * hidden;
  SK_CHECK(b_ih.has_value() == b_hh.has_value(), op, ": b_ih and b_hh must both be given or both be None");
  std::optional<Tensor> bias;
  if (b_ih) {
    check_like(*b_ih, {gate_columns}, l.type, op, "b_ih");
    check_like(*b_hh, {gate_columns}, l.type, op, "b_hh");
    // The stable ABI has a subtraction only; its factor of -1 makes it the sum.
    bias = as_contiguous(torch::stable::subtract(as_type(*b_ih, l.acc), as_type(*b_hh, l.acc), -1.0));
  }
  Tensor output = empty(l.input, {steps, batch, hidden}, l.type);
  Tensor cells = empty(l.input, {steps, batch, hidden}, l.acc);
  Tensor gates = empty(l.input, {steps, batch, gate_columns}, l.acc);
  if (output.numel() == 0) return {output, cells, gates};

  const Tensor packed_w_ih = pack(l, {{l.w_ih.const_data_ptr(), l.inputs, 1, l.inputs}}, gate_columns, 1);
  const Tensor packed_w_hh = pack(l, {{l.w_hh.const_data_ptr(), hidden, 1, hidden}}, gate_columns, 4);
  Tensor h = as_type_copy(l.h0, l.acc);
  LstmForward args{l.dtype,
                   steps,
                   batch,
                   hidden,
                   0,
                   0,
                   reverse,
                   packed_w_hh.const_data_ptr(),
                   l.c0.const_data_ptr(),
                   h.mutable_data_ptr(),
                   gates.mutable_data_ptr(),
                   cells.mutable_data_ptr(),
                   output.mutable_data_ptr()};
  const RnnKernels& kernels = rnn_kernels();
  const int64_t chunk = chunk_steps(l);
  for (int64_t begin = 0; begin < steps; begin += chunk) {
    args.step_begin = begin, args.step_end = std::min(steps, begin + chunk);
    const int64_t first = (reverse ? steps - args.step_end : begin) * batch, rows = (args.step_end - begin) * batch;
    multiply(l, rows, gate_columns, l.inputs, {at(l.input, first * l.inputs), l.dtype, l.inputs, 1}, packed_w_ih, bias,
             l.acc_dtype, at(gates, first * gate_columns), false);
    for_rows(l, args.step_end - begin, [&](int64_t row_begin, int64_t row_end, void* scratch) {
      kernels.lstm_forward(args, row_begin, row_end, scratch);
    });
  }
  return {output, cells, gates};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_bwd(
    const Tensor& grad_output, const Tensor& grad_h_n, const Tensor& grad_c_n, const Tensor& input, const Tensor& h0,
    const Tensor& c0, const Tensor& w_ih, const Tensor& w_hh, const Tensor& output, const Tensor& cells,
    const Tensor& gates, bool reverse, bool need_input, bool need_weights) {
  const char* op = "lstm_bwd";
  const Layer l(input, h0, c0, w_ih, w_hh, op);
  const int64_t steps = l.steps, batch = l.batch, inputs = l.inputs, hidden = l.hidden, gate_columns = 4 * hidden;
  check_like(grad_output, {steps, batch, hidden}, l.type, op, "grad_output");
  check_like(grad_h_n, {batch, hidden}, l.type, op, "grad_h_n");
  check_like(grad_c_n, {batch, hidden}, l.type, op, "grad_c_n");
  check_like(output, {steps, batch, hidden}, l.type, op, "output");
  check_like(cells, {steps, batch, hidden}, l.acc, op, "cells");
  check_like(gates, {steps, batch, gate_columns}, l.acc, op, "gates");
  const Tensor dy = as_contiguous(grad_output), y = as_contiguous(output);
  const Tensor c = as_contiguous(cells), z = as_contiguous(gates);

  // What the chunks add to starts at zero, and is all there is of an empty sequence.
  const auto zeros = [&](bool needed, std::initializer_list<int64_t> sizes) {
    return needed ? torch::stable::new_zeros(l.input, {sizes.begin(), sizes.size()}, l.acc)
                  : empty(l.input, {0}, l.acc);
  };
  Tensor grad_h = as_type_copy(grad_h_n, l.acc), grad_c = as_type_copy(grad_c_n, l.acc);
  Tensor grad_w_ih = zeros(need_weights, {gate_columns, inputs}),
         grad_w_hh = zeros(need_weights, {gate_columns, hidden});
  Tensor grad_bias = zeros(need_weights, {gate_columns});
  Tensor grad_input = need_input ? empty(l.input, {steps, batch, inputs}, l.type) : empty(l.input, {0}, l.type);
  if (dy.numel() > 0) {
    const RnnKernels& kernels = rnn_kernels();
    const int64_t chunk = chunk_steps(l);
    const Tensor packed_w_hh = pack(l, {{l.w_hh.const_data_ptr(), gate_columns, hidden, 1}}, hidden, 1);
    const Tensor packed_w_ih =
        pack(l, {{l.w_ih.const_data_ptr(), need_input ? gate_columns : 0, inputs, 1}}, inputs, 1);
    Tensor grad_gates = empty(l.input, {chunk, batch, gate_columns}, l.acc);
    Tensor grad_gates_sum = empty(l.input, {need_weights ? batch : 0, gate_columns}, l.acc);
    LstmBackward args{l.dtype,
                      steps,
                      batch,
                      hidden,
                      0,
                      0,
                      reverse,
                      packed_w_hh.const_data_ptr(),
                      dy.const_data_ptr(),
                      l.c0.const_data_ptr(),
                      c.const_data_ptr(),
                      z.const_data_ptr(),
                      grad_h.mutable_data_ptr(),
                      grad_c.mutable_data_ptr(),
                      grad_gates.mutable_data_ptr(),
                      need_weights ? grad_gates_sum.mutable_data_ptr() : nullptr};
    for (int64_t end = steps; end > 0; end -= chunk) {
      const int64_t begin = std::max<int64_t>(0, end - chunk), count = end - begin, rows = count * batch;
      args.step_begin = begin, args.step_end = end;
      for_rows(l, count, [&](int64_t row_begin, int64_t row_end, void* scratch) {
        kernels.lstm_backward(args, row_begin, row_end, scratch);
      });
      const int64_t first_step = reverse ? steps - end : begin, first = first_step * batch;
      if (need_input) {
        multiply(l, rows, inputs, gate_columns, {grad_gates.const_data_ptr(), l.acc_dtype, gate_columns, 1},
                 packed_w_ih, std::nullopt, l.dtype, at(grad_input, first * inputs), false);
      }
      if (!need_weights) continue;
      // dW_ih = sum of grad_gates^T x, dW_hh = sum of grad_gates^T h_{t-1}: the outputs one step before, or h0.
      const Matrix grad_gates_t{grad_gates.const_data_ptr(), l.acc_dtype, 1, gate_columns};
      multiply(l, gate_columns, inputs, rows, grad_gates_t,
               pack(l, {{at(l.input, first * inputs), rows, inputs, 1}}, inputs, 1), std::nullopt, l.acc_dtype,
               grad_w_ih.mutable_data_ptr(), true);
      const int64_t from_h0 = begin == 0 ? batch : 0;
      const Source initial{l.h0.const_data_ptr(), from_h0, hidden, 1};
      const int64_t previous = reverse ? first + batch : first - batch + from_h0;
      const Source later{at(y, previous * hidden), rows - from_h0, hidden, 1};
      multiply(l, gate_columns, hidden, rows, grad_gates_t,
               reverse ? pack(l, {later, initial}, hidden, 1) : pack(l, {initial, later}, hidden, 1), std::nullopt,
               l.acc_dtype, grad_w_hh.mutable_data_ptr(), true);
    }
    if (need_weights)
      kernels.sum_rows(l.dtype, batch, gate_columns, grad_gates_sum.const_data_ptr(), grad_bias.mutable_data_ptr());
  } else if (need_input) {
    grad_input = torch::stable::new_zeros(l.input, {steps, batch, inputs}, l.type);
  }
  return {grad_input,
          as_type(grad_h, l.type),
          as_type(grad_c, l.type),
          as_type(grad_w_ih, l.type),
          as_type(grad_w_hh, l.type),
          as_type(grad_bias, l.type)};
}

// ---- LSTM cell ------------------------------------------------------------------------------------------------------
template <class Body>
void for_cells(int64_t batch, int64_t hidden, const Body& body) {
  torch::stable::parallel_for(0, batch, std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, hidden)), body);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_fwd(const Tensor& gates, const Tensor& c) {
  const char* op = "lstm_cell_fwd";
  const Dtype dtype = dtype_of(gates, op, "gates");
  const ScalarType type = gates.scalar_type(), acc = acc_type(dtype);
  check_dim(c, 2, op, "c");
  const int64_t batch = c.size(0), hidden = c.size(1), gate_columns = checked_product({4, hidden}, op);
  check_like(gates, {batch, gate_columns}, type, op, "gates");
  check_like(c, {batch, hidden}, type, op, "c");
  const Tensor z = as_contiguous(gates), c_prev = as_contiguous(c);
  Tensor h = empty(z, {batch, hidden}, type), c_new = empty(z, {batch, hidden}, type);
  Tensor activated = empty(z, {batch, gate_columns}, acc);
  const LstmCellForward args{dtype,
                             hidden,
                             z.const_data_ptr(),
                             c_prev.const_data_ptr(),
                             h.mutable_data_ptr(),
                             c_new.mutable_data_ptr(),
                             activated.mutable_data_ptr()};
  const RnnKernels& kernels = rnn_kernels();
  for_cells(batch, hidden, [&](int64_t begin, int64_t end) { kernels.lstm_cell_forward(args, begin, end); });
  return {h, c_new, activated};
}

std::tuple<Tensor, Tensor> lstm_cell_bwd(const Tensor& grad_h, const Tensor& grad_c, const Tensor& activated,
                                         const Tensor& c, const Tensor& c_new) {
  const char* op = "lstm_cell_bwd";
  const Dtype dtype = dtype_of(c, op, "c");
  const ScalarType type = c.scalar_type();
  check_dim(c, 2, op, "c");
  const int64_t batch = c.size(0), hidden = c.size(1), gate_columns = checked_product({4, hidden}, op);
  check_cpu(c, op, "c");
  check_like(grad_h, {batch, hidden}, type, op, "grad_h");
  check_like(grad_c, {batch, hidden}, type, op, "grad_c");
  check_like(activated, {batch, gate_columns}, acc_type(dtype), op, "activated");
  check_like(c_new, {batch, hidden}, type, op, "c_new");
  const Tensor dh = as_contiguous(grad_h), dc = as_contiguous(grad_c), gates = as_contiguous(activated);
  const Tensor c_prev = as_contiguous(c), c_next = as_contiguous(c_new);
  Tensor grad_gates = empty(dh, {batch, gate_columns}, type), grad_c_prev = empty(dh, {batch, hidden}, type);
  const LstmCellBackward args{dtype,
                              hidden,
                              dh.const_data_ptr(),
                              dc.const_data_ptr(),
                              gates.const_data_ptr(),
                              c_prev.const_data_ptr(),
                              c_next.const_data_ptr(),
                              grad_gates.mutable_data_ptr(),
                              grad_c_prev.mutable_data_ptr()};
  const RnnKernels& kernels = rnn_kernels();
  for_cells(batch, hidden, [&](int64_t begin, int64_t end) { kernels.lstm_cell_backward(args, begin, end); });
  return {grad_gates, grad_c_prev};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("lstm_fwd", TORCH_BOX(&lstm_fwd));
  m.impl("lstm_bwd", TORCH_BOX(&lstm_bwd));
  m.impl("lstm_cell_fwd", TORCH_BOX(&lstm_cell_fwd));
  m.impl("lstm_cell_bwd", TORCH_BOX(&lstm_cell_bwd));
}

}  // namespace seqkern
