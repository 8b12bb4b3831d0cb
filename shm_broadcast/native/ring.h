/* One end of a ring, and its fast path: small messages of one record (ring.c) and the records of
 * long ones (long_messages.c). ring/writer.py and ring/reader.py hold the complete logic. All state
 * lies in the ring, so calls in C and in Python may alternate in any order. */
#ifndef GC_RING_H
#define GC_RING_H

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"
#include "way.h"

#define RESERVED_FOR_CANCEL RECORD_ALIGN

typedef struct {
    PyObject_HEAD
    PyObject *ring_words, *board_words; /* keep the memory below alive */
    char *ring, *board, *data;
    uint64_t capacity;
    size_t slot;         /* offset of this member's slot in the board */
    char *history;       /* this member's flight recorder; NULL: none */
    bool oversubscribed; /* the board has more members than the machine has cores */
    uint64_t begun;      /* reader only: sequence number of the last dequeue on the board */
    size_t own_line;     /* reader only: offset of its line in the ring */
    size_t n_peers;
    size_t *peers;       /* eventcounts to notify: the readers', or the writer's */
    /* Bytes of the current long message written (including its table of sizes) or read (excluding
     * it). Kept in C: a signal handler may raise between any two Python instructions, and a count
     * in Python would then disagree with the ring. */
    uint64_t moved;
    gc_way way;          /* how records are written */
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

/* Returns the bytes that a record with `size` bytes of payload occupies in the ring. */
static inline uint64_t record_stride(uint64_t size) {
    return (RECORD_HEADER + size + RECORD_ALIGN - 1) & ~(uint64_t)(RECORD_ALIGN - 1);
}

static inline char *ring_at(const RingEnd *self, uint64_t position) {
    return self->data + position % self->capacity;
}

/* Returns true if the record at `position` does not wrap; valid records never do. */
static inline bool ring_holds(const RingEnd *self, uint64_t position, uint64_t size) {
    return record_stride(size) <= self->capacity - position % self->capacity;
}

bool ring_aborted(const RingEnd *self);

/* Writer only: returns true if all readers have read the `need` bytes from `position` on. */
bool ring_has_room(RingEnd *self, uint64_t position, uint64_t need);

/* Writes a PADDING record of `padding` bytes at `position`, without publishing it. */
void ring_pad(RingEnd *self, uint64_t position, uint64_t padding);

/* Returns how the record at `position` is timed (way.h), alike at writer and readers. */
static inline way_kind ring_tried(uint64_t position, uint64_t size) {
    return way_tried(position / RECORD_ALIGN, size);
}

/* Completes the writing of a record; to be called before it is published. */
void ring_wrote(RingEnd *self, way_kind tried);

/* Times the fetching of a record of `size` bytes before it is copied, if it is to be timed. */
void ring_fetch(RingEnd *self, uint64_t position, uint64_t size);

/* Executes a full fence, then wakes the peers that sleep. */
void ring_peers(RingEnd *self);

/* Methods of the two types, in long_messages.c. */
PyObject *write_parts(PyObject *writer, PyObject *const *args, Py_ssize_t n);
PyObject *read_parts(PyObject *reader, PyObject *const *args, Py_ssize_t n);

/* Create the types; return a new reference, or NULL with an error set. */
PyObject *fast_writer_type(PyObject *module);
PyObject *fast_reader_type(PyObject *module);

#endif
