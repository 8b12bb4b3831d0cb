/* The owner lock: see turn.c. */
#ifndef GC_TURN_H
#define GC_TURN_H

#include <Python.h>

PyObject *turn_type(PyObject *module);

#endif
