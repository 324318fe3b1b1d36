// The forward recurrent scan: one persistent kernel runs all steps of an LSTM, GRU or RNN layer, with the weights on
// chip.
//
// The idea. x = w_ih x_t of all steps is given. What is left of a step is w_hh h, the cell, and sending the new h to
// everyone who needs it. Teams of thread blocks hold the weights (team.cuh) and exchange h
// (exchange.cuh); teams of different directions or tiles of the batch never meet. Equations: kernels/rnn/rnn.py. A
// lane owns the gates of its pairs (unit, row) and keeps their h and c in float32 registers for the whole sequence; h
// is rounded only as an operand and as output. x of the next step is prefetched as soon as h has been sent.
//
// A step: product, sum of the parts (one barrier), cells, publish h, store output, cells and gates, load x, wait for h.
// The parts and the exchange are its only barriers. Each layer norm adds two block sums and one exchange.
//
// Tiers (chosen by plan.h), with the limits on a device of 132 multiprocessors, 227 KB a block, clusters of
// 16:
//     block    up to 128 units (float32 LSTM: 112). 16-bit weights are in registers: an LSTM of 128 units has 8 warps
//              with 4 chunks of 4 gates each.
//     cluster  2 to 16 blocks: 16-bit LSTM up to 512 units, GRU 768, RNN 1280; float32 LSTM and GRU 256, RNN 768.
//     grid     as many blocks as the units need, all resident: 16-bit LSTM up to 2048 units, GRU 2112, RNN more than
//              2500; float32 LSTM 640, GRU 768, RNN 1696. On a device without clusters it follows `block`.
//
// Registers: at most 255 (256 threads, one block a multiprocessor), no spills.
//
// Shared memory: two operands of 64 bytes a chunk and row (512 units of 16 bits, 8 rows: 8 KB each); with several parts
// their sums, 512 bytes a warp and gate; in clusters and grids the slabs to send, 8 to 16 bytes a lane; biases and norm
// parameters of the block's units, 4 bytes each; then the weights that are not in registers, 1 KB for 16 units, a gate
// and a chunk. 16-bit LSTM, 512 units, cluster of 16: 34 KB a block.
//
// FLOP and bytes of a step, one direction: 2 G H^2 B FLOP; x 4 G H B bytes (2 in the dtype), output 2 H B or 4 H B;
// where they are kept, cells 4 H B and gates 4 R H B. Between blocks, for a tile of 8 rows: each block receives 16 H
// bytes of 16 bits (32 H of float32), in the grid tier a third more. NOTES.md has registers by kernel, the estimated
// floor, and what was tried.
#pragma once

#include "cell.cuh"
#include "team.cuh"

namespace seqkern {

struct RnnForwardArgs {
  RnnTeamShape shape;
  RnnScan scan;
  const void* x;                    // (directions, steps, batch, G hidden), float or the weights' type
  int64_t x_strides[3];             // of directions, steps, rows
  bool half;                        // 16-bit elements are float16
  bool x_wide, h0_wide, c0_wide;    // whether x, h0, c0 are float
  const void* w_hh;                 // (directions, G hidden, hidden)
  bool aligned;                     // whether its rows start at multiples of 16 bytes
  const float* bias;                // (directions, R hidden), or null
  const void *h0, *c0;              // (directions, batch, hidden)
  void* output;                     // (steps, batch, directions hidden)
  float *cells, *gates, *products;  // (directions, steps, batch, .), or null
  float *h_n, *c_n;                 // (directions, batch, hidden)
  unsigned char* mailbox;
};

// Reads rows of w_hh as RnnTeam::load_weights wants them.
template <class T>
struct RnnForwardWeights {
  const T* w;  // (G hidden, hidden)
  int hidden;
  bool aligned;  // whether rows start at multiples of 16 bytes

  SK_DEVICE uint4 operator()(int gate, int unit, int k) const {
    constexpr int COUNT = 16 / sizeof(T);
    uint4 v = {0, 0, 0, 0};
    if (unit >= hidden || k >= hidden) return v;
    const T* row = w + (static_cast<int64_t>(gate) * hidden + unit) * hidden + k;
    if (aligned) return __ldg(reinterpret_cast<const uint4*>(row));
    uint64_t low = 0, high = 0;  // element by element: runs once, and is inlined in many places
#pragma unroll 1
    for (int i = min(COUNT, hidden - k) - 1; i >= 0; --i) {
      constexpr int BITS = 8 * sizeof(T);
      high = high << BITS | low >> (64 - BITS);
      low <<= BITS;
      if constexpr (sizeof(T) == 2) {
        low |= row[i].bits;
      } else {
        low |= device_bits<uint32_t>(row[i]);
      }
    }
    return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
            static_cast<uint32_t>(high >> 32)};
  }
};

template <class T>
SK_DEVICE float load_either(const void* p, int64_t at, bool wide, bool half) {
  return wide ? static_cast<const float*>(p)[at] : rnn_widen(static_cast<const T*>(p)[at], half);
}

// h, masked and rounded, as the product takes it.
template <class T>
SK_DEVICE T rnn_operand(float h, const float* factor, bool reset, bool half) {
  if (reset) return T{};
  const T rounded = rnn_narrow<T>(h, half);
  return factor == nullptr ? rounded : rnn_narrow<T>(rnn_widen(rounded, half) * *factor, half);
}

// CELL: kRnnLstm, kRnnGru, or kRnnTanh for both simple cells.
template <class T, int CELL, int NT>
struct RnnForwardScan {
  static constexpr int G = rnn_gates(CELL), R = rnn_kept(CELL), COLUMNS = 2 * NT;
  using Team = RnnTeam<T, G, NT>;
  static constexpr int SLOTS = Team::SLOTS;

  const RnnForwardArgs& args;
  const RnnScan& scan;
  Team team;
  int d;
  bool backwards;
  int first_row;
  int length[COLUMNS];
  // Bits, lowest first: columns that are reset before this step; columns reset before the next; slots that are `here`.
  unsigned flags;
  float h[SLOTS], c[SLOTS], x[G][SLOTS], kept[R][SLOTS];

  SK_DEVICE explicit RnnForwardScan(const RnnForwardArgs& a) : args(a), scan(a.scan) {}

  SK_DEVICE int row(int slot) const { return first_row + team.row(slot); }
  // Whether this warp finishes the lane's pair of that slot, and the pair is in the layer and the batch.
  SK_DEVICE bool here(int slot) const { return flags >> (2 * COLUMNS + slot) & 1; }
  // Index of the lane's first pair in a (.., batch, hidden) tensor, `rows` rows in. The other slots are offsets from
  // it.
  SK_DEVICE int64_t first_at(int64_t rows) const { return (rows + row(0)) * scan.hidden + team.unit(0); }
  SK_DEVICE static int row_of(int slot) { return 8 * (slot / 4) + slot % 2; }
  SK_DEVICE static int unit_of(int slot) { return 8 * (slot / 2 % 2); }

  // Block (rank, team). A team takes tiles of the batch in turn, one direction after the other.
  SK_DEVICE void run() {
    const int tiles = (scan.batch + Team::ROWS - 1) / Team::ROWS;
    SK_SHARED(shared);
    team.begin(args.shape, shared, static_cast<int>(blockIdx.x), args.mailbox + blockIdx.y * args.shape.mailbox_bytes);
    d = -1;
    for (int tile = static_cast<int>(blockIdx.y); tile < tiles * scan.directions; tile += gridDim.y) {
      if (tile / tiles != d) {
        d = tile / tiles;
        const int64_t weights = static_cast<int64_t>(G) * scan.hidden * scan.hidden;
        team.load_weights(
            RnnForwardWeights<T>{static_cast<const T*>(args.w_hh) + d * weights, scan.hidden, args.aligned});
        load_parameters();
      }
      backwards = rnn_backwards(d);
      first_row = tile % tiles * Team::ROWS;
      const bool ran = sequence();
      tile = d * tiles + first_row / Team::ROWS;  // recomputed, so that it need not be kept in a register meanwhile
      if (ran && tile + static_cast<int>(gridDim.y) < tiles * scan.directions) team.renew();
    }
    team.end();
  }

  // Biases and norm parameters of this block's units, into shared memory: every step reads them, and in a cluster each
  // wait invalidates L1. Call after a barrier, and before that of `start`.
  SK_DEVICE void load_parameters() const {
    const int units = args.shape.groups * kRnnGroup, columns = (2 * G + (CELL == kRnnLstm ? 2 : 0));
    const int count = R + (scan.norm == nullptr ? 0 : columns);
    float* to = reinterpret_cast<float*>(team.shared + args.shape.parameters);
#pragma unroll 1
    for (int at = threadIdx.x; at < count * units; at += blockDim.x) {
      const int row = at / units, unit = team.rank * units + at % units;
      const float* from = row < R ? args.bias : scan.norm;
      const int64_t first = row < R ? static_cast<int64_t>(d) * R + row : static_cast<int64_t>(d) * columns + row - R;
      to[at] = from == nullptr || unit >= scan.hidden ? 0.0f : from[first * scan.hidden + unit];
    }
  }

  // Runs a tile's sequences; whether there was a step.
  SK_DEVICE bool sequence() {
    // Steps that no row of the tile has are skipped.
    int longest = 0;
#pragma unroll 1
    for (int r = 0; r < Team::ROWS; ++r) longest = max(longest, rnn_length(scan, first_row + r));
    const int begin = backwards ? scan.steps - longest : 0, end = backwards ? scan.steps : longest;
    for (int column = 0; column < COLUMNS; ++column) length[column] = rnn_length(scan, first_row + team.row_of(column));
    flags = 0;
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (team.owns(slot) && team.unit(slot) < scan.hidden && row(slot) < scan.batch)
        flags |= 1u << (2 * COLUMNS + slot);
    }
    first_operand(rnn_time(scan, begin, backwards));
    first_state();
    load_x(begin);
    flags |= resets_at(begin) | resets_at(begin + 1) << COLUMNS;
    team.start();
    for (int step = begin; step < end; ++step) {
      float sums[G][SLOTS];
      team.product(sums, args.half);
      team.finish(sums);
      const int t = rnn_time(scan, step, backwards);
      cells(sums, t);
      const bool last = step + 1 == end;
      if (!last) team.publish();
      store(t);
      load_x(step + 1);
      constexpr unsigned SLOT_BITS = ~((1u << 2 * COLUMNS) - 1), NOW = (1u << COLUMNS) - 1;
      flags = (flags & SLOT_BITS) | (flags >> COLUMNS & NOW) | resets_at(step + 2) << COLUMNS;
      if (!last) team.wait();
    }
    const int64_t state = first_at(static_cast<int64_t>(d) * scan.batch);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!here(slot)) continue;
      const int64_t at = state + row_of(slot) * scan.hidden + unit_of(slot);
      args.h_n[at] = h[slot];
      if constexpr (CELL == kRnnLstm) args.c_n[at] = c[slot];
#pragma unroll
      for (int k = 0; k < R; ++k) kept[k][slot] = 0;
    }
    for (int t = longest; t < scan.steps; ++t) {
      float zeros[G][SLOTS] = {};
      store(t);
      store_products(zeros, t);
    }
    return begin < end;
  }

  // Every block writes the whole first operand.
  SK_DEVICE void first_operand(int t) {
#pragma unroll 1
    for (int at = threadIdx.x; at < Team::ROWS * scan.hidden; at += blockDim.x) {
      const int r = at / scan.hidden, k = at % scan.hidden;
      const int b = first_row + r;
      if (b >= scan.batch) break;
      const int64_t from = (static_cast<int64_t>(d) * scan.batch + b) * scan.hidden + k;
      const bool reset = rnn_resets(scan, t, backwards, b, rnn_length(scan, b));
      const float* factor = scan.mask == nullptr ? nullptr : scan.mask + from;
      *team.operand(k, r) =
          rnn_operand<T>(load_either<T>(args.h0, from, args.h0_wide, args.half), factor, reset, args.half);
    }
  }
  SK_DEVICE void first_state() {
    const int64_t state = first_at(static_cast<int64_t>(d) * scan.batch);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      h[slot] = c[slot] = 0;
      if (!here(slot)) continue;
      const int64_t at = state + row_of(slot) * scan.hidden + unit_of(slot);
      h[slot] = load_either<T>(args.h0, at, args.h0_wide, args.half);
      if constexpr (CELL == kRnnLstm) c[slot] = load_either<T>(args.c0, at, args.c0_wide, args.half);
    }
  }
  SK_DEVICE void load_x(int step) {
    if (step >= scan.steps) return;
    const int64_t first = d * args.x_strides[0] + rnn_time(scan, step, backwards) * args.x_strides[1] +
                          row(0) * args.x_strides[2] + team.unit(0);
    if (args.x_wide) {
      load_x_from(static_cast<const float*>(args.x) + first);
    } else {
      load_x_from(static_cast<const T*>(args.x) + first);
    }
  }
  template <class From>
  SK_DEVICE void load_x_from(const From* from) {
#pragma unroll
    for (int k = 0; k < G; ++k, from += scan.hidden) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        x[k][slot] = here(slot) ? rnn_widen(from[row_of(slot) * args.x_strides[2] + unit_of(slot)], args.half) : 0.0f;
      }
    }
  }
  // A bit for each column that is reset before the step.
  SK_DEVICE unsigned resets_at(int step) const {
    unsigned bits = 0;
    if (scan.resets == nullptr || step >= scan.steps) return bits;
    const int t = rnn_time(scan, step, backwards);
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      const int b = first_row + team.row_of(column);
      if (rnn_resets(scan, t, backwards, b, length[column])) bits |= 1u << column;
    }
    return bits;
  }

  // A bit for each slot whose old value zoneout keeps: of h, then of c.
  SK_DEVICE unsigned stays_at(int t) const {
    unsigned bits = 0;
#pragma unroll 1
    for (int i = 0; i < (CELL == kRnnLstm ? 2 : 1) * SLOTS; ++i) {
      const int slot = i % SLOTS;
      if (here(slot) && rnn_stays(scan, i / SLOTS, t, d, row(slot), team.unit(slot))) bits |= 1u << i;
    }
    return bits;
  }

  // Layer norm of N numbers a pair over all units of the layer. Each block computes its own mean and centred squares;
  // those of all blocks are merged in order (Chan, Golub & LeVeque 1983), so one exchange is enough.
  template <int N>
  SK_DEVICE void normalise(int kind, float (&v)[N][SLOTS], const float* weight, const float* bias, int units) {
    const float own = static_cast<float>(N * team.units_of(team.rank));
    float mean[COLUMNS], square[COLUMNS];
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) mean[column] = square[column] = 0;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
#pragma unroll
      for (int n = 0; n < N; ++n) mean[Team::column(slot)] += here(slot) ? v[n][slot] : 0.0f;
    }
    team.block_sum(mean);
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) mean[column] = own > 0 ? mean[column] / own : 0.0f;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float centred = here(slot) ? v[n][slot] - mean[Team::column(slot)] : 0.0f;
        square[Team::column(slot)] += centred * centred;
      }
    }
    team.block_sum(square);
    if (args.shape.tier != RnnTier::block) {
      float2 pair[COLUMNS];
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) pair[column] = {mean[column], square[column]};
      team.share(kind, pair);
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) mean[column] = square[column] = 0;
      float before = 0;
#pragma unroll 1
      for (int r = 0; r < args.shape.blocks; ++r) {
        const float more = static_cast<float>(N * team.units_of(r));
        if (more == 0) break;
        const float share = more / (before + more);
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
          const float2 theirs = team.shared_pair(kind, r, column);
          const float apart = theirs.x - mean[column];
          mean[column] += apart * share;
          square[column] += theirs.y + apart * apart * share * before;
        }
        before += more;
      }
    }
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      square[column] = 1.0f / sqrtf(square[column] / static_cast<float>(N * scan.hidden) + scan.eps);
    }
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!here(slot)) continue;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float xhat = (v[n][slot] - mean[Team::column(slot)]) * square[Team::column(slot)];
        const int at = n * units + unit_of(slot);
        v[n][slot] = fmaf(xhat, weight[at], bias[at]);
      }
    }
  }

  // Everything after the product; stages the next operand.
  SK_DEVICE void cells(float (&sums)[G][SLOTS], int t) {
    const int units = args.shape.groups * kRnnGroup;
    const float* bias =
        reinterpret_cast<const float*>(team.shared + args.shape.parameters) + team.group * kRnnGroup + team.lane / 4;
    const float* norm = bias + R * units;
    store_products(sums, t);
    if (scan.norm != nullptr) normalise<G>(0, sums, norm, norm + G * units, units);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (flags >> Team::column(slot) & 1) h[slot] = c[slot] = 0;
      if (!here(slot)) continue;
      float a[R];
#pragma unroll
      for (int k = 0; k < G; ++k) a[k] = CELL == kRnnGru && k == 2 ? x[k][slot] : x[k][slot] + sums[k][slot];
      if constexpr (CELL == kRnnGru) a[3] = sums[2][slot];
      if (args.bias != nullptr) {
#pragma unroll
        for (int k = 0; k < R; ++k) a[k] += bias[k * units + unit_of(slot)];
      }
      if constexpr (CELL == kRnnLstm) {
        a[0] = sigmoid(a[0]);
        a[1] = sigmoid(a[1]);
        a[2] = tanhf(a[2]);
        a[3] = sigmoid(a[3]);
        sums[0][slot] = a[1] * c[slot] + a[0] * a[2];
      } else if constexpr (CELL == kRnnGru) {
        a[0] = sigmoid(a[0]);
        a[1] = sigmoid(a[1]);
        a[2] = tanhf(a[2] + a[0] * a[3]);
        sums[0][slot] = (1.0f - a[1]) * a[2] + a[1] * h[slot];
      } else {
        a[0] = scan.cell == kRnnTanh ? tanhf(a[0]) : a[0] < 0 ? 0.0f : a[0];
        sums[0][slot] = a[0];
      }
#pragma unroll
      for (int k = 0; k < R; ++k) kept[k][slot] = a[k];
    }
    if constexpr (CELL == kRnnLstm) {  // sums[0] is c~ and becomes the argument of tanh
      float (&seen)[1][SLOTS] = *reinterpret_cast<float (*)[1][SLOTS]>(&sums[1]);
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) seen[0][slot] = sums[0][slot];
      if (scan.norm != nullptr) normalise<1>(1, seen, norm + 2 * G * units, norm + (2 * G + 1) * units, units);
    }
    settle(sums, t);
  }

  // Applies zoneout and updates the states of active rows.
  SK_DEVICE void settle(const float (&sums)[G][SLOTS], int t) {
    const bool zones = scan.expected || scan.seed != nullptr;
    const unsigned stays = scan.seed == nullptr ? 0 : stays_at(t);
    const float* mask = scan.mask == nullptr ? nullptr : scan.mask + first_at(static_cast<int64_t>(d) * scan.batch);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!team.owns(slot)) continue;
      T operand{};
      if (here(slot)) {
        const int column = Team::column(slot);
        if (t < length[column]) {
          float y = sums[0][slot];
          if constexpr (CELL == kRnnLstm) {
            y = kept[3][slot] * tanhf(sums[1][slot]);
            c[slot] = zones ? rnn_zone(scan, sums[0][slot], c[slot], 1, stays >> (SLOTS + slot) & 1) : sums[0][slot];
          }
          h[slot] = zones ? rnn_zone(scan, y, h[slot], 0, stays >> slot & 1) : y;
        }
        const float* factor = mask == nullptr ? nullptr : mask + row_of(slot) * scan.hidden + unit_of(slot);
        operand = rnn_operand<T>(h[slot], factor, flags >> (COLUMNS + column) & 1, args.half);
      }
      team.stage(slot, operand);
    }
  }

  SK_DEVICE void store_products(const float (&sums)[G][SLOTS], int t) const {
    if (args.products == nullptr) return;
    const int64_t rows = (static_cast<int64_t>(d) * scan.steps + t) * scan.batch;
    float* product = args.products + (rows + row(0)) * G * scan.hidden + team.unit(0);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!here(slot)) continue;
#pragma unroll
      for (int k = 0; k < G; ++k) product[(row_of(slot) * G + k) * scan.hidden + unit_of(slot)] = sums[k][slot];
    }
  }

  SK_DEVICE void store(int t) {
    const int64_t rows = (static_cast<int64_t>(d) * scan.steps + t) * scan.batch;
    const int output_row = scan.directions * scan.hidden;
    T* output = static_cast<T*>(args.output) + (static_cast<int64_t>(t) * scan.batch + row(0)) * output_row +
                d * scan.hidden + team.unit(0);
    float* cell = args.cells == nullptr ? nullptr : args.cells + first_at(rows);
    float* gate = args.gates == nullptr ? nullptr : args.gates + (rows + row(0)) * R * scan.hidden + team.unit(0);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      if (!here(slot)) continue;
      const bool active = t < length[Team::column(slot)];
      output[row_of(slot) * output_row + unit_of(slot)] = rnn_narrow<T>(active ? h[slot] : 0.0f, args.half);
      if constexpr (CELL == kRnnLstm) {
        if (cell != nullptr) cell[row_of(slot) * scan.hidden + unit_of(slot)] = active ? c[slot] : 0.0f;
      }
      if (gate != nullptr) {
#pragma unroll
        for (int k = 0; k < R; ++k) { gate[(row_of(slot) * R + k) * scan.hidden + unit_of(slot)] = kept[k][slot]; }
      }
    }
  }
};

template <class T, int CELL, int NT>
__global__ void __launch_bounds__(256, 1) rnn_forward_kernel(RnnForwardArgs args) {
  RnnForwardScan<T, CELL, NT> scan(args);
  scan.run();
}

}  // namespace seqkern
