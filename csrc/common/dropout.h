// The dropout arguments of a kernel. Torch-free.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace seqkern {

struct Dropout {
  bool active = false;
  uint32_t threshold = 0;  // p * 2^32: a random word below it drops its element
  double scale = 1;        // of the elements that are kept: 1 / (1 - p)
  uint64_t seed = 0;

  static Dropout with(double p, uint64_t seed) {
    const double threshold = std::min(std::floor(p * 0x1p32), 0x1p32 - 1);
    return {true, static_cast<uint32_t>(threshold), p < 1 ? 1 / (1 - p) : 0.0, seed};
  }
};

}  // namespace seqkern
