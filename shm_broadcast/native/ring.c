/* The two ends of a ring as Python types, and the fast path for small messages: one record, no
 * out-of-band buffers. */
#include "ring.h"

#include <string.h>
#include <structmember.h>

#include "atomics.h"
#include "history.h"
#include "stream.h"
#include "words.h"

static const char ENQUEUE[OPERATION_BYTES] = "enqueue", DEQUEUE[OPERATION_BYTES] = "dequeue";

bool ring_aborted(const RingEnd *self) { return gc_load32(self->board, BOARD_ABORT) != 0; }

static uint64_t smallest_consumed(const RingEnd *self) {
    uint64_t least = UINT64_MAX;
    for (size_t reader = 0; reader < self->n_peers; reader++) {
        uint64_t consumed =
            gc_load64(self->ring, RING_READERS + reader * READER_STRIDE + READER_CONSUMED);
        if (consumed < least) least = consumed;
    }
    return least;
}

bool ring_has_room(RingEnd *self, uint64_t position, uint64_t need) {
    uint64_t gate = gc_load64(self->ring, RING_GATE);
    /* Load the readers' words only if the cached gate is insufficient: readers store into their
     * cache lines all the time. */
    if (position + need - gate <= self->capacity) return true;
    gate = smallest_consumed(self);
    if (gate == UINT64_MAX) return false; /* LEFT, of every reader */
    gc_store64(self->ring, RING_GATE, gate);
    /* A reader may rejoin concurrently: with a fence on both sides it loads this gate, or the second
     * scan loads its position. See RingReader._join_again in ring/reader.py. */
    gc_fence();
    uint64_t again = smallest_consumed(self);
    if (again < gate) gc_store64(self->ring, RING_GATE, gate = again);
    return position + need - gate <= self->capacity;
}

void ring_pad(RingEnd *self, uint64_t position, uint64_t padding) {
    record_header header = {.size = (uint32_t)(padding - RECORD_HEADER), .kind = KIND_PADDING};
    memcpy(ring_at(self, position), &header, sizeof header);
}

void ring_peers(RingEnd *self) {
    gc_fence(); /* once for all peers */
    gc_notify_all_after_fence(self->board, self->peers, self->n_peers);
}

void ring_wrote(RingEnd *self, way_kind tried) {
    if (tried != WAYS)
        way_wrote(&self->way, tried, self->ring + RING_READERS + READER_READS, READER_STRIDE,
                  self->n_peers);
    stream_end();
}

void ring_fetch(RingEnd *self, uint64_t position, uint64_t size) {
    way_kind tried = ring_tried(position, size);
    if (tried == WAYS) return;
    way_fetch(&self->way, ring_at(self, position) + RECORD_HEADER, size);
    way_fetched(&self->way, tried, self->ring + self->own_line + READER_READS);
}

static PyObject *try_write(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    RingEnd *self = (RingEnd *)object;
    uint32_t codec;
    Py_buffer body;
    uint64_t begin = self->history ? gc_now_ns() : 0;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "try_write(codec, body)");
        return NULL;
    }
    if (u32_argument(args[0], &codec) < 0 || PyObject_GetBuffer(args[1], &body, PyBUF_SIMPLE) < 0)
        return NULL;
    uint64_t size = (uint64_t)body.len, stride = record_stride(size);
    uint64_t position = gc_load64(self->ring, RING_PUBLISHED);
    uint64_t to_end = self->capacity - position % self->capacity;
    uint64_t padding = stride > to_end ? to_end : 0;
    /* At most a quarter of the ring: with its padding the record needs less than half of the ring.
     * Larger messages are split (write_parts), so that they need not wait for the ring to drain. */
    bool written = size <= UINT32_MAX && 4 * stride <= self->capacity && !ring_aborted(self) &&
                   ring_has_room(self, position, padding + stride + RESERVED_FOR_CANCEL);
    if (written) {
        uint64_t sequence = gc_load64(self->ring, RING_SEQUENCE) + 1;
        record_header header = {.size = (uint32_t)size,
                                .kind = KIND_MESSAGE,
                                .codec = (uint8_t)codec,
                                .total = size,
                                .sequence = sequence};
        if (padding) ring_pad(self, position, padding);
        position += padding;
        char *record = ring_at(self, position);
        memcpy(record, &header, sizeof header);
        way_kind tried = ring_tried(position, size);
        way_copy(&self->way, tried, record + RECORD_HEADER, body.buf, size);
        ring_wrote(self, tried);
        gc_store64(self->ring, RING_SEQUENCE, sequence);
        gc_store64(self->ring, RING_PUBLISHED, position + stride);
        gc_entry about = {.begin = begin,
                          .bytes = size,
                          .number = (uint32_t)sequence,
                          .peer = NO_PEER,
                          .verb = DID_ENQUEUE};
        gc_stamp(self->board, self->slot, STATE_BUSY, ENQUEUE, self->history, about);
        ring_peers(self);
    }
    PyBuffer_Release(&body);
    return PyBool_FromLong(written);
}

/* Waits up to `spin_ns`, without the GIL, for a record at `position`. Returns 1, or 0 without a
 * record, or -1 if a signal handler has raised: then nothing is consumed, so no message is lost. If
 * the record is there at once, the GIL is kept: releasing it costs more than a small read. */
static int spin_for_record(RingEnd *self, uint64_t position, uint64_t spin_ns) {
    if (gc_load64(self->ring, RING_PUBLISHED) != position) return 1;
    if (spin_ns == 0) return 0;
    bool there;
    Py_BEGIN_ALLOW_THREADS
    gc_spin spin = gc_spin_for(spin_ns, self->oversubscribed);
    while (!(there = gc_load64(self->ring, RING_PUBLISHED) != position) && gc_spin_again(&spin)) {}
    Py_END_ALLOW_THREADS
    return there && PyErr_CheckSignals() < 0 ? -1 : there;
}

/* Steals three references; each may be NULL with an error set. */
static PyObject *make_message(PyObject *codec, PyObject *body, PyObject *buffers) {
    PyObject *message = codec && body && buffers ? PyTuple_New(3) : NULL;
    if (message == NULL) {
        Py_XDECREF(codec);
        Py_XDECREF(body);
        Py_XDECREF(buffers);
        return NULL;
    }
    PyTuple_SetItem(message, 0, codec);
    PyTuple_SetItem(message, 1, body);
    PyTuple_SetItem(message, 2, buffers);
    return message;
}

static PyObject *try_read(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    RingEnd *self = (RingEnd *)object;
    size_t spin_ns, begins;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "try_read(spin_ns, begins)");
        return NULL;
    }
    if (size_argument(args[0], &spin_ns) < 0 || size_argument(args[1], &begins) < 0) return NULL;
    if (begins) {
        gc_entry about = {.peer = NO_PEER, .verb = DID_DEQUEUE};
        self->begun =
            gc_stamp(self->board, self->slot, STATE_BUSY, DEQUEUE, self->history, about);
    }
    if (ring_aborted(self)) Py_RETURN_NONE;
    for (;;) {
        uint64_t position = gc_load64(self->ring, self->own_line + READER_CONSUMED);
        int there = spin_for_record(self, position, spin_ns);
        if (there < 0) return NULL;
        if (!there) Py_RETURN_NONE;
        const char *record = ring_at(self, position);
        record_header header;
        memcpy(&header, record, sizeof header);
        uint64_t next = position + record_stride(header.size);
        if (header.kind == KIND_PADDING) { /* no wake-up of the writer: a record follows at once */
            gc_store64(self->ring, self->own_line + READER_CONSUMED, next);
            continue;
        }
        if (header.kind != KIND_MESSAGE || header.total != header.size || header.buffers != 0 ||
            !ring_holds(self, position, header.size))
            Py_RETURN_FALSE;
        ring_fetch(self, position, header.size);
        PyObject *body = PyBytes_FromStringAndSize(record + RECORD_HEADER, (Py_ssize_t)header.size);
        if (body == NULL) return NULL;
        gc_store64(self->ring, self->own_line + READER_SEQUENCE, header.sequence);
        gc_store64(self->ring, self->own_line + READER_CONSUMED, next);
        uint64_t now = gc_now_ns();
        gc_store64(self->board, self->slot + MEMBER_PROGRESS, now);
        gc_leave(self->history, self->begun, OUTCOME_DONE, header.size,
                 (uint32_t)header.sequence, now);
        ring_peers(self);
        return make_message(PyLong_FromLong(header.codec), body, PyTuple_New(0));
    }
}

static PyObject *look(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    RingEnd *self = (RingEnd *)object;
    size_t spin_ns;
    if (n != 1) {
        PyErr_SetString(PyExc_TypeError, "look(spin_ns)");
        return NULL;
    }
    if (size_argument(args[0], &spin_ns) < 0) return NULL;
    uint64_t position = gc_load64(self->ring, self->own_line + READER_CONSUMED);
    int there = spin_for_record(self, position, spin_ns);
    return there < 0 ? NULL : PyBool_FromLong(there);
}

/* (ring, board, data_offset, slot, history, eventcounts, oversubscribed[, own_line]). Checks every
 * offset against the segments' sizes once; the hot path does not check. */
static PyObject *end_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *ring, *board, *history, *eventcounts;
    Py_ssize_t data, slot, own_line = 0;
    int oversubscribed;
    if (!PyArg_ParseTuple(args, "OOnnOO!p|n", &ring, &board, &data, &slot, &history, &PyTuple_Type,
                          &eventcounts, &oversubscribed, &own_line))
        return NULL;
    if (data < 0 || slot < 0 || own_line < 0) {
        PyErr_SetString(PyExc_ValueError, "an offset is negative");
        return NULL;
    }
    Py_ssize_t n_peers = PyTuple_Size(eventcounts);
    char *ring_memory = words_memory(ring, (size_t)data);
    char *board_memory = words_memory(board, (size_t)slot + MEMBER_OPERATION + OPERATION_BYTES);
    char *entries;
    if (ring_memory == NULL || board_memory == NULL || history_argument(board, history, &entries) < 0)
        return NULL;
    uint64_t capacity = gc_load64(ring_memory, RING_CAPACITY);
    if (capacity == 0) PyErr_SetString(PyExc_ValueError, "a ring of no bytes");
    if (capacity == 0 || words_memory(ring, (size_t)data + capacity) == NULL) return NULL;
    if (words_memory(ring, RING_READERS + (size_t)n_peers * READER_STRIDE) == NULL ||
        words_memory(ring, (size_t)own_line + READER_STRIDE) == NULL)
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    RingEnd *self = (RingEnd *)allocate(type, 0);
    if (self == NULL) return NULL;
    self->peers = PyMem_Malloc((size_t)(n_peers ? n_peers : 1) * sizeof(size_t));
    if (self->peers == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t peer = 0; peer < n_peers; peer++) {
        size_t eventcount;
        if (size_argument(PyTuple_GetItem(eventcounts, peer), &eventcount) < 0 ||
            words_memory(board, eventcount + 8) == NULL) {
            Py_DECREF(self);
            return NULL;
        }
        self->peers[peer] = eventcount;
    }
    Py_INCREF(ring);
    Py_INCREF(board);
    self->ring_words = ring;
    self->board_words = board;
    self->ring = ring_memory;
    self->board = board_memory;
    self->data = ring_memory + data;
    self->capacity = capacity;
    self->slot = (size_t)slot;
    self->history = entries;
    self->own_line = (size_t)own_line;
    self->oversubscribed = oversubscribed;
    self->way = way_new();
    self->n_peers = (size_t)n_peers;
    return (PyObject *)self;
}

static void end_dealloc(PyObject *object) {
    RingEnd *self = (RingEnd *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->peers);
    Py_XDECREF(self->ring_words);
    Py_XDECREF(self->board_words);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

#define FAST(name, function, doc) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, doc}

static PyMethodDef writer_methods[] = {
    FAST("try_write", try_write,
         "try_write(codec, body) -> bool: publish a message as one record; False if the ring has no "
         "room, the record exceeds a quarter of the ring, or the board is aborted."),
    FAST("write_parts", write_parts,
         "write_parts(codec, largest, parts, patience_ns): publish records of a long message from "
         "byte `moved` on, while the ring has room."),
    {NULL, NULL, 0, NULL},
};

static PyMethodDef reader_methods[] = {
    FAST("try_read", try_read,
         "try_read(spin_ns, begins) -> (codec, body, ()) | None | False: read a message of one "
         "record; None without a record, or if the board is aborted; False if the next record is "
         "of another kind."),
    FAST("look", look,
         "look(spin_ns) -> bool: return True if the ring holds a record within spin_ns."),
    FAST("read_parts", read_parts,
         "read_parts(targets, spin_ns): read records of one long message from byte `moved` on, "
         "while the ring holds any."),
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"moved", T_ULONGLONG, offsetof(RingEnd, moved), 0,
     "Bytes of the current long message written or read so far."},
    {"begun", T_ULONGLONG, offsetof(RingEnd, begun), READONLY,
     "Reader only: the sequence number on the board of the last dequeue."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot writer_slots[] = {{Py_tp_new, end_new},
                                     {Py_tp_dealloc, end_dealloc},
                                     {Py_tp_methods, writer_methods},
                                     {Py_tp_members, members},
                                     {0, NULL}};

static PyType_Slot reader_slots[] = {{Py_tp_new, end_new},
                                     {Py_tp_dealloc, end_dealloc},
                                     {Py_tp_methods, reader_methods},
                                     {Py_tp_members, members},
                                     {0, NULL}};

static PyType_Spec writer_spec = {.name = "shm_broadcast._native.FastWriter",
                                  .basicsize = sizeof(RingEnd),
                                  .flags = Py_TPFLAGS_DEFAULT,
                                  .slots = writer_slots};

static PyType_Spec reader_spec = {.name = "shm_broadcast._native.FastReader",
                                  .basicsize = sizeof(RingEnd),
                                  .flags = Py_TPFLAGS_DEFAULT,
                                  .slots = reader_slots};

PyObject *fast_writer_type(PyObject *module) {
    return PyType_FromModuleAndSpec(module, &writer_spec, NULL);
}

PyObject *fast_reader_type(PyObject *module) {
    return PyType_FromModuleAndSpec(module, &reader_spec, NULL);
}
