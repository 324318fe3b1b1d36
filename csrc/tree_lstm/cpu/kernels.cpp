// Cells of Tree-LSTMs on CPU, forward and backward, from their products. Compiled once per instruction-set tier.
//
//   c = i g + sum over the children k of f_k c_k,    h = o tanh(c)                 Tai et al. 2015, eq. 2-8 and 9-14
//
// and back, from dh and dc of a node, which are complete when its parent is done:
//
//   do = dh tanh(c),   dc += dh o (1 - tanh^2 c),   di = dc g,   dg = dc i,   df_k = dc c_k,   dc_k += dc f_k
//
// A node has one parent at most: what a child gets is added once, whoever works on it.
#include "tree_lstm/tree_lstm.h"
#include "vectors.h"

namespace seqkern {
namespace SK_TIER {
namespace {

template <class A>
SK_INLINE Vec<A> sigmoid_slope(Vec<A> s) {
  return s * (A(1) - s);
}

// Where the products of a node have i, g and o, and the f of a slot.
struct Layout {
  int64_t width, g, o;
  Layout(int64_t hidden, int64_t nary) : width((3 + nary) * hidden), g((nary ? 1 + nary : 1) * hidden), o(g + hidden) {}
};

template <class T>
void sum_rows(const TreeLstmForward& p, int64_t begin, int64_t end, void* sums) {
  using A = acc_t<T>;
  const int64_t H = p.hidden;
  const T* h = static_cast<const T*>(p.h);
  for (int64_t place = begin; place < end; ++place) {
    T* const sum = static_cast<T*>(sums) + (place - begin) * H;
    const int64_t first = p.forest.child_starts[place], last = p.forest.child_starts[place + 1];
    for_vectors<A>(H, [&](int64_t u, int64_t n) SK_INLINED {
      Vec<A> total{};
      for (int64_t e = first; e < last; ++e) total += load_upto(h + p.forest.children[e] * H + u, n);
      store_upto(sum + u, total, n);
    });
  }
}

template <class T>
void forward_places(const TreeLstmForward& p, int64_t begin, int64_t end, const void* products, const void* forget) {
  using A = acc_t<T>;
  const Forest& in = p.forest;
  const int64_t H = p.hidden;
  const Layout layout(H, p.nary);
  A *const cells = static_cast<A*>(p.cells), *const gates = static_cast<A*>(p.gates);
  for (int64_t place = begin; place < end; ++place) {
    const int64_t node = in.order[place], first = in.child_starts[place], last = in.child_starts[place + 1];
    const T* x = static_cast<const T*>(p.x_gates) + node * 4 * H;
    const A* own = products ? static_cast<const A*>(products) + (place - begin) * layout.width : nullptr;
    for_vectors<A>(H, [&](int64_t u, int64_t n) SK_INLINED {
      Vec<A> i = load_upto(x + u, n), g = load_upto(x + 2 * H + u, n), o = load_upto(x + 3 * H + u, n);
      if (own) i += load_upto(own + u, n), g += load_upto(own + layout.g + u, n), o += load_upto(own + layout.o + u, n);
      i = sigmoid<A>(i), g = tanh<A>(g), o = sigmoid<A>(o);
      Vec<A> c = rounded(i * g);
      const Vec<A> x_f = load_upto(x + H + u, n);
      for (int64_t e = first; e < last; ++e) {
        const int64_t child = in.children[e];
        const A* of_edge =
            p.nary ? own + (1 + in.slots[e]) * H : static_cast<const A*>(forget) + (e - in.child_starts[begin]) * H;
        const Vec<A> f = sigmoid<A>(x_f + load_upto(of_edge + u, n));
        store_upto(gates + child * 4 * H + H + u, f, n);
        c += rounded(f * load_upto(cells + child * H + u, n));
      }
      A* const kept = gates + node * 4 * H + u;
      store_upto(kept, i, n), store_upto(kept + 2 * H, g, n), store_upto(kept + 3 * H, o, n);
      store_upto(cells + node * H + u, c, n);
      store_upto(static_cast<T*>(p.h) + node * H + u, o * tanh<A>(c), n);
      if (p.c != p.cells) store_upto(static_cast<T*>(p.c) + node * H + u, c, n);
    });
  }
}

template <class T>
void backward_places(const TreeLstmBackward& p, int64_t begin, int64_t end, void* grad_products, void* grad_forget) {
  using A = acc_t<T>;
  const Forest& in = p.forest;
  const int64_t H = p.hidden;
  const Layout layout(H, p.nary);
  const A *cells = static_cast<const A*>(p.cells), *gates = static_cast<const A*>(p.gates);
  A *const grad_h = static_cast<A*>(p.grad_h), *const grad_c = static_cast<A*>(p.grad_c);
  for (int64_t place = begin; place < end; ++place) {
    const int64_t node = in.order[place], first = in.child_starts[place], last = in.child_starts[place + 1];
    T* const x = static_cast<T*>(p.grad_x) + node * 4 * H;
    A* const own = grad_products ? static_cast<A*>(grad_products) + (place - begin) * layout.width : nullptr;
    if (own && p.nary)
      for (int64_t slot = 0; slot < p.nary; ++slot)
        for (int64_t u = 0; u < H; ++u) own[(1 + slot) * H + u] = 0;
    for_vectors<A>(H, [&](int64_t u, int64_t n) SK_INLINED {
      const A* kept = gates + node * 4 * H + u;
      const Vec<A> i = load_upto(kept, n), g = load_upto(kept + 2 * H, n), o = load_upto(kept + 3 * H, n);
      const Vec<A> dh = load_upto(grad_h + node * H + u, n);
      Vec<A> slope;
      const Vec<A> t = tanh<A>(load_upto(cells + node * H + u, n), slope);
      const Vec<A> dc = load_upto(grad_c + node * H + u, n) + rounded(dh * o * slope);
      const Vec<A> di = dc * g * sigmoid_slope<A>(i), dg = dc * i * (A(1) - g * g);
      const Vec<A> d_o = dh * t * sigmoid_slope<A>(o);
      Vec<A> df{};
      for (int64_t e = first; e < last; ++e) {
        const int64_t child = in.children[e];
        const Vec<A> f = load_upto(gates + child * 4 * H + H + u, n);
        const Vec<A> d = dc * load_upto(cells + child * H + u, n) * sigmoid_slope<A>(f);
        A* const of_child = grad_c + child * H + u;
        store_upto(of_child, load_upto(of_child, n) + rounded(dc * f), n);
        df += d;
        if (p.nary) {
          store_upto(own + (1 + in.slots[e]) * H + u, d, n);
        } else {
          store_upto(static_cast<A*>(grad_forget) + (e - in.child_starts[begin]) * H + u, d, n);
          store_upto(static_cast<T*>(p.grad_edge) + child * H + u, d, n);
        }
      }
      store_upto(x + u, di, n), store_upto(x + H + u, df, n);
      store_upto(x + 2 * H + u, dg, n), store_upto(x + 3 * H + u, d_o, n);
      if (own) {
        store_upto(own + u, di, n), store_upto(own + layout.g + u, dg, n), store_upto(own + layout.o + u, d_o, n);
      }
    });
  }
}

template <class T>
void add_to_children(const TreeLstmBackward& p, int64_t begin, int64_t end, const void* of_sums, const void* of_edges) {
  using A = acc_t<T>;
  const Forest& in = p.forest;
  const int64_t H = p.hidden;
  for (int64_t place = begin; place < end; ++place) {
    const A* of_sum = static_cast<const A*>(of_sums) + (place - begin) * H;
    for (int64_t e = in.child_starts[place]; e < in.child_starts[place + 1]; ++e) {
      A* const grad = static_cast<A*>(p.grad_h) + in.children[e] * H;
      const A* of_edge = static_cast<const A*>(of_edges) + (e - in.child_starts[begin]) * H;
      for_vectors<A>(H, [&](int64_t u, int64_t n) SK_INLINED {
        store_upto(grad + u, load_upto(grad + u, n) + (load_upto(of_sum + u, n) + load_upto(of_edge + u, n)), n);
      });
    }
  }
}

// ---- entry points ---------------------------------------------------------------------------------------------------

void sum_children(const TreeLstmForward& p, int64_t begin, int64_t end, void* sums) {
  SK_DISPATCH(p.dtype, sum_rows<T>(p, begin, end, sums));
}
void forward(const TreeLstmForward& p, int64_t begin, int64_t end, const void* products, const void* forget) {
  SK_DISPATCH(p.dtype, forward_places<T>(p, begin, end, products, forget));
}
void backward(const TreeLstmBackward& p, int64_t begin, int64_t end, void* grad_products, void* grad_forget) {
  SK_DISPATCH(p.dtype, backward_places<T>(p, begin, end, grad_products, grad_forget));
}
void add_children(const TreeLstmBackward& p, int64_t begin, int64_t end, const void* of_sums, const void* of_edges) {
  SK_DISPATCH(p.dtype, add_to_children<T>(p, begin, end, of_sums, of_edges));
}

}  // namespace

const TreeLstmKernels tree_lstm_kernels = {sum_children, forward, backward, add_children};

}  // namespace SK_TIER
}  // namespace seqkern
