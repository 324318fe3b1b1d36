// Recurrent layers in bfloat16 by bf16 dot products, with the kernels of kernels.cpp on operands of pairs (operand.h):
// twice the rate of float32, and half the weights to read. On AMX with products on matrix tiles (few_rows_tiles.h).
//
// Operands of products are rounded to bfloat16. Weights, inputs and outputs are bfloat16 anyway. The next step
// multiplies the rounded output h. The gates' gradients are stored rounded, as the next step and the large products
// read them. All sums, gates and cell states stay in float32, as does h where it is added without a product.
// Measurements: NOTES.md.
#define SK_PAIRS
#include "kernels.h"

namespace seqkern {
namespace SK_TIER {

const RnnKernels rnn_bf16_kernels = kKernels;

}  // namespace SK_TIER
}  // namespace seqkern
