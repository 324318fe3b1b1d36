// What the GPU kernels take. seqkern/_limits.py says the same in Python, and a test compares.
#pragma once

#include <cstdint>

namespace seqkern {

constexpr int64_t kMostHeadDim = 256;
constexpr int64_t kMostDecodeQueries = 16;  // more are no decoding

}  // namespace seqkern
