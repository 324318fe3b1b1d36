// What the host side of the attention ops passes to the launchers of its CUDA C++ kernels. A launcher is in its
// kernel's file.
#pragma once

#include <optional>
#include <string>

#include "attention.cuh"
#include "common/cuda/launch.h"

namespace seqkern {

// Common to all launchers: the op's name for errors, the dtype, a tensor on the device, the stream.
struct AttentionCall {
  const char* op;
  Dtype dtype;
  const Tensor& like;
  void* stream;
};

struct AttentionForwardCuda {
  AttentionCuda call;
  AttentionResult out;
  float* lse;  // (batch, heads, query_rows)
};

struct AttentionBackwardCuda {
  AttentionCuda call;
  AttentionTensor grad_out, out;
  const float *lse, *grad_lse;  // (batch, heads, query_rows); grad_lse may be null
  float* delta;                 // scratch, as lse
  AttentionResult grad_query, grad_key, grad_value;
  float* grad_distance;            // (batch, heads, query_rows), or null
  void* grad_mask;                 // contiguous, in the mask's dtype, or null
  int mask_sequences, mask_heads;  // its sizes: number of sequences or 1, number of heads or 1
};

// Whether a call's mask is looked at (limits.cuh). Then: sets the limits of the call, of keys too for a backward pass,
// and returns their memory.
bool looks_at_mask(const AttentionCuda& call, const std::optional<Tensor>& mask);
Tensor look_at_mask(const AttentionCall& call, AttentionCuda& c, const Tensor& mask, bool keys);

void launch_attention_forward(const AttentionCall& call, const AttentionForwardCuda& forward);
void launch_attention_backward(const AttentionCall& call, const AttentionBackwardCuda& backward);

// For `explain`: the tiles of a call without options on the scores; of the backward pass, on the device of `like`.
std::string attention_forward_tiles(Dtype dtype, int dim);
std::string attention_backward_tiles(const Tensor& like, Dtype dtype, int dim);

// Hopper: whether its kernels serve a call, and the launch.
bool hopper_serves_forward(const AttentionCall& call, const AttentionForwardCuda& forward);
void launch_attention_forward_hopper(const AttentionCall& call, const AttentionForwardCuda& forward);
bool hopper_serves_backward(const AttentionCall& call, const AttentionBackwardCuda& backward);
void launch_attention_backward_hopper(const AttentionCall& call, const AttentionBackwardCuda& backward);

}  // namespace seqkern
