/* One end of a channel between two ranks, as a Python type. */
#ifndef GC_PIPE_OBJECT_H
#define GC_PIPE_OBJECT_H

#include <Python.h>

#include "pipe.h"

typedef struct {
    PyObject_HEAD
    Py_buffer memory, board; /* keep the memory below alive */
    shm_pipe pipe;
} Pipe;

/* Creates the type; returns a new reference, or NULL with an error set. */
PyObject *pipe_type(PyObject *module);

/* Calls `step` (pipe_push or pipe_pull); releases the GIL if that takes long. */
uint64_t pipe_move(Pipe *self, mover step, message x, uint64_t done, uint64_t wait_ns);

#endif
