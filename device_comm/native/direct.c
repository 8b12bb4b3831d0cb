/* The fast path: the verbs on plain tensors in one call of C, one microsecond instead of ten.
 *
 * A verb returns NotImplemented, without side effects, in all other cases: an argument is wrong or
 * not plain, the group is aborted, or a blocked call was not finished. The caller then takes the slow
 * path, which handles the case or raises. A verb returns Ellipsis if it has begun the operation and
 * is blocked: the caller waits, calls `advance`, and gets the result from `finish`. */
#include "direct.h"

#include <string.h>

#include "atomics.h"

bool direct_callable(const Comm *self, Py_ssize_t given, Py_ssize_t wanted) {
    return given == wanted && self->reader != NULL && !comm_under_way(self) &&
           gc_load32(self->board.buf, BOARD_ABORT) == 0;
}

bool direct_describe(const Comm *self, PyObject *object, tensor *described) {
    return tensor_read(self->reader, self->tensor_type, self->is_neg, object, described) &&
           !comm_under_way(self); /* another thread may have begun a call meanwhile */
}

bool direct_read_op(const Comm *self, PyObject *object, const tensor *x, int *op) {
    if ((PyObject *)Py_TYPE(object) != self->reduce_op_type) return false;
    *op = (int)PyLong_AsLong(object);
    return reduce_defined(x->dtype, *op);
}

size_t direct_read_rank(const Comm *self, PyObject *object) {
    size_t rank = PyLong_CheckExact(object) ? PyLong_AsSize_t(object) : self->steps.n;
    PyErr_Clear();
    return rank < self->steps.n ? rank : self->steps.n;
}

bool direct_accepts(const Comm *self, Py_ssize_t given, Py_ssize_t wanted, PyObject *object,
                    tensor *x) {
    return direct_callable(self, given, wanted) && direct_describe(self, object, x);
}

bool direct_fits(const Comm *self, PyObject *out, const tensor *x, shape wanted,
                 tensor *described) {
    if (out == Py_None) return true;
    if (!direct_describe(self, out, described) || described->dtype != x->dtype ||
        described->ndim != x->ndim)
        return false;
    for (int i = 0; i < x->ndim; i++)
        if ((uint64_t)described->shape[i] != shape_size(wanted, i)) return false;
    return !tensor_overlaps(described, x);
}

bool direct_lands(const Comm *self, PyObject *out, PyObject *object, const tensor *x,
                  tensor *described) {
    *described = *x;
    return out == object || direct_fits(self, out, x, shape_of(x), described);
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

plan *direct_plan(Comm *self, int verb, shape agreed, int op, size_t place, uint64_t length) {
    steps *s = &self->steps;
    plan *p = &s->plan;
    const tensor *x = agreed.like;
    self->planned = true; /* from here on Python may run: a signal handler may call the group */
    memset(p->signature, 0, SIGNATURE_BYTES);
    p->signature[SIGNATURE_VERB] = (unsigned char)verb;
    p->signature[SIGNATURE_OP] = (unsigned char)op;
    uint32_t place32 = (uint32_t)place;
    memcpy(p->signature + SIGNATURE_PLACE, &place32, sizeof place32);
    uint32_t call = comm_call(self);
    memcpy(p->signature + SIGNATURE_CALL, &call, sizeof call);
    if (x != NULL) {
        uint64_t dims[SHAPE_DIMS] = {0};
        int folded = x->ndim > SHAPE_DIMS ? x->ndim - SHAPE_DIMS : 0;
        for (int i = x->ndim - 1; i >= 0; i--) {
            if (i >= folded)
                dims[i - folded] = shape_size(agreed, i);
            else
                dims[0] *= shape_size(agreed, i);
        }
        p->signature[SIGNATURE_DTYPE] = (unsigned char)x->dtype;
        p->signature[SIGNATURE_DIMS] = (unsigned char)x->ndim;
        memcpy(p->signature + SIGNATURE_SHAPE, dims, sizeof dims);
        p->dtype = x->dtype;
    }
    p->kind = KIND_MOVE;
    p->op = op;
    p->puts = false;
    p->addressed = false;
    p->length = length;
    p->own = x ? x->data : NULL;
    memset(p->awaits, 1, s->n);
    p->awaits[s->rank] = 0;
    memset(p->gives, 0, s->n * sizeof(span));
    memset(p->takes, 0, s->n * sizeof(span));
    return p;
}

void direct_give(plan *p, const tensor *x) {
    p->puts = true;
    p->gives[0] = (span){x->data, tensor_bytes(x)};
}

void direct_give_parts(Comm *self, const tensor *x, uint64_t bytes) {
    plan *p = &self->steps.plan;
    p->puts = p->addressed = true;
    p->own = x->data + self->steps.rank * bytes;
    for (size_t rank = 0; rank < self->steps.n; rank++)
        p->gives[rank] = (span){x->data + rank * bytes, bytes};
}

void direct_take_in_a_row(Comm *self, const tensor *result, uint64_t bytes) {
    for (size_t rank = 0; rank < self->steps.n; rank++)
        self->steps.plan.takes[rank] = (span){result->data + rank * bytes, bytes};
}

void direct_await_only(Comm *self, size_t root) {
    plan *p = &self->steps.plan;
    memset(p->awaits, 0, self->steps.n);
    p->awaits[root] = root != self->steps.rank;
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

static uint64_t mixed(uint64_t checksum, uint64_t word) {
    uint64_t product = (checksum ^ word) * BEGUN_FACTOR;
    return product ^ product >> 32;
}

/* As OperationCounts.add of device_comm/call_number.py. */
static void add_to_begun(Comm *self) {
    uint64_t *words = self->begun.buf, count = words[BEGUN_COUNT], hashed = 0;
    uint64_t *last = words + BEGUN_LAST + count % BEGUN_KEPT * SIGNATURE_WORDS;
    memcpy(last, self->steps.plan.signature, SIGNATURE_COMPARED);
    last[SIGNATURE_WORDS - 1] = 0;
    for (size_t i = 0; i < SIGNATURE_WORDS; i++) hashed = mixed(hashed, last[i]);
    words[BEGUN_CHECKSUM] = mixed(words[BEGUN_CHECKSUM], hashed);
    words[BEGUN_COUNT] = count + 1;
}

void direct_start(Comm *self, int verb) {
    const plan *p = &self->steps.plan;
    uint32_t place;
    memcpy(&place, p->signature + SIGNATURE_PLACE, sizeof place);
    self->about.peer = verb >= VERB_BROADCAST ? (uint16_t)place : NO_PEER;
    self->about.dtype = p->signature[SIGNATURE_DTYPE];
    self->about.number = ++((uint32_t *)self->numbers.buf)[0];
    uint64_t bytes = p->addressed && p->puts ? p->length * self->steps.n : p->length;
    uint64_t begin = gc_pace_now(&self->pace);
    steps_begin(&self->steps);
    steps_put_first(&self->steps);
    /* After the put, which the other ranks wait for: overlaps with their arrival. */
    if (comm_call(self) != 0) add_to_begun(self);
    self->blocked = direct_stamp(self, verb, bytes, begin, 0);
}

PyObject *direct_make(Comm *self, int verb, PyObject *x, PyObject *out, shape wanted,
                      tensor *result) {
    if (out == Py_None && shape_bytes(wanted) >= RECYCLED_BYTES) {
        /* Before the start: the allocation may raise, and the other ranks would be left waiting. */
        PyObject *made = make_large(self, x, wanted, &result->data);
        if (made == NULL)
            self->planned = false;
        else
            direct_start(self, verb);
        return made;
    }
    direct_start(self, verb);
    return out != Py_None ? Py_NewRef(out) : tensor_new(self->reader, wanted, &result->data);
}

PyObject *direct_run(Comm *self, PyObject *source, PyObject *result, uint64_t bytes) {
    if (comm_run(self, bytes, SPIN_NS) == STEPS_DONE) {
        if (self->history)
            gc_leave(self->history, self->blocked, OUTCOME_DONE, 0, 0, gc_pace_now(&self->pace));
        return result;
    }
    stamp_state(self, STATE_BUSY);
    self->source = Py_NewRef(source);
    self->result = result;
    return Py_NewRef(Py_Ellipsis);
}

PyObject *direct_finish(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Comm *self = (Comm *)object;
    PyObject *result = self->result;
    self->result = NULL;
    Py_CLEAR(self->source);
    stamp_state(self, STATE_IDLE);
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
