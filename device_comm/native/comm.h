/* One rank's end of a group, as a Python type. */
#ifndef GC_COMM_H
#define GC_COMM_H

#include <Python.h>

#include "history.h"
#include "pace.h"
#include "steps.h"
#include "tensors.h"

/* From here on, results come from memory that is recycled: see shm_broadcast/ring/buffers.py. */
#define RECYCLED_BYTES (1 << 20)

/* The call that a thread carries out, 0 if none: device_comm/call_number.py says what for. */
extern _Thread_local uint32_t the_call;

/* What is done beside collectives, which have the numbers of their verbs. */
enum { OPERATION_SEND = VERBS, OPERATION_RECV, OPERATIONS };

typedef struct {
    PyObject_HEAD
    Py_buffer group, board; /* keep the memory below alive */
    Py_buffer begun;        /* u64: their fingerprint; see device_comm/call_number.py */
    Py_buffer numbers;      /* u32: see device_comm/watch.py */
    char *history;          /* of this rank's process on the board; NULL if none is kept */
    gc_entry about;         /* of the operation that begins; the group is filled in for good */
    gc_pace pace;           /* the clock of direct calls */
    uint64_t blocked;       /* the number on the board of a direct call that is blocked */
    steps steps;
    size_t slot;                             /* of this rank's process on the board */
    char operations[OPERATIONS][OPERATION_BYTES]; /* what each is called there */
    PyObject *tensor_type, *is_neg, *reduce_op_type, *pipe_type;
    PyObject *allocate;                      /* gives room for large results */
    const tensor_reader *reader;             /* NULL: no direct calls */
    PyObject *source, *result;               /* of a direct call that is blocked */
    bool in_calls;                           /* compares the_call with the other ranks */
    bool planned;                            /* a call that is not done has the plan */
    bool halfway;                            /* the last direct message was moved in part */
} Comm;

/* Creates the type; returns a new reference, or NULL with an error set. */
PyObject *comm_type(PyObject *module);

/* The number of the call that an operation of this group is part of; 0: none. */
uint32_t comm_call(const Comm *self);

/* Whether a call has begun that is not done, or whose result nobody has. */
bool comm_under_way(const Comm *self);

/* Goes on with the plan that was begun, which moves `bytes` here; lets the GIL go if it takes long. */
steps_status comm_run(Comm *self, uint64_t bytes, uint64_t spin_ns);

/* The verbs on tensors as they are: see direct.c. */
PyObject *direct_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_all_gather(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_reduce_scatter(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_all_to_all(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_broadcast(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_reduce(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_gather(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_scatter(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_barrier(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_send(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_recv(PyObject *self, PyObject *const *args, Py_ssize_t n);
PyObject *direct_finish(PyObject *self, PyObject *ignored);
PyObject *direct_give_up(PyObject *self, PyObject *outcome);

#endif
