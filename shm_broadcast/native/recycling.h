/* Memory for large messages and results that is used again: see recycling.c. */
#ifndef GC_RECYCLING_H
#define GC_RECYCLING_H

#include <Python.h>

/* Each creates a type; returns a new reference, or NULL with an error set. */
PyObject *recycling_pool_type(PyObject *module);
PyObject *block_type(PyObject *module);

#endif
