#include "node.h"

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PythonDispatcherTLS.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>

namespace seqkern::direct {

using torch::autograd::Node;
using torch::autograd::SavedVariable;

namespace {

Link* links = nullptr;
Rule* rules = nullptr;
Front* fronts = nullptr;
PyObject* long_way;  // (rule's name, gradients, saved, kept, numbers, needs) -> the inputs' gradients

// The state of a thread in which nothing has been asked of the dispatcher, and the tensors made in it.
struct Usual {
  uint64_t included, excluded, tensor;
  static Usual here() {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    return {keys.included_.raw_repr(), keys.excluded_.raw_repr(),
            at::detail::empty_cpu({0}, at::kFloat).key_set().raw_repr()};
  }
};
struct Usuals {
  Usual normal, inference;
  Usuals() {
    const c10::impl::ForceDispatchKeyGuard start(c10::default_included_set, c10::default_excluded_set);
    normal = Usual::here();
    const c10::InferenceMode guard;
    inference = Usual::here();
  }
};
const Usuals& usuals() {
  static const Usuals found;
  return found;
}

// csrc/common/tensor.cpp asks for memory here.
AtenTensorHandle allocate(const int64_t* sizes, size_t dims, int32_t dtype) {
  try {
    return reinterpret_cast<AtenTensorHandle>(new NativeTensor(
        at::detail::empty_cpu(at::IntArrayRef(sizes, dims), static_cast<at::ScalarType>(dtype), false)));
  } catch (const std::exception&) { return nullptr; }  // the caller says how much it was
}

}  // namespace

Link::Link(const char* name, const char* signature) : name(name), signature(signature), next(links) { links = this; }
Rule::Rule(const char* name, variable_list (*backward)(const Call&), Reads reads)
    : name(name), backward(backward), reads(reads), next(rules), index(rules ? rules->index + 1 : 0) {
  rules = this;
}
Front::Front(const char* name, PyCFunction function) : method{name, function, METH_FASTCALL, nullptr}, next(fronts) {
  fronts = this;
}

// ---- what may take the fast path ------------------------------------------------------------------------------------

bool undisturbed() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const uint64_t included = keys.included_.raw_repr(), excluded = keys.excluded_.raw_repr();
  const auto is = [&](const Usual& usual) { return included == usual.included && excluded == usual.excluded; };
  return (is(usuals().normal) || is(usuals().inference)) && !at::hasCallbacks() &&
         !at::impl::torch_function_mode_enabled() && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::PythonDispatcherTLS::get_state() && !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool usual(const NativeTensor& t) {
  const uint64_t keys = t.key_set().raw_repr();
  return (keys == usuals().normal.tensor || keys == usuals().inference.tensor) && t.has_storage();
}

const NativeTensor* read(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return nullptr;
  const NativeTensor& t = THPVariable_Unpack(object);
  if (!usual(t) || t.numel() == 0) return nullptr;
  switch (t.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kBFloat16:
    case at::kHalf: return &t;
    default: return nullptr;
  }
}

bool read_optional(PyObject* object, NativeTensor& t) {
  if (object == Py_None) return true;
  const NativeTensor* found = read(object);
  if (found) t = *found;
  return found;
}

bool read_number(PyObject* object, double& number) {
  if (!PyFloat_Check(object) && !PyLong_Check(object)) return false;
  number = PyFloat_AsDouble(object);
  return !(number == -1 && PyErr_Occurred());
}

bool read_integer(PyObject* object, int64_t& number) {
  if (!PyLong_CheckExact(object)) return false;
  number = PyLong_AsLongLong(object);
  return !(number == -1 && PyErr_Occurred());
}

bool read_flag(PyObject* object, bool& flag) {
  flag = object == Py_True;
  return flag || object == Py_False;
}

namespace {
NativeTensor alias_of(const NativeTensor& t, int64_t offset) {
  NativeTensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()),
                                                                t.key_set(), t.dtype());
  alias.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset() + offset);
  return alias;
}
}  // namespace

NativeTensor in_shape(const NativeTensor& t, at::IntArrayRef sizes) {
  NativeTensor alias = alias_of(t, 0);
  alias.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return alias;
}

NativeTensor in_strides(const NativeTensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  NativeTensor alias = alias_of(t, offset);
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return alias;
}

// ---- autograd -------------------------------------------------------------------------------------------------------

namespace {

// What Python returns for a call, or its error.
variable_list by_python(const Rule& rule, const Call& call) {
  const pybind11::gil_scoped_acquire lock;
  const auto tensors = [](const variable_list& list) {
    pybind11::tuple objects(list.size());
    for (size_t n = 0; n < list.size(); ++n)
      objects[n] = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(list[n]));
    return objects;
  };
  const auto others = [](const auto& list) {
    pybind11::tuple objects(list.size());
    for (size_t n = 0; n < list.size(); ++n)
      objects[n] = pybind11::cast(typename std::decay_t<decltype(list)>::value_type(list[n]));
    return objects;
  };
  const pybind11::object result = pybind11::reinterpret_borrow<pybind11::object>(long_way)(
      rule.name, tensors(call.grads), tensors(call.saved), tensors(call.kept), others(call.numbers),
      others(call.needs));
  variable_list found;
  for (const pybind11::handle t : result) found.push_back(t.is_none() ? NativeTensor() : THPVariable_Unpack(t.ptr()));
  return found;
}

variable_list gradients(const Rule& rule, const Call& call) {
  bool any = false, direct = !at::GradMode::is_enabled() && undisturbed();
  for (const NativeTensor& grad : call.grads) {
    any |= grad.defined();
    direct = direct && (!grad.defined() || usual(grad));
  }
  if (!any) return variable_list(call.needs.size());
  for (const variable_list* list : {&call.saved, &call.kept})
    for (const NativeTensor& t : *list) direct = direct && (!t.defined() || usual(t));
  if (direct) {
    try {
      variable_list found = rule.backward(call);
      if (!found.empty()) return found;
    } catch (const std::exception&) {}  // the dispatcher meets it again and names it
  }
  return by_python(rule, call);
}

struct DirectNode : Node {
  const Rule* rule;
  std::vector<SavedVariable> saved;
  size_t first_result;  // of the saved ones that are results
  variable_list kept;
  std::vector<double> numbers;

  std::string name() const override { return rule->name; }

  // Once a backward pass: a checkpoint refuses a second time.
  variable_list unpacked() {
    variable_list tensors;
    tensors.reserve(saved.size());
    for (size_t n = 0; n < saved.size(); ++n)
      tensors.push_back(n < first_result ? saved[n].unpack() : saved[n].unpack(this->getptr()));
    return tensors;
  }
  std::vector<bool> needs() const {
    std::vector<bool> wanted;
    for (size_t n = 0; n < this->num_outputs(); ++n) wanted.push_back(this->task_should_compute_output(n));
    return wanted;
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(this->mutex_);
    const bool reads = rule->reads == Reads::always || grads[0].defined();
    return gradients(*rule, {grads, reads ? unpacked() : variable_list(), kept, numbers, needs()});
  }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(this->mutex_);
    for (SavedVariable& each : saved) each.reset_data();
    kept.clear();
  }

  // For compiled autograd, which calls `gradients` as an opaque function of a graph. What was kept is found again.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(name());
    args.collect(static_cast<int64_t>(numbers.size()));
    for (const double number : numbers) args.collect(number);
    for (size_t n = 0; n < saved.size(); ++n) args.collect(saved[n], n >= first_result);
  }
  static variable_list of_packed(const variable_list& grads, const std::vector<c10::IValue>& values) {
    torch::dynamo::autograd::PackedArgs packed(values);
    const auto tensors = packed.template unpack<variable_list>();
    const auto index = packed.template unpack<int64_t>();
    const auto needs = packed.template unpack<std::vector<bool>>();
    std::vector<double> numbers(static_cast<size_t>(packed.template unpack<int64_t>()));
    for (double& number : numbers) number = packed.template unpack<double>();
    const Rule* rule = rules;
    while (rule->index != index) rule = rule->next;
    return gradients(*rule, {grads, tensors, {}, numbers, needs});
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable& each : saved) swap.before(each);
    PackedArgs packed;
    packed.pack(unpacked());
    packed.pack(rule->index);
    packed.pack(needs());
    packed.pack(static_cast<int64_t>(numbers.size()));
    for (const double number : numbers) packed.pack(number);
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
    for (SavedVariable& each : saved) swap.after(each);
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

template <class Inputs>
bool any_wanted(const Inputs& inputs) {
  if (!at::GradMode::is_enabled()) return false;
  for (const NativeTensor* t : inputs)
    if (t && t->defined() && t->requires_grad()) return true;
  return false;
}

}  // namespace

bool wanted(std::initializer_list<const NativeTensor*> inputs) { return any_wanted(inputs); }
bool wanted(const std::vector<const NativeTensor*>& inputs) { return any_wanted(inputs); }

void remember(Record&& record) {
  const auto node = make_node<DirectNode>();
  auto& fields = static_cast<DirectNode&>(*node);
  torch::autograd::edge_list edges;
  edges.reserve(record.inputs.size());
  for (const NativeTensor* t : record.inputs)
    edges.push_back(t && t->defined() ? torch::autograd::impl::gradient_edge(*t) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  fields.rule = &record.rule;
  for (NativeTensor& t : record.results) torch::autograd::set_history(t, node);
  fields.first_result = record.saved.size();
  fields.saved.reserve(record.saved.size() + record.saved_results.size());
  for (const NativeTensor& t : record.saved) fields.saved.emplace_back(t, false);
  for (const int n : record.saved_results) fields.saved.emplace_back(record.results[static_cast<size_t>(n)], true);
  fields.kept = std::move(record.kept);
  fields.numbers = std::move(record.numbers);
}

// ---- Python ---------------------------------------------------------------------------------------------------------

PyObject* wrap(const NativeTensor& t) { return THPVariable_Wrap(t); }

PyObject* tuple(std::initializer_list<PyObject*> objects) {
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(objects.size()));
  Py_ssize_t n = 0;
  for (PyObject* object : objects) PyTuple_SET_ITEM(result, n++, object);
  return result;
}

PyObject* run(Body body, Py_ssize_t expected, PyObject* const* arguments, Py_ssize_t count) {
  PyObject* result = nullptr;
  if (count == expected && undisturbed()) {
    try {
      result = body(arguments, count);
    } catch (python_error& error) {  // of a hook on saved tensors
      error.restore();
      return nullptr;
    } catch (const std::exception&) { result = nullptr; }
  }
  if (result) return result;
  PyErr_Clear();
  Py_RETURN_NONE;
}

}  // namespace seqkern::direct

// Called once from Python with csrc/common/direct.cpp's two functions: the fronts by name, or None where the kernels
// are of another build.
extern "C" __attribute__((visibility("default"))) PyObject* seqkern_fast_path(
    PyObject* long_way, const void* (*find)(const char*, const char*), void (*set_allocate)(seqkern::DirectAllocate)) {
  using namespace seqkern::direct;
  for (Link* link = links; link; link = link->next) {
    link->function = find(link->name, link->signature);
    if (!link->function) Py_RETURN_NONE;
  }
  Py_INCREF(long_way);  // for ever
  seqkern::direct::long_way = long_way;
  usuals();
  set_allocate(allocate);
  PyObject* functions = PyDict_New();
  for (Front* front = fronts; front && functions; front = front->next) {
    PyObject* function = PyCFunction_NewEx(&front->method, nullptr, nullptr);
    if (!function || PyDict_SetItemString(functions, front->method.ml_name, function) != 0) Py_CLEAR(functions);
    Py_XDECREF(function);
  }
  return functions;
}
