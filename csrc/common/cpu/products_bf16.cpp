// Products of bfloat16 by bf16 dot products (operand.h), or on AMX by matrix tiles (tile_gemm.h, few_rows_tiles.h): at
// least twice the rate of float32, and half the weights to read. All sums are in float32.
#define SK_PAIRS
#include "products_tier.h"

namespace seqkern {
namespace SK_TIER {

const ProductKernels product_bf16_kernels = kProductKernels;

}  // namespace SK_TIER
}  // namespace seqkern
