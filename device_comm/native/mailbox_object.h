/* One end of a box between two ranks, as a Python type. */
#ifndef GC_MAILBOX_OBJECT_H
#define GC_MAILBOX_OBJECT_H

#include <Python.h>

#include "mailbox.h"

typedef struct {
    PyObject_HEAD
    Py_buffer box, board; /* keep the memory below alive */
    mailbox mailbox;
} Mailbox;

/* Creates the type; returns a new reference, or NULL with an error set. */
PyObject *mailbox_type(PyObject *module);

/* As the functions of mailbox.h; they let the GIL go if it takes long. */
uint64_t mailbox_push_politely(Mailbox *self, message x, uint64_t sent, uint64_t patience_ns);
uint64_t mailbox_pull_politely(Mailbox *self, message x, uint64_t received, uint64_t spin_ns);

#endif
