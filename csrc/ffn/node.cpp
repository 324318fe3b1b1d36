// The fast path of the feed-forward block where no gradient is wanted: the products and the activation between them.
#include "node.h"

#include <ATen/ops/linear.h>

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<ffn_fwd> forward("ffn_fwd");

// (x, w1, b1, w2, b2, activation, gated, the most numbers of the activation) -> output.
PyObject* ffn(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor *x = read(arguments[0]), *w1 = read(arguments[1]), *w2 = read(arguments[3]);
  NativeTensor b1, b2;
  int64_t activation, most;
  bool gated;
  if (!x || !w1 || !w2 || !read_optional(arguments[2], b1) || !read_optional(arguments[4], b2) ||
      !read_integer(arguments[5], activation) || !read_flag(arguments[6], gated) || !read_integer(arguments[7], most))
    return nullptr;
  if (x->dim() < 1 || w1->dim() != 2 || w2->dim() != 2 || !x->is_contiguous()) return nullptr;
  const int64_t depth = x->size(-1), inner = w1->size(0), rows = x->numel() / depth;
  if (w1->size(1) != depth || (gated && inner % 2) || w2->size(1) != (gated ? inner / 2 : inner)) return nullptr;
  const auto fits = [&](const NativeTensor& b, int64_t size) {
    return !b.defined() || (b.dim() == 1 && b.size(0) == size && b.scalar_type() == x->scalar_type());
  };
  if (!fits(b1, inner) || !fits(b2, w2->size(0)) || w1->scalar_type() != x->scalar_type() ||
      w2->scalar_type() != x->scalar_type() || rows * w2->size(1) > most)
    return nullptr;
  if (wanted({x, w1, w2, &b1, &b2})) return nullptr;
  NativeTensor y;
  {
    const WithoutPython free;
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto bias = [](const NativeTensor& b) { return b.defined() ? std::optional(b) : std::nullopt; };
    const NativeTensor z = at::linear(in_shape(*x, {rows, depth}), *w1, bias(b1));
    y = at::linear(native(forward(stable(z), activation, gated)), *w2, bias(b2));
    if (x->dim() != 2) {
      std::vector<int64_t> sizes(x->sizes().begin(), x->sizes().end());
      sizes.back() = w2->size(0);
      y = in_shape(y.contiguous(), sizes);
    }
  }
  return wrap(y);
}

SK_FRONT(ffn, 8, ffn)

}  // namespace
}  // namespace seqkern::direct
