/* device_comm._native: collectives and messages through shared memory, reductions, and launches of
 * CUDA kernels. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "comm.h"
#include "direct.h"
#include "group_layout.h"
#include "launch.h"
#include "pipe_object.h"
#include "reduce.h"
#include "way.h"

_Thread_local uint32_t the_call;

static PyObject *call_number(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLong(the_call);
}

static PyObject *set_call_number(PyObject *Py_UNUSED(module), PyObject *number) {
    unsigned long value = PyLong_AsUnsignedLongMask(number);
    if (value == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    the_call = (uint32_t)value;
    Py_RETURN_NONE;
}

static PyObject *next_digest(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned int digest;
    const char *signature;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "Iy#", &digest, &signature, &size)) return NULL;
    if (size != SIGNATURE_BYTES) {
        PyErr_SetString(PyExc_ValueError, "the signature has the wrong length");
        return NULL;
    }
    return PyLong_FromUnsignedLong(direct_digest(digest, signature));
}

static PyObject *write_past_caches(PyObject *Py_UNUSED(module), PyObject *args) {
    int past, always = 0;
    if (!PyArg_ParseTuple(args, "p|p", &past, &always)) return NULL;
    way_begin_with(past, always);
    Py_RETURN_NONE;
}

static PyObject *tried_way(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long number, size;
    if (!PyArg_ParseTuple(args, "KK", &number, &size)) return NULL;
    return PyLong_FromLong(way_tried(number, size));
}

static PyObject *weigh_ways(PyObject *Py_UNUSED(module), PyObject *args) {
    gc_way way = way_new();
    uint32_t reads[WAYS] = {0};
    int past;
    PyObject *trials;
    if (!PyArg_ParseTuple(args, "pO!", &past, &PyList_Type, &trials)) return NULL;
    way.past = past;
    PyObject *taken = PyList_New(0);
    for (Py_ssize_t i = 0; taken != NULL && i < PyList_Size(trials); i++) {
        int kind;
        unsigned int write, read;
        if (!PyArg_ParseTuple(PyList_GetItem(trials, i), "iII", &kind, &write, &read)) {
            Py_CLEAR(taken);
            break;
        }
        reads[kind == WAY_PAST] = read;
        way_weigh(&way, kind == WAY_PAST ? WAY_PAST : WAY_PLAIN, write, reads);
        if (PyList_Append(taken, way.past ? Py_True : Py_False) < 0) Py_CLEAR(taken);
    }
    return taken;
}

static PyMethodDef functions[] = {
    {"call_number", call_number, METH_NOARGS, "call_number() -> this thread's call number; 0: none."},
    {"set_call_number", set_call_number, METH_O, "set_call_number(number): set this thread's."},
    {"next_digest", next_digest, METH_VARARGS,
     "next_digest(digest, signature) -> the checksum after one more collective."},
    {"tried_way", tried_way, METH_VARARGS,
     "tried_way(number, size) -> how the piece is timed: 0 plain, 1 past the caches, 2 not."},
    {"weigh_ways", weigh_ways, METH_VARARGS,
     "weigh_ways(past, [(way, write, read), ...]) -> list of bools: past the caches after each "
     "sample; see way_weigh."},
    {"write_past_caches", write_past_caches, METH_VARARGS,
     "write_past_caches(past, always=False): set how new ends write: past the caches or through them."},
    {NULL, NULL, 0, NULL},
};

#define CONSTANT(name) {#name, name}

static const struct {
    const char *name;
    long value;
} constants[] = {
    CONSTANT(GROUP_RANKS),        CONSTANT(GROUP_INSIDE_BYTES), CONSTANT(GROUP_WHOLE_BYTES),
    CONSTANT(GROUP_STEP_BYTES),   CONSTANT(GROUP_RING_BYTES),  CONSTANT(GROUP_SLOTS),
    CONSTANT(GROUP_RINGS),        CONSTANT(RING_STEPS),
    CONSTANT(RANK_LINES),         CONSTANT(RANK_STRIDE),
    CONSTANT(RANK_DONE), CONSTANT(RANK_READS),          CONSTANT(BUFFERS),           CONSTANT(SLOT_HEADER),
    CONSTANT(SLOT_ARRIVED),       CONSTANT(SLOT_SIGNATURE),    CONSTANT(PIECE_ALIGN),
    CONSTANT(SIGNATURE_COMPARED), CONSTANT(SIGNATURE_CHUNK),   CONSTANT(SIGNATURE_CALL),
    CONSTANT(SIGNATURE_BYTES),
    CONSTANT(LOG_COUNT),          CONSTANT(LOG_ENTRIES),       CONSTANT(COLLECTIVE_STRIDE),
    CONSTANT(COLLECTIVE_WORD),           CONSTANT(COLLECTIVE_SIGNATURE),     CONSTANT(CALL_ENTRIES),
    CONSTANT(SHAPE_DIMS),         CONSTANT(NO_OP),             CONSTANT(STATE_IDLE),
    CONSTANT(STATE_BUSY),
    CONSTANT(STEPS_DONE),         CONSTANT(STEPS_BLOCKED),     CONSTANT(STEPS_DIVERGED),
    CONSTANT(DTYPE_FLOAT16),      CONSTANT(DTYPE_BFLOAT16),    CONSTANT(DTYPE_FLOAT32),
    CONSTANT(DTYPE_FLOAT64),      CONSTANT(DTYPE_UINT8),       CONSTANT(DTYPE_INT8),
    CONSTANT(DTYPE_INT16),        CONSTANT(DTYPE_INT32),       CONSTANT(DTYPE_INT64),
    CONSTANT(DTYPE_UINT16),       CONSTANT(DTYPE_UINT32),      CONSTANT(DTYPE_BOOL),
    CONSTANT(DTYPE_COMPLEX64),    CONSTANT(DTYPE_COMPLEX128),  CONSTANT(RECYCLED_BYTES),
    CONSTANT(PIPE_POSTED),     CONSTANT(PIPE_TAKEN), CONSTANT(PIPE_READS),    CONSTANT(PIPE_RING),
    CONSTANT(PIPE_RING_BYTES), CONSTANT(PIPE_PIECE_BYTES), CONSTANT(PIPE_RESERVED_BYTES),
    CONSTANT(PIPE_SMALL_BYTES), CONSTANT(PIPE_HEADER_BYTES), CONSTANT(PIPE_AT_ONCE_BYTES),
    CONSTANT(PIPE_INSIDE),
};

static int add_type(PyObject *module, const char *name, PyObject *type) {
    if (type == NULL) return -1;
    int added = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return added;
}

static int execute(PyObject *module) {
    if (add_type(module, "Comm", comm_type(module)) < 0 ||
        add_type(module, "Pipe", pipe_type(module)) < 0 ||
        add_type(module, "Launch", launch_type(module)) < 0 ||
        add_type(module, "Cuda", cuda_type(module)) < 0)
        return -1;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "device_comm._native",
    .m_doc = "Collectives and messages through shared memory, reductions, and kernel launches.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
