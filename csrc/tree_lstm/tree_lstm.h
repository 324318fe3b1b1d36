// Arguments and entry points of Tree-LSTMs. Torch-free.
#pragma once

#include <cstdint>

#include "cpu_isa.h"
#include "dtype.h"

namespace seqkern {

// A forest, level by level. Place p of the order is a node; places [levels[l], levels[l + 1]) are those of height l.
// Its children, nodes too, are children[child_starts[p]] ... , each in a slot.
struct Forest {
  int64_t nodes, edges, height;  // height: how many levels
  const int64_t *order, *levels, *child_starts, *children, *slots;
};

// Nodes' rows are in the caller's order. "Inner" is a row for each place that is no leaf's, in order.
struct TreeLstmForward {
  Dtype dtype;
  int64_t hidden, nary;  // nary: slots, or 0 for the sum of the children
  Forest forest;
  const void* x_gates;  // (nodes, 4 hidden) dtype: i, f, g, o
  void *h, *c;          // (nodes, hidden) dtype
  void* cells;          // (nodes, hidden) acc; c itself where that is acc
  // (nodes, 4 hidden) acc: i, g and o of a node, and in the second place f of the edge to its parent.
  void* gates;
};

struct TreeLstmBackward {
  Dtype dtype;
  int64_t hidden, nary;
  Forest forest;
  const void *cells, *gates;
  void *grad_h, *grad_c;  // (nodes, hidden) acc: of a node, complete when its parent is done
  void* grad_x;           // (nodes, 4 hidden) dtype
  void* grad_edge;        // (nodes, hidden) dtype: of f before its sigmoid; child-sum only, 0 of roots
};

struct TreeLstmKernels {
  // Rows of h~ for the places [begin, end): the sums of the children's h, to a matrix (.., hidden) of dtype.
  void (*sum_children)(const TreeLstmForward&, int64_t begin, int64_t end, void* sums);
  // The cells of places [begin, end). products: U h~ (.., 3 hidden), or U [h_1; ...] (.., (3 + nary) hidden), acc, or
  // null for leaves; forget: U_f h_k for the edges from child_starts[begin] on, acc, child-sum only.
  void (*forward)(const TreeLstmForward&, int64_t begin, int64_t end, const void* products, const void* forget);
  // The gradients of the same: grad_products, acc, in the same layouts, and grad_forget; adds to the children's grad_c.
  void (*backward)(const TreeLstmBackward&, int64_t begin, int64_t end, void* grad_products, void* grad_forget);
  // Adds rows of h~'s gradient (.., hidden), acc, and of the edges' (.., hidden), acc, to the children's grad_h.
  void (*add_children)(const TreeLstmBackward&, int64_t begin, int64_t end, const void* of_sums, const void* of_edges);
};

SK_DECLARE_KERNEL_TABLE(TreeLstmKernels, tree_lstm_kernels)

}  // namespace seqkern
