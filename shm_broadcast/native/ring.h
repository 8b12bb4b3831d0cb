/* One end of a ring, and the fast path as two types: whole small messages (ring.c) and the records of
 * long ones (long_messages.c). ring_writer.py and ring_reader.py hold the complete logic; all state
 * lives in the ring itself, so that both paths may be mixed freely. */
#ifndef GC_RING_H
#define GC_RING_H

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

#define RESERVED_FOR_CANCEL RECORD_ALIGN

typedef struct {
    PyObject_HEAD
    PyObject *ring_words, *board_words; /* keep the memory below alive */
    char *ring, *board, *data;
    uint64_t capacity;
    size_t slot;       /* offset of this member's slot, in the board */
    size_t own_line;   /* reader only: its line in the ring */
    size_t n_peers;    /* doorbells to ring: the readers', or the writer's one */
    size_t *peers;
    /* Bytes of the long message under way that were written, with its table of sizes, or read,
     * without it. Kept here, where an exception of a signal handler cannot come between. */
    uint64_t moved;
} RingEnd;

typedef struct {
    uint32_t size;
    uint8_t kind, codec;
    uint16_t buffers;
    uint64_t total, sequence, offset;
} record_header;

_Static_assert(sizeof(record_header) == RECORD_HEADER &&
                   offsetof(record_header, size) == RECORD_SIZE &&
                   offsetof(record_header, kind) == RECORD_KIND &&
                   offsetof(record_header, codec) == RECORD_CODEC &&
                   offsetof(record_header, buffers) == RECORD_BUFFERS &&
                   offsetof(record_header, total) == RECORD_TOTAL &&
                   offsetof(record_header, sequence) == RECORD_SEQUENCE &&
                   offsetof(record_header, offset) == RECORD_OFFSET,
               "as in layout.h");

/* The bytes of the ring that a record with so much payload takes. */
static inline uint64_t record_stride(uint64_t size) {
    return (RECORD_HEADER + size + RECORD_ALIGN - 1) & ~(uint64_t)(RECORD_ALIGN - 1);
}

static inline char *ring_at(const RingEnd *self, uint64_t position) {
    return self->data + position % self->capacity;
}

bool ring_aborted(const RingEnd *self);

/* Whether `need` bytes behind `position` are free of unread records. */
bool ring_has_room(RingEnd *self, uint64_t position, uint64_t need);

void ring_pad(RingEnd *self, uint64_t position, uint64_t padding);

void ring_peers(RingEnd *self);

/* Methods of the two types. */
PyObject *write_parts(PyObject *writer, PyObject *const *args, Py_ssize_t n);
PyObject *read_parts(PyObject *reader, PyObject *const *args, Py_ssize_t n);

/* Each returns a new reference, or NULL with an error set. */
PyObject *fast_writer_type(PyObject *module);
PyObject *fast_reader_type(PyObject *module);

#endif
