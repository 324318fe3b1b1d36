// The short way for norms: a Python function that goes from tensors to the kernel without the dispatcher.
//
// A dispatched call takes several microseconds before the kernel starts, and ten times as long where the last op has
// just swept the caches; a norm of 8 x 64 takes half of one. Where nothing can tell the difference, this function reads
// the tensors' addresses and calls the kernel. Where anything else is the case (a subclass, another device or layout, a
// mode, a transform, a trace, a profiler) it returns None, and the caller takes the long way, which also has the error
// messages. seqkern/ops/_direct.py has the Python half.
//
// Tried and lost, forward calls of 8 x 64 beside torch's 3.3 us (now 3.9 to 4.6): the dispatcher, 25 us; the same
// checks in Python and the kernel through ctypes, 6.6.
#include "direct.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "python_abi.h"

namespace seqkern {
namespace {

// Owns a reference, which may be null (an error is set then).
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() {
    if (object_) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* release() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }

 private:
  PyObject* object_;
};

// What Python hands over once: types, singletons and callables. All live as long as the process.
struct Python {
  PyObject *none, *exception, *tensor, *parameter, *dtypes[4];
  PyObject *empty_like, *apply, *apply_added, *is_grad_enabled, *is_usual;
  PyObject* guards;  // a tuple of functions without arguments: any that returns something true forbids the short way
  PyObject* forward_ad;  // the module: forward mode is at work when its _current_level is not negative
  PyObject *is_cpu, *dtype, *shape, *requires_grad, *is_contiguous, *is_neg, *data_ptr, *current_level;
};
Python py;

// None for the long way. Errors on the way here mean no more than that; an interrupt is passed on.
PyObject* none() {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(py.exception)) return nullptr;
  PyErr_Clear();
  Py_IncRef(py.none);
  return py.none;
}

bool attribute(PyObject* object, PyObject* name) {
  const Ref value(PyObject_GetAttr(object, name));
  return value && PyObject_IsTrue(value.get()) == 1;
}
bool method(PyObject* object, PyObject* name) {
  const Ref value(PyObject_CallMethodObjArgs(object, name, nullptr));
  return value && PyObject_IsTrue(value.get()) == 1;
}

// A plain contiguous CPU tensor with memory: its dtype and address.
bool plain(PyObject* object, Dtype& dtype, void*& address) {
  const Ref type(PyObject_Type(object));
  if (type.get() != py.tensor && type.get() != py.parameter) return false;
  if (!attribute(object, py.is_cpu) || !method(object, py.is_contiguous) || method(object, py.is_neg)) return false;
  const Ref found(PyObject_GetAttr(object, py.dtype));
  int code = 0;
  while (code < 4 && found.get() != py.dtypes[code]) ++code;
  if (code == 4) return false;
  dtype = static_cast<Dtype>(code);
  const Ref number(PyObject_CallMethodObjArgs(object, py.data_ptr, nullptr));
  if (!number) return false;
  address = PyLong_AsVoidPtr(number.get());
  return address != nullptr;
}

// The same for a parameter of `columns` elements, or None.
bool plain_parameter(PyObject* object, int64_t columns, Dtype& dtype, void*& address) {
  address = nullptr;
  if (object == py.none) return true;
  if (!plain(object, dtype, address)) return false;
  const Ref shape(PyObject_GetAttr(object, py.shape));
  return shape && PyTuple_Size(shape.get()) == 1 && PyLong_AsLongLong(PyTuple_GetItem(shape.get(), 0)) == columns;
}

bool quiet() {
  for (Py_ssize_t i = 0, count = PyTuple_Size(py.guards); i < count; ++i) {
    const Ref answer(PyObject_CallNoArgs(PyTuple_GetItem(py.guards, i)));
    if (!answer || PyObject_IsTrue(answer.get()) != 0) return false;
  }
  const Ref level(PyObject_GetAttr(py.forward_ad, py.current_level));
  return level && PyLong_AsLongLong(level.get()) < 0;
}

// What is read of one tensor's shape.
struct Shape {
  static constexpr Py_ssize_t kMost = 8;
  int64_t sizes[kMost];
  Py_ssize_t dims = 0;

  bool read(PyObject* tensor) {
    const Ref shape(PyObject_GetAttr(tensor, py.shape));
    dims = shape ? PyTuple_Size(shape.get()) : 0;
    if (dims < 1 || dims > kMost) return false;
    for (Py_ssize_t i = 0; i < dims; ++i) sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), i));
    return true;
  }
  bool operator==(const Shape& other) const {
    return dims == other.dims && std::equal(sizes, sizes + dims, other.sizes);
  }
  // Rows and columns of a matrix of 1 to `largest` elements.
  bool matrix(int64_t largest, DirectNorm& norm) const {
    int64_t elements = 1;
    for (Py_ssize_t i = 0; i < dims; ++i) {
      if (sizes[i] <= 0 || sizes[i] > largest / elements) return false;
      elements *= sizes[i];
    }
    norm.columns = sizes[dims - 1];
    norm.rows = elements / norm.columns;
    return true;
  }
};

PyObject* new_like(PyObject* like, void*& address) {
  Ref result(PyObject_CallFunctionObjArgs(py.empty_like, like, nullptr));
  const Ref number(result ? PyObject_CallMethodObjArgs(result.get(), py.data_ptr, nullptr) : nullptr);
  if (!number) return nullptr;
  address = PyLong_AsVoidPtr(number.get());
  return address ? result.release() : nullptr;
}

bool no_grad() {
  const Ref grad(PyObject_CallNoArgs(py.is_grad_enabled));
  return PyObject_IsTrue(grad.get()) == 0;
}

PyObject* pair(PyObject* first, PyObject* second) {
  PyObject* result = PyTuple_New(second ? 2 : 1);
  Py_IncRef(first);
  PyTuple_SetItem(result, 0, first);
  if (second) {
    Py_IncRef(second);
    PyTuple_SetItem(result, 1, second);
  }
  return result;
}

// Memory of a forward call's statistics that Python owns, or nothing, which is as good.
constexpr const char* kStatistics = "seqkern.layer_norm.statistics";
constexpr size_t kMostStatistics = size_t{1} << 20;  // more should come from the pool
PyObject* new_statistics(const DirectNorm& norm, void*& address) {
  address = std::malloc(statistics_size(norm));
  if (!address) return none();
  PyObject* owner = PyCapsule_New(address, kStatistics,
                                  [](PyObject* capsule) { std::free(PyCapsule_GetPointer(capsule, kStatistics)); });
  if (!owner) std::free(address);
  return owner;
}

// Whether a kernel found the memory that it needs. The long way asks for more, and says so when there is none.
template <class Kernel>
bool has_memory(Kernel kernel) {
  try {
    kernel();
    return true;
  } catch (const std::bad_alloc&) { return false; }
}

// Elements from which on other threads may run Python meanwhile.
constexpr int64_t kLarge = int64_t{1} << 17;

// forward(input, residual, normalized_shape, weight, bias, eps, centred, largest) -> output, or (output, sum) with a
// residual, or None for the long way.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 8 || !quiet()) return none();
  PyObject *input = arguments[0], *residual = arguments[1], *weight = arguments[3], *bias = arguments[4];
  const bool added = residual != py.none;
  DirectNorm norm{};
  Dtype residual_dtype{};
  Shape shape, residual_shape;
  void *x, *r = nullptr, *w, *b, *y, *s = nullptr;
  // What may run code of the caller comes before the addresses.
  if (PySequence_Size(arguments[2]) != 1) return none();
  const Ref last(PySequence_GetItem(arguments[2], 0));
  const int64_t columns = last ? PyLong_AsLongLong(last.get()) : 0;
  norm.eps = PyFloat_AsDouble(arguments[5]);
  norm.centred = PyObject_IsTrue(arguments[6]) == 1;
  if (PyErr_Occurred() || !(norm.eps >= 0)) return none();
  if (!plain(input, norm.dtype, x) || !shape.read(input)) return none();
  if (!shape.matrix(PyLong_AsLongLong(arguments[7]), norm) || norm.columns != columns) return none();
  if (statistics_size(norm) > kMostStatistics) return none();
  if (added && (!plain(residual, residual_dtype, r) || residual_dtype != norm.dtype || !residual_shape.read(residual) ||
                !(residual_shape == shape)))
    return none();
  if (!plain_parameter(weight, norm.columns, norm.weight_dtype, w)) return none();
  if (!plain_parameter(bias, norm.columns, norm.bias_dtype, b)) return none();
  const Ref output(new_like(input, y));
  const Ref sum(output && added ? new_like(input, s) : nullptr);
  if (!output || (added && !sum)) return none();
  const bool wanted =
      !no_grad() && (attribute(input, py.requires_grad) || (added && attribute(residual, py.requires_grad)) ||
                     (w && attribute(weight, py.requires_grad)) || (b && attribute(bias, py.requires_grad)));
  void* found = nullptr;
  const Ref statistics(wanted ? new_statistics(norm, found) : none());
  if (!statistics) return none();
  const bool large = norm.rows * norm.columns > kLarge;
  PyThreadState* const state = large ? PyEval_SaveThread() : nullptr;
  const bool done = has_memory([&] { direct_forward(norm, x, r, w, b, y, s, found); });
  if (large) PyEval_RestoreThread(state);
  if (!done) return none();

  Ref results(pair(output.get(), sum.get()));
  // The results are already there; the Function only remembers how to go back.
  if (wanted && added)
    return PyObject_CallFunctionObjArgs(py.apply_added, results.get(), input, residual, weight, bias, arguments[5],
                                        arguments[6], statistics.get(), nullptr);
  if (wanted)
    return PyObject_CallFunctionObjArgs(py.apply, results.get(), input, weight, bias, arguments[5], arguments[6],
                                        statistics.get(), nullptr);
  if (added) return results.release();
  Py_IncRef(output.get());
  return output.get();
}

// backward(grad_output, grad_sum, what was normalised, weight, bias, eps, centred, statistics or None, need_weight,
// need_bias) -> (gradient of what was normalised, grad_weight, grad_bias), None in it for what is not needed, or None
// for the long way.
PyObject* backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 10 || !quiet() || !no_grad()) return none();  // with gradients enabled they are differentiated again
  PyObject *input = arguments[2], *weight = arguments[3], *bias = arguments[4];
  DirectNorm norm{};
  Shape shape;
  void *x, *w, *b, *dx, *dw = nullptr, *db = nullptr, *grads[2] = {nullptr, nullptr};
  if (!plain(input, norm.dtype, x) || !shape.read(input) || !shape.matrix(int64_t{1} << 40, norm)) return none();
  for (int i = 0; i < 2; ++i) {
    PyObject* grad = arguments[i];
    if (i == 1 && grad == py.none) continue;
    // Gradients can be more things than arguments: batched, or known to be zero. `is_usual` tells them apart.
    const Ref usual(PyObject_CallFunctionObjArgs(py.is_usual, grad, nullptr));
    if (!usual || PyObject_IsTrue(usual.get()) != 1) return none();
    Dtype dtype{};
    Shape grad_shape;
    if (!plain(grad, dtype, grads[i]) || dtype != norm.dtype || !grad_shape.read(grad) || !(grad_shape == shape))
      return none();
  }
  if (!plain_parameter(weight, norm.columns, norm.weight_dtype, w)) return none();
  if (!plain_parameter(bias, norm.columns, norm.bias_dtype, b)) return none();
  norm.eps = PyFloat_AsDouble(arguments[5]);
  norm.centred = PyObject_IsTrue(arguments[6]) == 1;
  const void* statistics = arguments[7] == py.none ? nullptr : PyCapsule_GetPointer(arguments[7], kStatistics);
  const bool need_weight = PyObject_IsTrue(arguments[8]) == 1, need_bias = PyObject_IsTrue(arguments[9]) == 1;
  Ref grad_input(new_like(input, dx));
  Ref grad_weight(need_weight ? new_like(weight, dw) : none());
  Ref grad_bias(need_bias ? new_like(bias, db) : none());
  if (!grad_input || !grad_weight || !grad_bias || PyErr_Occurred()) return none();
  if (!has_memory([&] { direct_backward(norm, statistics, grads[0], grads[1], x, w, dx, dw, db); })) return none();
  PyObject* result = PyTuple_New(3);
  PyTuple_SetItem(result, 0, grad_input.release());
  PyTuple_SetItem(result, 1, grad_weight.release());
  PyTuple_SetItem(result, 2, grad_bias.release());
  return result;
}

PyMethodDef kForward = {"layer_norm", forward, METH_FASTCALL, nullptr};
PyMethodDef kBackward = {"layer_norm_backward", backward, METH_FASTCALL, nullptr};

}  // namespace
}  // namespace seqkern

// Called once from Python with everything in `Python`, in order; returns (forward, backward).
extern "C" __attribute__((visibility("default"))) PyObject* seqkern_direct_layer_norm(PyObject* objects) {
  using seqkern::py;
  Py_IncRef(objects);  // for ever
  PyObject** targets[] = {&py.none,       &py.exception,       &py.tensor,    &py.parameter, &py.dtypes[0],
                          &py.dtypes[1],  &py.dtypes[2],       &py.dtypes[3], &py.apply,     &py.apply_added,
                          &py.empty_like, &py.is_grad_enabled, &py.is_usual,  &py.guards,    &py.forward_ad};
  Py_ssize_t i = 0;
  for (PyObject** target : targets) *target = PyTuple_GetItem(objects, i++);
  py.is_cpu = PyUnicode_InternFromString("is_cpu");
  py.dtype = PyUnicode_InternFromString("dtype");
  py.shape = PyUnicode_InternFromString("shape");
  py.requires_grad = PyUnicode_InternFromString("requires_grad");
  py.is_contiguous = PyUnicode_InternFromString("is_contiguous");
  py.is_neg = PyUnicode_InternFromString("is_neg");
  py.current_level = PyUnicode_InternFromString("_current_level");
  py.data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* functions = PyTuple_New(2);
  PyTuple_SetItem(functions, 0, PyCFunction_NewEx(&seqkern::kForward, nullptr, nullptr));
  PyTuple_SetItem(functions, 1, PyCFunction_NewEx(&seqkern::kBackward, nullptr, nullptr));
  return functions;
}

extern "C" __attribute__((visibility("default"))) const void* seqkern_direct_calls() {
  static const seqkern::DirectCalls calls = {seqkern::direct_backward, seqkern::pool_take, seqkern::pool_give};
  return &calls;
}
