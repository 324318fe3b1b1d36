// The activations by their numbers in the ops' schemas. Torch-free.
#pragma once

namespace seqkern {

// gelu_tanh approximates gelu by tanh.
enum class Activation : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3 };

}  // namespace seqkern
