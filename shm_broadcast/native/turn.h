/* The type by which threads take turns. */
#ifndef GC_TURN_H
#define GC_TURN_H

#include <Python.h>

PyObject *turn_type(PyObject *module);

#endif
