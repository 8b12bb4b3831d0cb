/* An owner lock for `with`. No signal handler runs between the acquisition and the block, or between
 * the block and the release: a handler that raised there would leave the lock held. A thread that
 * acquires the lock twice gets an error instead of a deadlock. */
#include <Python.h>
#include <pythread.h>
#include <stdbool.h>

#include "turn.h"

typedef struct {
    PyObject_HEAD
    PyThread_type_lock lock;
    bool taken; /* guarded by the lock, like the owner */
    unsigned long owner;
} Turn;

static bool is_mine(const Turn *self) {
    return self->taken && self->owner == PyThread_get_thread_ident();
}

static PyObject *took(Turn *self) {
    self->taken = true;
    self->owner = PyThread_get_thread_ident();
    Py_RETURN_TRUE;
}

static PyObject *turn_new(PyTypeObject *type, PyObject *Py_UNUSED(args),
                          PyObject *Py_UNUSED(kwargs)) {
    Turn *self = (Turn *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self != NULL && (self->lock = PyThread_allocate_lock()) == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void turn_dealloc(PyObject *object) {
    Turn *self = (Turn *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->lock != NULL) {
        if (self->taken) PyThread_release_lock(self->lock);
        PyThread_free_lock(self->lock);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *enter(PyObject *object, PyObject *Py_UNUSED(none)) {
    Turn *self = (Turn *)object;
    if (PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) return took(self);
    if (!is_mine(self)) Py_RETURN_FALSE;
    PyErr_SetString(PyExc_RuntimeError,
                    "this thread is in it already: it would wait for itself");
    return NULL;
}

static PyObject *leave(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(n)) {
    Turn *self = (Turn *)object;
    if (is_mine(self)) {
        self->taken = false;
        PyThread_release_lock(self->lock);
    }
    Py_RETURN_NONE;
}

static PyObject *is_owned(PyObject *object, PyObject *Py_UNUSED(none)) {
    return PyBool_FromLong(is_mine((Turn *)object));
}

static PyObject *adopt(PyObject *object, PyObject *Py_UNUSED(none)) {
    ((Turn *)object)->owner = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

static PyObject *take_within(PyObject *object, PyObject *seconds) {
    Turn *self = (Turn *)object;
    double within = PyFloat_AsDouble(seconds);
    if (within == -1.0 && PyErr_Occurred()) return NULL;
    PY_TIMEOUT_T microseconds = within > 0 ? (PY_TIMEOUT_T)(within * 1e6) : 0;
    PyLockStatus status;
    Py_BEGIN_ALLOW_THREADS
    status = PyThread_acquire_lock_timed(self->lock, microseconds, 1);
    Py_END_ALLOW_THREADS
    if (status == PY_LOCK_ACQUIRED) return took(self);
    if (status == PY_LOCK_INTR && PyErr_CheckSignals() < 0) return NULL;
    Py_RETURN_FALSE;
}

static PyMethodDef methods[] = {
    {"__enter__", enter, METH_NOARGS,
     "__enter__() -> bool: acquire the lock if it is free; RuntimeError if this thread owns it."},
    {"__exit__", (PyCFunction)(void (*)(void))leave, METH_FASTCALL,
     "__exit__(*_): release the lock, if this thread owns it."},
    {"take_within", take_within, METH_O,
     "take_within(seconds) -> bool: acquire the lock within `seconds`; a signal ends the wait early."},
    {"is_owned", is_owned, METH_NOARGS, "is_owned() -> bool: return True if this thread owns the lock."},
    {"adopt", adopt, METH_NOARGS, "adopt(): make this thread the owner of the lock, which is held."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {{Py_tp_new, turn_new},
                              {Py_tp_dealloc, turn_dealloc},
                              {Py_tp_methods, methods},
                              {0, NULL}};

static PyType_Spec spec = {.name = "shm_broadcast._native.Turn",
                           .basicsize = sizeof(Turn),
                           .flags = Py_TPFLAGS_DEFAULT,
                           .slots = slots};

PyObject *turn_type(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
