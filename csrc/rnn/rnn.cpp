// Recurrent networks, host side: forward and backward over the chunks of a sequence, registration under the CPU key.
#include "rnn.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "gradients.h"
#include "inputs.h"
#include "ops.h"
#include "work.h"

namespace seqkern {
namespace {

// Zeroes the rows of inactive steps in (steps, batch, columns).
void zero_inactive(const RnnProblem& p, Tensor& t, int64_t first, int64_t columns) {
  const auto bytes = static_cast<size_t>(columns) * t.element_size();
  for (int64_t step = 0; step < p.steps; ++step)
    for (int64_t g = p.active[step]; g < p.batch; ++g)
      std::memset(at(t, first + (step * p.batch + p.order[g]) * columns), 0, bytes);
}

// ---- forward --------------------------------------------------------------------------------------------------------
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> rnn_fwd(
    const Tensor& input, const Tensor& h0, const MaybeTensor& c0, const Tensors& w_ih, const Tensors& w_hh,
    const Tensors& b_ih, const Tensors& b_hh, const Tensors& w_hr, const Tensors& peephole, const Tensors& norm,
    const MaybeTensor& lengths, const MaybeTensor& resets, const MaybeTensor& recurrent_mask, const MaybeTensor& seed,
    double zoneout_h, double zoneout_c, double eps, int64_t cell, bool keep) {
  const RnnProblem p({.op = "rnn_fwd",
                      .input = input,
                      .h0 = h0,
                      .c0 = c0,
                      .w_ih = w_ih,
                      .w_hh = w_hh,
                      .b_ih = b_ih,
                      .b_hh = b_hh,
                      .w_hr = w_hr,
                      .peephole = peephole,
                      .norm = norm,
                      .lengths = lengths,
                      .resets = resets,
                      .recurrent_mask = recurrent_mask,
                      .seed = seed,
                      .zoneout_h = zoneout_h,
                      .zoneout_c = zoneout_c,
                      .eps = eps,
                      .cell = cell});
  const bool lstm = p.cell == Cell::lstm;
  const int64_t D = p.directions, T = p.steps, B = p.batch, H = p.hidden, P = p.width;
  Tensor output = empty(p.input, {T, B, D * P}, p.type);
  const auto none = [&] { return empty(p.input, {0}, p.acc); };  // results must not share memory
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
  const int64_t stride = p.products.row_stride(p.dtype, p.gate_columns);
  std::vector<std::optional<PackedMatrix>> w_ih_packed;
  std::vector<PackedMatrix> packed;
  std::vector<RnnForward> args;
  Loops loops(p, kernels.forward);
  // zx is rows of all gates, or, where the loops make it themselves, panels; and not stored where they do at every
  // step.
  const bool panels = !few_tokens(p) && (loops.all_threads() || !kernels.forward.same_bits);
  const int64_t panel_columns = panels ? kernels.forward.input_columns(p.layer) : 0;
  const int64_t shares = loops.shares(), share_rows = (B + shares - 1) / shares;
  const int64_t every_step_from = panel_columns > 0 ? kernels.forward.every_step_from : 0;
  const bool every_step = every_step_from > 0 && share_rows >= every_step_from;
  const int64_t chunk = every_step ? T : chunk_steps(p), share_tokens = (chunk * share_rows + 31) / 32 * 32;
  const int64_t zx_size = every_step          ? 0
                          : panel_columns > 0 ? checked_product({shares, share_tokens, panel_columns}, p.op)
                                              : checked_product({chunk, B, stride}, p.op);
  Tensor zx = empty(p.input, {D, zx_size}, p.acc);
  const auto part = [](Tensor& t, int64_t element) -> void* { return t.numel() > 0 ? at(t, element) : nullptr; };
  for (int64_t d = 0; d < D; ++d) {
    const auto i = static_cast<size_t>(d);
    w_ih_packed.emplace_back();
    if (p.has_w_ih && !few_tokens(p))
      w_ih_packed.back().emplace(
          pack(p.products, panel_columns > 0 ? by_gates(p, p.w_ih[i]) : transposed(p, p.w_ih[i])));
    RnnDirection direction = p.direction(d);
    direction.w_hh = by_gates(p, p.w_hh[i]);
    if (!packs_on_the_fly(p.layer)) {
      packed.push_back(pack(p.products, direction.w_hh));
      direction.packed_w_hh = packed.back().data();
    }
    if (p.has_w_hr) {
      packed.push_back(pack(p.products, transposed(p, p.w_hr[i])));
      direction.packed_w_hr = packed.back().data();
    }
    args.push_back({.layer = &p.layer,
                    .direction = direction,
                    .step_begin = 0,
                    .step_end = 0,
                    .h = at(h, d * B * P),
                    .c = part(c, d * B * H),
                    .zx = part(zx, d * zx_size),
                    .zx_stride = stride,
                    .output = at(output, d * P),
                    .output_stride = D * P,
                    .cells = part(cells, d * T * B * H),
                    .gates = part(gates, d * T * B * p.saved_columns),
                    .products = part(products, d * T * B * p.gate_columns),
                    .input = {}});
    if (panel_columns > 0)
      args.back().input = {.packed_w_ih = w_ih_packed.back()->data(),
                           .bias = p.bias.empty() ? nullptr : p.bias[i].const_data_ptr(),
                           .x = p.input.const_data_ptr(),
                           .every_step = every_step,
                           .share_stride = zx_size / shares,
                           .panel_stride = zx_size / shares / kernels.forward.panels(p.layer)};
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
using TenTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

TenTensors rnn_bwd(const MaybeTensor& grad_output, const MaybeTensor& grad_h_n, const MaybeTensor& grad_c_n,
                   const MaybeTensor& grad_cells, const Tensor& input, const Tensor& h0, const MaybeTensor& c0,
                   const Tensors& w_ih, const Tensors& w_hh, const Tensors& b_ih, const Tensors& b_hh,
                   const Tensors& w_hr, const Tensors& peephole, const Tensors& norm, const MaybeTensor& lengths,
                   const MaybeTensor& resets, const MaybeTensor& recurrent_mask, const MaybeTensor& seed,
                   double zoneout_h, double zoneout_c, double eps, int64_t cell, const Tensor& output,
                   const Tensor& cells, const Tensor& gates, const Tensor& products, bool need_input,
                   bool need_weights) {
  const RnnProblem p({.op = "rnn_bwd",
                      .input = input,
                      .h0 = h0,
                      .c0 = c0,
                      .w_ih = w_ih,
                      .w_hh = w_hh,
                      .b_ih = b_ih,
                      .b_hh = b_hh,
                      .w_hr = w_hr,
                      .peephole = peephole,
                      .norm = norm,
                      .lengths = lengths,
                      .resets = resets,
                      .recurrent_mask = recurrent_mask,
                      .seed = seed,
                      .zoneout_h = zoneout_h,
                      .zoneout_c = zoneout_c,
                      .eps = eps,
                      .cell = cell});
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
  RnnGradientProducts gradients(p, need_input, need_weights);
  const int64_t peephole_columns = p.has_peephole ? 3 * H : 0, norms = p.has_norm ? norm_columns(p.cell, H) : 0;
  const int64_t sum_columns = peephole_columns + norms, total_columns = R + sum_columns;
  Tensor totals = zeros(p.input, {need_weights ? D : 0, total_columns}, ScalarType::Double);

  if (!p.empty()) {
    const RnnKernels& kernels = p.kernels;
    const int64_t chunk = chunk_steps(p), stride = p.products.row_stride(p.dtype, std::max(R, G));
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
    std::vector<PackedMatrix> packed, w_hh_packed;
    std::vector<std::optional<PackedMatrix>> w_ih_packed;
    std::vector<RnnBackward> args;
    for (int64_t d = 0; d < D; ++d) {
      const auto i = static_cast<size_t>(d);
      RnnDirection direction = p.direction(d);
      direction.w_hh = as_stored(p, p.w_hh[i]);
      if (!packs_on_the_fly_back(p.layer)) {
        packed.push_back(pack(p.products, direction.w_hh));
        direction.packed_w_hh = packed.back().data();
      }
      if (p.has_w_hr) {
        packed.push_back(pack(p.products, as_stored(p, p.w_hr[i])));
        direction.packed_w_hr = packed.back().data();
      }
      if (recompute) {
        w_ih_packed.emplace_back();
        if (p.has_w_ih) w_ih_packed.back().emplace(pack(p.products, transposed(p, p.w_ih[i])));
        w_hh_packed.push_back(pack(p.products, transposed(p, p.w_hh[i])));
      }
      args.push_back({.layer = &p.layer,
                      .direction = direction,
                      .step_begin = 0,
                      .step_end = 0,
                      .grad_output = read(dy, d * P),
                      .grad_cells = read(dcells, d * T * B * H),
                      .output = at(y, d * P),
                      .output_stride = D * P,
                      .h0 = at(p.h0, d * B * P),
                      .c0 = read(p.c0, d * B * H),
                      .cells = read(c, d * T * B * H),
                      .gates = recompute ? part(chunk_gates, d) : read(z, d * T * B * R),
                      .products = recompute ? part(chunk_products, d) : read(raw, d * T * B * G),
                      .by_token = recompute,
                      .grad_h = at(grad_h, d * B * P),
                      .grad_c = lstm ? at(grad_c, d * B * H) : nullptr,
                      .grad_z = part(grad_z, d),
                      .grad_zh = part(grad_zh, d),
                      .h_wide = part(h_wide, d),
                      .grad_h_hat = part(grad_h_hat, d),
                      .grad_z_stride = stride,
                      .sums = need_weights && sum_columns > 0 ? at(sums, d * B * sum_columns) : nullptr,
                      .sum_columns = sum_columns});
    }
    Loops loops(p, kernels.backward);
    std::vector<TokenRows> x(static_cast<size_t>(D)), previous_h(static_cast<size_t>(D));
    for (int64_t end = T; end > 0; end -= chunk) {
      const int64_t begin = std::max<int64_t>(0, end - chunk);
      for (int64_t d = 0; d < D; ++d) {
        const auto i = static_cast<size_t>(d);
        args[i].step_begin = begin, args[i].step_end = end;
        x[i] = input_rows(p, d, begin, end);
        if (!need_h) continue;
        // The state before each step; null where it starts from zero.
        TokenRows h, previous_c, factors;
        const uint8_t* resets = p.layer.resets;
        p.for_tokens(d, begin, end, [&](int64_t t, int64_t b, int64_t g) {
          const bool later = t + 1 < T && g < p.active[t + 1], backwards = is_reverse(d);
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
          gather(p.products, {.dtype = p.dtype,
                              .count = tokens,
                              .columns = P,
                              .rows = h.data(),
                              .factors = factors.data(),
                              .out = part(masked_h, d),
                              .out_stride = P});
          for (int64_t k = 0; k < tokens; ++k) h[static_cast<size_t>(k)] = at(masked_h, d * masked_h.size(1) + k * P);
        }
        if (recompute) {
          input_products(p, d, x[i], w_ih_packed[i], part(zx, d), stride);
          multiply(p.products, {.rows = tokens,
                                .columns = G,
                                .depth = P,
                                .a_type = p.has_mask ? p.acc_dtype : p.dtype,
                                .a_rows = h.data(),
                                .packed_b = w_hh_packed[i].data(),
                                .c_type = p.acc_dtype,
                                .c = part(chunk_products, d),
                                .c_stride = G});
          const RnnActivate activate{.layer = &p.layer,
                                     .direction = args[i].direction,
                                     .zx = part(zx, d),
                                     .zx_stride = stride,
                                     .zh = part(chunk_products, d),
                                     .c_prev = lstm ? previous_c.data() : nullptr,
                                     .gates = part(chunk_gates, d)};
          for_ranges(tokens, R, kernels.activate_scratch(p.layer),
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
        add_columns(p.products, {.dtype = p.operand_dtype,
                                 .rows = static_cast<int64_t>(x[i].size()),
                                 .columns = R,
                                 .source = args[i].grad_z,
                                 .stride = stride,
                                 .sums = total});
        if (sum_columns == 0) continue;
        add_columns(p.products, {.dtype = p.acc_dtype,
                                 .rows = B,
                                 .columns = sum_columns,
                                 .source = args[i].sums,
                                 .stride = sum_columns,
                                 .sums = total + R});
        std::memset(args[i].sums, 0, static_cast<size_t>(B * sum_columns) * sums.element_size());
      }
    }
  }

  // Columns [first, first + count) of the totals, joined.
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

SK_DIRECT_OP(rnn_fwd)
SK_DIRECT_OP(rnn_bwd)

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(seqkern, CPU, m) {
  m.impl("rnn_fwd", TORCH_BOX(&rnn_fwd));
  m.impl("rnn_bwd", TORCH_BOX(&rnn_bwd));
}

}  // namespace seqkern
