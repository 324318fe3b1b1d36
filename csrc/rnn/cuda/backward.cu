// The backward scan of recurrent layers, host side: checks, choice of a tier, launch.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "backward.cuh"
#include "common/cuda/launch.h"
#include "plan.h"
#include "scan.h"

namespace seqkern {
namespace {

using namespace rnn_backward;

constexpr const char* kTiers[] = {"block", "cluster", "grid"};

// ---- plan ---------------------------------------------------------------------------------------------------------

using Kernel = void (*)(const BackwardArgs);

template <class T, int CELL>
Kernel kernel_of_size(int units, bool norm) {
  if (norm) return &scan_backward_kernel<T, CELL, 1, true>;
  return units <= kShortest ? &scan_backward_kernel<T, CELL, 1, false>
                            : &scan_backward_kernel<T, CELL, kLongest / kShortest, false>;
}
// F<T, CELL>::of(arguments): the kernel of a dtype and a cell.
template <class T, class F>
auto of_cell(int cell, F f) {
  switch (cell) {
    case kRnnLstm: return f.template of<T, kRnnLstm>();
    case kRnnGru: return f.template of<T, kRnnGru>();
    default: return f.template of<T, kRnnTanh>();
  }
}
template <class F>
auto of_type(ScalarType type, int cell, F f) {
  switch (type) {
    case ScalarType::Float: return of_cell<float>(cell, f);
    case ScalarType::BFloat16: return of_cell<BFloat16>(cell, f);
    default: return of_cell<Half>(cell, f);
  }
}
struct Scan {
  int units;
  bool norm;
  template <class T, int CELL>
  Kernel of() const {
    return kernel_of_size<T, CELL>(units, norm);
  }
};
struct RowStatistics {
  template <class T, int CELL>
  Kernel of() const {
    return &row_statistics_kernel<T, CELL>;
  }
};

struct Plan {
  bool served = false;
  Exchange exchange = kBlock;
  int blocks = 1;  // a team
  Layout layout{};
  int teams = 1, launches = 1;  // teams a direction; launches: 2 where one direction fills the device
  LaunchShape shape;
  Kernel kernel = nullptr;
  std::string why;
};

class Planner {
 public:
  Planner(const Tensor& w_hh, int64_t batch, int cell, bool norm)
      : device_(cuda_device(w_hh)),
        type_(w_hh.scalar_type()),
        cell_(cell),
        norm_(norm),
        hidden_(static_cast<int>(w_hh.size(2))),
        directions_(static_cast<int>(w_hh.size(0))),
        element_(static_cast<int>(w_hh.element_size())),
        groups_((hidden_ + 7) / 8),
        tiles_(std::max<int64_t>(1, (batch + kRows - 1) / kRows)) {}

  // The smallest tier that holds the weights, or the tier asked for.
  Plan plan(const std::string& tier) const {
    Plan none;
    for (Exchange exchange : {kBlock, kCluster, kGrid}) {
      if (tier != "auto" && tier != kTiers[exchange]) continue;
      Plan plan = exchange == kBlock ? block() : exchange == kCluster ? cluster() : grid();
      if (plan.served) return plan;
      none.why += (none.why.empty() ? "" : "; ") + plan.why;
    }
    return none;
  }

 private:
  // The plan of a team of that size. Not served if a block has too little shared memory.
  Plan team(Exchange exchange, int blocks) const {
    Plan plan;
    const Layout layout = layout_of(hidden_, cell_, blocks, exchange, element_, norm_);
    plan.layout = layout;
    plan.exchange = exchange;
    plan.blocks = blocks;
    plan.shape.block = dim3(kThreads);
    plan.shape.shared_bytes = static_cast<size_t>(layout.total);
    plan.shape.cluster = exchange == kCluster ? blocks : 1;
    plan.shape.all_resident = exchange == kGrid;
    plan.kernel = of_type(type_, cell_, Scan{layout.units, norm_});
    plan.served = layout.units <= (norm_ ? kShortest : kLongest) && layout.total <= device_.shared_per_block;
    plan.why = "teams of " + std::to_string(blocks) + (blocks == 1 ? " block" : " blocks") + ", " +
               std::to_string(layout.units) + " units and " + std::to_string(layout.total) +
               " bytes of shared memory a block";
    return plan;
  }
  void spread(Plan& plan, int64_t teams) const {
    plan.teams = static_cast<int>(std::min<int64_t>(tiles_, std::max<int64_t>(1, teams)));
    plan.shape.grid = dim3(static_cast<unsigned>(plan.teams * directions_ / plan.launches * plan.blocks));
  }

  int residents(const Plan& plan) const {
    return rnn_residents("rnn_scan_bwd", device_, reinterpret_cast<const void*>(plan.kernel), plan.shape);
  }

  Plan block() const {
    Plan plan = team(kBlock, 1);
    if (!plan.served) plan.why = "a block does not hold " + std::to_string(hidden_) + " units";
    spread(plan, tiles_);
    return plan;
  }

  // Chooses the fewest blocks that leave each at most kShortest units; otherwise the most there may be. The number of
  // blocks does not depend on the batch, so no sum does. Never one block: PTX does not define asynchronous stores
  // within a cluster of one block.
  Plan cluster() const {
    Plan best;
    best.why = device_.max_cluster == 1 ? "the device has no clusters" : "no cluster holds the weights";
    if (groups_ == 1 && device_.max_cluster > 1) {
      Plan plan = block();
      plan.why += ", as a cluster would have units for one block alone";
      return plan;
    }
    for (int blocks = 2; blocks <= std::min(device_.max_cluster, groups_); blocks *= 2) {
      Plan plan = team(kCluster, blocks);
      if (!plan.served) continue;
      const int resident = residents(plan);
      if (resident == 0) continue;
      spread(plan, resident / directions_);
      best = plan;
      if (plan.layout.units <= kShortest) break;
    }
    return best;
  }
  Plan grid() const {
    Plan best;
    best.why = "the device does not hold the weights";
    for (int blocks = 1; blocks <= std::min(groups_, device_.multiprocessors); ++blocks) {
      Plan plan = team(kGrid, blocks);
      if (!plan.served || (best.served && plan.layout.units == best.layout.units)) continue;
      if (residents(plan) == 0) continue;
      const int together = device_.multiprocessors / blocks;  // teams that run at once
      plan.launches = together >= directions_ ? 1 : directions_;
      spread(plan, together * plan.launches / directions_);
      best = plan;
      if (plan.layout.units <= kShortest) break;
    }
    return best;
  }

  const CudaDevice& device_;
  ScalarType type_;
  int cell_;
  bool norm_;
  int hidden_, directions_, element_, groups_;
  int64_t tiles_;
};

Planner planner(const Tensor& w_hh, int64_t batch, int64_t cell, bool norm, const std::string& tier, const char* op) {
  SK_CHECK(cell >= 0 && cell <= 3, op, ": cell must be 0 (LSTM), 1 (GRU), 2 (tanh) or 3 (relu), got ", cell);
  SK_CHECK(tier == "auto" || std::find(std::begin(kTiers), std::end(kTiers), tier) != std::end(kTiers), op,
           ": tier must be auto, block, cluster or grid, got ", tier);
  check_dim(w_hh, 3, op, "w_hh");
  SK_CHECK(w_hh.size(0) == 1 || w_hh.size(0) == 2, op, ": w_hh must have 1 or 2 directions, got ", w_hh.size(0));
  check_size(w_hh, 1, checked_product({rnn_gates(static_cast<int>(cell)), w_hh.size(2)}, op), op, "w_hh");
  SK_CHECK(w_hh.size(2) > 0 && w_hh.size(2) <= 65536, op, ": hidden sizes of 1 to 65536, got ", w_hh.size(2));
  return Planner(w_hh, batch, static_cast<int>(cell), norm);
}

// ---- the op -------------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> rnn_scan_bwd(const MaybeTensor& grad_output, const MaybeTensor& grad_h_n,
                                        const MaybeTensor& grad_c_n, const MaybeTensor& grad_cells, const Tensor& gates,
                                        const MaybeTensor& cells, const MaybeTensor& c0, const Tensor& output,
                                        const Tensor& h0, const MaybeTensor& products, const Tensor& w_hh,
                                        const MaybeTensor& norm, const MaybeTensor& lengths, const MaybeTensor& resets,
                                        const MaybeTensor& recurrent_mask, const MaybeTensor& seed, double zoneout_h,
                                        double zoneout_c, double eps, int64_t cell, Tensor grad_x,
                                        std::optional<Tensor> grad_products, std::optional<Tensor> norm_sums,
                                        std::string tier) {
  const char* op = "rnn_scan_bwd";
  const Planner plans = planner(w_hh, h0.dim() == 3 ? h0.size(1) : 0, cell, norm.has_value(), tier, op);
  const ScalarType type = w_hh.scalar_type(), acc = ScalarType::Float;
  SK_CHECK(type == acc || type == ScalarType::BFloat16 || type == ScalarType::Half, op,
           ": w_hh must be float32, bfloat16 or float16, got ScalarType ", static_cast<int>(type));
  const RnnScanChecks check{op, w_hh};
  check_dim(output, 3, op, "output");
  check_dim(h0, 3, op, "h0");
  const int cell_kind = static_cast<int>(cell);
  const int64_t D = w_hh.size(0), H = w_hh.size(2), T = output.size(0), B = h0.size(1), G = rnn_gates(cell_kind);
  const bool lstm = cell == kRnnLstm;
  SK_CHECK(lstm == c0.has_value() && lstm == cells.has_value(), op, ": c0 and cells are for LSTM, which needs them");
  SK_CHECK(lstm || (!grad_c_n && !grad_cells), op, ": grad_c_n and grad_cells are for LSTM");
  SK_CHECK(norm.has_value() == products.has_value() && norm.has_value() == norm_sums.has_value(), op,
           ": products and norm_sums are for layer norm, which needs them");
  check(w_hh, {D, G * H, H}, type, "w_hh");
  check(h0, {D, B, H}, type, "h0");
  check(c0, {D, B, H}, type, "c0");
  check(output, {T, B, D * H}, type, "output");
  check(cells, {D, T, B, H}, acc, "cells");
  check(gates, {D, T, B, rnn_kept(cell_kind) * H}, acc, "gates");
  check(grad_output, {T, B, D * H}, type, "grad_output", true);
  check(grad_h_n, {D, B, H}, type, "grad_h_n");
  check(grad_c_n, {D, B, H}, type, "grad_c_n");
  check(grad_cells, {D, T, B, H}, acc, "grad_cells");
  check(grad_x, {T, B, D * G * H}, type, "grad_x");
  check(grad_products, {D, T, B, G * H}, type, "grad_products", true);
  if (grad_products) {
    SK_CHECK(B <= 1 || grad_products->stride(2) == G * H, op,
             ": the rows of grad_products must lie next to each other");
  }
  check(products, {D, T, B, G * H}, acc, "products");
  check(norm_sums, {D, B, norm_columns_of(cell_kind, H)}, acc, "norm_sums");
  BackwardArgs p{};
  p.scan =
      checked_scan(check, {norm, lengths, resets, recurrent_mask, seed, zoneout_h, zoneout_c, eps, cell_kind}, T, B);

  Tensor grad_h0 = empty(w_hh, {D, B, H}, acc), grad_c0 = empty(w_hh, {lstm ? D : 0, B, H}, acc);
  if (B == 0) return {grad_h0, grad_c0};
  const OnDevice on_device(w_hh);
  const Plan plan = plans.plan(tier);
  SK_CHECK(plan.served, op, ": hidden size ", H, " is not served: ", plan.why);

  p.grad_output = data_or_null(grad_output);
  p.grad_h_n = data_or_null(grad_h_n);
  p.grad_c_n = data_or_null(grad_c_n);
  p.grad_cells = data_or_null<float>(grad_cells);
  p.gates = static_cast<const float*>(gates.const_data_ptr());
  p.cells = data_or_null<float>(cells);
  p.c0 = data_or_null(c0);
  p.output = output.const_data_ptr();
  p.h0 = h0.const_data_ptr();
  p.w_hh = w_hh.const_data_ptr();
  p.grad_x = grad_x.mutable_data_ptr();
  p.grad_products = grad_products ? grad_products->mutable_data_ptr() : nullptr;
  p.grad_h0 = static_cast<float*>(grad_h0.mutable_data_ptr());
  p.grad_c0 = lstm ? static_cast<float*>(grad_c0.mutable_data_ptr()) : nullptr;
  if (grad_output) p.grad_output_time = grad_output->stride(0), p.grad_output_row = grad_output->stride(1);
  if (grad_products) {
    p.grad_products_direction = grad_products->stride(0), p.grad_products_time = grad_products->stride(1);
  }
  p.team.exchange = plan.exchange;
  p.team.blocks = plan.blocks;
  p.team.teams = plan.teams;
  p.team.layout = plan.layout;
  void* const stream = current_stream(w_hh);
  std::optional<Tensor> statistics, mailbox;
  if (norm) p.norm.sums = static_cast<float*>(norm_sums->mutable_data_ptr());
  if (norm && T > 0) {
    statistics = empty(w_hh, {checked_product({D, T, B}, op), 4}, acc);
    p.norm.products = data_or_null<float>(products);
    p.norm.statistics = static_cast<Statistics*>(statistics->mutable_data_ptr());
    LaunchShape shape;
    shape.block = dim3(kThreads);
    shape.grid = dim3(static_cast<unsigned>((D * T * B + kWarps - 1) / kWarps));
    launch(op, of_type(type, cell_kind, RowStatistics{}), shape, stream, p);
  }
  for (int launched = 0; launched < plan.launches; ++launched) {
    p.team.first_direction = launched;
    if (plan.exchange == kGrid) {  // zeros: nothing has arrived yet
      const int64_t blocks = plan.shape.grid.x;
      const int64_t packets = checked_product({2, blocks, plan.blocks, plan.layout.units, kRows / kPack}, op);
      const int64_t of_rows = norm ? blocks * kRows * rnn_backward::norm_sums(cell_kind) / 4 : 0;
      mailbox = torch::stable::new_zeros(w_hh, {(packets + of_rows) * 4}, acc);
      p.team.mailbox = static_cast<uint4*>(mailbox->mutable_data_ptr());
      p.team.row_mailbox = p.team.mailbox + packets;
    }
    launch(op, plan.kernel, plan.shape, stream, p);
  }
  return {grad_h0, grad_c0};
}

}  // namespace

RnnPlan rnn_plan_backward(const Tensor& w_hh, int cell, bool norm, const std::string& tier) {
  const Planner plans = planner(w_hh, 1, cell, norm, tier, "rnn_scan_plan");
  const OnDevice on_device(w_hh);
  const Plan plan = plans.plan(tier);
  RnnPlan result;
  result.served = plan.served;
  result.why = (plan.served ? kTiers[plan.exchange] : std::string("none")) + ": " + plan.why;
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(seqkern_cuda, SK_CUDA_KEY, m) { m.impl("rnn_scan_bwd", TORCH_BOX(&rnn_scan_bwd)); }

}  // namespace seqkern
