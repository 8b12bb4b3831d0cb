/* The fast path: the verbs on plain tensors in one call of C, one microsecond instead of ten.
 *
 * A verb returns NotImplemented, without side effects, in all other cases: an argument is wrong or
 * not plain, the group is aborted, or a blocked call was not finished. The caller then takes the slow
 * path, which handles the case or raises. A verb returns Ellipsis if it has begun the operation and
 * is blocked: the caller waits, calls `advance`, and gets the result from `finish`. With one more
 * argument, a verb does not block: it returns the result, and the operation is `under_way` if it is
 * not done; `finish` ends it. */
#include "direct.h"

#include <string.h>

#include "atomics.h"
#include "plan.h"
#include "reduce.h"

bool direct_open(const Comm *self) {
    return self->reader != NULL && gc_load32(self->board.buf, BOARD_ABORT) == 0;
}

/* Returns true if a verb may run now, and `given` equals the `wanted` arguments. */
static bool callable(const Comm *self, Py_ssize_t given, Py_ssize_t wanted) {
    return given == wanted && direct_open(self) && !comm_under_way(self);
}

/* Reads a plain tensor. Returns false, without an error set, for any other object. */
static bool describe(const Comm *self, PyObject *object, tensor *described) {
    return tensor_read(self->reader, self->tensor_type, self->is_neg, object, described) &&
           !comm_under_way(self); /* another thread may have begun a call meanwhile */
}

static bool read_op(const Comm *self, PyObject *object, const tensor *x, int *op) {
    if ((PyObject *)Py_TYPE(object) != self->reduce_op_type) return false;
    *op = (int)PyLong_AsLong(object);
    return reduce_defined(x->dtype, *op);
}

size_t direct_read_rank(const Comm *self, PyObject *object) {
    size_t rank = PyLong_CheckExact(object) ? PyLong_AsSize_t(object) : self->steps.n;
    PyErr_Clear();
    return rank < self->steps.n ? rank : self->steps.n;
}

/* Returns true if a result of shape `wanted` and the dtype of `x` may be written into `out`, which is
 * None or a tensor; describes the tensor. */
static bool fits(const Comm *self, PyObject *out, const tensor *x, shape wanted,
                 tensor *described) {
    if (out == Py_None) return true;
    if (!describe(self, out, described) || described->dtype != x->dtype ||
        described->ndim != x->ndim)
        return false;
    for (int i = 0; i < x->ndim; i++)
        if ((uint64_t)described->shape[i] != shape_size(wanted, i)) return false;
    return !tensor_overlaps(described, x);
}

/* Does not store the state: it shares a cache line with the eventcount, which the others read. Only
 * a call that blocks stores it (stamp_state). */
uint64_t direct_stamp(Comm *self, int operation, uint64_t bytes, uint64_t begin, uint64_t end) {
    char *slot = (char *)self->board.buf + self->slot;
    uint64_t sequence = gc_load64(slot, MEMBER_SEQUENCE) + 1;
    memcpy(slot + MEMBER_OPERATION, self->operations[operation], OPERATION_BYTES);
    self->about.begin = begin;
    self->about.end = end;
    self->about.bytes = bytes;
    self->about.verb = (uint8_t)(operation + 1);
    gc_enter(self->history, self->about, sequence);
    gc_store64(slot, MEMBER_SEQUENCE, sequence);
    gc_store64(slot, MEMBER_PROGRESS, end ? end : begin);
    return sequence;
}

static void stamp_state(Comm *self, uint32_t state) {
    char *slot = (char *)self->board.buf + self->slot;
    gc_store64(slot, MEMBER_PROGRESS, gc_now_ns());
    gc_store32(slot, MEMBER_STATE, state);
}

/* Begins a signature with the shape `agreed` and the dtype of its model. `place` is the root, or the
 * dimension along which all ranks split or concatenate. */
static void sign(Comm *self, int verb, shape agreed, int op, size_t place) {
    unsigned char *signature = self->steps.plan.signature;
    const tensor *x = agreed.like;
    self->planned = true; /* from here on Python may run: a signal handler may call the group */
    memset(signature, 0, SIGNATURE_BYTES);
    signature[SIGNATURE_VERB] = (unsigned char)verb;
    signature[SIGNATURE_OP] = (unsigned char)op;
    uint32_t place32 = (uint32_t)place;
    memcpy(signature + SIGNATURE_PLACE, &place32, sizeof place32);
    uint32_t call = comm_call(self);
    memcpy(signature + SIGNATURE_CALL, &call, sizeof call);
    if (x == NULL) return;
    uint64_t dims[SHAPE_DIMS] = {0};
    int folded = x->ndim > SHAPE_DIMS ? x->ndim - SHAPE_DIMS : 0;
    for (int i = x->ndim - 1; i >= 0; i--) {
        if (i >= folded)
            dims[i - folded] = shape_size(agreed, i);
        else
            dims[0] *= shape_size(agreed, i);
    }
    signature[SIGNATURE_DTYPE] = (unsigned char)x->dtype;
    signature[SIGNATURE_DIMS] = (unsigned char)x->ndim;
    memcpy(signature + SIGNATURE_SHAPE, dims, sizeof dims);
}

/* Returns a new tensor of the dtype of `x` in recycled memory, and its address in `data`. */
static PyObject *make_large(Comm *self, PyObject *x, shape wanted, char **data) {
    tensor described;
    PyObject *sizes = PyTuple_New(wanted.like->ndim);
    for (int i = 0; sizes != NULL && i < wanted.like->ndim; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(shape_size(wanted, i));
        if (number == NULL || PyTuple_SetItem(sizes, i, number) < 0) Py_CLEAR(sizes);
    }
    if (sizes == NULL) return NULL;
    PyObject *made = PyObject_CallFunctionObjArgs(self->allocate, sizes, x, NULL);
    Py_DECREF(sizes);
    if (made != NULL &&
        !tensor_read(self->reader, self->tensor_type, self->is_neg, made, &described)) {
        PyErr_SetString(PyExc_TypeError, "the result's memory is not plain");
        Py_CLEAR(made);
    }
    if (made != NULL) *data = described.data;
    return made;
}

uint32_t direct_digest(uint32_t digest, const void *signature) {
    uint64_t words[SIGNATURE_BYTES / 8], hashed = 0;
    memcpy(words, signature, sizeof words);
    for (size_t i = 0; i < SIGNATURE_BYTES / 8; i++) {
        hashed = (hashed ^ words[i]) * 0x9E3779B97F4A7C15u;
        hashed ^= hashed >> 32;
    }
    digest = (digest ^ (uint32_t)hashed) * 0x9E3779B1u;
    return digest ^ digest >> 16;
}

/* As CollectiveLog.add of device_comm/call_number.py. */
static void add_to_log(Comm *self) {
    char *log = self->log.buf, *entries = log + LOG_ENTRIES;
    uint64_t count, word;
    memcpy(&count, log + LOG_COUNT, sizeof count);
    char *entry = entries + count++ % CALL_ENTRIES * COLLECTIVE_STRIDE;
    memcpy(&word, entry + COLLECTIVE_WORD, sizeof word);
    entry = entries + count % CALL_ENTRIES * COLLECTIVE_STRIDE;
    unsigned char signature[SIGNATURE_BYTES] = {0};
    memcpy(signature, self->steps.plan.signature, SIGNATURE_COMPARED);
    memcpy(entry + COLLECTIVE_SIGNATURE, signature, sizeof signature);
    word = count << 32 | direct_digest((uint32_t)word, signature);
    memcpy(entry + COLLECTIVE_WORD, &word, sizeof word);
    memcpy(log + LOG_COUNT, &count, sizeof count);
}

/* Begins the plan, and publishes the operation on the board. */
static void start(Comm *self, const collective *c) {
    bool outputs = c->source.size == 0;
    self->about.peer = c->verb >= VERB_BROADCAST ? (uint16_t)c->root : NO_PEER;
    self->about.dtype = self->steps.plan.signature[SIGNATURE_DTYPE];
    self->about.number = ++((uint32_t *)self->numbers.buf)[0];
    uint64_t begin = gc_pace_now(&self->pace);
    steps_begin(&self->steps);
    /* After the put, which the other ranks wait for: overlaps with their arrival. */
    if (comm_call(self) != 0) add_to_log(self);
    self->blocked =
        direct_stamp(self, c->verb, outputs ? c->output.size : c->source.size, begin, 0);
}

/* Begins the plan, and allocates the result unless `out` is a tensor; a small result after the begin,
 * while the other ranks arrive. Returns a new reference to the tensor to be filled, and its address
 * in `result`; or NULL with an error set. */
static PyObject *make(Comm *self, const collective *c, PyObject *x, PyObject *out, shape wanted,
                      tensor *result) {
    if (out == Py_None && c->output.size >= RECYCLED_BYTES) {
        /* Before the start: the allocation may raise, and the other ranks would be left waiting. */
        PyObject *made = make_large(self, x, wanted, &result->data);
        if (made == NULL)
            self->planned = false;
        else
            start(self, c);
        return made;
    }
    start(self, c);
    return out != Py_None ? Py_NewRef(out) : tensor_new(self->reader, wanted, &result->data);
}

/* Copies `pieces` along a dimension, with `outer` rows before it: from one piece after the other to
 * one row after the other, or back. */
static void arrange(char *to, const char *from, uint64_t size, uint64_t pieces, uint64_t outer,
                    bool to_rows) {
    uint64_t row = size / (pieces * outer), at = 0;
    for (uint64_t piece = 0; piece < pieces; piece++)
        for (uint64_t before = 0; before < outer; before++, at += row) {
            uint64_t placed = (before * pieces + piece) * row;
            if (to_rows)
                memcpy(to + placed, from + at, row);
            else
                memcpy(to + at, from + placed, row);
        }
}

/* Moves the pieces of a complete result to their places. */
static void place(const Comm *self) {
    const arranged *a = &self->arranged;
    if (a->output != NULL)
        arrange(a->output, self->results, a->size, a->pieces, a->outer, true);
}

/* Runs the plan. Steals `result`; returns it, or Ellipsis if blocked and not in the background. */
static PyObject *run(Comm *self, PyObject *source, PyObject *result, const collective *c,
                     bool background) {
    uint64_t bytes = c->source.size > c->output.size ? c->source.size : c->output.size;
    if (comm_run(self, bytes, background ? comm_begin_spin(bytes) : SPIN_NS) == STEPS_DONE) {
        place(self);
        if (self->history)
            gc_leave(self->history, self->blocked, OUTCOME_DONE, 0, 0, gc_pace_now(&self->pace));
        return result;
    }
    self->background = background;
    if (!background) stamp_state(self, STATE_BUSY);
    self->source = Py_NewRef(source);
    self->result = result;
    return Py_NewRef(background ? result : Py_Ellipsis);
}

/* Runs a verb with the arguments (x, root, dim, op, out), without those that it does not have; one
 * more argument: in the background. */
static inline __attribute__((always_inline)) PyObject *
call(PyObject *object, int verb, PyObject *const *args, Py_ssize_t given) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    const bool rooted = verb >= VERB_BROADCAST;
    const bool cuts = verb != VERB_ALL_REDUCE && verb != VERB_BROADCAST && verb != VERB_REDUCE;
    const bool reduces =
        verb == VERB_ALL_REDUCE || verb == VERB_REDUCE_SCATTER || verb == VERB_REDUCE;
    const int dim_at = 1 + rooted, op_at = dim_at + cuts, out_at = op_at + reduces;
    const bool background = given == out_at + 2;
    if (!callable(self, given - background, out_at + 1)) Py_RETURN_NOTIMPLEMENTED;
    size_t root = rooted ? direct_read_rank(self, args[1]) : 0;
    if (root == s->n) Py_RETURN_NOTIMPLEMENTED;
    bool at_root = root == s->rank;
    bool takes_input = verb != VERB_SCATTER || at_root;
    bool has_result = at_root || (verb != VERB_REDUCE && verb != VERB_GATHER);
    PyObject *out = args[out_at], *model = takes_input ? args[0] : out;
    tensor x, result;
    int op = NO_OP, dim = 0;
    uint64_t outer = 1, pieces = s->n;
    if ((!takes_input && args[0] != Py_None) || (!has_result && out != Py_None) ||
        !describe(self, model, &x) || (reduces && !read_op(self, args[op_at], &x, &op)))
        Py_RETURN_NOTIMPLEMENTED;
    shape whole = {.like = &x, .dim = -1}, wanted = whole;
    if (cuts) {
        dim = tensor_dim(args[dim_at], &x);
        if (dim < 0) Py_RETURN_NOTIMPLEMENTED;
        for (int i = 0; takes_input && i < dim; i++) outer *= (uint64_t)x.shape[i];
        uint64_t rows = (uint64_t)x.shape[dim];
        if (verb == VERB_ALL_TO_ALL) pieces = rows;
        if (verb == VERB_ALL_GATHER || (verb == VERB_GATHER && at_root)) {
            wanted = (shape){.like = &x, .dim = dim, .rows = rows * s->n};
        } else if (verb != VERB_GATHER && takes_input) {
            if (rows % s->n) Py_RETURN_NOTIMPLEMENTED;
            if (verb != VERB_ALL_TO_ALL)
                wanted = (shape){.like = &x, .dim = dim, .rows = rows / s->n};
        }
    }
    result = x;
    bool in_place = !takes_input || !has_result || (!cuts && out == args[0]);
    if (!in_place && !fits(self, out, &x, wanted, &result)) Py_RETURN_NOTIMPLEMENTED;
    bool puts = takes_input && (verb != VERB_BROADCAST || at_root);
    collective c = {.verb = verb, .root = root, .itemsize = x.itemsize};
    if (puts) c.source = (span){x.data, tensor_bytes(&x)};
    if (has_result) c.output.size = shape_bytes(wanted);
    bool collects = verb == VERB_ALL_GATHER || verb == VERB_GATHER;
    bool cut = outer > 1 && !collects;
    bool joined = outer > 1 && has_result && (collects || verb == VERB_ALL_TO_ALL);
    if ((cut && c.source.size > ARRANGED_BYTES) || (joined && c.output.size > ARRANGED_BYTES))
        Py_RETURN_NOTIMPLEMENTED;
    if (cut) {
        arrange(self->sources, x.data, c.source.size, pieces, outer, false);
        c.source.address = self->sources;
    }
    sign(self, verb, verb == VERB_SCATTER ? wanted : whole, op, rooted ? root : (size_t)dim);
    plan_sources(s, &c);
    PyObject *filled = Py_None;
    self->arranged.output = NULL;
    if (!has_result) {
        start(self, &c);
        Py_INCREF(filled);
    } else {
        filled = make(self, &c, model, out, wanted, &result);
        if (filled == NULL) return NULL;
        c.output.address = joined ? self->results : result.data;
        self->arranged = (arranged){joined ? result.data : NULL, c.output.size, pieces, outer};
        plan_results(s, &c);
    }
    return run(self, model, filled, &c, background);
}

#define FAST_VERB(name, verb)                                                                       \
    PyObject *name(PyObject *self, PyObject *const *args, Py_ssize_t n) {                          \
        return call(self, verb, args, n);                                                          \
    }

FAST_VERB(direct_all_reduce, VERB_ALL_REDUCE)
FAST_VERB(direct_all_gather, VERB_ALL_GATHER)
FAST_VERB(direct_reduce_scatter, VERB_REDUCE_SCATTER)
FAST_VERB(direct_all_to_all, VERB_ALL_TO_ALL)
FAST_VERB(direct_broadcast, VERB_BROADCAST)
FAST_VERB(direct_reduce, VERB_REDUCE)
FAST_VERB(direct_gather, VERB_GATHER)
FAST_VERB(direct_scatter, VERB_SCATTER)

PyObject *direct_barrier(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t n) {
    Comm *self = (Comm *)object;
    collective c = {.verb = VERB_BARRIER};
    const bool background = n == 1;
    if (!callable(self, n - background, 0)) Py_RETURN_NOTIMPLEMENTED;
    sign(self, VERB_BARRIER, (shape){0}, NO_OP, 0);
    plan_sources(&self->steps, &c);
    self->arranged.output = NULL;
    start(self, &c);
    return run(self, Py_None, Py_NewRef(Py_None), &c, background);
}

PyObject *direct_finish(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Comm *self = (Comm *)object;
    PyObject *result = self->result;
    place(self);
    self->result = NULL;
    Py_CLEAR(self->source);
    if (!self->background) stamp_state(self, STATE_IDLE);
    gc_leave(self->history, self->blocked, OUTCOME_DONE, 0, 0, gc_now_ns());
    if (result == NULL) PyErr_SetString(PyExc_RuntimeError, "no call is blocked");
    return result;
}

PyObject *direct_give_up(PyObject *object, PyObject *outcome) {
    Comm *self = (Comm *)object;
    unsigned long code = PyLong_AsUnsignedLong(outcome);
    if (code == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    gc_leave(self->history, self->blocked, (uint8_t)code, 0, 0, gc_now_ns());
    Py_RETURN_NONE;
}
