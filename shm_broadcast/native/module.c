/* shm_broadcast._native: atomic words in shared memory, and the ring's fast path. */
#include <Python.h>

#include "layout.h"
#include "recycling.h"
#include "ring.h"
#include "turn.h"
#include "way.h"
#include "words.h"

static int add_type(PyObject *module, const char *name, PyObject *type) {
    if (type == NULL) return -1;
    int added = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return added;
}

static PyObject *write_past_caches(PyObject *Py_UNUSED(module), PyObject *args) {
    int past, always = 0;
    if (!PyArg_ParseTuple(args, "p|p", &past, &always)) return NULL;
    way_begin_with(past, always);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"write_past_caches", write_past_caches, METH_VARARGS,
     "write_past_caches(past, always=False): set how new ends write: past the caches or through them."},
    {NULL, NULL, 0, NULL},
};

#define CONSTANT(name) {#name, name}

static const struct {
    const char *name;
    long value;
} constants[] = {
    CONSTANT(RING_CAPACITY),   CONSTANT(RING_CLOSED),     CONSTANT(RING_PUBLISHED),
    CONSTANT(RING_SEQUENCE),   CONSTANT(RING_GATE),       CONSTANT(RING_READERS),
    CONSTANT(READER_STRIDE),   CONSTANT(READER_CONSUMED), CONSTANT(READER_SEQUENCE),
    CONSTANT(READER_READS),
    CONSTANT(RECORD_ALIGN),    CONSTANT(RECORD_HEADER),   CONSTANT(RECORD_SIZE),
    CONSTANT(RECORD_KIND),     CONSTANT(RECORD_CODEC),    CONSTANT(RECORD_BUFFERS),
    CONSTANT(RECORD_TOTAL),    CONSTANT(RECORD_SEQUENCE), CONSTANT(RECORD_OFFSET),
    CONSTANT(KIND_MESSAGE),    CONSTANT(KIND_FRAGMENT),   CONSTANT(KIND_PADDING),
    CONSTANT(KIND_CANCEL),     CONSTANT(MEMBER_STATE),    CONSTANT(MEMBER_SEQUENCE),
    CONSTANT(MEMBER_PROGRESS), CONSTANT(MEMBER_OPERATION), CONSTANT(OPERATION_BYTES),
    CONSTANT(EVENTCOUNT_WAITERS), CONSTANT(BOARD_ABORT),    CONSTANT(STATE_BUSY),
    CONSTANT(HISTORY_ENTRIES), CONSTANT(ENTRY_STRIDE),    CONSTANT(ENTRY_BEGIN),
    CONSTANT(ENTRY_END),       CONSTANT(ENTRY_SEQUENCE),  CONSTANT(ENTRY_BYTES),
    CONSTANT(ENTRY_NUMBER),    CONSTANT(ENTRY_PEER),      CONSTANT(ENTRY_VERB),
    CONSTANT(ENTRY_DTYPE),     CONSTANT(ENTRY_OUTCOME),   CONSTANT(ENTRY_GROUP),
    CONSTANT(ENTRY_GROUP_BYTES), CONSTANT(NO_PEER),       CONSTANT(DID_ENQUEUE),
    CONSTANT(DID_DEQUEUE),     CONSTANT(DID_ACQUIRE_READ), CONSTANT(OUTCOME_DONE),
    CONSTANT(TOTAL_GROUPS),    CONSTANT(TOTAL_NAME_STRIDE), CONSTANT(TOTAL_VERBS),
    CONSTANT(TOTAL_STRIDE),    CONSTANT(TOTAL_ENDED),     CONSTANT(TOTAL_FAILED),
    CONSTANT(TOTAL_NS),        CONSTANT(TOTAL_BYTES),     CONSTANT(TOTALS),
    CONSTANT(TOTALS_ROWS),     CONSTANT(HISTORY_STRIDE),
};

static int add_constants(PyObject *module) {
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) return -1;
    return 0;
}

static int execute(PyObject *module) {
    return add_type(module, "Words", words_type(module)) < 0 ||
                   add_type(module, "FastWriter", fast_writer_type(module)) < 0 ||
                   add_type(module, "FastReader", fast_reader_type(module)) < 0 ||
                   add_type(module, "Turn", turn_type(module)) < 0 ||
                   add_type(module, "Block", block_type(module)) < 0 ||
                   add_type(module, "RecyclingPool", recycling_pool_type(module)) < 0 ||
                   add_constants(module) < 0
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "shm_broadcast._native",
    .m_doc = "Atomic words on shared memory, and the ring's fast path.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
