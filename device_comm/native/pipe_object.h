/* One end of a pipe between two ranks, as a Python type. */
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

/* As the functions of pipe.h; they let the GIL go if it takes long. */
uint64_t pipe_push_politely(Pipe *self, message x, uint64_t sent, uint64_t patience_ns);
uint64_t pipe_pull_politely(Pipe *self, message x, uint64_t received, uint64_t spin_ns);

#endif
