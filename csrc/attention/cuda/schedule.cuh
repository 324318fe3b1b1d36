// The order in which thread blocks take the tiles of an attention kernel.
//
// A tile is a block of rows of one head of a sequence: of queries in kernels that own queries, of keys in kernels that
// own keys (there heads are key heads, and group = 1). There are sequences x heads x blocks tiles.
//
// - Tiles of one head, and of heads that share its keys, are adjacent, so that what they read comes from L2. Heads are
//   grouped as long as their keys and values fit L2.
// - Within a group of heads the longest tiles come first; the short ones fill the gaps at the end.
//
// Kernels are persistent: the grid is what is resident at once, and every block walks the tiles, from left to right in
// one round and from right to left in the next, so that the block with the longest tile gets the shortest one next.
// There is no counter in memory: launches need no reset, and a graph can replay them. The assignment changes no bits.
//
// Two adjacent rounds sum to the same work for all blocks where lengths change evenly. At the border between two groups
// lengths would jump from the shortest to the longest, and the same blocks could get the long ones each time. So
// lengths alternately descend and ascend (`walked`); in the last group they descend.
//
// A persistent grid saves block launches and start-up. It cannot adapt to lengths that the host does not know (packed
// sequences, key lengths). NOTES.md has the balance of work; none of it has been measured.
#pragma once

#include "attention.cuh"

namespace seqkern {

struct AttentionTile {
  int sequence, head, block;
};

struct AttentionOrder {
  int64_t pairs;    // sequences x heads
  int heads;        // of a sequence
  int blocks;       // of the longest sequence
  int together;     // pairs whose tiles are mixed: a group
  bool descending;  // the last block of a sequence is the longest

  SK_DEVICE constexpr int64_t tiles() const { return pairs * blocks; }

  SK_DEVICE constexpr AttentionTile at(int64_t index) const {
    const int64_t part = static_cast<int64_t>(together) * blocks, first = index / part * together;
    const int width = static_cast<int>(pairs - first < together ? pairs - first : together);
    const int rest = static_cast<int>(index % part), block = rest / width;
    const int64_t pair = first + rest % width;
    return {static_cast<int>(pair / heads), static_cast<int>(pair % heads), descending ? blocks - 1 - block : block};
  }

  // The tile at `index` of the walk: lengths descend and ascend without a jump, and descend in the last group.
  SK_DEVICE constexpr AttentionTile walked(int64_t index) const {
    AttentionTile tile = at(index);
    const int64_t before = index / (static_cast<int64_t>(together) * blocks), last = (pairs - 1) / together;
    if ((last - before) % 2 != 0) tile.block = blocks - 1 - tile.block;
    return tile;
  }
};

// Every tile occurs once: when the last group is smaller, when all heads are one group, when each head is alone.
constexpr bool every_tile_once(const AttentionOrder& order, bool walked) {
  uint64_t seen = 0;
  for (int64_t index = 0; index < order.tiles(); ++index) {
    const AttentionTile tile = walked ? order.walked(index) : order.at(index);
    const uint64_t bit = uint64_t{1} << ((tile.sequence * order.heads + tile.head) * order.blocks + tile.block);
    if (tile.head < 0 || tile.head >= order.heads || tile.block < 0 || (seen & bit) != 0) return false;
    seen |= bit;
  }
  return seen == (uint64_t{1} << order.tiles()) - 1;
}
constexpr bool every_tile_once(const AttentionOrder& order) {
  return every_tile_once(order, false) && every_tile_once(order, true);
}
static_assert(every_tile_once({10, 5, 3, 4, true}) && every_tile_once({10, 5, 3, 10, false}) &&
                  every_tile_once({6, 2, 1, 1, true}),
              "the order of tiles");
static_assert(AttentionOrder{4, 4, 3, 2, true}.walked(0).block == 0 &&
                  AttentionOrder{4, 4, 3, 2, true}.walked(5).block == 2 &&
                  AttentionOrder{4, 4, 3, 2, true}.walked(6).block == 2 &&
                  AttentionOrder{4, 4, 3, 2, true}.walked(11).block == 0,
              "up, then down");

// The tile of a thread block in round 0, 1 ..., as long as it is below tiles().
SK_DEVICE constexpr int64_t tile_of_round(int64_t round, int64_t block, int64_t grid) {
  return round * grid + (round % 2 == 0 ? block : grid - 1 - block);
}
SK_DEVICE int64_t tile_of_round(int64_t round) { return tile_of_round(round, blockIdx.x, gridDim.x); }

// The largest difference in work between blocks of a grid, for tiles of 1, 2, 3 ... pieces of work.
constexpr int64_t difference(const AttentionOrder& order, int64_t grid) {
  int64_t least = 0, most = 0;
  for (int64_t block = 0; block < grid; ++block) {
    int64_t sum = 0, index = 0;
    for (int64_t round = 0; (index = tile_of_round(round, block, grid)) < order.tiles(); ++round)
      sum += order.walked(index).block + 1;
    least = block == 0 || sum < least ? sum : least;
    most = sum > most ? sum : most;
  }
  return most - least;
}
static_assert(difference({8, 8, 8, 2, true}, 7) <= 1 && difference({24, 24, 16, 3, true}, 11) <= 2,
              "the walk shares the work");

// Calls f(tile) for all of the block's tiles. f owns the shared memory except the round number, which is kept there:
// where a loop needs all registers, even one for the round would spill.
constexpr int kWalkBytes = 128;
template <class F>
SK_DEVICE void walk_tiles(const AttentionOrder& order, unsigned char* memory, const F& f) {
  int* const round = reinterpret_cast<int*>(memory);
  if (threadIdx.x == 0) *round = 0;
  __syncthreads();
  int64_t index;
#pragma unroll 1
  while ((index = tile_of_round(*round)) < order.tiles()) {
    f(order.walked(index));
    __syncthreads();  // all threads have finished the tile
    if (threadIdx.x == 0) ++*round;
    __syncthreads();
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// bytes: what the tiles of `group` heads read repeatedly: their keys and values (or queries and gradients).
inline AttentionOrder attention_order(int sequences, int heads, int group, int rows, int block, int64_t bytes,
                                      bool descending, int architecture) {
  const int64_t cache = architecture >= 90 ? int64_t{32} << 20 : int64_t{16} << 20;
  const int64_t pairs = int64_t{sequences} * heads, blocks = rows / block + (rows % block != 0);
  int64_t groups = bytes > 0 ? cache / bytes : pairs;
  groups = groups < 1 ? 1 : groups;
  const int64_t most = blocks > 0 ? (int64_t{1} << 30) / blocks : pairs;  // mixed tiles: their index fits 32 bits
  int64_t together = groups * group < most ? groups * group : most;
  together = together < pairs ? together : pairs;
  return {pairs, heads, static_cast<int>(blocks), static_cast<int>(together < 1 ? 1 : together), descending};
}

// Whether the last queries are the longest tiles. Later queries see more keys, except with a window that ends at the
// last key: then, and only then, fewer queries see the last keys than the first.
inline bool last_queries_see_most(int low, int high) { return high != kAttentionFar || low == -kAttentionFar; }

// Thread blocks of a persistent grid: what is resident at once. `always`: at least one, for rows of no tile.
inline unsigned attention_grid(const AttentionOrder& order, int resident, int multiprocessors, bool always) {
  const int64_t room = int64_t{resident} * multiprocessors, tiles = order.tiles();
  const int64_t grid = tiles < room ? tiles : room;
  return static_cast<unsigned>(always && grid == 0 ? 1 : grid);
}

}  // namespace seqkern
