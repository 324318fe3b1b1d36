// The fast path of the norms over the last dimension, without dropout.
#include "node.h"

#include <limits>

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<layer_norm_fwd> forward("layer_norm_fwd");
const Function<layer_norm_bwd> backward("layer_norm_bwd");

// A contiguous tensor as the kernels see it.
NativeTensor matrix(const NativeTensor& t) {
  if (t.dim() == 2) return t;
  const NativeTensor dense = t.contiguous();
  const int64_t columns = t.size(-1);
  return in_shape(dense, {t.numel() / columns, columns});
}
// A result in the caller's shape; nothing else holds it.
NativeTensor shaped(const Tensor& result, const NativeTensor& like) {
  NativeTensor t = native(result);
  if (like.dim() != 2) t.unsafeGetTensorImpl()->set_sizes_contiguous(like.sizes());
  return t;
}

// saved: weight, bias, then what was normalised; kept: mean and rstd. Gradients of `inputs` terms and the parameters.
variable_list norm_gradients(const Call& call, int inputs) {
  const NativeTensor& grad = call.grads[0];
  const NativeTensor sum = call.grads.size() > 1 ? call.grads[1] : NativeTensor();
  const auto n = static_cast<size_t>(inputs);
  variable_list found(n + 2);
  const auto of_inputs = [&](const NativeTensor& g) {
    for (size_t i = 0; i < n; ++i)
      if (call.needs[i]) found[i] = g;
  };
  if (!grad.defined()) {  // the sum alone was used
    of_inputs(sum);
    return found;
  }
  const NativeTensor &weight = call.saved[0], &bias = call.saved[1], &normalised = call.saved[2];
  const int64_t rows = normalised.numel() / std::max<int64_t>(1, normalised.size(-1));
  const auto fits = [&](const NativeTensor& g) {
    return !g.defined() || (g.sizes() == normalised.sizes() && g.scalar_type() == normalised.scalar_type());
  };
  if (call.kept.size() != 2 || call.kept[1].numel() != rows || !fits(grad) || !fits(sum)) return {};
  const bool need_weight = call.needs[n], need_bias = call.needs[n + 1];
  const auto [grad_normalised, unused, grad_weight, grad_bias] =
      backward(stable(matrix(grad)), sum.defined() ? Maybe(stable(matrix(sum))) : std::nullopt,
               stable(matrix(normalised)), stable(call.kept[0]), stable(call.kept[1]), maybe(weight), std::nullopt, 0.0,
               call.numbers[1] != 0, call.numbers[2], need_weight, need_bias);
  of_inputs(shaped(grad_normalised, normalised));
  // Rounded once, to the parameter's own dtype.
  if (need_weight) found[n] = native(grad_weight).to(weight.scalar_type());
  if (need_bias) found[n + 1] = native(grad_bias).to(bias.scalar_type());
  return found;
}

const Rule kNorm("LayerNormNode", [](const Call& call) { return norm_gradients(call, 1); });
const Rule kAddNorm("AddLayerNormNode", [](const Call& call) { return norm_gradients(call, 2); }, Reads::with_first);

bool read_columns(PyObject* shape, int64_t& columns) {
  if (read_integer(shape, columns)) return true;
  if (PyTuple_Check(shape)) return PyTuple_GET_SIZE(shape) == 1 && read_integer(PyTuple_GET_ITEM(shape, 0), columns);
  return PyList_CheckExact(shape) && PyList_GET_SIZE(shape) == 1 && read_integer(PyList_GET_ITEM(shape, 0), columns);
}

// (input, residual or None, normalized_shape, weight, bias, eps, centred, weight_offset, round_before_weight) ->
// output, or (output, sum).
PyObject* norm(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor* input = read(arguments[0]);
  NativeTensor residual, weight, bias;
  int64_t columns;
  double eps, weight_offset;
  bool centred, round_before_weight;
  if (!input || input->dim() == 0 || !input->is_contiguous()) return nullptr;
  if (!read_optional(arguments[1], residual) || !read_columns(arguments[2], columns)) return nullptr;
  if (!read_optional(arguments[3], weight) || !read_optional(arguments[4], bias)) return nullptr;
  if (!read_flag(arguments[6], centred) || !read_number(arguments[7], weight_offset)) return nullptr;
  if (!read_flag(arguments[8], round_before_weight)) return nullptr;
  if (weight_offset != 0 && !weight.defined()) return nullptr;
  if (arguments[5] == Py_None && !centred)  // as torch's
    eps = input->scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                              : std::numeric_limits<float>::epsilon();
  else if (!read_number(arguments[5], eps) || !(eps >= 0)) return nullptr;
  if (input->size(-1) != columns) return nullptr;
  for (const NativeTensor* parameter : {&weight, &bias})
    if (parameter->defined() && (parameter->dim() != 1 || parameter->size(0) != columns)) return nullptr;
  const bool added = residual.defined();
  if (added && (residual.sizes() != input->sizes() || residual.scalar_type() != input->scalar_type() ||
                !residual.is_contiguous()))
    return nullptr;

  NativeTensor output, sum, mean, rstd;
  {
    const WithoutPython free;
    const auto results =
        forward(stable(matrix(*input)), added ? Maybe(stable(matrix(residual))) : std::nullopt, maybe(weight),
                maybe(bias), std::nullopt, eps, 0.0, centred, weight_offset, round_before_weight);
    output = shaped(std::get<0>(results), *input);
    if (added) sum = shaped(std::get<1>(results), *input);
    mean = native(std::get<2>(results)), rstd = native(std::get<3>(results));
  }
  if (!added) {
    if (wanted({input, &weight, &bias}))
      remember({.rule = kNorm,
                .inputs = {input, &weight, &bias},
                .results = {output},
                .saved = {weight, bias, *input},
                .saved_results = {},
                .kept = {mean, rstd},
                .numbers = {eps, static_cast<double>(centred), weight_offset}});
    return wrap(output);
  }
  if (wanted({input, &residual, &weight, &bias})) {
    const bool varies = wanted({input, &residual});  // else the sum is one of two constants
    Record record{.rule = kAddNorm,
                  .inputs = {input, &residual, &weight, &bias},
                  .results = {output},
                  .saved = {weight, bias},
                  .saved_results = {},
                  .kept = {mean, rstd},
                  .numbers = {eps, static_cast<double>(centred), weight_offset}};
    if (varies) record.results.push_back(sum), record.saved_results.push_back(1);
    else record.saved.push_back(sum);
    remember(std::move(record));
  }
  return tuple({wrap(output), wrap(sum)});
}

SK_FRONT(layer_norm, 9, norm)

}  // namespace
}  // namespace seqkern::direct
