// Recurrent layers in bfloat16 where the processor multiplies pairs of that type: the kernels of kernels.h with
// operands in pairs (operand.h), at twice the rate of float32 and with half the weights to read; on AMX with products
// of matrix tiles (few_rows_tiles.h).
//
// What a product takes is rounded to bfloat16: weights, inputs and outputs are that already; h as the next step's
// operand is the rounded output, and the gates' gradients are kept rounded, as the large products and the next step
// read them. All sums, gates, cell states, and h where it is added without a product, stay in float32.
//
// By dot products, one core of a Zen 4, where they reach 236 GF/s: products of a step run at 207 to 230, large ones at
// 192 to 212; LSTM with B = 32, T = 128, I = H = 512 takes 92 ms, of which products are 86 %, cells 9 %, packing 1 %.
// Tried and lost:
//   - slices of 64 and 96 words instead of 128: 0 to 4 % slower.
//   - weights packed gates side by side as they come, also with the next lines prefetched: 0 to 40 % slower.
//   - with B = 16, each of two threads its own 8 rows instead of 16 in common; with B = 32, all in common: no
//   difference.
#define SK_PAIRS
#include "kernels.h"

namespace seqkern {
namespace SK_TIER {

const RnnKernels rnn_bf16_kernels = kKernels;

}  // namespace SK_TIER
}  // namespace seqkern
