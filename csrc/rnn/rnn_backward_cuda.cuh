// The backward scan of a recurrent layer on the GPU: all steps of all sequences, in both directions, in one launch.
//
// A *team* of C thread blocks owns one direction and walks tiles of 8 rows of the batch, the last step first. Block r
// owns some groups of 8 units: the gates, cell state and incoming gradients of those units. With da the gradients of
// the gates (equations: kernels/rnn.py), a step is
//
//   pointwise   da of my units from dh, dc and what was kept; rounded to the dtype, into shared memory and to memory
//   product     part (H x 8) = W[my gates, :]^T da (my gates x 8), for all H units
//   exchange    the part of every block's units goes to that block
//   sum         dh of my units = the parts of all blocks, added up in the order of their ranks
//
// The product is divided along its sum, the gates: what travels is float32, but only H x 8 of it, whatever the cell.
// (Divided along the units, each block would have to hold da of all G H gates, four times as many numbers for an LSTM,
// and its warps would have to share a long sum and meet once more.) My rows of W never leave the chip. They stand as
// operands of the tensor cores, ready made: units on M, gates on K, the batch on N = 8, m16n8k16; float32 multiplies
// and adds without tensor cores. Sums have one order, so results do not differ from run to run, and a row of the batch
// never meets another.
//
// The three ways to exchange, the only difference between the tiers:
//   block     C = 1: shared memory
//   cluster   into the shared memory of the owner, 16 bytes at a time, counted by its mbarrier; two buffers. A block
//             writes a buffer again only after it has every part of the step between, and whoever sent that had read
//             the buffer. No barrier of the cluster in the loop.
//   grid      through global memory, two buffers likewise. A packet of 16 bytes is 4 rows of a unit; the lowest bits of
//             its 4 words, 2^-24 of the value, say which step it belongs to, and the owner polls until they do.
//
// Shared memory of a block: 2 G H^2 / C bytes of weights (4 G H^2 / C in float32), twice 16 or 32 bytes of da for each
// of its gates, 32 H bytes of parts (twice in a cluster; of the grid, as many as threads add up). A step of a block: 16
// G H^2 / C FLOP, the weights read once from shared memory, 32 H bytes sent and 32 H received. What memory holds of the
// next step is asked for before the product.
#pragma once

#include "rnn_cell_cuda.cuh"

namespace seqkern {
namespace rnn_backward {

enum Exchange { kBlock, kCluster, kGrid };

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = 8;          // of the batch, a tile
constexpr int kPack = 4;          // rows of one unit that travel together
constexpr int kLongest = 128;     // units of a block
constexpr unsigned kEpochs = 15;  // what four bits tell apart, beside 0: nothing yet

// An address is null where there is no such gradient, or it is not wanted.
struct Problem {
  RnnScan scan;
  const void *grad_output, *grad_h_n, *grad_c_n;
  const float *grad_cells, *gates, *cells;
  const void *c0, *output, *h0, *w_hh;
  void *grad_x, *grad_products;
  float *grad_h0, *grad_c0;
  uint4* mailbox;  // of the grid: [buffer][to, any block][from, of its team][half][unit]
  int64_t grad_output_time, grad_output_row, grad_products_direction, grad_products_time;  // strides
  Exchange exchange;
  int blocks;  // of a team
  int teams;   // of a direction
  int first_direction;
};

// How a block's work and its shared memory are divided. `element`: bytes of the dtype.
struct Layout {
  int groups;  // of 8 units, of the layer
  int units;   // most that a block owns
  int k, m;    // rows of my weights, and units: rounded up to tiles where the tensor cores take them
  int planes;  // parts that are added up when dh is read
  int64_t da, parts, where, barriers, total;  // offsets; the weights come first
  __host__ __device__ Layout(int hidden, int gates, int blocks, Exchange exchange, int element) {
    groups = (hidden + 7) / 8;
    units = (groups + blocks - 1) / blocks * 8;
    const int tile = element == 2 ? 16 : 1;
    k = (gates * units + tile - 1) / tile * tile;
    m = (hidden + 15) / 16 * 16;
    planes = exchange == kBlock ? 1 : exchange == kCluster ? blocks : min(blocks, kThreads / (2 * units));
    da = int64_t{k} * m * element;
    parts = da + 2 * int64_t{k} * kRows * element;
    where = parts + int64_t{exchange == kCluster ? 2 : 1} * planes * units * kRows * 4;
    barriers = where + (groups * 4 + 15) / 16 * 16;
    total = barriers + 16;
  }
};

// The groups of rank r begin here; every rank has at least one, as there are no more ranks than groups.
__host__ __device__ inline int first_group(int rank, int groups, int blocks) {
  return static_cast<int>(int64_t{rank} * groups / blocks);
}

template <class T>
SK_DEVICE float read(const void* p, int64_t at) {
  return widen(static_cast<const T*>(p)[at]);
}

// ---- the product --------------------------------------------------------------------------------------------------

// Loads the rows of w_hh (G H x H) that belong to my gates, in the order in which `product` reads them; zeros beyond.
template <class T, int G>
SK_DEVICE void load_weights(void* weights, const T* w_hh, const Layout& layout, int first_unit, int mine, int hidden) {
  if constexpr (sizeof(T) == 2) {
    // The lane's 8 elements of tile (m, k) lie together: element (row, column) is W[gate row `column`, unit `row`].
    uint16_t* to = static_cast<uint16_t*>(weights);
    const int k_tiles = layout.k / 16;
    for (int at = threadIdx.x; at < layout.k * layout.m / 8; at += kThreads) {
      const int lane = at % 32, tile = at / 32;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int unit = tile / k_tiles * 16 + lane / 4 + (e / 2 % 2) * 8;
        const int row = tile % k_tiles * 16 + lane % 4 * 2 + e % 2 + e / 4 * 8;
        const int gate = row / layout.units, u = row % layout.units;
        const bool there = gate < G && u < mine && unit < hidden;
        to[at * 8 + e] = there ? w_hh[(int64_t{gate} * hidden + first_unit + u) * hidden + unit].bits : uint16_t{0};
      }
    }
  } else {
    float* to = static_cast<float*>(weights);
    for (int at = threadIdx.x; at < layout.k * layout.m; at += kThreads) {
      const int unit = at % layout.m, row = at / layout.m;
      const int gate = row / layout.units, u = row % layout.units;
      const bool there = u < mine && unit < hidden;
      to[at] = there ? w_hh[(int64_t{gate} * hidden + first_unit + u) * hidden + unit] : 0.0f;
    }
  }
}

// My part of dh: `send(unit, half, sums)` for all units, 4 rows of a unit at a time.
template <class T, class Send>
SK_DEVICE void product(const unsigned char* weights, const unsigned char* da, const Layout& layout, Send send) {
  if constexpr (sizeof(T) == 2) {
    const int lane = threadIdx.x % 32, k_tiles = layout.k / 16;
    for (int m = threadIdx.x / 32; m < layout.m / 16; m += kWarps) {
      float sums[2][4] = {};  // two chains
      const uint4* tiles = reinterpret_cast<const uint4*>(weights) + m * k_tiles * 32 + lane;
      for (int k = 0; k < k_tiles; k += 2) {
        const bool pair = k + 1 < k_tiles;
        uint32_t b[4] = {};
        if (pair) {
          ldmatrix_x4_trans(b, da + (k * 16 + lane) * 16);
        } else {
          uint32_t one[2];
          ldmatrix_x2_trans(one, da + (k * 16 + lane % 16) * 16);
          b[0] = one[0], b[1] = one[1];
        }
        const uint4 left = tiles[k * 32];
        mma_16816<T>(sums[0], {left.x, left.y, left.z, left.w}, {b[0], b[1]});
        if (pair) {
          const uint4 right = tiles[(k + 1) * 32];
          mma_16816<T>(sums[1], {right.x, right.y, right.z, right.w}, {b[2], b[3]});
        }
      }
      // A lane holds 2 rows of the units g and g + 8. Neighbours trade, so that each has 4 rows of one of them.
      const bool odd = lane % 2;
      float s[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = sums[0][i] + sums[1][i];
      const float got0 = __shfl_xor_sync(0xffffffffu, odd ? s[0] : s[2], 1);
      const float got1 = __shfl_xor_sync(0xffffffffu, odd ? s[1] : s[3], 1);
      const float4 rows = odd ? float4{got0, got1, s[2], s[3]} : float4{s[0], s[1], got0, got1};
      send(m * 16 + lane / 4 + odd * 8, lane % 4 / 2, rows);
    }
  } else {
    // A thread takes 4 rows of a unit. m is a multiple of 16, so that half a warp reads neighbouring weights.
    for (int at = threadIdx.x; at < 2 * layout.m; at += kThreads) {
      const int half = at >= layout.m, unit = at - half * layout.m;
      const float* w = reinterpret_cast<const float*>(weights) + unit;
      const float4* x = reinterpret_cast<const float4*>(da) + half;
      float4 sums = {0, 0, 0, 0};
#pragma unroll 4
      for (int k = 0; k < layout.k; ++k) {
        const float weight = w[k * layout.m];
        const float4 rows = x[k * 2];
        sums.x = fmaf(weight, rows.x, sums.x), sums.y = fmaf(weight, rows.y, sums.y);
        sums.z = fmaf(weight, rows.z, sums.z), sums.w = fmaf(weight, rows.w, sums.w);
      }
      send(unit, half, sums);
    }
  }
}

// ---- the exchange of the grid -------------------------------------------------------------------------------------

SK_DEVICE uint4 tagged(float4 v, unsigned epoch) {
  return {(device_bits<uint32_t>(v.x) & ~1u) | (epoch & 1), (device_bits<uint32_t>(v.y) & ~1u) | (epoch >> 1 & 1),
          (device_bits<uint32_t>(v.z) & ~1u) | (epoch >> 2 & 1), (device_bits<uint32_t>(v.w) & ~1u) | (epoch >> 3 & 1)};
}
SK_DEVICE float untagged(uint32_t v) { return device_bits<float>(v & ~1u); }
SK_DEVICE bool arrived(uint4 v, unsigned epoch) {
  return ((v.x & 1) | (v.y & 1) << 1 | (v.z & 1) << 2 | (v.w & 1) << 3) == epoch;
}

// Sums, over the senders first, first + stride ..., of one packet from each. `inbox`: that of sender 0.
SK_DEVICE float4 collect(const uint4* inbox, int64_t between, int first, int stride, int senders, unsigned epoch) {
  constexpr int kAhead = 4;
  float4 sums = {0, 0, 0, 0};
  for (int s = first; s < senders; s += kAhead * stride) {
    uint4 packet[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (s + i * stride < senders) packet[i] = load_fresh_16(inbox + (s + i * stride) * between);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (s + i * stride < senders) {
        while (!arrived(packet[i], epoch)) {
          pause();
          packet[i] = load_fresh_16(inbox + (s + i * stride) * between);
        }
        sums.x += untagged(packet[i].x), sums.y += untagged(packet[i].y);
        sums.z += untagged(packet[i].z), sums.w += untagged(packet[i].w);
      }
    }
  }
  return sums;
}

// ---- one step of one unit and row ---------------------------------------------------------------------------------

// A lane's row of the batch: all its elements are of one.
struct Row {
  int number, length;  // no times beyond the batch
  bool there;
};

// What memory holds of a step of one element.
struct Kept {
  float gates[4], state, grad_h, grad_c;  // state: c, or h, before the step
};

struct Flags {
  bool active, reset;
};
SK_DEVICE Flags flags(const RnnScan& s, const Row& row, bool backwards, int t) {
  Flags f;
  f.active = t >= 0 && t < row.length;
  f.reset = f.active && rnn_resets(s, t, backwards, row.number, row.length);
  return f;
}

// Of an active step.
template <class T, int CELL>
SK_DEVICE Kept fetch(const Problem& p, const Row& row, int unit, int d, bool backwards, int t, bool reset) {
  constexpr int R = rnn_kept(CELL);
  Kept kept = {};
  const int64_t B = p.scan.batch, H = p.scan.hidden;
  const int64_t before = int64_t{d} * p.scan.steps * B + row.number, first = (d * B + row.number) * H + unit;
  const int past = backwards ? t + 1 : t - 1;
  const bool inside = past >= 0 && past < row.length;
#pragma unroll
  for (int k = 0; k < R; ++k) kept.gates[k] = p.gates[((before + t * B) * R + k) * H + unit];
  if (CELL == kRnnLstm && !reset) {
    kept.state = inside ? p.cells[(before + past * B) * H + unit] : read<T>(p.c0, first);
  }
  if (CELL == kRnnGru && !reset) {
    kept.state =
        inside ? read<T>(p.output, ((past * B + row.number) * p.scan.directions + d) * H + unit) : read<T>(p.h0, first);
  }
  if (p.grad_output != nullptr) {
    kept.grad_h = read<T>(p.grad_output, t * p.grad_output_time + row.number * p.grad_output_row + d * H + unit);
  }
  if (CELL == kRnnLstm && p.grad_cells != nullptr) kept.grad_c = p.grad_cells[(before + t * B) * H + unit];
  return kept;
}

// Takes from the gradient of a state after zoneout that before; what of it the old state gets. kind: 0 for h, 1 for c.
SK_DEVICE float through_zoneout(const RnnScan& s, int kind, int t, int d, int row, int unit, float& grad) {
  float of_old = 0;
  if (s.expected) {
    of_old = grad * s.zoneout[kind];
    grad *= 1.0f - s.zoneout[kind];
  } else if (s.seed != nullptr && rnn_stays(s, kind, t, d, row, unit)) {
    of_old = grad;
    grad = 0;
  }
  return of_old;
}

// The gradients of zx (`of_x`) and of w_hh's product (`of_h`); returns that of the old h past the product. `later_c`
// goes in as the gradient of the new cell state and comes out as that of the old one.
template <int CELL>
SK_DEVICE float pointwise(const RnnScan& s, int row, int unit, const Kept& kept, int d, int t, bool reset, float later,
                          float& later_c, float (&of_x)[rnn_gates(CELL)], float (&of_h)[rnn_gates(CELL)]) {
  float grad = later + kept.grad_h;
  float beside = through_zoneout(s, 0, t, d, row, unit, grad);
  if constexpr (CELL == kRnnLstm) {
    const float i = kept.gates[0], f = kept.gates[1], g = kept.gates[2], o = kept.gates[3], c = kept.state;
    const float tanh_c = tanhf(f * c + i * g);
    float grad_c = later_c + kept.grad_c;
    const float beside_c = through_zoneout(s, 1, t, d, row, unit, grad_c);
    grad_c += grad * o * (1.0f - tanh_c * tanh_c);
    of_x[0] = grad_c * g * i * (1.0f - i);
    of_x[1] = grad_c * c * f * (1.0f - f);
    of_x[2] = grad_c * i * (1.0f - g * g);
    of_x[3] = grad * tanh_c * o * (1.0f - o);
    later_c = reset ? 0.0f : beside_c + grad_c * f;
  } else if constexpr (CELL == kRnnGru) {
    const float r = kept.gates[0], z = kept.gates[1], n = kept.gates[2], q = kept.gates[3];
    of_x[2] = grad * (1.0f - z) * (1.0f - n * n);
    of_x[0] = of_x[2] * q * r * (1.0f - r);
    of_x[1] = grad * (kept.state - n) * z * (1.0f - z);
    beside += grad * z;
  } else {
    const float y = kept.gates[0];
    of_x[0] = s.cell == kRnnRelu ? (y <= 0.0f ? 0.0f : grad) : grad * (1.0f - y * y);
  }
#pragma unroll
  for (int k = 0; k < rnn_gates(CELL); ++k) of_h[k] = of_x[k];
  if constexpr (CELL == kRnnGru) of_h[2] = of_x[2] * kept.gates[0];
  return beside;
}

// ---- the kernel ---------------------------------------------------------------------------------------------------

// CELL: kRnnLstm, kRnnGru, or kRnnTanh for both simple ones. E: elements of a thread. A warp's lanes are 8 units by 4
// rows, so that memory is read by whole 32-byte sectors and the parts, 4 rows of a unit after 4 rows of the next,
// without bank conflicts.
template <class T, int CELL, int E>
__global__ void __launch_bounds__(kThreads, 1) scan_backward_kernel(const Problem p) {
  constexpr int G = rnn_gates(CELL);
  SK_SHARED(shared);
  const Layout layout(p.scan.hidden, G, p.blocks, p.exchange, sizeof(T));
  float* parts = reinterpret_cast<float*>(shared + layout.parts);
  uint32_t* where = reinterpret_cast<uint32_t*>(shared + layout.where);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(shared + layout.barriers);

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int rank = blockIdx.x % p.blocks, team = blockIdx.x / p.blocks;
  const int d = p.first_direction + team / p.teams;
  const bool backwards = rnn_backwards(p.scan, d);
  const RnnScan& scan = p.scan;
  const int64_t B = scan.batch, H = scan.hidden, D = scan.directions;
  const int begin = first_group(rank, layout.groups, p.blocks);
  const int first_unit = begin * 8;
  const int owned = (first_group(rank + 1, layout.groups, p.blocks) - begin) * 8;
  const int mine = min(owned, scan.hidden - first_unit);

  const T* w_hh = static_cast<const T*>(p.w_hh) + d * (G * H) * H;
  load_weights<T, G>(shared, w_hh, layout, first_unit, mine, scan.hidden);
  for (int at = thread; at < 2 * layout.k * kRows; at += kThreads) reinterpret_cast<T*>(shared + layout.da)[at] = T{};
  for (int r = thread; r < p.blocks; r += kThreads) {  // the owner of each group, and its first group
    const int from = first_group(r, layout.groups, p.blocks), to = first_group(r + 1, layout.groups, p.blocks);
    for (int group = from; group < to; ++group) where[group] = static_cast<uint32_t>(r) << 16 | from;
  }
  if (p.exchange == kCluster && thread == 0) {
    mbarrier_init(barriers, 1);
    mbarrier_init(barriers + 1, 1);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (p.exchange == kCluster) {
    cluster_arrive();
    cluster_wait();
  }

  // Element i of a lane is unit i * 32 + u of the block, in a row that does not depend on i.
  const int half = warp % 2, u = warp / 2 * 8 + lane % 8, row_in_tile = half * kPack + lane / 8;
  uint32_t count = 0;  // of exchanges
  const int tiles = (scan.batch + kRows - 1) / kRows;
  for (int tile = team % p.teams; tile < tiles; tile += p.teams) {
    Row row;
    row.number = tile * kRows + row_in_tile;
    row.there = row.number < scan.batch;
    row.length = rnn_length(scan, row.number);
    bool there[E];
    float factor[E], later[E], later_c[E];
    Kept kept[E];
    const int last = rnn_time(scan, scan.steps - 1, backwards);
    Flags now = flags(scan, row, backwards, last);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      const int unit = first_unit + u + 32 * i;
      there[i] = row.there && u + 32 * i < mine;
      factor[i] = 1, later[i] = later_c[i] = 0;
      if (!there[i]) continue;
      const int64_t at = (d * B + row.number) * H + unit;
      if (scan.mask != nullptr) factor[i] = scan.mask[at];
      if (p.grad_h_n != nullptr) later[i] = read<T>(p.grad_h_n, at);
      if (CELL == kRnnLstm && p.grad_c_n != nullptr) later_c[i] = read<T>(p.grad_c_n, at);
      if (now.active) { kept[i] = fetch<T, CELL>(p, row, unit, d, backwards, last, now.reset); }
    }
    for (int step = scan.steps - 1; step >= 0; --step, ++count) {
      const int t = rnn_time(scan, step, backwards), ahead = rnn_time(scan, step - 1, backwards);
      const unsigned buffer = count % 2, epoch = 1 + count % kEpochs;
      unsigned char* da = shared + layout.da + buffer * (layout.k * kRows * sizeof(T));
      const Flags next = step > 0 ? flags(scan, row, backwards, ahead) : Flags{};
      float beside[E];
      T of_x[E][G], of_h[E][G];
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const int unit = first_unit + u + 32 * i;
        const bool live = there[i] && now.active;
        float x[G] = {}, h[G] = {};
        beside[i] = 0;
        if (live) {
          beside[i] = pointwise<CELL>(scan, row.number, unit, kept[i], d, t, now.reset, later[i], later_c[i], x, h);
        }
#pragma unroll
        for (int k = 0; k < G; ++k) {
          of_x[i][k] = narrow<T>(x[k]), of_h[i][k] = narrow<T>(h[k]);
          if (u + 32 * i < mine) {
            reinterpret_cast<T*>(da)[(k * layout.units + u + 32 * i) * kRows + row_in_tile] = of_h[i][k];
          }
        }
        if (there[i] && next.active) kept[i] = fetch<T, CELL>(p, row, unit, d, backwards, ahead, next.reset);
      }
      __syncthreads();

      // my part of dh for every unit, to the unit's owner
      product<T>(shared, da, layout, [&](int unit, int which, float4 rows) {
        if (unit >= scan.hidden) return;
        const uint32_t owner = where[unit / 8];
        const int to = static_cast<int>(owner >> 16), place = unit - static_cast<int>(owner & 0xffff) * 8;
        if (p.exchange == kGrid) {
          const int64_t box = ((int64_t{buffer} * gridDim.x + team * p.blocks + to)) * p.blocks + rank;
          store_fresh_16(p.mailbox + (box * 2 + which) * layout.units + place, tagged(rows, epoch));
        } else {
          const int plane = p.exchange == kCluster ? static_cast<int>(buffer) * p.blocks + rank : 0;
          float* at = parts + ((plane * 2 + which) * layout.units + place) * kPack;
          if (p.exchange == kBlock) {
            *reinterpret_cast<float4*>(at) = rows;
          } else {
            store_async_16(at, barriers + buffer, to, device_bits<uint4>(rows));
          }
        }
      });

      // off the way that the next step waits for: what the GEMMs behind the scan read
#pragma unroll
      for (int i = 0; i < E; ++i) {
        if (!there[i]) continue;
        const int unit = first_unit + u + 32 * i;
        T* x = static_cast<T*>(p.grad_x) + ((t * B + row.number) * D + d) * (G * H) + unit;
#pragma unroll
        for (int k = 0; k < G; ++k) x[k * H] = of_x[i][k];
        if (p.grad_products != nullptr) {
          const int slab = d == 1 ? scan.steps - 1 - t : t;
          T* h = static_cast<T*>(p.grad_products) + d * p.grad_products_direction + slab * p.grad_products_time +
                 row.number * (G * H) + unit;
#pragma unroll
          for (int k = 0; k < G; ++k) h[k * H] = of_h[i][k];
        }
      }

      const float* arrivals = parts;
      if (p.exchange == kCluster) {
        if (thread == 0) mbarrier_arrive_expect(barriers + buffer, static_cast<unsigned>(p.blocks * mine * kRows * 4));
        mbarrier_wait(barriers + buffer, count / 2 % 2);
        arrivals += buffer * p.blocks * layout.units * kRows;
      } else {
        if (p.exchange == kGrid) {
          const int place = thread % (2 * layout.units), plane = thread / (2 * layout.units);
          if (plane < layout.planes && place % layout.units < mine) {
            const int64_t box = (int64_t{buffer} * gridDim.x + blockIdx.x) * p.blocks;
            const uint4* inbox = p.mailbox + box * 2 * layout.units + place;
            *reinterpret_cast<float4*>(parts + (plane * 2 * layout.units + place) * kPack) =
                collect(inbox, 2 * layout.units, plane, layout.planes, p.blocks, epoch);
          }
        }
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < E; ++i) {
        if (!there[i] || !now.active) continue;
        const float* from = arrivals + (half * layout.units + u + 32 * i) * kPack + lane / 8;
        float back = 0;
        for (int plane = 0; plane < layout.planes; ++plane) back += from[plane * layout.units * kRows];
        later[i] = now.reset ? 0.0f : beside[i] + factor[i] * back;
      }
      now = next;
    }
#pragma unroll
    for (int i = 0; i < E; ++i) {
      if (!there[i]) continue;
      const int64_t at = (d * B + row.number) * H + first_unit + u + 32 * i;
      p.grad_h0[at] = later[i];
      if (CELL == kRnnLstm) p.grad_c0[at] = later_c[i];
    }
  }
  if (p.exchange == kCluster) {  // nobody leaves while others may still write to it
    cluster_arrive();
    cluster_wait();
  }
}

}  // namespace rnn_backward
}  // namespace seqkern
