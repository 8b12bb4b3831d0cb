/* The Words type: atomic words of a writable buffer, bounds-checked. */
#ifndef GC_WORDS_H
#define GC_WORDS_H

#include <Python.h>

typedef struct {
    PyObject_HEAD
    Py_buffer view;
} Words;

/* Creates the type; returns a new reference, or NULL with an error set. */
PyObject *words_type(PyObject *module);

/* Borrows the memory of a Words; returns NULL with an error set if it has fewer than `need` bytes. */
char *words_memory(PyObject *object, size_t need);

/* Read a non-negative integer argument; return -1 with an error set if it is not one. */
int size_argument(PyObject *object, size_t *value);
int u32_argument(PyObject *object, uint32_t *value);

/* Reads the offset of a flight recorder in a Words, and stores its address; NULL for offset 0.
 * Returns -1 with an error set if it does not fit there. */
int history_argument(PyObject *words, PyObject *offset, char **history);

#endif
