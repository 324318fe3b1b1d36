// LSTM, GRU and RNN on CPU, forward and backward through time. Compiled once per instruction-set tier. The equations
// are in cell.h, the loops over the steps in forward.h and backward.h.
//
// The host runs chunks of steps: the products with W_ih for all steps of a chunk (blocked_gemm.h), then the loop;
// backward the loop first, then the products for dx and dW. A chunk's gates are still in cache when the next pass reads
// them, and backward needs the gates' gradients of one chunk, not of the whole sequence.
//
// Sequences of a batch are independent, so a thread takes some rows of the batch through the steps alone. Where there
// are fewer rows than would keep the threads busy, several take the same rows and share the units: each keeps its
// panels of weights, in its own cache, from step to step, and waits for the others once a step (team.h). No sum
// depends on that division: the same bits on any number of threads and in any batch.
//
// Rows are taken in the order of their lengths, so that the active ones of a step are the first: no product is spent on
// the others, here or in the large products, which run over the tokens only. h, c and the gates stay in the
// accumulation type from step to step; rounded values leave through `output` only.
//
// Tried and lost (AVX-512, one core of Zen 4; T = 128, B = 16, I = H = 256, LSTM, float32; 9.2 ms a product at peak
// rate):
//   - torch's matmul (MKL) for the products that are not in the loop: 93-97 GF/s, blocked_gemm.h 104-110.
//   - gates' gradients of all steps kept for one product at the end: 10 % of a training step, most of it page faults.
//   - the cell of all units after the whole product, without prefetch: backward loop 11.9 ms against 11.2, forward loop
//     11.0 against 10.7. Prefetching everything at once instead of a few lines a tile gains nothing: the tiles wait.
// With AVX2 (one core of Zen 3; T = 64, B = 16, I = H = 256), where the weights, 1 MB, do not fit L2 and a tile in L1
// runs at 92 GF/s, MKL's products at 88 to 94, these at 85, the loops' at 88:
//   - prefetching the next slice of weights under the tiles of this one: the loops took 4 to 8 % longer.
//   - all turns through the panels in one direction: with one row, where the weights are all there is to do, 10 % more
//     time than back and forth.
//   - an LSTM's four gates as one tile of 3 x 4 vectors: 3 to 8 % slower than as two panels of 6 x 2.
//   - large products with the rows of the next tile, or the next panel, prefetched: 1 to 3 % slower.
//   - large products by other blocks (48 rows, rows before columns), or panels no power of two apart: no difference.
#include "kernels.h"

namespace seqkern {
namespace SK_TIER {

const RnnKernels rnn_kernels = kKernels;

}  // namespace SK_TIER
}  // namespace seqkern
