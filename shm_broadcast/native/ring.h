/* One end of a ring, and the fast path: small messages of one record (ring.c) and the records of
 * long ones (long_messages.c). ring/writer.py and ring/reader.py hold the complete logic. All state
 * lives in the ring, so calls in C and in Python may follow each other in any order. */
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
    size_t slot;       /* offset of this member's slot, in the board */
    char *history;     /* of this member; NULL if none is kept */
    bool oversubscribed;      /* the board has more members than there are cores */
    uint64_t begun;    /* reader only: the last dequeue, by its number on the board */
    size_t own_line;   /* reader only: its line in the ring */
    size_t n_peers;    /* eventcounts to ring: the readers', or the writer's one */
    size_t *peers;
    /* Bytes of the current long message that were written (its table of sizes included) or read
     * (without the table). Kept in C: a Python signal handler may raise between any two steps in
     * Python, and a count kept there would then disagree with the ring. */
    uint64_t moved;
    gc_way way;        /* how records are written */
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

/* Whether the record at `position` with so much payload ends before the ring does, as all do. */
static inline bool ring_holds(const RingEnd *self, uint64_t position, uint64_t size) {
    return record_stride(size) <= self->capacity - position % self->capacity;
}

bool ring_aborted(const RingEnd *self);

/* Writer only: whether `need` bytes from `position` on hold nothing that a reader has not read. */
bool ring_has_room(RingEnd *self, uint64_t position, uint64_t need);

/* Writes a PADDING record that fills `padding` bytes at `position`; it is not published. */
void ring_pad(RingEnd *self, uint64_t position, uint64_t padding);

/* How the record at `position` is tried, at writer and readers. */
static inline way_kind ring_tried(uint64_t position, uint64_t size) {
    return way_tried(position / RECORD_ALIGN, size);
}

/* Ends the writing of a record, before it is published. */
void ring_wrote(RingEnd *self, way_kind tried);

/* Fetches a record of `size` bytes that is about to be copied, if it is tried. */
void ring_fetch(RingEnd *self, uint64_t position, uint64_t size);

/* Wakes the peers that sleep, after a full fence. */
void ring_peers(RingEnd *self);

/* Methods of the two types. */
PyObject *write_parts(PyObject *writer, PyObject *const *args, Py_ssize_t n);
PyObject *read_parts(PyObject *reader, PyObject *const *args, Py_ssize_t n);

/* Each returns a new reference, or NULL with an error set. */
PyObject *fast_writer_type(PyObject *module);
PyObject *fast_reader_type(PyObject *module);

#endif
