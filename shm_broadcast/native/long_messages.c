/* Long messages: copies their records into the ring while it has room, and out of it while it holds
 * records, without the GIL. Without room or records it returns: ring/writer.py and ring/reader.py
 * then sleep, check deadlines and peers, and call again. */
#include <string.h>

#include "atomics.h"
#include "ring.h"
#include "stream.h"
#include "words.h"

/* A message of this size or more does not fit into a core's caches, so its reader copies past them
 * (stream.h), independently of the writer (way.h). */
#define LARGE_BYTES (8 << 20)

/* push and pull return after this many bytes: Python runs signal handlers (Ctrl-C) only between
 * calls into C. */
#define AT_ONCE (64 << 20)

/* A message's buffers as one sequence of `total` bytes, with a cursor at byte `within` of
 * `parts[part]`. The writer's first part is the table of sizes; the reader's parts exclude it. */
typedef struct {
    Py_buffer *parts;
    Py_ssize_t n_parts, part;
    uint64_t within, total;
} body;

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Returns the contiguous bytes at the cursor, at most `most`, and stores their number in `size`.
 * Advances the cursor past them. Returns NULL at the end. */
static char *next_run(body *b, uint64_t most, uint64_t *size) {
    while (b->part < b->n_parts && b->within == (uint64_t)b->parts[b->part].len) {
        b->part++;
        b->within = 0;
    }
    if (b->part == b->n_parts) return NULL;
    char *run = (char *)b->parts[b->part].buf + b->within;
    *size = smaller(most, (uint64_t)b->parts[b->part].len - b->within);
    b->within += *size;
    return run;
}

static void skip(body *b, uint64_t size) {
    for (uint64_t run; size && next_run(b, size, &run); size -= run) {}
}

static void copy_out_of(body *b, gc_way *way, way_kind tried, char *to, uint64_t size) {
    const char *from;
    for (uint64_t run; size && (from = next_run(b, size, &run)); to += run, size -= run)
        way_copy(way, tried, to, from, run);
}

static void copy_into(body *b, const char *from, uint64_t size) {
    char *to;
    for (uint64_t run; size && (to = next_run(b, size, &run)); from += run, size -= run) {
        if (b->total >= LARGE_BYTES)
            stream_copy(to, from, run);
        else
            memcpy(to, from, run);
    }
}

static void release(body *b) {
    while (b->n_parts) PyBuffer_Release(&b->parts[--b->n_parts]);
    PyMem_Free(b->parts);
}

/* Acquires the buffers of a tuple, with the cursor at byte `offset`; returns -1 with an error set on
 * failure. */
static int acquire(body *b, PyObject *buffers, int flags, uint64_t offset) {
    *b = (body){0};
    if (!PyTuple_Check(buffers)) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of buffers");
        return -1;
    }
    Py_ssize_t n = PyTuple_Size(buffers);
    b->parts = PyMem_Malloc((size_t)(n ? n : 1) * sizeof *b->parts);
    if (b->parts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; b->n_parts < n; b->n_parts++) {
        Py_buffer *part = &b->parts[b->n_parts];
        if (PyObject_GetBuffer(PyTuple_GetItem(buffers, b->n_parts), part, flags) < 0) {
            release(b);
            return -1;
        }
        b->total += (uint64_t)part->len;
    }
    if (offset > b->total) {
        PyErr_SetString(PyExc_ValueError, "the offset lies behind the end");
        release(b);
        return -1;
    }
    skip(b, offset);
    return 0;
}

/* Called after each record, not only at the end: the other end continues while this one copies the
 * next record, and inspection shows this member as slow, not stuck. */
static void made_progress(RingEnd *self) {
    gc_store64(self->board, self->slot + MEMBER_PROGRESS, gc_now_ns());
    ring_peers(self);
}

/* Returns the header of the next record, and the padding before it: Body.place of ring/writer.py. */
static record_header next_record(const RingEnd *self, const body *b, uint64_t position,
                                 uint64_t largest, uint64_t *padding) {
    bool splits = b->total > largest;
    uint64_t offset = self->moved, table = (uint64_t)b->parts[0].len;
    uint64_t left = b->total - offset, first = offset ? 1 : table;
    uint64_t size = splits ? smaller(left, largest) : left;
    uint64_t to_end = self->capacity - position % self->capacity;
    *padding = 0;
    if (record_stride(size) > to_end) {
        if (splits && to_end - RECORD_HEADER >= first)
            size = to_end - RECORD_HEADER;
        else
            *padding = to_end;
    }
    return (record_header){.size = (uint32_t)size,
                           .kind = offset ? KIND_FRAGMENT : KIND_MESSAGE,
                           .buffers = (uint16_t)(table / 8),
                           .total = b->total,
                           .offset = offset};
}

/* Publishes records from byte `moved` on. Returns after the message or AT_ONCE bytes, after
 * `patience_ns` without room, or when the board is aborted. */
static void push(RingEnd *self, body *b, uint8_t codec, uint64_t largest, uint64_t patience_ns) {
    uint64_t until = smaller(b->total, self->moved + AT_ONCE);
    gc_spin spin = gc_spin_for(patience_ns, self->oversubscribed);
    while (self->moved < until && !ring_aborted(self)) {
        uint64_t position = gc_load64(self->ring, RING_PUBLISHED), padding;
        record_header header = next_record(self, b, position, largest, &padding);
        uint64_t stride = record_stride(header.size);
        if (!ring_has_room(self, position, padding + stride + RESERVED_FOR_CANCEL)) {
            if (!gc_spin_again(&spin)) break;
            continue;
        }
        header.codec = codec;
        /* The message takes its number with its first record. */
        header.sequence = gc_load64(self->ring, RING_SEQUENCE) + (self->moved == 0);
        if (padding) ring_pad(self, position, padding);
        position += padding;
        char *record = ring_at(self, position);
        memcpy(record, &header, sizeof header);
        way_kind tried = ring_tried(position, header.size);
        copy_out_of(b, &self->way, tried, record + RECORD_HEADER, header.size);
        ring_wrote(self, tried);
        gc_store64(self->ring, RING_SEQUENCE, header.sequence);
        gc_store64(self->ring, RING_PUBLISHED, position + stride);
        self->moved += header.size;
        made_progress(self);
        spin = gc_spin_for(patience_ns, self->oversubscribed);
    }
}

/* Reads records of one message. Returns after the message or AT_ONCE bytes, after `spin_ns` without
 * a record, or when the board is aborted. Returns false if a record is longer than the rest of the
 * message or of the ring: the ring is corrupt; the record stays in it. */
static bool pull(RingEnd *self, body *b, uint64_t spin_ns) {
    uint64_t until = smaller(b->total, self->moved + AT_ONCE);
    bool took_some = self->moved > 0, fits = true;
    gc_spin spin = gc_spin_for(spin_ns, self->oversubscribed);
    while (self->moved < until) {
        uint64_t position = gc_load64(self->ring, self->own_line + READER_CONSUMED);
        if (gc_load64(self->ring, RING_PUBLISHED) == position) {
            if (ring_aborted(self) || !gc_spin_again(&spin)) break;
            continue;
        }
        const char *record = ring_at(self, position);
        record_header header;
        memcpy(&header, record, sizeof header);
        bool begins = header.kind == KIND_MESSAGE;
        /* The message was cancelled, or another one begins: ring/reader.py handles both. */
        if (header.kind == KIND_CANCEL || (begins && took_some)) break;
        if (header.kind != KIND_PADDING) {
            uint64_t table = begins ? 8 * (uint64_t)header.buffers : 0;
            fits = header.size >= table && header.size - table <= b->total - self->moved &&
                   ring_holds(self, position, header.size);
            if (!fits) break;
            ring_fetch(self, position, header.size);
            copy_into(b, record + RECORD_HEADER + table, header.size - table);
            self->moved += header.size - table;
            took_some = true;
        }
        if (begins) gc_store64(self->ring, self->own_line + READER_SEQUENCE, header.sequence);
        gc_store64(self->ring, self->own_line + READER_CONSUMED,
                   position + record_stride(header.size));
        made_progress(self);
        spin = gc_spin_for(spin_ns, self->oversubscribed);
    }
    stream_end();
    return fits;
}

PyObject *write_parts(PyObject *writer, PyObject *const *args, Py_ssize_t n) {
    RingEnd *self = (RingEnd *)writer;
    uint32_t codec;
    size_t largest, patience_ns;
    body b;
    if (n != 4) {
        PyErr_SetString(PyExc_TypeError, "write_parts(codec, largest, parts, patience_ns)");
        return NULL;
    }
    if (u32_argument(args[0], &codec) < 0 || size_argument(args[1], &largest) < 0 ||
        size_argument(args[3], &patience_ns) < 0 ||
        acquire(&b, args[2], PyBUF_SIMPLE, self->moved) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    push(self, &b, (uint8_t)codec, largest, patience_ns);
    Py_END_ALLOW_THREADS
    release(&b);
    Py_RETURN_NONE;
}

PyObject *read_parts(PyObject *reader, PyObject *const *args, Py_ssize_t n) {
    RingEnd *self = (RingEnd *)reader;
    size_t spin_ns;
    body b;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "read_parts(targets, spin_ns)");
        return NULL;
    }
    if (size_argument(args[1], &spin_ns) < 0 ||
        acquire(&b, args[0], PyBUF_WRITABLE, self->moved) < 0)
        return NULL;
    bool fits;
    Py_BEGIN_ALLOW_THREADS
    fits = pull(self, &b, spin_ns);
    Py_END_ALLOW_THREADS
    release(&b);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "a record of another message lies in the ring");
        return NULL;
    }
    Py_RETURN_NONE;
}
