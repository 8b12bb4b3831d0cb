/* Kernel launches by the functions of CUDA's driver, as Python types. */
#ifndef GC_LAUNCH_H
#define GC_LAUNCH_H

#include <Python.h>

/* Each creates a type; they return a new reference, or NULL with an error set. Cuda makes Launch. */
PyObject *cuda_type(PyObject *module);
PyObject *launch_type(PyObject *module);

#endif
