/* Kernel launches through the CUDA driver API, as Python types. */
#ifndef GC_LAUNCH_H
#define GC_LAUNCH_H

#include <Python.h>

/* Create the types; return a new reference, or NULL with an error set. Cuda makes Launch objects. */
PyObject *cuda_type(PyObject *module);
PyObject *launch_type(PyObject *module);

#endif
