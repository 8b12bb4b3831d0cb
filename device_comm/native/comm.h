/* One rank's end of a group, as a Python type. */
#ifndef GC_COMM_H
#define GC_COMM_H

#include <Python.h>

#include "history.h"
#include "pace.h"
#include "plan.h"
#include "tensors.h"

/* Results of this size or more lie in recycled memory: see shm_broadcast/ring/buffers.py. */
#define RECYCLED_BYTES (1 << 20)

/* The number of the call that this thread runs; 0: none. See device_comm/call_number.py. */
extern _Thread_local uint32_t the_call;

/* Operations besides collectives, which have the numbers of their verbs. */
enum { OPERATION_SEND = VERBS, OPERATION_RECV, OPERATIONS };

/* Tensors up to this size are rearranged on the fast path, if a dimension other than the first is
 * split or concatenated. */
#define ARRANGED_BYTES 65536

/* Where the pieces of a result go once it is complete; output NULL: they are there. */
typedef struct {
    char *output;
    uint64_t size, pieces, outer;
} arranged;

typedef struct {
    PyObject_HEAD
    Py_buffer group, board; /* keep the memory below alive */
    Py_buffer log;          /* of the current call's collectives; see device_comm/call_number.py */
    Py_buffer numbers;      /* u32: see device_comm/watch.py */
    char *history;          /* this member's flight recorder on the board; NULL: none */
    gc_entry about;         /* entry of the next operation; the group's name is constant */
    gc_pace pace;           /* clock of the fast path */
    uint64_t blocked;       /* sequence number on the board of the current fast-path call */
    steps steps;
    collective call;        /* of `begin` */
    char *sources, *results; /* ARRANGED_BYTES each: a rearranged source; a result before that */
    arranged arranged;      /* of the current fast-path call */
    uint64_t *sizes;        /* table that the ranks exchange: rank r's row, by rank */
    uint64_t *sent, *received, *row; /* this rank's source and output sizes; its row */
    bool exchanging;        /* the plan exchanges sizes; the data follows */
    size_t slot;            /* offset of this member's slot on the board */
    char operations[OPERATIONS][OPERATION_BYTES]; /* their names on the board */
    PyObject *tensor_type, *is_neg, *reduce_op_type, *pipe_type;
    PyObject *allocate;                      /* makes large results */
    const tensor_reader *reader;             /* NULL: no fast path */
    PyObject *source, *result;               /* of a blocked fast-path call */
    bool in_calls;                           /* compares the_call with the other ranks */
    bool background;                         /* the blocked call does not wait */
    bool planned;                            /* the plan is in use: a call is not done */
    bool halfway;                            /* the last fast-path message was moved in part */
} Comm;

/* Creates the type; returns a new reference, or NULL with an error set. */
PyObject *comm_type(PyObject *module);

/* Returns the number of the call that this group's operations belong to; 0: none. */
uint32_t comm_call(const Comm *self);

/* Returns true while a plan is not done, or a result was not fetched (direct_finish). */
bool comm_under_way(const Comm *self);

/* Returns how long a plan of `bytes` that begins in the background polls. */
uint64_t comm_begin_spin(uint64_t bytes);

/* Runs the current plan, which moves `bytes` at this rank; releases the GIL if that takes long. */
steps_status comm_run(Comm *self, uint64_t bytes, uint64_t spin_ns);

/* The fast path: see direct.c. */
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
