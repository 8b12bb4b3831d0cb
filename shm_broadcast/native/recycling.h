/* Recycled memory for large messages and results: see recycling.c. */
#ifndef GC_RECYCLING_H
#define GC_RECYCLING_H

#include <Python.h>

/* Create the types; return a new reference, or NULL with an error set. */
PyObject *recycling_pool_type(PyObject *module);
PyObject *block_type(PyObject *module);

#endif
