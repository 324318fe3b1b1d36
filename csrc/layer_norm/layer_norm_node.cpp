// The autograd node of the short way (layer_norm_direct.cpp) in C++.
//
// A node of Python's takes longer than a small norm: of 98 us for an 8 x 64 norm, forward and backward, this one saves
// 15 (one Zen 3 core; torch's takes 75). torch's stable ABI has no nodes, so this file is a library of its own, built
// against the headers of the torch that is installed and loaded beside that very torch only; with any other, or where
// Python's headers are missing, the Python Functions of seqkern/ops/_direct.py do the same.
//
// The results are computed already when a node is made. It keeps what was normalised and the parameters, as torch's
// node does, and calls the kernels by address. A gradient that is anything but a plain tensor, or that is itself to be
// differentiated, takes the long way, in Python.
#include <Python.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "layer_norm_direct.h"

namespace seqkern {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

decltype(&direct_backward) kernels_backward;
PyObject* long_way;  // of seqkern/ops/_direct.py

struct Options {
  Tensor output, sum;
  double eps;
  bool centred;
};

bool find_dtype(const Tensor& t, Dtype& dtype) {
  switch (t.scalar_type()) {
    case at::kFloat: dtype = Dtype::f32; return true;
    case at::kDouble: dtype = Dtype::f64; return true;
    case at::kBFloat16: dtype = Dtype::bf16; return true;
    case at::kHalf: dtype = Dtype::f16; return true;
    default: return false;
  }
}

// Whether a tensor is nothing but contiguous memory of the CPU, with no derivative of forward mode.
bool plain(const Tensor& t) {
  static const uint64_t usual = at::empty({0}).key_set().raw_repr();
  return t.key_set().raw_repr() == usual && t.is_contiguous() && t.data_ptr() != nullptr && !t._fw_grad(0).defined();
}
bool plain_parameter(const Tensor& t, int64_t columns, Dtype& dtype) {
  return !t.defined() || (plain(t) && find_dtype(t, dtype) && t.dim() == 1 && t.numel() == columns);
}

// What a node keeps beside tensors, as one complex number: each entry of `saved_data` takes its time.
struct Kept {
  double eps;
  bool centred, weight, bias;
  explicit Kept(AutogradContext* ctx) {
    const c10::complex<double> stored = ctx->saved_data.begin()->second.toComplexDouble();
    const int flags = static_cast<int>(stored.imag());
    eps = stored.real(), centred = flags & 1, weight = flags & 2, bias = flags & 4;
  }
  static void store(AutogradContext* ctx, double eps, bool centred, bool weight, bool bias) {
    ctx->saved_data.emplace("kept", c10::complex<double>(eps, centred + 2 * weight + 4 * bias));
  }
};

struct Gradients {
  Tensor normalised, weight, bias;
};

// What Python returns, or its error, with the global lock held.
Gradients by_python(const Tensor& grad_output, const Tensor& grad_sum, const variable_list& saved, double eps,
                    bool centred, bool need_weight, bool need_bias) {
  const pybind11::gil_scoped_acquire lock;
  const auto wrap = [](const Tensor& t) { return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t)); };
  const pybind11::object inputs = pybind11::make_tuple(wrap(saved[0]), wrap(saved[1]), wrap(saved[2]));
  const pybind11::object result = pybind11::reinterpret_borrow<pybind11::object>(long_way)(
      wrap(grad_output), wrap(grad_sum), inputs, eps, centred, need_weight, need_bias);
  const auto unwrap = [&](int i) {
    const pybind11::object t = result[pybind11::int_(i)];
    return t.is_none() ? Tensor() : THPVariable_Unpack(t.ptr());
  };
  return {unwrap(0), unwrap(1), unwrap(2)};
}

Gradients norm_gradients(AutogradContext* ctx, const Tensor& grad_output, const Tensor& grad_sum, bool need_weight,
                         bool need_bias) {
  const variable_list saved = ctx->get_saved_variables();
  const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
  DirectNorm norm{};
  const Kept kept(ctx);
  norm.eps = kept.eps;
  norm.centred = kept.centred;
  const auto like_input = [&](const Tensor& grad) {
    return plain(grad) && grad.scalar_type() == input.scalar_type() && grad.sizes() == input.sizes();
  };
  bool direct = !at::GradMode::is_enabled() && !at::hasCallbacks() && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  direct = direct && plain(input) && find_dtype(input, norm.dtype) && input.dim() > 0 && input.numel() > 0;
  direct = direct && like_input(grad_output) && (!grad_sum.defined() || like_input(grad_sum));
  direct = direct && plain_parameter(weight, input.size(-1), norm.weight_dtype) &&
           plain_parameter(bias, input.size(-1), norm.bias_dtype);
  if (!direct) return by_python(grad_output, grad_sum, saved, norm.eps, norm.centred, need_weight, need_bias);

  const at::AutoDispatchBelowADInplaceOrView below;
  norm.columns = input.size(-1);
  norm.rows = input.numel() / norm.columns;
  const auto address = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
  const Gradients g{at::empty(input.sizes(), input.options()), need_weight ? at::empty_like(weight) : Tensor(),
                    need_bias ? at::empty_like(bias) : Tensor()};
  kernels_backward(norm, address(grad_output), address(grad_sum), address(input), address(weight),
                   address(g.normalised), address(g.weight), address(g.bias));
  return g;
}

void keep(AutogradContext* ctx, const Tensor& normalised, const std::optional<Tensor>& weight,
          const std::optional<Tensor>& bias, const Options& options) {
  ctx->save_for_backward({normalised, weight.value_or(Tensor()), bias.value_or(Tensor())});
  Kept::store(ctx, options.eps, options.centred, weight.has_value(), bias.has_value());
}

// Edges exist for the parameters that there are.
struct Needs {
  bool weight, bias;
  Needs(AutogradContext* ctx, size_t edge) {
    const Kept kept(ctx);
    weight = kept.weight && ctx->needs_input_grad(edge);
    bias = kept.bias && ctx->needs_input_grad(edge + kept.weight);
  }
};

struct LayerNormNode : torch::autograd::Function<LayerNormNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const std::optional<Tensor>& weight,
                        const std::optional<Tensor>& bias, const Options& options) {
    keep(ctx, input, weight, bias, options);
    return options.output;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const Needs needs(ctx, 1);
    const Gradients g = norm_gradients(ctx, grads[0], Tensor(), needs.weight, needs.bias);
    return {g.normalised, g.weight, g.bias, Tensor()};
  }
};

struct AddLayerNormNode : torch::autograd::Function<AddLayerNormNode> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& residual,
                               const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                               const Options& options) {
    ctx->set_materialize_grads(false);
    if (!(input.requires_grad() || residual.requires_grad())) ctx->mark_non_differentiable({options.sum});
    keep(ctx, options.sum, weight, bias, options);
    return {options.output, options.sum};
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const bool input = ctx->needs_input_grad(0), residual = ctx->needs_input_grad(1);
    const auto of_sum = [&](const Tensor& grad, const Tensor& weight, const Tensor& bias) -> variable_list {
      return {input ? grad : Tensor(), residual ? grad : Tensor(), weight, bias, Tensor()};
    };
    if (!grads[0].defined()) return of_sum(grads[1], Tensor(), Tensor());  // the sum alone was used
    const Needs needs(ctx, 2);
    const Gradients g = norm_gradients(ctx, grads[0], grads[1], needs.weight, needs.bias);
    return of_sum(g.normalised, g.weight, g.bias);
  }
};

std::optional<Tensor> optional(PyObject* object) {
  return object == Py_None ? std::nullopt : std::optional(THPVariable_Unpack(object));
}

// As the Functions' apply: (results, input, weight, bias, eps, centred), with a residual behind input for a sum.
PyObject* apply(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const Options options{THPVariable_Unpack(PyTuple_GET_ITEM(arguments[0], 0)), Tensor(), PyFloat_AsDouble(arguments[4]),
                        PyObject_IsTrue(arguments[5]) == 1};
  return THPVariable_Wrap(
      LayerNormNode::apply(THPVariable_Unpack(arguments[1]), optional(arguments[2]), optional(arguments[3]), options));
  END_HANDLE_TH_ERRORS
}
PyObject* apply_added(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* results = arguments[0];
  const Options options{THPVariable_Unpack(PyTuple_GET_ITEM(results, 0)),
                        THPVariable_Unpack(PyTuple_GET_ITEM(results, 1)), PyFloat_AsDouble(arguments[5]),
                        PyObject_IsTrue(arguments[6]) == 1};
  const variable_list outputs =
      AddLayerNormNode::apply(THPVariable_Unpack(arguments[1]), THPVariable_Unpack(arguments[2]),
                              optional(arguments[3]), optional(arguments[4]), options);
  PyObject* both = PyTuple_New(2);  // which takes over what it is given: PyTuple_Pack would hold it for ever
  PyTuple_SET_ITEM(both, 0, THPVariable_Wrap(outputs[0]));
  PyTuple_SET_ITEM(both, 1, THPVariable_Wrap(outputs[1]));
  return both;
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}
PyMethodDef kApply = method<apply>("layer_norm_node"), kApplyAdded = method<apply_added>("add_layer_norm_node");

}  // namespace
}  // namespace seqkern

// Called once from Python; returns (apply, apply_added).
extern "C" __attribute__((visibility("default"))) PyObject* seqkern_layer_norm_node(PyObject* long_way,
                                                                                    void* direct_backward) {
  Py_INCREF(long_way);  // for ever
  seqkern::long_way = long_way;
  seqkern::kernels_backward = reinterpret_cast<decltype(seqkern::kernels_backward)>(direct_backward);
  PyObject* functions = PyTuple_New(2);
  PyTuple_SET_ITEM(functions, 0, PyCFunction_NewEx(&seqkern::kApply, nullptr, nullptr));
  PyTuple_SET_ITEM(functions, 1, PyCFunction_NewEx(&seqkern::kApplyAdded, nullptr, nullptr));
  return functions;
}
