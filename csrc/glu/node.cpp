// The fast path of the gated linear units.
#include "node.h"

#include "ops.h"

namespace seqkern::direct {
namespace {

const Function<glu_fwd> forward("glu_fwd");
const Function<glu_bwd> backward("glu_bwd");

// saved: gate, up.
const Rule kGlu("GluNode", [](const Call& call) -> variable_list {
  const auto [grad_gate, grad_up] = backward(stable(call.grads[0]), stable(call.saved[0]), stable(call.saved[1]),
                                             static_cast<int64_t>(call.numbers[0]));
  return {call.needs[0] ? native(grad_gate) : NativeTensor(), call.needs[1] ? native(grad_up) : NativeTensor()};
});

// (gate, up, activation) -> output.
PyObject* glu(PyObject* const* arguments, Py_ssize_t) {
  const NativeTensor *gate = read(arguments[0]), *up = read(arguments[1]);
  int64_t activation;
  if (!gate || !up || !read_integer(arguments[2], activation)) return nullptr;
  if (gate->sizes() != up->sizes() || gate->scalar_type() != up->scalar_type()) return nullptr;
  NativeTensor output;
  {
    const WithoutPython free;
    output = native(forward(stable(*gate), stable(*up), activation));
  }
  if (wanted({gate, up}))
    remember({.rule = kGlu,
              .inputs = {gate, up},
              .results = {output},
              .saved = {*gate, *up},
              .saved_results = {},
              .kept = {},
              .numbers = {static_cast<double>(activation)}});
  return wrap(output);
}

SK_FRONT(glu, 3, glu)

}  // namespace
}  // namespace seqkern::direct
