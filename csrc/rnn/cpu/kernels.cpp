// LSTM, GRU and RNN on CPU, forward and backward through time. Compiled once per instruction-set tier. The equations
// are in cell.h, the loops over the steps in forward.h and backward.h.
//
// The host works in chunks of steps. Forward: first the products with W_ih for all steps of the chunk, each worker for
// its own hidden units (input_panels.h, input_tiles.h), or with a norm, a projection or too few units for all threads
// beforehand (blocked_gemm.h);
// then the loop. Backward: first the loop, then the products for dx and dW. So a chunk's gates are still in cache when
// the next pass reads them, and backward stores the gates' gradients of one chunk only, not of the whole sequence.
//
// Sequences of a batch are independent, so a thread takes some rows of the batch through the steps alone. If there are
// too few rows to keep the threads busy, several workers take the same rows and divide the hidden units: each keeps its
// panels of weights in its own cache from step to step, and waits for the others at a barrier once a step (team.h).
// No sum depends on that division: the bits are the same on any number of threads and in any batch.
//
// Rows are sorted by length, so that the active rows of a step come first. No product is spent on inactive rows,
// neither here nor in the large products, which run over tokens only. h, c and the gates stay in the accumulation type
// from step to step; only `output` is rounded.
//
// Measurements, and what was tried and lost: NOTES.md.
#include "kernels.h"

namespace seqkern {
namespace SK_TIER {

const RnnKernels rnn_kernels = kKernels;

}  // namespace SK_TIER
}  // namespace seqkern
