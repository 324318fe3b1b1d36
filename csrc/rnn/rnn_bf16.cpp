// Recurrent layers in bfloat16 where the processor multiplies pairs of that type: the kernels of rnn_cpu.cpp with
// operands in pairs (operand.h), at twice the rate of float32 and with half the weights to read.
//
// What a product takes is rounded to bfloat16: weights, inputs and outputs are that already; h as the next step's
// operand is the rounded output, and the gates' gradients are kept rounded, as the large products and the next step
// read them. All sums, gates, cell states, and h where it is added without a product, stay in float32.
#define SK_PAIRS
#include "rnn_kernels.h"

namespace seqkern {
namespace SK_TIER {

const RnnKernels rnn_bf16_kernels = kKernels;

}  // namespace SK_TIER
}  // namespace seqkern
