// Plans the persistent scans: which tier (block, cluster or grid) runs a layer on a device, and how it divides the
// work. If none can, the layer runs step by step (kernels/rnn/rnn.py). Host code.
//
// The choice depends on the device's limits and its occupancy queries. The batch decides the number of teams and
// whether a tile has 8 or 16 rows, but never the order of a sum: every bit of a result is the same whatever else is in
// the batch.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>

#include "cell.cuh"
#include "common/cuda/launch.h"
#include "team.cuh"

namespace seqkern {

struct RnnPlanRequest {
  const char* op;
  int64_t batch;
  int directions;
  int hidden, element;  // element: bytes
  int gates;
  bool norm;
  std::string tier;        // "auto", or the only tier allowed
  const void* kernels[2];  // of tiles of 8 and 16 rows, for the occupancy queries
};

struct RnnPlan {
  bool served = false;
  RnnTeamShape shape{};
  int rows = 8;       // of the batch, in a tile
  int64_t teams = 0;  // launched
  std::string why;    // a sentence for `explain`
};

constexpr int kRnnWarps = 8;  // most warps of a block

inline const char* rnn_tier_name(RnnTier tier) {
  return tier == RnnTier::block ? "block" : tier == RnnTier::cluster ? "cluster" : "grid";
}

inline RnnTeamShape rnn_shape(const RnnPlanRequest& r, RnnTier tier, int blocks, int groups) {
  const int units = blocks * groups * kRnnGroup, chunk = 64 / r.element;
  const int chunks = (units + chunk - 1) / chunk;
  int parts = 1;
  while (2 * parts * groups <= kRnnWarps && 2 * parts <= chunks) parts *= 2;
  return rnn_team_shape(tier, r.hidden, blocks, groups, parts, r.element, r.gates, 1, r.norm);
}

// If there are more teams than rows in the grid, a team takes several tiles in turn.
inline LaunchShape rnn_launch_shape(const RnnTeamShape& s, int64_t teams) {
  LaunchShape launch;
  launch.grid = dim3(static_cast<unsigned>(s.blocks), static_cast<unsigned>(std::min<int64_t>(teams, 65535)));
  launch.block = dim3(static_cast<unsigned>(32 * s.groups * s.parts));
  launch.shared_bytes = static_cast<size_t>(s.shared_bytes);
  launch.cluster = s.tier == RnnTier::cluster ? s.blocks : 1;
  launch.all_resident = s.tier == RnnTier::grid;
  return launch;
}

// Clusters that the device holds at once or, without clusters, blocks that a multiprocessor holds. Cached: the query
// takes longer than some scans.
inline int rnn_residents(const char* op, const CudaDevice& device, const void* kernel, const LaunchShape& shape) {
  static std::mutex mutex;
  static std::map<std::array<int64_t, 8>, int> known;
  const std::array<int64_t, 8> key = {device.index,
                                      device.multiprocessors,
                                      device.shared_per_block,
                                      device.max_cluster,
                                      static_cast<int64_t>(reinterpret_cast<intptr_t>(kernel)),
                                      shape.cluster,
                                      shape.block.x,
                                      static_cast<int64_t>(shape.shared_bytes)};
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto at = known.find(key); at != known.end()) return at->second;
  const int count = shape.cluster > 1 ? resident_clusters(op, kernel, shape) : resident_blocks(op, kernel, shape);
  known.emplace(key, count);
  return count;
}

// Teams that the device holds at once.
inline int64_t rnn_room(const char* op, const CudaDevice& device, const RnnTeamShape& s, const void* kernel) {
  const int64_t count = rnn_residents(op, device, kernel, rnn_launch_shape(s, 1));
  return s.tier == RnnTier::cluster ? count : device.multiprocessors * count / s.blocks;
}

inline std::string rnn_describe(const RnnTeamShape& s, const RnnPlanRequest& r, int rows) {
  const int held = std::min(s.per_warp, rnn_held(r.element, r.gates, rows / 8));
  return std::string(rnn_tier_name(s.tier)) + ": teams of " + std::to_string(s.blocks) + " blocks of " +
         std::to_string(s.groups * s.parts) + " warps, " + std::to_string(s.groups * kRnnGroup) +
         " units a block, k in " + std::to_string(s.parts) + " parts, " + std::to_string(held) + " of " +
         std::to_string(s.per_warp) + " chunks of weights in registers, " + std::to_string(s.shared_bytes) +
         " bytes of shared memory, " + std::to_string(rows) + " rows of the batch a team";
}

// The device must be current.
inline RnnPlan rnn_plan(const CudaDevice& device, const RnnPlanRequest& r) {
  SK_CHECK(r.tier == "auto" || r.tier == "block" || r.tier == "cluster" || r.tier == "grid", r.op,
           ": tier must be \"auto\", \"block\", \"cluster\" or \"grid\", got \"", r.tier, "\"");
  RnnPlan plan;
  const auto asked = [&](const char* tier) { return r.tier == "auto" || r.tier == tier; };
  const auto fits = [&](const RnnTeamShape& s) { return s.shared_bytes <= device.shared_per_block; };
  const auto room = [&](const RnnTeamShape& s, const void* kernel) {
    return fits(s) ? rnn_room(r.op, device, s, kernel) : 0;
  };
  const auto serve = [&](const RnnTeamShape& s, int64_t at_once) {
    plan.served = true;
    plan.shape = s;
    plan.rows = 8;
    if (r.kernels[1] != nullptr && r.batch > 8 &&
        r.directions * ((r.batch + 7) / 8) > at_once) {  // larger tiles rather than tiles in turn
      const RnnTeamShape wide =
          rnn_team_shape(s.tier, r.hidden, s.blocks, s.groups, s.parts, r.element, r.gates, 2, r.norm);
      if (const int64_t n = room(wide, r.kernels[1]); n > 0) {
        plan.shape = wide;
        plan.rows = 16;
        at_once = n;
      }
    }
    plan.teams = r.directions * ((r.batch + plan.rows - 1) / plan.rows);
    if (s.tier == RnnTier::grid) plan.teams = std::min(plan.teams, at_once);
    plan.why = rnn_describe(plan.shape, r, plan.rows);
  };
  const int groups = (r.hidden + kRnnGroup - 1) / kRnnGroup;
  std::string reasons;

  if (asked("block")) {
    if (groups <= kRnnWarps) {
      const RnnTeamShape s = rnn_shape(r, RnnTier::block, 1, groups);
      if (fits(s)) return serve(s, room(s, r.kernels[0])), plan;
      reasons += "; one block would need " + std::to_string(s.shared_bytes) + " bytes of shared memory";
    } else {
      reasons += "; one block has warps for 128 units";
    }
  }

  if (asked("cluster")) {
    // The fewest blocks that hold all weights in registers; otherwise the most there may be.
    RnnTeamShape best{};
    int64_t at_once = 0;
    for (int blocks = 2; blocks <= device.max_cluster && (blocks == 2 || blocks < 2 * groups); blocks *= 2) {
      const int own = (groups + blocks - 1) / blocks;
      if (own > kRnnWarps) continue;
      const RnnTeamShape s = rnn_shape(r, RnnTier::cluster, blocks, own);
      const int64_t n = room(s, r.kernels[0]);
      if (n < 1) continue;
      best = s;
      at_once = n;
      if (s.per_warp <= rnn_held(r.element, r.gates, 1)) break;
    }
    if (best.blocks > 0) return serve(best, at_once), plan;
    reasons += device.max_cluster < 2 ? "; the device has no clusters" : "; no cluster holds the weights";
  }

  if (asked("grid")) {
    for (int own = 1; own <= kRnnWarps; ++own) {
      const RnnTeamShape s = rnn_shape(r, RnnTier::grid, (groups + own - 1) / own, own);
      if (const int64_t n = room(s, r.kernels[0]); n > 0) return serve(s, n), plan;
    }
    reasons += "; the whole device does not hold the weights";
  }
  plan.why = "none: " + (reasons.empty() ? reasons : reasons.substr(2));
  return plan;
}

// The plan of the backward scan (backward.cu).
RnnPlan rnn_plan_backward(const Tensor& w_hh, int cell, bool norm, const std::string& tier);

}  // namespace seqkern
