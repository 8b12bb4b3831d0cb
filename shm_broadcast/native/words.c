#include "words.h"

#include <string.h>

#include "atomics.h"
#include "history.h"
#include "layout.h"
#include "stream.h"

static PyTypeObject *the_type;

int size_argument(PyObject *object, size_t *value) {
    *value = PyLong_AsSize_t(object);
    return *value == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

int u32_argument(PyObject *object, uint32_t *value) {
    unsigned long wide = PyLong_AsUnsignedLong(object);
    if (wide == (unsigned long)-1 && PyErr_Occurred()) return -1;
    if (wide > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "value does not fit in 32 bits");
        return -1;
    }
    *value = (uint32_t)wide;
    return 0;
}

char *words_memory(PyObject *object, size_t need) {
    if (!PyObject_TypeCheck(object, the_type)) {
        PyErr_SetString(PyExc_TypeError, "expected Words");
        return NULL;
    }
    Words *self = (Words *)object;
    if (need > (size_t)self->view.len) {
        PyErr_Format(PyExc_ValueError, "needs %zu bytes, the segment has %zd", need, self->view.len);
        return NULL;
    }
    return self->view.buf;
}

/* Checks the number of arguments, reads the offset, and checks its alignment and bounds. */
static char *at(PyObject *self, PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted,
                size_t width, size_t *offset) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
        return NULL;
    }
    if (size_argument(args[0], offset) < 0) return NULL;
    if (*offset > SIZE_MAX - width || (*offset & (width == 8 ? 7 : width == 4 ? 3 : 0))) {
        PyErr_Format(PyExc_ValueError, "offset %zu is not aligned", *offset);
        return NULL;
    }
    return words_memory(self, *offset + width);
}

static PyObject *load32(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    char *base = at(self, args, n, 1, 4, &offset);
    return base ? PyLong_FromUnsignedLong(gc_load32(base, offset)) : NULL;
}

static PyObject *load64(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    char *base = at(self, args, n, 1, 8, &offset);
    return base ? PyLong_FromUnsignedLongLong(gc_load64(base, offset)) : NULL;
}

static PyObject *store32(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    uint32_t value;
    char *base = at(self, args, n, 2, 4, &offset);
    if (base == NULL || u32_argument(args[1], &value) < 0) return NULL;
    gc_store32(base, offset, value);
    Py_RETURN_NONE;
}

static PyObject *store64(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    char *base = at(self, args, n, 2, 8, &offset);
    if (base == NULL) return NULL;
    unsigned long long value = PyLong_AsUnsignedLongLong(args[1]);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    gc_store64(base, offset, value);
    Py_RETURN_NONE;
}

static PyObject *add32(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    char *base = at(self, args, n, 2, 4, &offset);
    if (base == NULL) return NULL;
    long value = PyLong_AsLong(args[1]);
    if (value == -1 && PyErr_Occurred()) return NULL;
    uint32_t before =
        atomic_fetch_add_explicit(GC_AT32(base, offset), (uint32_t)value, memory_order_seq_cst);
    gc_fence(); /* C11 does not order later acquire loads after a seq_cst read-modify-write */
    return PyLong_FromUnsignedLong(before);
}

static PyObject *compare_and_swap32(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    uint32_t expected, desired;
    char *base = at(self, args, n, 3, 4, &offset);
    if (base == NULL || u32_argument(args[1], &expected) < 0 || u32_argument(args[2], &desired) < 0)
        return NULL;
    return PyBool_FromLong(atomic_compare_exchange_strong(GC_AT32(base, offset), &expected, desired));
}

static int u64_argument(PyObject *object, uint64_t *value) {
    *value = PyLong_AsUnsignedLongLong(object);
    return *value == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static PyObject *compare_and_swap64(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    uint64_t expected, desired;
    char *base = at(self, args, n, 3, 8, &offset);
    if (base == NULL || u64_argument(args[1], &expected) < 0 || u64_argument(args[2], &desired) < 0)
        return NULL;
    return PyBool_FromLong(atomic_compare_exchange_strong(GC_AT64(base, offset), &expected, desired));
}

static PyObject *ring(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    char *base = at(self, args, n, 1, 8, &offset);
    if (base == NULL) return NULL;
    gc_fence();
    gc_notify_after_fence(base, offset);
    Py_RETURN_NONE;
}

static PyObject *sleep_on(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    uint32_t seen;
    char *base = at(self, args, n, 3, 8, &offset);
    if (base == NULL || u32_argument(args[1], &seen) < 0) return NULL;
    double seconds = PyFloat_AsDouble(args[2]);
    if (seconds == -1.0 && PyErr_Occurred()) return NULL;
    if (seconds > 0) {
        Py_BEGIN_ALLOW_THREADS
        gc_futex_wait(base, offset, seen, (uint64_t)(seconds * 1e9));
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* Copies of this size or more release the GIL; releasing it costs more than a smaller copy. */
#define LARGE_COPY 65536

/* Only blocks (ring/buffers.py) are written in pieces of this size. Their readers start after the
 * whole block is written; by then this core's caches have evicted its beginning, so it is written
 * past them. */
#define STREAMED_WRITE (8 << 20)

static PyObject *write_bytes(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t offset;
    char *base = at(self, args, n, 2, 0, &offset);
    if (base == NULL) return NULL;
    Py_buffer from;
    if (PyObject_GetBuffer(args[1], &from, PyBUF_SIMPLE) < 0) return NULL;
    size_t size = (size_t)from.len;
    if (words_memory(self, offset + size) == NULL) {
        PyBuffer_Release(&from);
        return NULL;
    }
    if (size >= LARGE_COPY) {
        Py_BEGIN_ALLOW_THREADS
        if (size >= STREAMED_WRITE) {
            stream_copy(base + offset, from.buf, size);
            stream_end();
        } else {
            memcpy(base + offset, from.buf, size);
        }
        Py_END_ALLOW_THREADS
    } else {
        memcpy(base + offset, from.buf, size);
    }
    PyBuffer_Release(&from);
    Py_RETURN_NONE;
}

/* Copies a string, truncated to `size` bytes, into zeroed memory; returns -1 with an error set if
 * `object` is not a string. */
static int text_argument(PyObject *object, char *to, size_t size) {
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(object, &length);
    if (text == NULL) return -1;
    memcpy(to, text, (size_t)length < size ? (size_t)length : size);
    return 0;
}

int history_argument(PyObject *words, PyObject *offset, char **history) {
    size_t at;
    if (size_argument(offset, &at) < 0) return -1;
    *history = NULL;
    if (at == 0) return 0;
    size_t size = HISTORY_STRIDE;
    char *base = at % 8 || at > SIZE_MAX - size ? NULL : words_memory(words, at + size);
    if (base != NULL) *history = base + at;
    if (base == NULL && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "no history lies at %zu", at);
    return base == NULL ? -1 : 0;
}

/* (slot, state, operation[, history, group, verb, bytes, number, peer, dtype]) */
static PyObject *stamp(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t slot;
    uint32_t state, verb, number, peer, dtype;
    char *base = at(self, args, n, n == 10 ? 10 : 3, 8, &slot), *history = NULL;
    if (base == NULL || u32_argument(args[1], &state) < 0) return NULL;
    if (words_memory(self, slot + MEMBER_OPERATION + OPERATION_BYTES) == NULL) return NULL;
    char name[OPERATION_BYTES] = {0};
    gc_entry about = {0};
    if (text_argument(args[2], name, OPERATION_BYTES) < 0) return NULL;
    if (n == 10) {
        if (history_argument(self, args[3], &history) < 0 ||
            text_argument(args[4], about.group, ENTRY_GROUP_BYTES) < 0 ||
            u32_argument(args[5], &verb) < 0 || u32_argument(args[7], &number) < 0 ||
            u32_argument(args[8], &peer) < 0 || u32_argument(args[9], &dtype) < 0)
            return NULL;
        about.bytes = PyLong_AsUnsignedLongLong(args[6]);
        if (about.bytes == UINT64_MAX && PyErr_Occurred()) return NULL;
        about.verb = (uint8_t)verb;
        about.number = number;
        about.peer = (uint16_t)peer;
        about.dtype = (uint8_t)dtype;
    }
    return PyLong_FromUnsignedLongLong(gc_stamp(base, slot, state, name, history, about));
}

/* (history, sequence, outcome, bytes, number) */
static PyObject *leave(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    char *history;
    uint32_t outcome, number;
    size_t sequence, bytes;
    if (n != 5) {
        PyErr_SetString(PyExc_TypeError, "leave(history, sequence, outcome, bytes, number)");
        return NULL;
    }
    if (history_argument(self, args[0], &history) < 0 || size_argument(args[1], &sequence) < 0 ||
        u32_argument(args[2], &outcome) < 0 || size_argument(args[3], &bytes) < 0 ||
        u32_argument(args[4], &number) < 0)
        return NULL;
    gc_leave(history, sequence, (uint8_t)outcome, bytes, number, gc_now_ns());
    Py_RETURN_NONE;
}

static PyObject *progress(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    size_t slot;
    uint32_t state;
    char *base = at(self, args, n, 2, 8, &slot);
    if (base == NULL || u32_argument(args[1], &state) < 0) return NULL;
    if (words_memory(self, slot + MEMBER_PROGRESS + 8) == NULL) return NULL;
    gc_store64(base, slot + MEMBER_PROGRESS, gc_now_ns());
    gc_store32(base, slot + MEMBER_STATE, state);
    Py_RETURN_NONE;
}

static PyObject *fence(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ignored)) {
    gc_fence();
    Py_RETURN_NONE;
}

static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *buffer;
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Words takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O", &buffer)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Words *self = (Words *)allocate(type, 0);
    if (self == NULL) return NULL;
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void words_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&((Words *)self)->view);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

#define FAST(name, function, doc) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, doc}

static PyMethodDef methods[] = {
    FAST("load32", load32, "load32(offset) -> int: acquire load."),
    FAST("load64", load64, "load64(offset) -> int: acquire load."),
    FAST("store32", store32, "store32(offset, value): release store."),
    FAST("store64", store64, "store64(offset, value): release store."),
    FAST("add32", add32, "add32(offset, value) -> int: atomic add, full fence; the previous value."),
    FAST("compare_and_swap32", compare_and_swap32,
         "compare_and_swap32(offset, expected, desired) -> bool: full fence."),
    FAST("compare_and_swap64", compare_and_swap64,
         "compare_and_swap64(offset, expected, desired) -> bool: full fence."),
    FAST("ring", ring, "ring(eventcount): full fence, then wake all sleepers of the eventcount."),
    FAST("sleep_on", sleep_on,
         "sleep_on(eventcount, seen, seconds): sleep while the eventcount holds `seen`, without the "
         "GIL."),
    FAST("write", write_bytes, "write(offset, buffer): copy a buffer into the segment."),
    FAST("stamp", stamp,
         "stamp(slot, state, operation[, history, group, verb, bytes, number, peer, dtype]) -> int: "
         "record the begin of an operation, also in the flight recorder at `history` unless 0; "
         "return its sequence number."),
    FAST("leave", leave,
         "leave(history, sequence, outcome, bytes, number): record an operation's outcome."),
    FAST("progress", progress, "progress(slot, state): store the time of progress and the state."),
    {"fence", fence, METH_NOARGS, "fence(): full memory fence."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, words_new},
    {Py_tp_dealloc, words_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Words(buffer): atomic words of a writable buffer, bounds-checked."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "shm_broadcast._native.Words",
    .basicsize = sizeof(Words),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

PyObject *words_type(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    the_type = (PyTypeObject *)type;
    return type;
}
