// The few functions of Python's stable ABI (PEP 384, version 3.10) that are called from here, declared by hand: the
// build then needs no Python headers, which many machines lack. Only functions: an address of Python's data would keep
// the library from loading outside of Python.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct PyObject;
struct PyThreadState;
using Py_ssize_t = std::ptrdiff_t;

void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
int PyObject_IsTrue(PyObject*);
PyObject* PyObject_CallNoArgs(PyObject*);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PyObject* PyObject_CallMethodObjArgs(PyObject*, PyObject* name, ...);
PyObject* PyUnicode_InternFromString(const char*);
PyObject* PyTuple_New(Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);       // borrowed
int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);  // steals
Py_ssize_t PySequence_Size(PyObject*);
PyObject* PySequence_GetItem(PyObject*, Py_ssize_t);
PyObject* PyLong_FromLongLong(long long);
long long PyLong_AsLongLong(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyFloat_FromDouble(double);
double PyFloat_AsDouble(PyObject*);
PyObject* PyCapsule_New(void* pointer, const char* name, void (*destructor)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char* name);
int PyErr_ExceptionMatches(PyObject*);
PyObject* PyErr_Occurred();
void PyErr_Clear();
PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);

struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
  int flags;
  const char* doc;
};
constexpr int METH_FASTCALL = 0x0080;
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
}
