/* A pool of memory for large results: a block returns to the pool with its last reference, and is
 * reused. The first pass over newly mapped pages costs four to seven times a later one. All functions
 * need the GIL. */
#define _GNU_SOURCE
#include "recycling.h"

#include <stdlib.h>
#include <sys/mman.h>

/* Smaller requests go to malloc, which keeps their pages itself: shm_broadcast/ring/buffers.py. */
#define RECYCLED_BYTES ((size_t)1 << 20)

/* Bytes of a huge page; mappings of two or more request huge pages. */
#define HUGE_BYTES ((size_t)2 << 20)

typedef struct unused {
    struct unused *next; /* released before this one */
    size_t capacity;
} unused;

typedef struct {
    PyObject_HEAD
    unused *latest; /* list of unused blocks, each headed by its `unused` */
    size_t kept, limit;
    PyTypeObject *block_type;
} RecyclingPool;

typedef struct {
    PyObject_HEAD
    RecyclingPool *pool; /* NULL: memory of malloc */
    void *memory;
    size_t size, capacity;
} Block;

/* Rounds up by at most an eighth, as `size_class` of shm_broadcast/ring/buffers.py. */
static size_t size_class(size_t size) {
    size_t step = 1;
    for (size_t rest = size >> 4; rest > 0; rest >>= 1) step <<= 1;
    return (size + step - 1) / step * step;
}

static void *map(size_t capacity) {
    void *memory = mmap(NULL, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    if (capacity >= 2 * HUGE_BYTES) madvise(memory, capacity, MADV_HUGEPAGE);
    return memory;
}

/* Removes and returns the block of this capacity that was released last; NULL without one. */
static void *take_unused(RecyclingPool *self, size_t capacity) {
    for (unused **at = &self->latest; *at != NULL; at = &(*at)->next) {
        unused *found = *at;
        if (found->capacity != capacity) continue;
        *at = found->next;
        self->kept -= capacity;
        return found;
    }
    return NULL;
}

/* Unmaps the blocks that were released first, until at most `limit` bytes are kept. */
static void keep_to(RecyclingPool *self, size_t limit) {
    while (self->kept > limit) {
        unused **last = &self->latest;
        while ((*last)->next != NULL) last = &(*last)->next;
        unused *oldest = *last;
        *last = NULL;
        self->kept -= oldest->capacity;
        munmap(oldest, oldest->capacity);
    }
}

static void give_back(RecyclingPool *self, void *memory, size_t capacity) {
    if (capacity > self->limit) {
        munmap(memory, capacity);
        return;
    }
    unused *given = memory;
    *given = (unused){.next = self->latest, .capacity = capacity};
    self->latest = given;
    self->kept += capacity;
    keep_to(self, self->limit);
}

static PyObject *take(PyObject *object, PyObject *argument) {
    RecyclingPool *self = (RecyclingPool *)object;
    size_t size = PyLong_AsSize_t(argument);
    if (size == (size_t)-1 && PyErr_Occurred()) return NULL;
    if (size > (size_t)PY_SSIZE_T_MAX / 2) return PyErr_NoMemory();
    Block *made = (Block *)((allocfunc)PyType_GetSlot(self->block_type, Py_tp_alloc))(self->block_type, 0);
    if (made == NULL) return NULL;
    made->size = size;
    if (size < RECYCLED_BYTES) {
        made->memory = malloc(size ? size : 1);
    } else {
        made->capacity = size_class(size);
        made->memory = take_unused(self, made->capacity);
        if (made->memory == NULL) made->memory = map(made->capacity);
        made->pool = (RecyclingPool *)Py_NewRef(object);
    }
    if (made->memory != NULL) return (PyObject *)made;
    Py_DECREF(made);
    return PyErr_NoMemory();
}

static PyObject *kept_bytes(PyObject *object, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(((RecyclingPool *)object)->kept);
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"kept_bytes", NULL};
    Py_ssize_t limit = (Py_ssize_t)256 << 20;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|n", names, &limit)) return NULL;
    PyObject *module = PyType_GetModule(type);
    if (module == NULL) return NULL;
    RecyclingPool *self = (RecyclingPool *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL) return NULL;
    self->limit = limit > 0 ? (size_t)limit : 0;
    self->block_type = (PyTypeObject *)PyObject_GetAttrString(module, "Block");
    if (self->block_type != NULL) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void pool_dealloc(PyObject *object) {
    RecyclingPool *self = (RecyclingPool *)object;
    PyTypeObject *type = Py_TYPE(object);
    keep_to(self, 0);
    Py_XDECREF((PyObject *)self->block_type);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int block_buffer(PyObject *object, Py_buffer *view, int flags) {
    Block *self = (Block *)object;
    return PyBuffer_FillInfo(view, object, self->memory, (Py_ssize_t)self->size, 0, flags);
}

static void block_dealloc(PyObject *object) {
    Block *self = (Block *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->pool == NULL) {
        free(self->memory);
    } else {
        if (self->memory != NULL) give_back(self->pool, self->memory, self->capacity);
        Py_DECREF((PyObject *)self->pool);
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef pool_methods[] = {
    {"take", take, METH_O,
     "take(size) -> Block: return writable memory of `size` bytes with undefined content."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_attributes[] = {
    {"kept_bytes", kept_bytes, NULL, "Bytes of unused blocks.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_attributes},
    {0, NULL},
};

static PyType_Spec pool_spec = {.name = "shm_broadcast._native.RecyclingPool",
                                .basicsize = sizeof(RecyclingPool),
                                .flags = Py_TPFLAGS_DEFAULT,
                                .slots = pool_slots};

static PyType_Slot block_slots[] = {
    {Py_tp_dealloc, block_dealloc},
    {Py_bf_getbuffer, block_buffer},
    {Py_tp_doc, "Memory that its pool reuses once no reference to this or to a view of it is left."},
    {0, NULL},
};

static PyType_Spec block_spec = {.name = "shm_broadcast._native.Block",
                                 .basicsize = sizeof(Block),
                                 .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 .slots = block_slots};

PyObject *recycling_pool_type(PyObject *module) {
    return PyType_FromModuleAndSpec(module, &pool_spec, NULL);
}

PyObject *block_type(PyObject *module) {
    return PyType_FromModuleAndSpec(module, &block_spec, NULL);
}
