// The fast path of rotary position embeddings, of tokens that follow each other or by tables.
#include "node.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/pow.h>

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<rope> rotate("rope");
const Function<rope_tables> make_tables("rope_tables");

// Whole numbers that float64 has.
constexpr int64_t kLargest = int64_t{1} << 52;

// How the kernel is to see queries and keys: heads and tokens in the order of memory.
struct Layout {
  bool swapped;
  int64_t dim;  // of the tokens, as the kernel sees it
  NativeTensor lay(const NativeTensor& t) const { return swapped ? t.transpose(1, 2) : t; }
};

// Both sides turned, or one. cos and sin of two dimensions are those of every sequence.
std::pair<NativeTensor, NativeTensor> turned(const Layout& layout, const NativeTensor& first,
                                             const NativeTensor& second, const NativeTensor& cos,
                                             const NativeTensor& sin, int64_t rotary_dim, bool interleaved,
                                             bool inverse) {
  const auto table = [](const NativeTensor& t) { return stable(t.dim() == 3 ? t : t.unsqueeze(0)); };
  const auto results =
      rotate(stable(layout.lay(first)), second.defined() ? Maybe(stable(layout.lay(second))) : std::nullopt, table(cos),
             table(sin), layout.dim, rotary_dim, interleaved, inverse);
  return {layout.lay(native(std::get<0>(results))),
          second.defined() ? layout.lay(native(std::get<1>(results))) : NativeTensor()};
}

// saved: cos, sin; numbers: swapped, dimension of the tokens, rotary_dim, interleaved. The gradient is turned back.
const Rule kRope("RopeNode", [](const Call& call) -> variable_list {
  const at::AutoDispatchBelowADInplaceOrView below;
  const NativeTensor query = call.grads[0], key = call.grads.size() > 1 ? call.grads[1] : NativeTensor();
  const Layout layout{call.numbers[0] != 0, static_cast<int64_t>(call.numbers[1])};
  const auto [first, second] =
      turned(layout, query.defined() ? query : key, query.defined() ? key : NativeTensor(), call.saved[0],
             call.saved[1], static_cast<int64_t>(call.numbers[2]), call.numbers[3] != 0, true);
  variable_list found{first, second};
  if (!query.defined()) std::swap(found[0], found[1]);
  return found;
});

bool read_tables(PyObject* object, at::ScalarType type, int64_t batch, int64_t tokens, int64_t rotary_dim,
                 NativeTensor& cos, NativeTensor& sin) {
  if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != 2) return false;
  const NativeTensor *first = read(PyTuple_GET_ITEM(object, 0)), *second = read(PyTuple_GET_ITEM(object, 1));
  if (!first || !second || first->sizes() != second->sizes() || wanted({first, second})) return false;
  const int64_t dims = first->dim(), width = first->size(-1);
  if ((dims != 2 && dims != 3) || first->size(-2) != tokens || (width != rotary_dim && width != rotary_dim / 2) ||
      (dims == 3 && first->size(0) != 1 && first->size(0) != batch))
    return false;
  if (first->scalar_type() != type || second->scalar_type() != type) return false;
  cos = *first, sin = *second;
  return true;
}

// (query, key, position of the first token, tables, theta, inv_freq, scaling, rotary_dim, interleaved, sequence_dim) ->
// (query, key).
PyObject* rope_of(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor* query = read(arguments[0]);
  NativeTensor key;
  if (!query || query->dim() != 4 || !read_optional(arguments[1], key)) return nullptr;
  int64_t position = 0, rotary_dim = query->size(3), sequence_dim;
  bool interleaved;
  double theta, scaling;
  if ((arguments[7] != Py_None && !read_integer(arguments[7], rotary_dim)) || !read_flag(arguments[8], interleaved) ||
      !read_integer(arguments[9], sequence_dim))
    return nullptr;
  if ((sequence_dim != -2 && sequence_dim != -3) || rotary_dim < 2 || rotary_dim % 2 || rotary_dim > query->size(3))
    return nullptr;
  const int64_t dim = sequence_dim + 4, tokens = query->size(dim);
  if (key.defined()) {
    if (key.dim() != 4 || key.scalar_type() != query->scalar_type()) return nullptr;
    for (const int64_t n : {int64_t{0}, dim, int64_t{3}})
      if (key.size(n) != query->size(n)) return nullptr;
  }
  const bool wide = query->scalar_type() == at::kDouble;
  NativeTensor cos, sin, frequencies;
  if (!read_integer(arguments[2], position)) return nullptr;
  if (arguments[3] != Py_None) {
    if (arguments[5] != Py_None ||
        !read_tables(arguments[3], wide ? at::kDouble : at::kFloat, query->size(0), tokens, rotary_dim, cos, sin))
      return nullptr;
  } else {
    if (position < -kLargest || position > kLargest || !read_number(arguments[4], theta) || !(theta > 0) ||
        !read_number(arguments[6], scaling) || !read_optional(arguments[5], frequencies))
      return nullptr;
    if (frequencies.defined() && (frequencies.scalar_type() != at::kDouble || frequencies.dim() != 1 ||
                                  frequencies.size(0) != rotary_dim / 2 || wanted({&frequencies})))
      return nullptr;
  }

  const bool swapped = query->stride(1) < query->stride(2) && query->size(1) > 1 && query->size(2) > 1;
  const Layout layout{swapped, swapped ? 3 - dim : dim};
  std::pair<NativeTensor, NativeTensor> results;
  {
    const WithoutPython free;
    const at::AutoDispatchBelowADInplaceOrView below;
    if (!cos.defined()) {
      const auto options = at::TensorOptions().device(at::kCPU);
      if (!frequencies.defined())
        frequencies = at::pow(theta, at::arange(0, rotary_dim, 2, options.dtype(at::kDouble)).div(-rotary_dim));
      const NativeTensor at = at::arange(position, position + tokens, options.dtype(at::kLong)).unsqueeze(0);
      const auto tables = make_tables(stable(at), stable(frequencies), scaling, wide);
      cos = native(std::get<0>(tables)), sin = native(std::get<1>(tables));
    }
    results = turned(layout, *query, key, cos, sin, rotary_dim, interleaved, false);
  }
  auto& [query_out, key_out] = results;
  if (wanted({query, &key}))
    remember({.rule = kRope,
              .inputs = {query, &key},
              .results = key.defined() ? variable_list{query_out, key_out} : variable_list{query_out},
              .saved = {cos, sin},
              .saved_results = {},
              .kept = {},
              .numbers = {static_cast<double>(swapped), static_cast<double>(layout.dim),
                          static_cast<double>(rotary_dim), static_cast<double>(interleaved)}});
  return tuple({wrap(query_out), key.defined() ? wrap(key_out) : Py_NewRef(Py_None)});
}

SK_FRONT(rope, 10, rope_of)

}  // namespace
}  // namespace seqkern::direct
