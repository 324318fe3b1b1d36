// Products of every dtype, in the accumulation type. Compiled once per instruction-set tier. Large products are in
// blocked_gemm.h, products of few rows in few_rows_panels.h.
#include "products_tier.h"

namespace seqkern {
namespace SK_TIER {

const ProductKernels product_kernels = kProductKernels;

}  // namespace SK_TIER
}  // namespace seqkern
