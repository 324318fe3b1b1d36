// The recurrent kernels' entry points, for the dtypes of a translation unit: all of them (kernels.cpp), or bfloat16
// with operands of pairs (bf16.cpp).
#pragma once

#include "backward.h"
#include "forward.h"

namespace seqkern {
namespace SK_TIER {
namespace {

int64_t forward_panel_count(const RnnLayer& l) { SK_BY_ACC(l.dtype, forward_panels<A>(l)); }
int64_t forward_tile_rows(const RnnLayer& l) { return whole_tile(tile_vectors(gate_count(l.cell))); }
int64_t forward_state_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, ForwardState<A>(l, rows, nullptr).bytes);
}
int64_t forward_scratch_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, forward_scratch<A>(l, rows) * static_cast<int64_t>(sizeof(A)));
}
// Products with the input, unless a norm or a projection needs whole rows.
int64_t forward_input_columns(const RnnLayer& l) {
  if (l.inputs == 0 || l.norm || l.project) return 0;
  SK_BY_ACC(l.dtype, forward_panels<A>(l) * panel_width<A>(gate_count(l.cell)));
}
int64_t no_input_columns(const RnnLayer&) { return 0; }
int64_t backward_panel_count(const RnnLayer& l) { SK_BY_ACC(l.dtype, backward_panels<A>(l)); }
int64_t backward_tile_rows(const RnnLayer&) { return kTileRows<kPanelVecs>; }
int64_t backward_state_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, BackwardState<A>(l, rows, nullptr).bytes);
}
int64_t backward_scratch_bytes(const RnnLayer& l, int64_t rows) {
  SK_BY_ACC(l.dtype, backward_scratch<A>(l, rows) * static_cast<int64_t>(sizeof(A)));
}

void forward_turn(const RnnForward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end, void* scratch) {
  SK_LAYER_CELL(p.layer->cell, SK_BY_ACC(p.layer->dtype, forward_cell_turn<A, kCell>(p, share, turn, begin, end,
                                                                                     static_cast<A*>(scratch))));
}
void backward_turn(const RnnBackward& p, const RnnShare& share, int64_t turn, int64_t begin, int64_t end,
                   void* scratch) {
  SK_LAYER_CELL(p.layer->cell, SK_BY_ACC(p.layer->dtype, backward_cell_turn<A, kCell>(p, share, turn, begin, end,
                                                                                      static_cast<A*>(scratch))));
}

int64_t activate_bytes(const RnnLayer& l) {
  SK_BY_ACC(l.dtype, activate_scratch<A>(l) * static_cast<int64_t>(sizeof(A)));
}
void activate(const RnnActivate& p, int64_t begin, int64_t end, void* scratch) {
  SK_LAYER_CELL(p.layer->cell,
                SK_BY_ACC(p.layer->dtype, activate_tokens<A, kCell>(p, begin, end, static_cast<A*>(scratch))));
}

constexpr RnnKernels kKernels = {
    .forward = {.panels = forward_panel_count,
                .tile_rows = forward_tile_rows,
                .state_bytes = forward_state_bytes,
                .scratch_bytes = forward_scratch_bytes,
                .input_columns = forward_input_columns,
                .every_step_from = kEveryStepFrom,
                .same_bits = kDepthStep == 1},
    .backward = {.panels = backward_panel_count,
                 .tile_rows = backward_tile_rows,
                 .state_bytes = backward_state_bytes,
                 .scratch_bytes = backward_scratch_bytes,
                 .input_columns = no_input_columns,
                 .every_step_from = 0,
                 .same_bits = true},
    .forward_turn = forward_turn,
    .backward_turn = backward_turn,
    .activate_scratch = activate_bytes,
    .activate = activate,
};

}  // namespace
}  // namespace SK_TIER
}  // namespace seqkern
