// The fast path: from Python's arguments to an op's CPU kernel without the dispatcher, and back through a node of
// autograd in C++.
//
// A dispatched call with its checks in Python takes 20 to 60 us before the kernel starts; many a kernel takes less
// than one. Where nothing could tell the difference (plain CPU tensors; no mode, transform, trace, profiler or autocast
// at work), a front reads the arguments, calls the op as a function (direct.h) and keeps what the way back needs. In
// any other case, and for every argument that is not as it should be, it returns None: the caller goes on to the
// dispatcher, and to the error messages.
//
// torch's stable ABI has neither nodes nor a way to read Python's tensors, so csrc/*/node.cpp are a library of their
// own, built against the headers of the torch that is installed and loaded beside that very torch only. Without it
// every call goes through the dispatcher. csrc/common/NOTES.md has what else was tried.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "direct.h"

namespace seqkern::direct {

using torch::autograd::variable_list;
using NativeTensor = at::Tensor;

// ---- the op as a function -------------------------------------------------------------------------------------------

// What the loader fills in, all of them or none.
struct Link {
  Link(const char* name, const char* signature);
  const char *name, *signature;
  const void* function = nullptr;
  Link* next;
};

template <class Signature>
class Function {
 public:
  explicit Function(const char* name) : link_(name, typeid(Signature).name()) {}
  // As the dispatcher calls a CPU kernel: below autograd, with Python free to run in other threads.
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) const {
    const at::AutoDispatchBelowADInplaceOrView below;
    return reinterpret_cast<Signature*>(const_cast<void*>(link_.function))(std::forward<Arguments>(arguments)...);
  }

 private:
  Link link_;
};

// Between torch's tensors and the stable ABI's, whose handles are addresses of torch's.
inline Tensor stable(const NativeTensor& t) { return Tensor(reinterpret_cast<AtenTensorHandle>(new NativeTensor(t))); }
inline Maybe maybe(const NativeTensor& t) { return t.defined() ? Maybe(stable(t)) : std::nullopt; }
inline NativeTensor native(const Tensor& t) { return *reinterpret_cast<const NativeTensor*>(t.get()); }

// ---- what may take the fast path ------------------------------------------------------------------------------------

// Whether calls mean no more and are watched by no one.
bool undisturbed();
// Whether the dispatcher has nothing to do for a tensor but to find the CPU kernel.
bool usual(const NativeTensor& t);
// The tensor of a Python object that is one, usual, of a dtype that the ops take and not empty; else null.
const NativeTensor* read(PyObject* object);
// The same where None is allowed: an undefined tensor. False for the dispatcher.
bool read_optional(PyObject* object, NativeTensor& t);
// A number or the number in a bool. False with no error set for anything else.
bool read_number(PyObject* object, double& number);
bool read_integer(PyObject* object, int64_t& number);
bool read_flag(PyObject* object, bool& flag);

// An alias of the same contiguous memory in another shape of as many elements, unknown to autograd.
NativeTensor in_shape(const NativeTensor& t, at::IntArrayRef sizes);
// An alias from element `offset` on, by sizes and strides.
NativeTensor in_strides(const NativeTensor& t, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

// Gives the lock of the interpreter away while it lives.
class WithoutPython {
 public:
  WithoutPython() : state_(PyEval_SaveThread()) {}
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;
  ~WithoutPython() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// ---- autograd -------------------------------------------------------------------------------------------------------

// What a call of a node has at hand. `needs` has a flag for each input of the forward call, as have the results.
struct Call {
  const variable_list &grads, &saved, &kept;
  const std::vector<double>& numbers;
  const std::vector<bool>& needs;
};

// When the way back reads what was saved (else it may have been changed since, and a call finds none).
enum class Reads { always, with_first };  // with a gradient of the first result

// The way back of an op. `backward` sees plain gradients in the shape of the results (or undefined ones) and returns
// the inputs' gradients, or nothing: then the Python function of this name is called, which the op's module registers
// (seqkern/_direct.py).
struct Rule {
  Rule(const char* name, variable_list (*backward)(const Call&), Reads reads = Reads::always);
  const char* name;
  variable_list (*backward)(const Call&);
  Reads reads;
  Rule* next;
  int64_t index;
};

// What is to be remembered of a forward call whose results are there.
struct Record {
  const Rule& rule;
  std::vector<const NativeTensor*> inputs;  // null or undefined where there is none
  variable_list results;                    // those that have a gradient
  variable_list saved;                      // inputs and others that the way back reads, under saved-tensor hooks
  std::vector<int> saved_results;           // results that it reads, which follow them
  variable_list kept;                       // small ones of the kernel's own
  std::vector<double> numbers;
};

// Whether reverse mode will ask for a gradient of one of them.
bool wanted(std::initializer_list<const NativeTensor*> inputs);
bool wanted(const std::vector<const NativeTensor*>& inputs);
// Gives the results a history.
void remember(Record&& record);

// ---- Python ---------------------------------------------------------------------------------------------------------

// A function of the fast path by the name of the public one. The body returns null for the dispatcher.
using Body = PyObject* (*)(PyObject* const* arguments, Py_ssize_t count);
struct Front {
  Front(const char* name, PyCFunction function);
  PyMethodDef method;
  Front* next;
};
// What every front shares: None for a null, and for what C++ throws (the dispatcher meets it again and names it).
// Errors of Python, from hooks on saved tensors, are passed on.
PyObject* run(Body body, Py_ssize_t expected, PyObject* const* arguments, Py_ssize_t count);

#define SK_FRONT(op, count, body)                                                 \
  PyObject* op##_front(PyObject*, PyObject* const* arguments, Py_ssize_t given) { \
    return run(body, count, arguments, given);                                    \
  }                                                                               \
  Front op##_entry(#op, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(op##_front)));

// A new reference to a tensor's object, and a tuple of objects whose references it takes.
PyObject* wrap(const NativeTensor& t);
PyObject* tuple(std::initializer_list<PyObject*> objects);

}  // namespace seqkern::direct
