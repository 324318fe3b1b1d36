// Products in bfloat16 where the processor multiplies pairs of that type: by dot products (operand.h), or on AMX by
// matrix tiles (tile_gemm.h, few_rows_tiles.h). Twice the rate of float32 and more, and half the weights to read; all
// sums in float32.
#define SK_PAIRS
#include "products_tier.h"

namespace seqkern {
namespace SK_TIER {

const ProductKernels product_bf16_kernels = kProductKernels;

}  // namespace SK_TIER
}  // namespace seqkern
