// Recurrent networks, host side: forward and backward through the chunks of a sequence, registration under the CPU key.
#include "rnn.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "rnn_work.h"

namespace seqkern {
namespace {

// Addresses of the rows of a chunk's tokens.
using Rows = std::vector<const void*>;

Rows input_rows(const RnnProblem& p, int64_t d, int64_t begin, int64_t end) {
  const int64_t width = p.input.size(2), column = p.has_w_ih ? 0 : d * p.gate_columns;
  Rows rows;
  p.for_tokens(d, begin, end,
               [&](int64_t t, int64_t b, int64_t) { rows.push_back(at(p.input, (t * p.batch + b) * width + column)); });
  return rows;
}

// Tokens whose share of the weights' gradients is written without packing anything.
constexpr int64_t kFewOuter = 16;

// Whether W_ih is packed on the way.
bool few_tokens(const RnnProblem& p) { return p.inputs > 0 && p.steps * p.batch <= kFewRows; }

void few_rows_product(const RnnProblem& p, const RnnFewRows& few) {
  const RnnKernels& kernels = p.kernels;
  for_items(kernels.few_rows_items(few), static_cast<double>(few.b.depth) * few.b.columns * (few.rows + 4), p.input,
            kernels.few_rows_scratch(few), p.acc,
            [&](int64_t item, void* scratch) { kernels.few_rows(few, item, scratch); });
}

Source transposed(const Tensor& w) { return {w.const_data_ptr(), w.size(1), 1, w.size(1)}; }

// zx of a chunk's tokens; without a packed W_ih of all tokens, which are few.
void input_products(const RnnProblem& p, int64_t d, const Rows& rows, const MaybeTensor& packed_w_ih, void* zx,
                    int64_t stride) {
  const RnnKernels& kernels = p.kernels;
  const auto i = static_cast<size_t>(d);
  const void* bias = p.bias.empty() ? nullptr : p.bias[i].const_data_ptr();
  const auto count = static_cast<int64_t>(rows.size());
  const auto gather = [&](int64_t columns, const void* added, void* out, int64_t out_stride) {
    const RnnGather g{p.dtype, columns, rows.data(), nullptr, added, out, out_stride};
    for_ranges(count, columns, p.input, 0, p.acc,
               [&](int64_t first, int64_t last, void*) { kernels.gather(g, first, last); });
  };
  if (!p.has_w_ih) return gather(p.gate_columns, bias, zx, stride);
  if (packed_w_ih) {
    multiply(p, {count, p.gate_columns, p.inputs, p.dtype, nullptr, 0, 1, packed_w_ih->const_data_ptr(), bias,
                 p.acc_dtype, zx, stride, false, 0, 0, rows.data()});
    return;
  }
  const int64_t x_stride = kernels.row_stride(p.dtype, p.inputs);
  Tensor x = empty(p.input, {count, x_stride}, p.acc);
  gather(p.inputs, nullptr, x.mutable_data_ptr(), x_stride);
  few_rows_product(p, {packing_of(p, transposed(p.w_ih[i]), p.gate_columns, 1, false, nullptr), count, p.acc_dtype,
                       x.const_data_ptr(), x_stride, bias, zx, stride});
}

// Zeroes the rows of inactive steps in (steps, batch, columns).
void zero_inactive(const RnnProblem& p, Tensor& t, int64_t first, int64_t columns) {
  const auto bytes = static_cast<size_t>(columns) * t.element_size();
  for (int64_t step = 0; step < p.steps; ++step)
    for (int64_t g = p.active[step]; g < p.batch; ++g)
      std::memset(at(t, first + (step * p.batch + p.order[g]) * columns), 0, bytes);
}

Tensor packed_w_ih(const RnnProblem& p, int64_t d) {
  return pack(p, transposed(p.w_ih[static_cast<size_t>(d)]), p.gate_columns);
}

// The gates of W units side by side.
Tensor packed_gates(const RnnProblem& p, const Tensor& w) {
  return pack(p, transposed(w), p.gate_columns, gate_count(p.cell));
}

// ---- forward --------------------------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> rnn_fwd(
    const Tensor& input, const Tensor& h0, const MaybeTensor& c0, const Tensors& w_ih, const Tensors& w_hh,
    const Tensors& b_ih, const Tensors& b_hh, const Tensors& w_hr, const Tensors& peephole, const Tensors& norm,
    const MaybeTensor& lengths, const MaybeTensor& resets, const MaybeTensor& recurrent_mask, const MaybeTensor& seed,
    double zoneout_h, double zoneout_c, double eps, int64_t cell, bool reverse, bool keep) {
  const RnnProblem p({"rnn_fwd", input,     h0,        c0,   w_ih,    w_hh,   b_ih,
                      b_hh,      w_hr,      peephole,  norm, lengths, resets, recurrent_mask,
                      seed,      zoneout_h, zoneout_c, eps,  cell,    reverse});
  const bool lstm = p.cell == Cell::lstm;
  const int64_t D = p.directions, T = p.steps, B = p.batch, H = p.hidden, P = p.width;
  Tensor output = empty(p.input, {T, B, D * P}, p.type);
  const auto none = [&] { return empty(p.input, {0}, p.acc); };  // results share no memory
  Tensor cells = keep && lstm ? empty(p.input, {D, T, B, H}, p.acc) : none();
  Tensor gates = keep ? empty(p.input, {D, T, B, p.saved_columns}, p.acc) : none();
  Tensor products = keep && p.has_norm ? empty(p.input, {D, T, B, p.gate_columns}, p.acc) : none();
  Tensor h = as_type_copy(p.h0, p.acc), c = lstm ? as_type_copy(*p.c0, p.acc) : none();
  const auto result = [&] {
    return std::tuple(output, as_type(h, p.type), lstm ? as_type(c, p.type) : empty(p.input, {0}, p.type), cells, gates,
                      products);
  };
  if (p.empty()) {
    if (output.numel() > 0) output = zeros(p.input, {T, B, D * P}, p.type);
    return result();
  }
  zero_inactive(p, output, 0, D * P);
  if (cells.numel() > 0)
    for (int64_t d = 0; d < D; ++d) zero_inactive(p, cells, d * T * B * H, H);

  const RnnKernels& kernels = p.kernels;
  const int64_t chunk = chunk_steps(p), stride = kernels.row_stride(p.dtype, p.gate_columns);
  std::vector<MaybeTensor> w_ih_packed;
  Tensors packed;
  std::vector<RnnForward> args;
  Loops loops(p, kernels.forward);
  // zx of the loops' own making, by panels, or rows for all gates.
  const int64_t panel_columns = few_tokens(p) ? 0 : kernels.forward.input_columns(p.layer);
  const int64_t share_tokens = (chunk * ((B + loops.shares() - 1) / loops.shares()) + 31) / 32 * 32;
  const int64_t zx_size = panel_columns > 0 ? checked_product({loops.shares(), share_tokens, panel_columns}, p.op)
                                            : checked_product({chunk, B, stride}, p.op);
  Tensor zx = empty(p.input, {D, zx_size}, p.acc);
  const auto part = [](Tensor& t, int64_t element) -> void* { return t.numel() > 0 ? at(t, element) : nullptr; };
  for (int64_t d = 0; d < D; ++d) {
    const auto i = static_cast<size_t>(d);
    w_ih_packed.push_back(!p.has_w_ih || few_tokens(p) ? std::nullopt
                          : panel_columns > 0          ? MaybeTensor(packed_gates(p, p.w_ih[i]))
                                                       : MaybeTensor(packed_w_ih(p, d)));
    RnnDirection direction = p.direction(d);
    direction.w_hh = packing_of(p, transposed(p.w_hh[i]), p.gate_columns, gate_count(p.cell), false, nullptr);
    if (!packs_on_the_way(p.layer)) {
      packed.push_back(packed_gates(p, p.w_hh[i]));
      direction.packed_w_hh = packed.back().const_data_ptr();
    }
    if (p.has_w_hr) {
      packed.push_back(pack(p, transposed(p.w_hr[i]), P));
      direction.packed_w_hr = packed.back().const_data_ptr();
    }
    args.push_back({&p.layer,
                    direction,
                    0,
                    0,
                    at(h, d * B * P),
                    part(c, d * B * H),
                    at(zx, d * zx_size),
                    stride,
                    at(output, d * P),
                    D * P,
                    part(cells, d * T * B * H),
                    part(gates, d * T * B * p.saved_columns),
                    part(products, d * T * B * p.gate_columns),
                    {}});
    if (panel_columns > 0)
      args.back().input = {w_ih_packed.back()->const_data_ptr(), p.bias.empty() ? nullptr : p.bias[i].const_data_ptr(),
                           p.input.const_data_ptr(), share_tokens * panel_columns,
                           share_tokens * kernels.forward.input_columns(p.layer) / kernels.forward.panels(p.layer)};
  }
  for (int64_t begin = 0; begin < T; begin += chunk) {
    const int64_t end = std::min(T, begin + chunk);
    for (int64_t d = 0; d < D; ++d) {
      RnnForward& a = args[static_cast<size_t>(d)];
      a.step_begin = begin, a.step_end = end;
      if (panel_columns > 0) continue;
      input_products(p, d, input_rows(p, d, begin, end), w_ih_packed[static_cast<size_t>(d)], at(zx, d * zx_size),
                     stride);
    }
    loops.run(end - begin + 1,
              [&](int64_t d, const RnnShare& share, int64_t turn, int64_t first, int64_t last, void* scratch) {
                kernels.forward_turn(args[static_cast<size_t>(d)], share, turn, first, last, scratch);
              });
  }
  return result();
}

// ---- backward -------------------------------------------------------------------------------------------------------
// The gradients, and how a chunk's rows lead to them.
struct Gradients {
  const RnnProblem& p;
  const bool need_input, need_weights, at_once;  // at_once: the only chunk writes the gradients as they are returned
  Tensor input, w_ih, w_hh, w_hr;  // weights in acc, or in dtype at once; input in dtype where rows are written once
  std::vector<Tensor> packed_w_ih;

  Gradients(const RnnProblem& p_, bool need_input_, bool need_weights_)
      : p(p_),
        need_input(need_input_),
        need_weights(need_weights_),
        at_once(chunk_steps(p_) >= p_.steps),
        input(input_tensor()),
        w_ih(sum(need_weights && p.has_w_ih, p.gate_columns, p.inputs)),
        w_hh(sum(need_weights, p.gate_columns, p.width)),
        w_hr(sum(need_weights && p.has_w_hr, p.width, p.hidden)) {
    if (!need_input || !p.has_w_ih || p.empty() || direct_input()) return;
    for (const Tensor& w : p.w_ih) packed_w_ih.push_back(pack(p, rows_of(w), p.inputs));
  }

  // W_ih's rows as the columns of grad_z lie: GRU's have those of n first.
  Source rows_of(const Tensor& w) const {
    return {w.const_data_ptr(), p.gate_columns, p.inputs, 1, nullptr, p.cell == Cell::gru ? 2 * p.hidden : 0};
  }

  // From the rows of a chunk's tokens: x, h of the step before (in acc where there is a mask), and the gradients by
  // token in `a`. The first chunk of a direction writes the sums that later ones add to.
  void add(int64_t d, const Rows& x, const Rows& h, const RnnBackward& a, bool first) {
    const auto tokens = static_cast<int64_t>(x.size());
    const int64_t stride = a.grad_z_stride, H = p.hidden, P = p.width, I = p.inputs;
    const int64_t part = recurrent_part(p.cell);
    const auto column = [&](const void* base, int64_t first) {
      return static_cast<const char*>(base) + first * operand_bytes();
    };
    // Adds to rows of the sum the columns of A, transposed, times B.
    const auto add_product = [&](Dtype type, const void* source, int64_t source_stride, int64_t columns,
                                 const Tensor& packed, int64_t width, Tensor& sum, int64_t row) {
      multiply(p, {columns, width, tokens, type, source, 1, source_stride, packed.const_data_ptr(), nullptr,
                   at_once ? p.dtype : p.acc_dtype, at(sum, (d * sum.size(1) + row) * width), width, !first, 0, 0});
    };
    const auto add_outer = [&](const void* source, int64_t columns, const Rows& rows, Dtype dtype, int64_t width,
                               Tensor& sum, int64_t row) {
      const RnnOuter outer{dtype,       at_once ? p.dtype : p.acc_dtype,          tokens, width, source, stride,
                           rows.data(), at(sum, (d * sum.size(1) + row) * width), width,  !first};
      for_ranges(columns, width, p.input, 0, p.acc,
                 [&](int64_t begin, int64_t end, void*) { p.kernels.outer(outer, begin, end); });
    };
    const bool few = tokens <= kFewOuter && !p.has_w_hr;
    if (need_input) add_input(d, x, a);
    if (!need_weights) return;
    const void* recurrent = p.has_norm ? a.grad_zh : column(a.grad_z, part * H);
    if (few) {
      if (p.has_w_ih && part > 0) add_outer(a.grad_z, H, x, p.dtype, I, w_ih, 2 * H);
      if (p.has_w_ih) add_outer(column(a.grad_z, part * H), p.gate_columns - part * H, x, p.dtype, I, w_ih, 0);
      add_outer(recurrent, p.gate_columns, h, p.has_mask ? p.acc_dtype : p.dtype, P, w_hh, 0);
      return;
    }
    if (p.has_w_ih) {
      const Tensor packed = pack(p, {nullptr, tokens, 0, 1, x.data()}, I);
      if (part > 0) add_product(p.operand_dtype, a.grad_z, stride, H, packed, I, w_ih, 2 * H);
      add_product(p.operand_dtype, column(a.grad_z, part * H), stride, p.gate_columns - part * H, packed, I, w_ih, 0);
    }
    add_product(p.operand_dtype, recurrent, stride, p.gate_columns,
                pack(p, {nullptr, tokens, 0, 1, h.data()}, P, 1, p.has_mask), P, w_hh, 0);
    if (p.has_w_hr)
      add_product(p.acc_dtype, a.grad_h_hat, P, P, pack(p, {a.h_wide, tokens, H, 1}, H, 1, true), H, w_hr, 0);
  }

 private:
  int64_t operand_bytes() const { return p.operand_dtype == Dtype::f64 ? 8 : p.operand_dtype == Dtype::f32 ? 4 : 2; }
  Tensor sum(bool needed, int64_t rows, int64_t columns) const {
    if (!needed) return empty(p.input, {0}, p.acc);
    const ScalarType type = at_once ? p.type : p.acc;
    return p.empty() ? zeros(p.input, {p.directions, rows, columns}, type)
                     : empty(p.input, {p.directions, rows, columns}, type);
  }
  bool direct_input() const { return few_tokens(p) && !both(); }
  bool both() const { return p.has_w_ih && p.directions == 2; }
  Tensor input_tensor() const {
    if (!need_input) return empty(p.input, {0}, p.type);
    const int64_t columns = p.input.size(2);
    if (both()) return zeros(p.input, {p.steps, p.batch, columns}, p.acc);
    return p.has_lengths || p.empty() ? zeros(p.input, {p.steps, p.batch, columns}, p.type)
                                      : empty(p.input, {p.steps, p.batch, columns}, p.type);
  }
  void add_input(int64_t d, const Rows& x, const RnnBackward& a) {
    const int64_t columns = p.input.size(2), tokens = static_cast<int64_t>(x.size()), H = p.hidden;
    const auto element = static_cast<int64_t>(p.input.element_size()), own = static_cast<int64_t>(input.element_size());
    std::vector<void*> rows;
    for (const void* row : x) {
      const int64_t offset =
          (static_cast<const char*>(row) - static_cast<const char*>(p.input.const_data_ptr())) / element;
      rows.push_back(static_cast<char*>(input.mutable_data_ptr()) + offset * own);
    }
    if (p.has_w_ih && direct_input()) {
      const int64_t stride = p.kernels.row_stride(p.dtype, columns);
      const Tensor& w = p.w_ih[static_cast<size_t>(d)];
      Tensor sums = empty(p.input, {tokens, stride}, p.acc);
      const Packing b = packing_of(p, rows_of(w), columns, 1, false, nullptr);
      few_rows_product(
          p, {b, tokens, p.operand_dtype, a.grad_z, a.grad_z_stride, nullptr, sums.mutable_data_ptr(), stride});
      const RnnScatter s{p.dtype, columns, p.acc_dtype, sums.const_data_ptr(), stride, rows.data(), 0};
      for_ranges(tokens, columns, p.input, 0, p.acc,
                 [&](int64_t begin, int64_t end, void*) { p.kernels.scatter(s, begin, end); });
      return;
    }
    if (p.has_w_ih) {
      multiply(p, {tokens, columns, p.gate_columns, p.operand_dtype, a.grad_z, a.grad_z_stride, 1,
                   packed_w_ih[static_cast<size_t>(d)].const_data_ptr(), nullptr, both() ? p.acc_dtype : p.dtype,
                   nullptr, columns, both(), 0, 0, nullptr, rows.data()});
      return;
    }
    const auto scatter = [&](int64_t from, int64_t count, int64_t to) {
      const RnnScatter s{p.dtype,
                         count,
                         p.operand_dtype,
                         static_cast<const char*>(a.grad_z) + from * operand_bytes(),
                         a.grad_z_stride,
                         rows.data(),
                         to};
      for_ranges(tokens, count, p.input, 0, p.acc,
                 [&](int64_t first, int64_t last, void*) { p.kernels.scatter(s, first, last); });
    };
    const int64_t part = recurrent_part(p.cell) * H;
    if (part > 0) scatter(0, H, 2 * H);
    scatter(part, p.gate_columns - part, 0);
  }
};

using TenTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

TenTensors rnn_bwd(const MaybeTensor& grad_output, const MaybeTensor& grad_h_n, const MaybeTensor& grad_c_n,
                   const MaybeTensor& grad_cells, const Tensor& input, const Tensor& h0, const MaybeTensor& c0,
                   const Tensors& w_ih, const Tensors& w_hh, const Tensors& b_ih, const Tensors& b_hh,
                   const Tensors& w_hr, const Tensors& peephole, const Tensors& norm, const MaybeTensor& lengths,
                   const MaybeTensor& resets, const MaybeTensor& recurrent_mask, const MaybeTensor& seed,
                   double zoneout_h, double zoneout_c, double eps, int64_t cell, bool reverse, const Tensor& output,
                   const Tensor& cells, const Tensor& gates, const Tensor& products, bool need_input,
                   bool need_weights) {
  const RnnProblem p({"rnn_bwd", input,     h0,        c0,   w_ih,    w_hh,   b_ih,
                      b_hh,      w_hr,      peephole,  norm, lengths, resets, recurrent_mask,
                      seed,      zoneout_h, zoneout_c, eps,  cell,    reverse});
  const char* op = p.op;
  const bool lstm = p.cell == Cell::lstm;
  const int64_t D = p.directions, T = p.steps, B = p.batch, H = p.hidden, P = p.width;
  const int64_t G = p.gate_columns, R = p.saved_columns;
  const auto checked = [&](const MaybeTensor& t, std::initializer_list<int64_t> sizes, ScalarType type,
                           const char* argument) -> MaybeTensor {
    if (!t) return std::nullopt;
    check_like(*t, sizes, type, op, argument);
    return as_contiguous(*t);
  };
  SK_CHECK(lstm || (!grad_c_n && !grad_cells), op, ": grad_c_n and grad_cells are for LSTM");
  const MaybeTensor dy = checked(grad_output, {T, B, D * P}, p.type, "grad_output");
  const MaybeTensor dcells = checked(grad_cells, {D, T, B, H}, p.acc, "grad_cells");
  const MaybeTensor dh_n = checked(grad_h_n, {D, B, P}, p.type, "grad_h_n");
  const MaybeTensor dc_n = checked(grad_c_n, {D, B, H}, p.type, "grad_c_n");
  const Tensor y = *checked(output, {T, B, D * P}, p.type, "output");
  const Tensor none = empty(p.input, {0}, p.acc);
  const Tensor c = lstm ? *checked(cells, {D, T, B, H}, p.acc, "cells") : none;
  const auto absent = [](const Tensor& t) { return t.dim() == 1 && t.size(0) == 0; };
  const bool recompute = absent(gates) || (p.has_norm && absent(products));
  const Tensor z = recompute ? none : *checked(gates, {D, T, B, R}, p.acc, "gates");
  const Tensor raw = recompute || !p.has_norm ? none : *checked(products, {D, T, B, G}, p.acc, "products");

  Tensor grad_h = dh_n ? as_type_copy(*dh_n, p.acc) : zeros(p.input, {D, B, P}, p.acc);
  Tensor grad_c = !lstm ? none : dc_n ? as_type_copy(*dc_n, p.acc) : zeros(p.input, {D, B, H}, p.acc);
  Gradients gradients(p, need_input, need_weights);
  const int64_t peephole_columns = p.has_peephole ? 3 * H : 0, norms = p.has_norm ? norm_columns(p.cell, H) : 0;
  const int64_t sum_columns = peephole_columns + norms, total_columns = R + sum_columns;
  Tensor totals = zeros(p.input, {need_weights ? D : 0, total_columns}, ScalarType::Double);

  if (!p.empty()) {
    const RnnKernels& kernels = p.kernels;
    const int64_t chunk = chunk_steps(p), stride = kernels.row_stride(p.dtype, std::max(R, G));
    const int64_t most = checked_product({chunk, B}, op);
    const auto buffer_of = [&](ScalarType type, bool needed, int64_t columns) {
      return empty(p.input, {D, needed ? checked_product({most, columns}, op) : 0}, type);
    };
    const auto buffer = [&](bool needed, int64_t columns) { return buffer_of(p.acc, needed, columns); };
    Tensor grad_z = buffer_of(p.operand, true, stride), grad_zh = buffer_of(p.operand, p.has_norm, stride);
    const bool projected = p.has_w_hr && need_weights;
    Tensor h_wide = buffer(projected, H), grad_h_hat = buffer(projected, P);
    Tensor chunk_gates = buffer(recompute, R), chunk_products = buffer(recompute, G), zx = buffer(recompute, stride);
    const bool need_h = need_weights || recompute;
    Tensor masked_h = buffer(p.has_mask && need_h, P);
    Tensor sums = zeros(p.input, {need_weights ? D : 0, B, sum_columns}, p.acc);
    const auto part = [](Tensor& t, int64_t d) -> void* { return t.numel() > 0 ? at(t, d * t.size(1)) : nullptr; };
    const auto read = [](const MaybeTensor& t, int64_t element) -> const void* {
      return t && t->numel() > 0 ? at(*t, element) : nullptr;
    };
    Tensors packed, w_ih_packed, w_hh_packed;
    std::vector<RnnBackward> args;
    for (int64_t d = 0; d < D; ++d) {
      const auto i = static_cast<size_t>(d);
      RnnDirection direction = p.direction(d);
      const Source w_hh{p.w_hh[i].const_data_ptr(), G, P, 1};
      direction.w_hh = packing_of(p, w_hh, P, 1, false, nullptr);
      if (!packs_on_the_way_back(p.layer)) {
        packed.push_back(pack(p, w_hh, P));
        direction.packed_w_hh = packed.back().const_data_ptr();
      }
      if (p.has_w_hr) {
        packed.push_back(pack(p, {p.w_hr[i].const_data_ptr(), P, H, 1}, H));
        direction.packed_w_hr = packed.back().const_data_ptr();
      }
      if (recompute) {
        if (p.has_w_ih) w_ih_packed.push_back(packed_w_ih(p, d));
        w_hh_packed.push_back(pack(p, transposed(p.w_hh[i]), G));
      }
      args.push_back({&p.layer,
                      direction,
                      0,
                      0,
                      read(dy, d * P),
                      read(dcells, d * T * B * H),
                      at(y, d * P),
                      D * P,
                      at(p.h0, d * B * P),
                      read(p.c0, d * B * H),
                      read(c, d * T * B * H),
                      recompute ? part(chunk_gates, d) : read(z, d * T * B * R),
                      recompute ? part(chunk_products, d) : read(raw, d * T * B * G),
                      recompute,
                      at(grad_h, d * B * P),
                      lstm ? at(grad_c, d * B * H) : nullptr,
                      part(grad_z, d),
                      part(grad_zh, d),
                      part(h_wide, d),
                      part(grad_h_hat, d),
                      stride,
                      need_weights && sum_columns > 0 ? at(sums, d * B * sum_columns) : nullptr,
                      sum_columns});
    }
    Loops loops(p, kernels.backward);
    std::vector<Rows> x(static_cast<size_t>(D)), previous_h(static_cast<size_t>(D));
    for (int64_t end = T; end > 0; end -= chunk) {
      const int64_t begin = std::max<int64_t>(0, end - chunk);
      for (int64_t d = 0; d < D; ++d) {
        const auto i = static_cast<size_t>(d);
        args[i].step_begin = begin, args[i].step_end = end;
        x[i] = input_rows(p, d, begin, end);
        if (!need_h) continue;
        // The state before each step: null where it starts from zero.
        Rows h, previous_c, factors;
        const uint8_t* resets = p.layer.resets;
        p.for_tokens(d, begin, end, [&](int64_t t, int64_t b, int64_t g) {
          const bool later = t + 1 < T && g < p.active[t + 1], backwards = p.is_reverse(d);
          const bool reset = resets && (backwards ? later && resets[(t + 1) * B + b] : resets[t * B + b]);
          const int64_t before = !backwards ? t - 1 : later ? t + 1 : -1;
          h.push_back(reset ? nullptr : before < 0 ? at(p.h0, (d * B + b) * P) : at(y, ((before * B + b) * D + d) * P));
          if (lstm)
            previous_c.push_back(reset        ? nullptr
                                 : before < 0 ? at(*p.c0, (d * B + b) * H)
                                              : at(c, ((d * T + before) * B + b) * H));
          if (p.has_mask) factors.push_back(at(*p.mask, (d * B + b) * P));
        });
        const auto tokens = static_cast<int64_t>(h.size());
        if (p.has_mask) {
          const RnnGather gather{p.dtype, P, h.data(), factors.data(), nullptr, part(masked_h, d), P};
          for_ranges(tokens, P, p.input, 0, p.acc,
                     [&](int64_t first, int64_t last, void*) { kernels.gather(gather, first, last); });
          for (int64_t k = 0; k < tokens; ++k) h[static_cast<size_t>(k)] = at(masked_h, d * masked_h.size(1) + k * P);
        }
        if (recompute) {
          input_products(p, d, x[i], p.has_w_ih ? MaybeTensor(w_ih_packed[i]) : std::nullopt, part(zx, d), stride);
          multiply(p, {tokens, G, P, p.has_mask ? p.acc_dtype : p.dtype, nullptr, 0, 1, w_hh_packed[i].const_data_ptr(),
                       nullptr, p.acc_dtype, part(chunk_products, d), G, false, 0, 0, h.data()});
          const RnnActivate activate{&p.layer,
                                     args[i].direction,
                                     part(zx, d),
                                     stride,
                                     part(chunk_products, d),
                                     lstm ? previous_c.data() : nullptr,
                                     part(chunk_gates, d)};
          for_ranges(tokens, R, p.input, kernels.activate_scratch(p.layer), p.acc,
                     [&](int64_t first, int64_t last, void* s) { kernels.activate(activate, first, last, s); });
        }
        previous_h[i] = std::move(h);
      }
      loops.run(end - begin + 1,
                [&](int64_t d, const RnnShare& share, int64_t turn, int64_t first, int64_t last, void* scratch) {
                  kernels.backward_turn(args[static_cast<size_t>(d)], share, turn, first, last, scratch);
                });
      for (int64_t d = 0; d < D; ++d) {
        const auto i = static_cast<size_t>(d);
        gradients.add(d, x[i], previous_h[i], args[i], end == T);
        if (!need_weights) continue;
        double* total = static_cast<double*>(totals.mutable_data_ptr()) + d * total_columns;
        add_columns(p, p.operand_dtype, static_cast<int64_t>(x[i].size()), R, args[i].grad_z, stride, total);
        if (sum_columns == 0) continue;
        add_columns(p, p.acc_dtype, B, sum_columns, args[i].sums, sum_columns, total + R);
        std::memset(args[i].sums, 0, static_cast<size_t>(B * sum_columns) * sums.element_size());
      }
    }
  }

  // Columns [first, first + count) of the totals.
  const auto columns = [&](bool needed, std::initializer_list<std::pair<int64_t, int64_t>> parts) {
    int64_t width = 0, element = static_cast<int64_t>(totals.element_size());
    for (const auto& [first, count] : parts) width += count;
    if (!needed) return empty(p.input, {0}, p.acc);
    Tensor out = empty(p.input, {D, width}, ScalarType::Double);
    if (out.numel() == 0) return out;
    char* to = at(out, 0);
    for (int64_t d = 0; d < D; ++d) {
      for (const auto& [first, count] : parts) {
        std::memcpy(to, at(totals, d * total_columns + first), static_cast<size_t>(count * element));
        to += count * element;
      }
    }
    return out;
  };
  const bool gru = p.cell == Cell::gru;
  const auto given = [&](bool needed, const Tensor& t) {
    return needed ? as_type(t, p.type) : empty(p.input, {0}, p.type);
  };
  const Tensor b_ih_grad =
      gru ? columns(need_weights && p.has_w_ih, {{H, 2 * H}, {0, H}}) : columns(need_weights && p.has_w_ih, {{0, G}});
  const Tensor b_hh_grad = columns(need_weights, {{gru ? H : 0, G}});
  const Tensor peephole_grad = columns(need_weights && p.has_peephole, {{R, peephole_columns}});
  const bool peepholes = need_weights && p.has_peephole;
  return {as_type(gradients.input, p.type),
          as_type(grad_h, p.type),
          given(lstm, grad_c),
          as_type(gradients.w_ih, p.type),
          as_type(gradients.w_hh, p.type),
          as_type(b_ih_grad, p.type),
          as_type(b_hh_grad, p.type),
          as_type(gradients.w_hr, p.type),
          given(peepholes, peepholes ? torch::stable::reshape(peephole_grad, {D, 3, H}) : peephole_grad),
          as_type(columns(need_weights && p.has_norm, {{R + peephole_columns, norms}}), p.acc)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("rnn_fwd", TORCH_BOX(&rnn_fwd));
  m.impl("rnn_bwd", TORCH_BOX(&rnn_bwd));
}

}  // namespace seqkern
