/* The Words type: atomic words of a writable buffer, bounds-checked. */
#ifndef GC_WORDS_H
#define GC_WORDS_H

#include <Python.h>

typedef struct {
    PyObject_HEAD
    Py_buffer view;
} Words;

/* Adds the type to the module; returns a new reference, or NULL with an error set. */
PyObject *words_type(PyObject *module);

/* Borrows the memory of a Words that must hold `need` bytes; NULL with an error set otherwise. */
char *words_memory(PyObject *object, size_t need);

/* Reads a non-negative integer argument; returns -1 with an error set if it is none. */
int size_argument(PyObject *object, size_t *value);
int u32_argument(PyObject *object, uint32_t *value);

/* Reads where in a Words a history lies; NULL where the offset is 0. Returns -1 with an error set if
 * there is no room for it. */
int history_argument(PyObject *words, PyObject *offset, char **history);

#endif
