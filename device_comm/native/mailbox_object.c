#define PY_SSIZE_T_CLEAN
#include "mailbox_object.h"

/* Up to this size, copying with the GIL held beats giving it up. */
#define BRIEF_BYTES 32768

typedef uint64_t (*mover)(const mailbox *m, message x, uint64_t done, uint64_t wait_ns);

static uint64_t move(Mailbox *self, mover step, message x, uint64_t done, uint64_t wait_ns) {
    if (x.total - done <= BRIEF_BYTES) done = step(&self->mailbox, x, done, 0);
    if (done == x.total || (wait_ns == 0 && x.total - done <= BRIEF_BYTES)) return done;
    Py_BEGIN_ALLOW_THREADS
    done = step(&self->mailbox, x, done, wait_ns);
    Py_END_ALLOW_THREADS
    return done;
}

uint64_t mailbox_push_politely(Mailbox *self, message x, uint64_t sent, uint64_t patience_ns) {
    return move(self, mailbox_push, x, sent, patience_ns);
}

uint64_t mailbox_pull_politely(Mailbox *self, message x, uint64_t received, uint64_t spin_ns) {
    return move(self, mailbox_pull, x, received, spin_ns);
}

/* (address, total, dtype, done, wait_ns) */
static PyObject *move_args(PyObject *object, PyObject *args, mover step) {
    unsigned long long address, total, done, wait_ns;
    int dtype;
    if (!PyArg_ParseTuple(args, "KKiKK", &address, &total, &dtype, &done, &wait_ns)) return NULL;
    if (done > total) {
        PyErr_Format(PyExc_ValueError, "%llu of %llu bytes are done", done, total);
        return NULL;
    }
    message x = {.data = (char *)(uintptr_t)address, .total = total, .dtype = dtype};
    return PyLong_FromUnsignedLongLong(move((Mailbox *)object, step, x, done, wait_ns));
}

static PyObject *push(PyObject *self, PyObject *args) { return move_args(self, args, mailbox_push); }

static PyObject *pull(PyObject *self, PyObject *args) { return move_args(self, args, mailbox_pull); }

/* (box, board, doorbell) */
static PyObject *mailbox_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *box, *board;
    Py_ssize_t doorbell;
    if (!PyArg_ParseTuple(args, "OOn", &box, &board, &doorbell)) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Mailbox *self = (Mailbox *)make(type, 0);
    if (self == NULL) return NULL;
    if (PyObject_GetBuffer(box, &self->box, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(board, &self->board, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    if (self->box.len < MAILBOX_RING + MAILBOX_RING_BYTES || doorbell < 0 || doorbell % 8 ||
        doorbell + 8 > self->board.len) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "the ring or the doorbell is not in the memory given");
        return NULL;
    }
    self->mailbox = (mailbox){self->box.buf, self->board.buf, (size_t)doorbell};
    return (PyObject *)self;
}

static void mailbox_dealloc(PyObject *object) {
    Mailbox *self = (Mailbox *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyBuffer_Release(&self->box);
    PyBuffer_Release(&self->board);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"push", push, METH_VARARGS,
     "push(address, total, dtype, sent, patience_ns) -> sent; see device_comm.shm.mailbox.Mover."},
    {"pull", pull, METH_VARARGS,
     "pull(address, total, dtype, received, spin_ns) -> received; see the same."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, mailbox_new},
    {Py_tp_dealloc, mailbox_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "One end of a box between two ranks; one thread at a time."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "device_comm._native.Mailbox",
    .basicsize = sizeof(Mailbox),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

PyObject *mailbox_type(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
