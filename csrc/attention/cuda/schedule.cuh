// In which order blocks of threads do the tiles of an attention kernel, and who does which.
//
// A tile is a block of rows of a head of a sequence: of queries in the passes that own queries, of keys in those that
// own keys (their heads are the key heads, group = 1). There are sequences x heads x blocks of them, and
//
//  - tiles of one head, and of the heads that share its keys, stand next to each other, so that what they read comes
//    from the second-level cache: heads are taken together as long as their keys and values fit it;
//  - of the heads that are taken together the longest tiles come first, and the short ones fill the gaps at the end.
//
// The grid is what is resident at once, and every block walks the tiles: those of one round from left to right, those
// of the next from right to left, so that who had the longest one gets the shortest next. No counter in memory: the
// walk costs nothing between launches, and a graph can replay it. Who does a tile changes none of its bits.
//
// Two neighbouring rounds add up to the same for all blocks where lengths change evenly. Where the heads that are taken
// together end and others begin, they would jump from the shortest to the longest, and the same blocks may get the long
// ones each time. So lengths go down and up again by turns (`walked`), and in the end down.
//
// By counting chunks, for the causal backward pass with mma.sync of 512 to 32768 rows, head dims 64 to 256, 16384 and
// 65536 tokens a batch and batches of five: the time of the busiest block, as a multiple of the average one's, or of
// the longest tile where that is more, on average and at worst.
//
//                                                132 multiprocessors      108
//    walk, each group from its longest down        1.35    2.06        1.12   1.53
//    walk, by turns                                1.03    1.45        1.06   2.00
//    plain grid, each group from its longest       1.03    1.43        1.04   1.53
//
// Worst are calls of two or three rounds whose heads fill the cache one and a fraction times. What a walk saves is
// launches of blocks and their start; what it cannot do is to follow lengths that the host does not know (packed
// sequences, key lengths). Which counts for more only a measurement says, and none has been made.
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
  int together;     // pairs whose tiles are mixed
  bool descending;  // the last block of a sequence is the longest

  SK_DEVICE constexpr int64_t tiles() const { return pairs * blocks; }

  SK_DEVICE constexpr AttentionTile at(int64_t index) const {
    const int64_t part = static_cast<int64_t>(together) * blocks, first = index / part * together;
    const int width = static_cast<int>(pairs - first < together ? pairs - first : together);
    const int rest = static_cast<int>(index % part), block = rest / width;
    const int64_t pair = first + rest % width;
    return {static_cast<int>(pair / heads), static_cast<int>(pair % heads), descending ? blocks - 1 - block : block};
  }

  // For those who walk: lengths go up and down without a jump, and the last ones down.
  SK_DEVICE constexpr AttentionTile walked(int64_t index) const {
    AttentionTile tile = at(index);
    const int64_t before = index / (static_cast<int64_t>(together) * blocks), last = (pairs - 1) / together;
    if ((last - before) % 2 != 0) tile.block = blocks - 1 - tile.block;
    return tile;
  }
};

// Every tile once, where the last heads taken together are fewer, or all, or each is alone.
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

// The tile that a block of threads does in round 0, 1 ..., while it is below tiles().
SK_DEVICE constexpr int64_t tile_of_round(int64_t round, int64_t block, int64_t grid) {
  return round * grid + (round % 2 == 0 ? block : grid - 1 - block);
}
SK_DEVICE int64_t tile_of_round(int64_t round) { return tile_of_round(round, blockIdx.x, gridDim.x); }

// By how much two blocks of a grid differ in what they have to do, with tiles of 1, 2, 3 ... pieces of work.
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

// All of them, by f(tile), which has the shared memory for itself but for the round's number: where a loop needs all
// registers, even one for that would spill.
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
    __syncthreads();  // all have finished it
    if (threadIdx.x == 0) ++*round;
    __syncthreads();
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// bytes: what the tiles of a group of heads read again and again, their keys and values (or queries and gradients).
inline AttentionOrder attention_order(int sequences, int heads, int group, int rows, int block, int64_t bytes,
                                      bool descending, int architecture) {
  const int64_t cache = architecture >= 90 ? int64_t{32} << 20 : int64_t{16} << 20;
  const int64_t pairs = int64_t{sequences} * heads, blocks = rows / block + (rows % block != 0);
  int64_t groups = bytes > 0 ? cache / bytes : pairs;
  groups = groups < 1 ? 1 : groups;
  const int64_t most = blocks > 0 ? (int64_t{1} << 30) / blocks : pairs;  // tiles that are mixed: 32 bits
  int64_t together = groups * group < most ? groups * group : most;
  together = together < pairs ? together : pairs;
  return {pairs, heads, static_cast<int>(blocks), static_cast<int>(together < 1 ? 1 : together), descending};
}

// Of queries the last are the longest tiles: later ones see more keys, but for a window that ends at the last key.
// Then, and only then, fewer see the last keys than the first.
inline bool last_queries_see_most(int low, int high) { return high != kAttentionFar || low == -kAttentionFar; }

// Blocks of threads that walk the tiles: what is resident at once; `always`: one at least, for what no tile has.
inline unsigned attention_grid(const AttentionOrder& order, int resident, int multiprocessors, bool always) {
  const int64_t room = int64_t{resident} * multiprocessors, tiles = order.tiles();
  const int64_t grid = tiles < room ? tiles : room;
  return static_cast<unsigned>(always && grid == 0 ? 1 : grid);
}

}  // namespace seqkern
