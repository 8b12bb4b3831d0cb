#define PY_SSIZE_T_CLEAN
#include "comm.h"

#include <string.h>

#include "atomics.h"
#include "reduce.h"

/* Up to this size, polling for a microsecond with the GIL held costs less than releasing it. */
#define BRIEF_BYTES 32768

/* A small plan that begins polls for this long, which costs less than to sleep or to wake the thread
 * that advances it. */
#define BEGIN_SPIN_NS 20000

static steps_status run(Comm *self, uint64_t bytes, uint64_t spin_ns) {
    steps_status status = STEPS_BLOCKED;
    if (bytes <= BRIEF_BYTES) status = steps_run_briefly(&self->steps);
    if (status == STEPS_BLOCKED && (spin_ns != 0 || bytes > BRIEF_BYTES)) {
        Py_BEGIN_ALLOW_THREADS
        status = steps_run(&self->steps, spin_ns);
        Py_END_ALLOW_THREADS
    }
    return status;
}

/* Returns the first rank whose sizes contradict this rank's; n if none does. */
static size_t contradicts(const Comm *self) {
    const steps *s = &self->steps;
    const collective *c = &self->call;
    for (size_t rank = 0; rank < s->n; rank++) {
        const uint64_t *row = self->sizes + rank * s->n;
        bool same = c->verb == VERB_ALL_TO_ALL
                        ? row[s->rank] == c->output_sizes[rank]
                        : memcmp(row, self->row, s->n * sizeof *row) == 0;
        if (!same) return rank;
    }
    return s->n;
}

/* Begins the plan that moves the data, after the exchange of sizes. Returns false if they differ. */
static bool begin_move(Comm *self) {
    steps *s = &self->steps;
    if (contradicts(self) < s->n) return false;
    self->exchanging = false;
    self->call.longest = 0;
    for (size_t i = 0; i < s->n * s->n; i++)
        if (self->sizes[i] > self->call.longest) self->call.longest = self->sizes[i];
    plan_sources(s, &self->call);
    plan_results(s, &self->call);
    steps_begin(s);
    return true;
}

steps_status comm_run(Comm *self, uint64_t bytes, uint64_t spin_ns) {
    steps_status status = run(self, bytes, spin_ns);
    if (status == STEPS_DONE && self->exchanging)
        status = begin_move(self) ? run(self, self->steps.plan.length, spin_ns) : STEPS_DIVERGED;
    if (status == STEPS_DONE) self->planned = false;
    return status;
}

uint64_t comm_begin_spin(uint64_t bytes) { return bytes <= BRIEF_BYTES ? BEGIN_SPIN_NS : 0; }

uint32_t comm_call(const Comm *self) { return self->in_calls ? the_call : 0; }

bool comm_under_way(const Comm *self) { return self->planned || self->result != NULL; }

static int read_u64(PyObject *object, uint64_t *value) {
    *value = PyLong_AsUnsignedLongLong(object);
    return *value == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* Reads None or a sequence of n sizes; sets `row` to NULL or `into`. */
static int read_sizes(const Comm *self, PyObject *sizes, uint64_t *into, const uint64_t **row) {
    *row = sizes == Py_None ? NULL : into;
    if (sizes == Py_None) return 0;
    Py_ssize_t count = PySequence_Size(sizes);
    if (count != (Py_ssize_t)self->steps.n) {
        if (count >= 0) PyErr_Format(PyExc_ValueError, "%zd sizes for %zu ranks", count, self->steps.n);
        return -1;
    }
    for (Py_ssize_t rank = 0; rank < count; rank++) {
        PyObject *size = PySequence_GetItem(sizes, rank);
        int read = size ? read_u64(size, into + rank) : -1;
        Py_XDECREF(size);
        if (read < 0) return -1;
    }
    return 0;
}

static steps_status progress(Comm *self, uint64_t spin_ns) {
    steps *s = &self->steps;
    const unsigned char *signature;
    steps_status status = comm_run(self, s->plan.length, spin_ns);
    if (status == STEPS_BLOCKED && steps_divergent(s, &signature) < s->n) status = STEPS_DIVERGED;
    return status;
}

/* (signature, source, its bytes, output, its bytes, item size, source sizes, output sizes, call,
 * spin_ns) */
static PyObject *begin(PyObject *object, PyObject *args) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    unsigned char *signature = s->plan.signature;
    const char *given;
    Py_ssize_t size;
    unsigned long long source, source_bytes, output, output_bytes, itemsize, spin_ns;
    PyObject *source_sizes, *output_sizes;
    uint32_t call, root;
    if (!PyArg_ParseTuple(args, "y#KKKKKOOIK", &given, &size, &source, &source_bytes, &output,
                          &output_bytes, &itemsize, &source_sizes, &output_sizes, &call, &spin_ns))
        return NULL;
    if (comm_under_way(self)) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in a call of this group, or one was "
                                            "interrupted when it had begun");
        return NULL;
    }
    if (size != SIGNATURE_BYTES) {
        PyErr_SetString(PyExc_ValueError, "the signature has the wrong length");
        return NULL;
    }
    memcpy(signature, given, SIGNATURE_BYTES);
    memcpy(signature + SIGNATURE_CALL, &call, sizeof call);
    memcpy(&root, signature + SIGNATURE_PLACE, sizeof root);
    collective *c = &self->call;
    *c = (collective){.verb = signature[SIGNATURE_VERB],
                      .source = {(char *)(uintptr_t)source, source_bytes},
                      .output = {(char *)(uintptr_t)output, output_bytes},
                      .itemsize = itemsize};
    if (c->verb >= VERB_BROADCAST) c->root = root;
    if (c->verb >= VERBS || c->root >= s->n) {
        PyErr_SetString(PyExc_ValueError, "the signature has no such verb or root");
        return NULL;
    }
    if (read_sizes(self, source_sizes, self->sent, &c->source_sizes) < 0 ||
        read_sizes(self, output_sizes, self->received, &c->output_sizes) < 0)
        return NULL;
    self->exchanging = c->source_sizes || c->output_sizes;
    collective first = *c;
    if (self->exchanging) { /* an all-gather of this rank's row */
        self->row = c->source_sizes ? self->sent : self->received;
        uint64_t bytes = s->n * sizeof *self->row;
        first = (collective){.verb = VERB_ALL_GATHER,
                             .source = {(char *)self->row, bytes},
                             .output = {(char *)self->sizes, bytes * s->n}};
    }
    plan_sources(s, &first);
    plan_results(s, &first);
    bool reduces = s->plan.kind != KIND_MOVE || s->plan.op != NO_OP;
    if (reduces && !reduce_defined(s->plan.dtype, s->plan.op)) {
        PyErr_Format(PyExc_ValueError, "no reduction %d of dtype %d", s->plan.op, s->plan.dtype);
        return NULL;
    }
    self->planned = true;
    steps_begin(s);
    uint64_t least = comm_begin_spin(s->plan.length);
    return PyLong_FromLong(progress(self, spin_ns < least ? least : spin_ns));
}

static PyObject *advance(PyObject *object, PyObject *spin) {
    uint64_t spin_ns;
    if (read_u64(spin, &spin_ns) < 0) return NULL;
    return PyLong_FromLong(progress((Comm *)object, spin_ns));
}

static PyObject *ready(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(steps_ready(&((Comm *)self)->steps));
}

static PyObject *missing(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    const steps *s = &((Comm *)self)->steps;
    PyObject *list = PyList_New(0);
    for (size_t rank = 0; list != NULL && rank < s->n; rank++) {
        if (!steps_waits_for(s, rank)) continue;
        PyObject *number = PyLong_FromSize_t(rank);
        if (number == NULL || PyList_Append(list, number) < 0) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    return list;
}

/* Returns a row of sizes as a list. */
static PyObject *listed(const uint64_t *row, size_t n) {
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; list != NULL && i < n; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(row[i]);
        if (number == NULL || PyList_SetItem(list, (Py_ssize_t)i, number) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *divergent(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    const Comm *self = (Comm *)object;
    const steps *s = &self->steps;
    const unsigned char *theirs;
    size_t rank;
    if (self->exchanging && s->taken == s->chunks && (rank = contradicts(self)) < s->n) {
        bool to_all = self->call.verb == VERB_ALL_TO_ALL;
        return Py_BuildValue("nNN", (Py_ssize_t)rank,
                             listed(to_all ? self->received : self->row, s->n),
                             listed(self->sizes + rank * s->n, s->n));
    }
    if ((rank = steps_divergent(s, &theirs)) == s->n) Py_RETURN_NONE;
    return Py_BuildValue("ny#y#", (Py_ssize_t)rank, s->plan.signature, (Py_ssize_t)SIGNATURE_BYTES,
                         theirs, (Py_ssize_t)SIGNATURE_BYTES);
}

static void comm_dealloc(PyObject *object) {
    Comm *self = (Comm *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyBuffer_Release(&self->group);
    PyBuffer_Release(&self->board);
    PyBuffer_Release(&self->log);
    PyBuffer_Release(&self->numbers);
    PyMem_Free(self->steps.eventcounts);
    PyMem_Free(self->steps.plan.awaits);
    PyMem_Free(self->steps.plan.gives);
    PyMem_Free(self->steps.plan.takes);
    PyMem_Free((void *)self->steps.parts);
    PyMem_Free(self->steps.scratch);
    PyMem_Free(self->sizes);
    PyMem_Free(self->sources);
    Py_XDECREF(self->tensor_type);
    Py_XDECREF(self->is_neg);
    Py_XDECREF(self->reduce_op_type);
    Py_XDECREF(self->pipe_type);
    Py_XDECREF(self->allocate);
    Py_XDECREF(self->source);
    Py_XDECREF(self->result);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int wrong_memory(const char *what) {
    PyErr_Format(PyExc_ValueError, "%s does not lie in the memory given", what);
    return -1;
}

/* Reads the group's layout, and checks that the segment holds all of it. */
static int read_group(Comm *self, size_t rank) {
    steps *s = &self->steps;
    size_t size = (size_t)self->group.len;
    if (size < RANK_LINES) return wrong_memory("the group");
    s->group = self->group.buf;
    s->n = gc_load32(s->group, GROUP_RANKS);
    s->rank = rank;
    s->inside_bytes = gc_load64(s->group, GROUP_INSIDE_BYTES);
    s->step_bytes = gc_load64(s->group, GROUP_STEP_BYTES);
    s->ring_bytes = gc_load64(s->group, GROUP_RING_BYTES);
    s->slots = gc_load64(s->group, GROUP_SLOTS);
    s->rings = gc_load64(s->group, GROUP_RINGS);
    uint64_t offsets = s->slots | s->rings | s->inside_bytes | s->ring_bytes;
    if (s->n < 2 || rank >= s->n || s->n > size / RANK_STRIDE || s->inside_bytes > size ||
        s->rings > size || s->slots > s->rings || s->slots < RANK_LINES + s->n * RANK_STRIDE ||
        (s->rings - s->slots) / (SLOT_HEADER + s->inside_bytes) / s->n < BUFFERS ||
        offsets % PIECE_ALIGN)
        return wrong_memory("a slot");
    if ((size - s->rings) / s->n < s->ring_bytes || s->ring_bytes / RING_STEPS < s->step_bytes ||
        s->step_bytes / s->n < PIECE_ALIGN)
        return wrong_memory("a ring");
    return 0;
}

static int read_doorbells(Comm *self, PyObject *offsets, Py_ssize_t slot) {
    steps *s = &self->steps;
    s->board = self->board.buf;
    if (PyTuple_Size(offsets) != (Py_ssize_t)s->n) return wrong_memory("an eventcount");
    for (size_t rank = 0; rank < s->n; rank++) {
        uint64_t offset;
        if (read_u64(PyTuple_GetItem(offsets, (Py_ssize_t)rank), &offset) < 0) return -1;
        if (offset % 8 || offset + 8 > (uint64_t)self->board.len) return wrong_memory("an eventcount");
        s->eventcounts[rank] = offset;
    }
    if (slot < 0 || slot % 8 || slot > self->board.len - MEMBER_OPERATION - OPERATION_BYTES)
        return wrong_memory("the slot on the board");
    self->slot = (size_t)slot;
    return 0;
}

static int read_operations(Comm *self, PyObject *names) {
    for (int i = 0; i < OPERATIONS; i++) {
        PyObject *name = PyTuple_GetItem(names, i);
        Py_ssize_t size;
        const char *text = name ? PyUnicode_AsUTF8AndSize(name, &size) : NULL;
        if (text == NULL) return -1;
        memcpy(self->operations[i], text, (size_t)(size < OPERATION_BYTES ? size : OPERATION_BYTES));
    }
    return 0;
}

static int make_room(Comm *self) {
    steps *s = &self->steps;
    self->sizes = PyMem_Calloc(s->n * (s->n + 2), sizeof *self->sizes);
    s->eventcounts = PyMem_Calloc(s->n, sizeof *s->eventcounts);
    s->plan.awaits = PyMem_Calloc(s->n, sizeof *s->plan.awaits);
    s->plan.gives = PyMem_Calloc(s->n, sizeof *s->plan.gives);
    s->plan.takes = PyMem_Calloc(s->n, sizeof *s->plan.takes);
    s->parts = PyMem_Calloc(s->n, sizeof *s->parts);
    s->scratch = PyMem_Calloc(1, SCRATCH_BYTES);
    self->sources = PyMem_Malloc(2 * ARRANGED_BYTES);
    bool all = s->eventcounts && s->plan.awaits && s->plan.gives && s->plan.takes && s->parts &&
               s->scratch && self->sizes && self->sources;
    if (self->sources) self->results = self->sources + ARRANGED_BYTES;
    if (self->sizes) {
        self->sent = self->sizes + s->n * s->n;
        self->received = self->sent + s->n;
    }
    if (!all) PyErr_NoMemory();
    return all ? 0 : -1;
}

static int read_log(Comm *self, PyObject *log) {
    if (PyObject_GetBuffer(log, &self->log, PyBUF_WRITABLE) < 0) return -1;
    if (self->log.len >= LOG_ENTRIES + CALL_ENTRIES * COLLECTIVE_STRIDE) return 0;
    PyErr_SetString(PyExc_ValueError, "too few entries");
    return -1;
}

static int read_history(Comm *self, PyObject *numbers, Py_ssize_t history, PyObject *group) {
    if (PyObject_GetBuffer(numbers, &self->numbers, PyBUF_WRITABLE) < 0) return -1;
    if (self->numbers.len < (Py_ssize_t)((1 + 2 * self->steps.n) * sizeof(uint32_t))) {
        PyErr_SetString(PyExc_ValueError, "too few numbers");
        return -1;
    }
    Py_ssize_t size;
    const char *name = PyUnicode_AsUTF8AndSize(group, &size);
    if (name == NULL) return -1;
    memcpy(self->about.group, name, (size_t)(size < ENTRY_GROUP_BYTES ? size : ENTRY_GROUP_BYTES));
    if (history == 0) return 0;
    if (history < 0 || history % 8 || history > self->board.len - HISTORY_STRIDE)
        return wrong_memory("the history on the board");
    self->history = (char *)self->board.buf + history;
    return 0;
}

/* (group, board, rank, slot, eventcounts, operations, tensor type, ReduceOp, allocate, log, numbers,
 * history, name, oversubscribed, in_calls) */
static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *group, *board, *eventcounts, *operations, *tensor_type, *reduce_op;
    PyObject *allocate, *log, *numbers, *name;
    Py_ssize_t rank, slot, history;
    int oversubscribed, in_calls;
    if (!PyArg_ParseTuple(args, "OOnnO!O!OOOOOnOpp", &group, &board, &rank, &slot, &PyTuple_Type,
                          &eventcounts, &PyTuple_Type, &operations, &tensor_type, &reduce_op,
                          &allocate, &log, &numbers, &history, &name, &oversubscribed, &in_calls))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Comm *self = (Comm *)make(type, 0);
    if (self == NULL) return NULL;
    self->steps.oversubscribed = oversubscribed;
    self->steps.way = way_new();
    self->in_calls = in_calls;
    self->tensor_type = Py_NewRef(tensor_type);
    self->reduce_op_type = Py_NewRef(reduce_op);
    self->allocate = Py_NewRef(allocate);
    self->is_neg = PyObject_GetAttrString(tensor_type, "is_neg");
    self->pipe_type = PyObject_GetAttrString(PyType_GetModule(type), "Pipe");
    if (self->is_neg == NULL || self->pipe_type == NULL ||
        PyObject_GetBuffer(group, &self->group, PyBUF_WRITABLE) < 0 ||
        PyObject_GetBuffer(board, &self->board, PyBUF_WRITABLE) < 0 ||
        read_group(self, (size_t)rank) < 0 || make_room(self) < 0 ||
        read_doorbells(self, eventcounts, slot) < 0 || read_operations(self, operations) < 0 ||
        read_log(self, log) < 0 || read_history(self, numbers, history, name) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->reader = tensor_reader_of(tensor_type);
    return (PyObject *)self;
}

static PyObject *get_under_way(PyObject *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(comm_under_way((Comm *)self));
}

static PyObject *get_halfway(PyObject *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(((Comm *)self)->halfway);
}

static PyObject *get_way(PyObject *self, void *Py_UNUSED(closure)) {
    const gc_way *way = &((Comm *)self)->steps.way;
    return Py_BuildValue("Oii", way->past ? Py_True : Py_False, (int)way->costs[WAY_PLAIN],
                         (int)way->costs[WAY_PAST]);
}

static PyGetSetDef properties[] = {
    {"under_way", get_under_way, NULL,
     "True while a plan is not done, or a result was not fetched by `finish`.", NULL},
    {"halfway", get_halfway, NULL, "True if the last send or recv moved only a part.", NULL},
    {"way", get_way, NULL,
     "(past, plain cost, past cost): True if payloads are written past the caches; ticks per MiB.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define FAST(name, function, doc) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, doc}

static PyMethodDef methods[] = {
    {"begin", begin, METH_VARARGS, "begin(...) -> status: begin a collective; see _native.pyi."},
    {"advance", advance, METH_O, "advance(spin_ns) -> status: run it as far as possible."},
    {"ready", ready, METH_NOARGS, "ready() -> bool: return True if advance would make progress."},
    {"missing", missing, METH_NOARGS, "missing() -> list of the awaited ranks."},
    {"divergent", divergent, METH_NOARGS,
     "divergent() -> None, or (rank, own signature or sizes, that rank's)."},
    FAST("all_reduce", direct_all_reduce, "all_reduce(x, op, out) -> result; see direct.c."),
    FAST("all_gather", direct_all_gather, "all_gather(x, dim, out) -> result; see direct.c."),
    FAST("reduce_scatter", direct_reduce_scatter,
         "reduce_scatter(x, dim, op, out) -> result; see direct.c."),
    FAST("all_to_all", direct_all_to_all, "all_to_all(x, dim, out) -> result; see direct.c."),
    FAST("broadcast", direct_broadcast, "broadcast(x, src, out) -> result; see direct.c."),
    FAST("reduce", direct_reduce, "reduce(x, dst, op, out) -> result or None; see direct.c."),
    FAST("gather", direct_gather, "gather(x, dst, dim, out) -> result or None; see direct.c."),
    FAST("scatter", direct_scatter, "scatter(x, src, dim, out) -> result; see direct.c."),
    FAST("send", direct_send, "send(x, pipe, peer) -> None or bytes sent; see direct_messages.c."),
    FAST("recv", direct_recv, "recv(out, pipe, peer) -> None or bytes received; see direct_messages.c."),
    FAST("barrier", direct_barrier, "barrier() -> None; see direct.c."),
    {"finish", direct_finish, METH_NOARGS, "finish() -> result of the call that was blocked."},
    {"give_up", direct_give_up, METH_O, "give_up(outcome): record how the blocked call failed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, comm_new},
    {Py_tp_dealloc, comm_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, "One rank's end of a group; one thread at a time."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "device_comm._native.Comm",
    .basicsize = sizeof(Comm),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

PyObject *comm_type(PyObject *module) { return PyType_FromModuleAndSpec(module, &spec, NULL); }
