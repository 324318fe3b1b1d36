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
// walk costs nothing between launches, and a graph can replay it.
#pragma once

#include "cuda_device.cuh"

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
};

// Every tile once, where the last heads taken together are fewer, or all, or each is alone.
constexpr bool every_tile_once(const AttentionOrder& order) {
  uint64_t seen = 0;
  for (int64_t index = 0; index < order.tiles(); ++index) {
    const AttentionTile tile = order.at(index);
    const uint64_t bit = uint64_t{1} << ((tile.sequence * order.heads + tile.head) * order.blocks + tile.block);
    if (tile.head < 0 || tile.head >= order.heads || tile.block < 0 || (seen & bit) != 0) return false;
    seen |= bit;
  }
  return seen == (uint64_t{1} << order.tiles()) - 1;
}
static_assert(every_tile_once({10, 5, 3, 4, true}) && every_tile_once({10, 5, 3, 10, false}) &&
                  every_tile_once({6, 2, 1, 1, true}),
              "the order of tiles");

// The tile that this block of threads does in round 0, 1 ..., while it is below tiles().
SK_DEVICE int64_t tile_of_round(int64_t round) {
  const int64_t grid = gridDim.x, block = blockIdx.x;
  return round * grid + (round % 2 == 0 ? block : grid - 1 - block);
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

}  // namespace seqkern
