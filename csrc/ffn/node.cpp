// The fast path of the feed-forward block: the products and the activation between them, and their way back.
#include "node.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<ffn_fwd> forward("ffn_fwd");
const Function<ffn_bwd> backward("ffn_bwd");

// saved: x, w1, b1, w2, the first product's result; numbers: activation, gated.
const Rule kFfn("FfnNode", [](const Call& call) -> variable_list {
  const at::AutoDispatchBelowADInplaceOrView below;
  const NativeTensor &w1 = call.saved[1], &w2 = call.saved[3], &z = call.saved[4];
  const NativeTensor x = call.saved[0].reshape({z.size(0), w1.size(1)});
  const NativeTensor grad = call.grads[0].reshape({z.size(0), w2.size(0)});
  const bool need_x = call.needs[0], need_w1 = call.needs[1], need_b1 = call.needs[2], need_w2 = call.needs[3];
  variable_list found(5);
  if (call.needs[4]) found[4] = grad.sum(0);
  if (!(need_x || need_w1 || need_b1 || need_w2)) return found;
  NativeTensor grad_z;
  {
    const auto results =
        backward(stable(at::mm(grad, w2)), stable(z), static_cast<int64_t>(call.numbers[0]), call.numbers[1] != 0);
    grad_z = native(std::get<0>(results));
    if (need_w2) found[3] = at::mm(grad.t(), native(std::get<1>(results)));
  }
  if (need_w1) found[1] = at::mm(grad_z.t(), x);
  if (need_x) found[0] = at::mm(grad_z, w1).reshape(call.saved[0].sizes());
  if (need_b1) found[2] = grad_z.sum(0);
  return found;
});

// (x, w1, b1, w2, b2, activation, gated, the most numbers of the activation, make the first product again) -> output.
PyObject* ffn(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor *x = read(arguments[0]), *w1 = read(arguments[1]), *w2 = read(arguments[3]);
  NativeTensor b1, b2;
  int64_t activation, most;
  bool gated, recompute;
  if (!x || !w1 || !w2 || !read_optional(arguments[2], b1) || !read_optional(arguments[4], b2) ||
      !read_integer(arguments[5], activation) || !read_flag(arguments[6], gated) || !read_integer(arguments[7], most) ||
      !read_flag(arguments[8], recompute))
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
  const bool keep = wanted({x, w1, w2, &b1, &b2});
  if (keep && recompute) return nullptr;
  NativeTensor y, z;
  {
    const WithoutPython free;
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto bias = [](const NativeTensor& b) { return b.defined() ? std::optional(b) : std::nullopt; };
    z = at::linear(in_shape(*x, {rows, depth}), *w1, bias(b1));
    y = at::linear(native(forward(stable(z), activation, gated)), *w2, bias(b2));
    if (x->dim() != 2) {
      std::vector<int64_t> sizes(x->sizes().begin(), x->sizes().end());
      sizes.back() = w2->size(0);
      y = in_shape(y.contiguous(), sizes);
    }
  }
  if (keep)
    remember({.rule = kFfn,
              .inputs = {x, w1, &b1, w2, &b2},
              .results = {y},
              .saved = {*x, *w1, b1, *w2, z},
              .saved_results = {},
              .kept = {},
              .numbers = {static_cast<double>(activation), static_cast<double>(gated)}});
  return wrap(y);
}

SK_FRONT(ffn, 9, ffn)

}  // namespace
}  // namespace seqkern::direct
