/* The ring's fast path as two types. Each returns a new reference, or NULL with an error set. */
#ifndef GC_RING_H
#define GC_RING_H

#include <Python.h>

PyObject *fast_writer_type(PyObject *module);
PyObject *fast_reader_type(PyObject *module);

#endif
