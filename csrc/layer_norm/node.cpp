// The autograd node of the short way (direct.cpp) in C++.
//
// A node of Python's takes longer than a small norm: an 8 x 64 norm with a graph takes 13.1 us there and 6.9 here, and
// 111 and 78 us forward and backward (processor time of one Zen 3 core; torch's 6.8 and 82, same run). torch's stable
// ABI has no nodes, so this file is a library of its own, built against the headers of the torch that is installed and
// loaded beside that very torch only; with any other, or where Python's headers are missing, the Python Functions of
// seqkern/ops/_direct.py do the same. Tried and lost: torch's Function for C++, 9.3 us and 89 (torch's 6.7 and 77 in
// that run): its context keeps options as a map of names.
//
// The results are computed already when a node is made. It keeps what was normalised and the parameters, as torch's
// node does, and calls the kernels by address. A gradient that is anything but a plain tensor, or that is itself to be
// differentiated, takes the long way, in Python.
#include <Python.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstdlib>
#include <memory>

#include "direct.h"

namespace seqkern {
namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

const DirectCalls* calls;
PyObject* long_way;  // of seqkern/ops/_direct.py

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

// Uninitialised, of a tensor's shape and dtype, from the pool where that has memory of the size.
Tensor memory_like(const Tensor& t) {
  size_t size;
  void* block = calls->take(t.nbytes(), size);
  if (!block) return at::empty(t.sizes(), t.options().requires_grad(false));
  const auto give = [size](void* memory) { calls->give(memory, size); };
  return at::from_blob(block, t.sizes(), give, t.options().requires_grad(false));
}

// What a node keeps beside tensors.
struct Options {
  double eps;
  bool centred;
};

struct Gradients {
  Tensor normalised, weight, bias;
};

// What Python returns, or its error, with the global lock held.
Gradients by_python(const Tensor& grad_output, const Tensor& grad_sum, const variable_list& saved,
                    const Options& options, bool need_weight, bool need_bias) {
  const pybind11::gil_scoped_acquire lock;
  const auto wrap = [](const Tensor& t) { return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(t)); };
  const pybind11::object inputs = pybind11::make_tuple(wrap(saved[0]), wrap(saved[1]), wrap(saved[2]));
  const pybind11::object result = pybind11::reinterpret_borrow<pybind11::object>(long_way)(
      wrap(grad_output), wrap(grad_sum), inputs, options.eps, options.centred, need_weight, need_bias);
  const auto unwrap = [&](int i) {
    const pybind11::object t = result[pybind11::int_(i)];
    return t.is_none() ? Tensor() : THPVariable_Unpack(t.ptr());
  };
  return {unwrap(0), unwrap(1), unwrap(2)};
}

// saved: what was normalised, weight, bias. `statistics`: the forward call's, or null.
Gradients norm_gradients(const Tensor& grad_output, const Tensor& grad_sum, const variable_list& saved,
                         const Options& options, const void* statistics, bool need_weight, bool need_bias) {
  const Tensor &input = saved[0], &weight = saved[1], &bias = saved[2];
  DirectNorm norm{};
  norm.eps = options.eps;
  norm.centred = options.centred;
  const auto like_input = [&](const Tensor& grad) {
    return plain(grad) && grad.scalar_type() == input.scalar_type() && grad.sizes() == input.sizes();
  };
  bool direct = !at::GradMode::is_enabled() && !at::hasCallbacks() && !c10::impl::TorchDispatchModeTLS::any_modes_set();
  direct = direct && plain(input) && find_dtype(input, norm.dtype) && input.dim() > 0 && input.numel() > 0;
  direct = direct && like_input(grad_output) && (!grad_sum.defined() || like_input(grad_sum));
  direct = direct && plain_parameter(weight, input.size(-1), norm.weight_dtype) &&
           plain_parameter(bias, input.size(-1), norm.bias_dtype);
  if (!direct) return by_python(grad_output, grad_sum, saved, options, need_weight, need_bias);

  const at::AutoDispatchBelowADInplaceOrView below;
  norm.columns = input.size(-1);
  norm.rows = input.numel() / norm.columns;
  const auto address = [](const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; };
  const Gradients g{memory_like(input), need_weight ? at::empty_like(weight) : Tensor(),
                    need_bias ? at::empty_like(bias) : Tensor()};
  calls->backward(norm, statistics, address(grad_output), address(grad_sum), address(input), address(weight),
                  address(g.normalised), address(g.weight), address(g.bias));
  return g;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// The edges are those of the inputs that were normalised (one, or the two terms of a sum), of weight and of bias; an
// edge that leads nowhere where one is not there. The gradients that come in are the output's, and the sum's where it
// can have one.
template <int kInputs>
struct NormNode : Node {
  Options options;
  SavedVariable normalised, weight, bias;
  std::unique_ptr<void, Free> statistics;

  std::string name() const override { return kInputs == 1 ? "LayerNormNode" : "AddLayerNormNode"; }

  static variable_list gradients(const variable_list& grads, const variable_list& saved, const Options& options,
                                 const void* statistics, const std::vector<bool>& needs) {
    variable_list found(kInputs + 2);
    const Tensor sum = grads.size() > 1 ? grads[1] : Tensor();
    const auto of_inputs = [&](const Tensor& grad) {
      for (int n = 0; n < kInputs; ++n)
        if (needs[n]) found[n] = grad;
    };
    if (!grads[0].defined()) {  // the sum alone was used, or nothing
      of_inputs(sum);
      return found;
    }
    const Gradients g = norm_gradients(grads[0], sum, saved, options, statistics, needs[kInputs], needs[kInputs + 1]);
    of_inputs(g.normalised);
    found[kInputs] = g.weight;
    found[kInputs + 1] = g.bias;
    return found;
  }

  // Once a backward pass: a checkpoint refuses a second time.
  variable_list saved_variables() { return {normalised.unpack(this->getptr()), weight.unpack(), bias.unpack()}; }
  std::vector<bool> needs() const {
    std::vector<bool> wanted;
    for (size_t n = 0; n < kInputs + 2; ++n) wanted.push_back(this->task_should_compute_output(n));
    return wanted;
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(this->mutex_);
    return gradients(grads, grads[0].defined() ? saved_variables() : variable_list(), options, statistics.get(),
                     needs());
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(this->mutex_);
    for (SavedVariable* saved : {&normalised, &weight, &bias}) saved->reset_data();
    statistics.reset();
  }

  // For compiled autograd, which calls `gradients` as an opaque function of a graph.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    args.collect(options.eps);
    args.collect(options.centred);
    args.collect(normalised, kInputs == 2);
    args.collect(weight, false);
    args.collect(bias, false);
  }
  static variable_list of_packed(const variable_list& grads, const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    const auto saved = packed.template unpack<variable_list>();
    const auto eps = packed.template unpack<double>();
    const auto centred = packed.template unpack<bool>();
    return gradients(grads, saved, {eps, centred}, nullptr, packed.template unpack<std::vector<bool>>());
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable* saved : {&normalised, &weight, &bias}) swap.before(*saved);
    PackedArgs packed;
    packed.pack(saved_variables());
    packed.pack(options.eps);
    packed.pack(options.centred);
    packed.pack(needs());
    const auto values = std::move(packed).vec();
    std::vector<at::TypePtr> types;
    for (const c10::IValue& value : values)
      types.push_back(value.isTensor() ? at::TypePtr(at::TensorType::get()) : value.type());
    const auto& compiler = getPyCompilerInterface();
    const auto function = compiler->bind_function(swap.get_py_compiler(), name(), of_packed, types, true, false);
    const auto metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(this->next_edges()));
    variable_list found =
        compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grads, values, metadata);
    for (SavedVariable* saved : {&normalised, &weight, &bias}) swap.after(*saved);
    return found;
  }
};

// A node that owns itself as this torch's nodes do.
template <class N, class Pointer = std::decay_t<decltype(std::declval<Node&>().getptr())>>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new N, [](auto* node) { deleteNode(node); });
  } else {
    return Pointer(c10::make_intrusive<N>());
  }
}

Tensor optional(PyObject* object) { return object == Py_None ? Tensor() : THPVariable_Unpack(object); }

// The results' history: made by a node of these edges. The sum is the second result, kept as what it is.
template <int kInputs>
void remember(const variable_list& results, torch::autograd::edge_list&& edges, bool sum_differentiable,
              const Tensor& input, PyObject* const* parameters) {
  const auto node = make_node<NormNode<kInputs>>();
  auto& fields = static_cast<NormNode<kInputs>&>(*node);
  node->set_next_edges(std::move(edges));
  fields.options = {PyFloat_AsDouble(parameters[2]), PyObject_IsTrue(parameters[3]) == 1};
  if (parameters[4] != Py_None) {  // a capsule that gives its memory away
    fields.statistics.reset(PyCapsule_GetPointer(parameters[4], PyCapsule_GetName(parameters[4])));
    PyCapsule_SetDestructor(parameters[4], nullptr);
  }
  torch::autograd::set_history(results[0], node);
  const bool output = kInputs == 2 && sum_differentiable;
  if (output) torch::autograd::set_history(results[1], node);
  fields.normalised = SavedVariable(kInputs == 2 ? results[1] : input, output);
  fields.weight = SavedVariable(optional(parameters[0]), false);
  fields.bias = SavedVariable(optional(parameters[1]), false);
}

// As the Functions' apply: (results, input, weight, bias, eps, centred, statistics), with a residual behind input for a
// sum.
PyObject* apply(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* output = PyTuple_GET_ITEM(arguments[0], 0);
  const Tensor& input = THPVariable_Unpack(arguments[1]);
  remember<1>({THPVariable_Unpack(output)},
              torch::autograd::collect_next_edges(input, optional(arguments[2]), optional(arguments[3])), false, input,
              arguments + 2);
  Py_INCREF(output);
  return output;
  END_HANDLE_TH_ERRORS
}
PyObject* apply_added(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* results = arguments[0];
  const Tensor &input = THPVariable_Unpack(arguments[1]), &residual = THPVariable_Unpack(arguments[2]);
  remember<2>({THPVariable_Unpack(PyTuple_GET_ITEM(results, 0)), THPVariable_Unpack(PyTuple_GET_ITEM(results, 1))},
              torch::autograd::collect_next_edges(input, residual, optional(arguments[3]), optional(arguments[4])),
              input.requires_grad() || residual.requires_grad(), input, arguments + 3);
  Py_INCREF(results);
  return results;
  END_HANDLE_TH_ERRORS
}

// (tensor) -> uninitialised memory like it.
PyObject* new_like(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(memory_like(THPVariable_Unpack(arguments[0])));
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}
PyMethodDef kApply = method<apply>("layer_norm_node"), kApplyAdded = method<apply_added>("add_layer_norm_node");
PyMethodDef kNewLike = method<new_like>("new_like");

}  // namespace
}  // namespace seqkern

// Called once from Python; returns (apply, apply_added, new_like). The number in its name grows with what it and the
// kernels' library expect of each other: one that was built before is not taken for this.
extern "C" __attribute__((visibility("default"))) PyObject* seqkern_layer_norm_node_3(PyObject* long_way,
                                                                                      const void* calls) {
  Py_INCREF(long_way);  // for ever
  seqkern::long_way = long_way;
  seqkern::calls = static_cast<const seqkern::DirectCalls*>(calls);
  PyObject* functions = PyTuple_New(3);
  PyTuple_SET_ITEM(functions, 0, PyCFunction_NewEx(&seqkern::kApply, nullptr, nullptr));
  PyTuple_SET_ITEM(functions, 1, PyCFunction_NewEx(&seqkern::kApplyAdded, nullptr, nullptr));
  PyTuple_SET_ITEM(functions, 2, PyCFunction_NewEx(&seqkern::kNewLike, nullptr, nullptr));
  return functions;
}
