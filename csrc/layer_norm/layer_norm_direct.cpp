// The short way for small norms: a Python function that goes from tensors to the kernel without the dispatcher.
//
// A dispatched call takes several microseconds before the kernel starts; a norm of 8 x 64 takes half of one. Where
// nothing can tell the difference, this function reads the tensors' addresses and calls the kernel. Where anything else
// is the case (a subclass, another device or layout, a mode, a transform, a trace, a profiler) it returns None, and the
// caller takes the long way, which also has the error messages. seqkern/ops/_direct.py has the Python half.
//
// Tried and lost, whole calls of 8 x 64 beside torch's 3.3 us: the dispatcher, 25 us; the same checks in Python and the
// kernel through ctypes, 6.6.
#include "layer_norm_direct.h"

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
  PyObject *none, *tensor, *parameter, *dtypes[4];
  PyObject *empty_like, *apply, *is_grad_enabled, *dispatch_keys;
  PyObject* guards;  // a tuple of functions without arguments: any that returns something true forbids the short way
  PyObject* forward_ad;  // the module: forward mode is at work when its _current_level is not negative
  PyObject *is_cpu, *dtype, *shape, *requires_grad, *is_contiguous, *is_neg, *data_ptr, *current_level;
};
Python py;

PyObject* none() {
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

PyObject* empty_like(PyObject* tensor, void*& address) {
  Ref result(PyObject_CallFunctionObjArgs(py.empty_like, tensor, nullptr));
  if (!result) return nullptr;
  const Ref number(PyObject_CallMethodObjArgs(result.get(), py.data_ptr, nullptr));
  if (!number) return nullptr;
  address = PyLong_AsVoidPtr(number.get());
  return address ? result.release() : nullptr;
}

// Rows and columns of a matrix of 1 to `largest` elements whose last dimension is `normalized_shape`.
bool sizes(PyObject* input, PyObject* normalized_shape, int64_t largest, DirectNorm& norm) {
  const Ref shape(PyObject_GetAttr(input, py.shape));
  const Py_ssize_t dims = shape ? PyTuple_Size(shape.get()) : 0;
  if (dims < 1 || PySequence_Size(normalized_shape) != 1) return false;
  const Ref last(PySequence_GetItem(normalized_shape, 0));
  if (!last) return false;
  norm.columns = PyLong_AsLongLong(last.get());
  norm.rows = 1;
  for (Py_ssize_t i = 0; i < dims; ++i) {
    const int64_t size = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), i));
    if (size <= 0 || size > largest) return false;
    if (i == dims - 1) return size == norm.columns && norm.rows <= largest / size;
    norm.rows *= size;
    if (norm.rows > largest) return false;
  }
  return false;
}

// forward(input, normalized_shape, weight, bias, eps, centred, largest) -> output, or None for the long way.
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 7 || !quiet()) return none();
  PyObject *input = arguments[0], *weight = arguments[2], *bias = arguments[3];
  DirectNorm norm{};
  void *x, *w, *b, *y;
  if (!plain(input, norm.dtype, x)) return none();
  if (!sizes(input, arguments[1], PyLong_AsLongLong(arguments[6]), norm)) return none();
  if (!plain_parameter(weight, norm.columns, norm.weight_dtype, w)) return none();
  if (!plain_parameter(bias, norm.columns, norm.bias_dtype, b)) return none();
  norm.eps = PyFloat_AsDouble(arguments[4]);
  norm.centred = PyObject_IsTrue(arguments[5]) == 1;
  if (PyErr_Occurred() || !(norm.eps >= 0)) return none();
  const Ref output(empty_like(input, y));
  if (!output) return none();
  direct_forward(norm, x, w, b, y);

  const Ref grad(PyObject_CallNoArgs(py.is_grad_enabled));
  const bool wanted = PyObject_IsTrue(grad.get()) == 1 &&
                      (attribute(input, py.requires_grad) || (w && attribute(weight, py.requires_grad)) ||
                       (b && attribute(bias, py.requires_grad)));
  if (!wanted) {
    Py_IncRef(output.get());
    return output.get();
  }
  // The output is already there; the Function only remembers how to go back.
  const Ref box(PyTuple_New(1));
  Py_IncRef(output.get());
  PyTuple_SetItem(box.get(), 0, output.get());
  return PyObject_CallFunctionObjArgs(py.apply, box.get(), input, weight, bias, arguments[4], arguments[5], nullptr);
}

// backward(grad_output, input, weight, bias, eps, centred, need_weight, need_bias) -> (grad_input, grad_weight,
// grad_bias), None in it for what is not needed, or None for the long way.
PyObject* backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 8 || !quiet()) return none();
  PyObject *grad_output = arguments[0], *input = arguments[1], *weight = arguments[2], *bias = arguments[3];
  const Ref grad(PyObject_CallNoArgs(py.is_grad_enabled));  // then the gradients are differentiated again
  if (PyObject_IsTrue(grad.get()) != 0) return none();
  DirectNorm norm{};
  Dtype grad_dtype{};
  void *dy, *x, *w, *b, *dx, *dw = nullptr, *db = nullptr;
  // Gradients can be more things than arguments: batched, or known to be zero. `dispatch_keys` tells them apart.
  const Ref usual(PyObject_CallFunctionObjArgs(py.dispatch_keys, grad_output, nullptr));
  if (!usual || PyObject_IsTrue(usual.get()) != 1) return none();
  if (!plain(grad_output, grad_dtype, dy) || !plain(input, norm.dtype, x) || grad_dtype != norm.dtype) return none();
  const Ref shape(PyObject_GetAttr(input, py.shape)), grad_shape(PyObject_GetAttr(grad_output, py.shape));
  const Py_ssize_t dims = PyTuple_Size(shape.get());
  if (PyTuple_Size(grad_shape.get()) != dims) return none();
  norm.rows = 1;
  for (Py_ssize_t i = 0; i < dims; ++i) {
    norm.columns = PyLong_AsLongLong(PyTuple_GetItem(shape.get(), i));
    if (PyLong_AsLongLong(PyTuple_GetItem(grad_shape.get(), i)) != norm.columns) return none();
    if (i < dims - 1) norm.rows *= norm.columns;
  }
  if (!plain_parameter(weight, norm.columns, norm.weight_dtype, w)) return none();
  if (!plain_parameter(bias, norm.columns, norm.bias_dtype, b)) return none();
  norm.eps = PyFloat_AsDouble(arguments[4]);
  norm.centred = PyObject_IsTrue(arguments[5]) == 1;
  const bool need_weight = PyObject_IsTrue(arguments[6]) == 1, need_bias = PyObject_IsTrue(arguments[7]) == 1;
  Ref grad_input(empty_like(input, dx));
  Ref grad_weight(need_weight ? empty_like(weight, dw) : none()), grad_bias(need_bias ? empty_like(bias, db) : none());
  if (PyErr_Occurred() || !grad_input || !grad_weight || !grad_bias) return none();
  direct_backward(norm, dy, x, w, dx, dw, db);
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
  PyObject** targets[] = {&py.none,          &py.tensor,    &py.parameter,  &py.dtypes[0], &py.dtypes[1],
                          &py.dtypes[2],     &py.dtypes[3], &py.empty_like, &py.apply,     &py.is_grad_enabled,
                          &py.dispatch_keys, &py.guards,    &py.forward_ad};
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
