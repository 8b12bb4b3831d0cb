#define PY_SSIZE_T_CLEAN
#include "pipe_object.h"

/* Up to this size, copying with the GIL held costs less than releasing it. */
#define BRIEF_BYTES 32768

uint64_t pipe_move(Pipe *self, mover step, message x, uint64_t done, uint64_t wait_ns) {
    if (x.total - done <= BRIEF_BYTES) done = step(&self->pipe, x, done, 0);
    if (done == x.total || (wait_ns == 0 && x.total - done <= BRIEF_BYTES)) return done;
    Py_BEGIN_ALLOW_THREADS
    done = step(&self->pipe, x, done, wait_ns);
    Py_END_ALLOW_THREADS
    return done;
}

/* (address, total, dtype, call, done, wait_ns) */
static PyObject *move_args(PyObject *object, PyObject *args, mover step) {
    unsigned long long address, total, done, wait_ns;
    int dtype;
    unsigned int call;
    if (!PyArg_ParseTuple(args, "KKiIKK", &address, &total, &dtype, &call, &done, &wait_ns)) return NULL;
    if (done > total) {
        PyErr_Format(PyExc_ValueError, "%llu of %llu bytes are done", done, total);
        return NULL;
    }
    message x = {
        .data = (char *)(uintptr_t)address, .total = total, .dtype = dtype, .call = call};
    return PyLong_FromUnsignedLongLong(pipe_move((Pipe *)object, step, x, done, wait_ns));
}

static PyObject *push(PyObject *self, PyObject *args) { return move_args(self, args, pipe_push); }

static PyObject *pull(PyObject *self, PyObject *args) { return move_args(self, args, pipe_pull); }

/* (memory, board, eventcount) */
static PyObject *pipe_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *memory, *board;
    Py_ssize_t eventcount;
    if (!PyArg_ParseTuple(args, "OOn", &memory, &board, &eventcount)) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Pipe *self = (Pipe *)make(type, 0);
    if (self == NULL) return NULL;
    if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(board, &self->board, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (self->memory.len < PIPE_RING + PIPE_RING_BYTES || eventcount < 0 || eventcount % 8 ||
        eventcount + 8 > self->board.len) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "the ring or the eventcount is not in the memory given");
        return NULL;
    }
    self->pipe = (shm_pipe){self->memory.buf, self->board.buf, (size_t)eventcount, way_new()};
    return (PyObject *)self;
}

static void pipe_dealloc(PyObject *object) {
    Pipe *self = (Pipe *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyBuffer_Release(&self->memory);
    PyBuffer_Release(&self->board);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"push", push, METH_VARARGS,
     "push(address, total, dtype, call, sent, patience_ns) -> sent."},
    {"pull", pull, METH_VARARGS,
     "pull(address, total, dtype, call, received, spin_ns) -> received."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, pipe_new},
    {Py_tp_dealloc, pipe_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "One end of a channel between two ranks; one thread at a time."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "device_comm._native.Pipe",
    .basicsize = sizeof(Pipe),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

PyObject *pipe_type(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
