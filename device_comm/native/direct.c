/* Verbs on tensors as they are: what device_comm's Python does in ten microseconds, in one, for
 * calls that need none of its care.
 *
 * Each returns NotImplemented, and has done nothing, where anything is out of the ordinary: an
 * argument that is wrong or not plain, an aborted group. The caller then goes the long way, which
 * says what is wrong or copes with it. It returns None when it has begun the operation and is
 * blocked; the caller waits, goes on with `advance`, and takes the result from `finish`. */
#include "comm.h"

#include <string.h>

#include "atomics.h"
#include "reduce.h"

/* Nanoseconds to look for the others before the caller is told to sleep. */
#define SPIN_NS 50000

static bool aborted(const Comm *self) { return gc_load32(self->board.buf, BOARD_ABORT) != 0; }

static bool describe(const Comm *self, PyObject *object, tensor *described) {
    return tensor_read(self->reader, self->tensor_type, object, described);
}

static uint64_t bytes_of(const tensor *x) { return x->numel * x->itemsize; }

static bool overlaps(const tensor *a, const tensor *b) {
    return a->data < b->data + bytes_of(b) && b->data < a->data + bytes_of(a);
}

/* Whether a result of `rows` rows in dimension `dim` of `x` may be written into `out`. */
static bool fits(const Comm *self, PyObject *out, const tensor *x, int dim, uint64_t rows,
                 tensor *described) {
    if (!describe(self, out, described) || described->dtype != x->dtype || described->ndim != x->ndim)
        return false;
    for (int i = 0; i < x->ndim; i++)
        if ((uint64_t)described->shape[i] != (i == dim ? rows : (uint64_t)x->shape[i])) return false;
    return !overlaps(described, x);
}

/* A dimension from Python, counted from the front; -1 if parts along it would not be contiguous. */
static int leading_dim(PyObject *object, const tensor *x) {
    long dim = PyLong_CheckExact(object) ? PyLong_AsLong(object) : x->ndim;
    if (dim < 0) dim += x->ndim;
    if (dim < 0 || dim >= x->ndim) return -1;
    for (int i = 0; i < dim; i++)
        if (x->shape[i] != 1) return -1;
    return (int)dim;
}

static bool read_op(const Comm *self, PyObject *object, const tensor *x, int *op) {
    if ((PyObject *)Py_TYPE(object) != self->reduce_op_type) return false;
    *op = (int)PyLong_AsLong(object);
    return reduce_defined(x->dtype, *op);
}

/* Says on the board what begins here. The state shares a line with the doorbell, which the others
 * read: it is not touched unless the call turns out to be a long one. */
static void stamp(Comm *self, int verb) {
    char *slot = (char *)self->board.buf + self->slot;
    memcpy(slot + MEMBER_OPERATION, self->operations[verb], OPERATION_BYTES);
    gc_store64(slot, MEMBER_SEQUENCE, gc_load64(slot, MEMBER_SEQUENCE) + 1);
    gc_store64(slot, MEMBER_PROGRESS, gc_now_ns());
}

static void stamp_state(Comm *self, uint32_t state) {
    char *slot = (char *)self->board.buf + self->slot;
    gc_store64(slot, MEMBER_PROGRESS, gc_now_ns());
    gc_store32(slot, MEMBER_STATE, state);
}

/* A plan in which every rank needs every other, and nothing is put or taken yet. */
static plan *new_plan(Comm *self, int verb, const tensor *x, int op, int root, uint64_t length) {
    steps *s = &self->steps;
    plan *p = &s->plan;
    memset(p->signature, 0, SIGNATURE_BYTES);
    p->signature[SIGNATURE_VERB] = (unsigned char)verb;
    p->signature[SIGNATURE_OP] = (unsigned char)op;
    uint32_t root32 = (uint32_t)root;
    memcpy(p->signature + SIGNATURE_ROOT, &root32, sizeof root32);
    if (x != NULL) {
        uint64_t dims[SHAPE_DIMS] = {0};
        int folded = x->ndim > SHAPE_DIMS ? x->ndim - SHAPE_DIMS : 0;
        for (int i = x->ndim - 1; i >= 0; i--) {
            if (i >= folded)
                dims[i - folded] = (uint64_t)x->shape[i];
            else
                dims[0] *= (uint64_t)x->shape[i];
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

/* Room for a result like `x` but with `rows` rows in dimension `dim`, if that is not negative. */
static PyObject *make_result(Comm *self, PyObject *x, const tensor *described, int dim,
                             uint64_t rows, uint64_t bytes) {
    bool small = bytes < RECYCLED_BYTES;
    if (dim < 0 && small) return PyObject_CallFunctionObjArgs(self->empty_like, x, NULL);
    PyObject *shape = PyTuple_New(described->ndim);
    for (int i = 0; shape != NULL && i < described->ndim; i++) {
        uint64_t size = i == dim ? rows : (uint64_t)described->shape[i];
        PyObject *number = PyLong_FromUnsignedLongLong(size);
        if (number == NULL || PyTuple_SetItem(shape, i, number) < 0) Py_CLEAR(shape);
    }
    if (shape == NULL) return NULL;
    PyObject *made = small ? PyObject_CallFunctionObjArgs(self->new_empty, x, shape, NULL)
                           : PyObject_CallFunctionObjArgs(self->allocate, shape, x, NULL);
    Py_DECREF(shape);
    return made;
}

/* Begins the plan, and finds room for the result while the others come. Returns a new reference
 * to the tensor that is to be filled, and describes it. */
static PyObject *begin(Comm *self, int verb, PyObject *x, const tensor *described, PyObject *out,
                       int dim, uint64_t rows, uint64_t bytes, tensor *result) {
    stamp(self, verb);
    steps_begin(&self->steps);
    steps_put_first(&self->steps);
    if (out != Py_None) return Py_NewRef(out);
    PyObject *made = make_result(self, x, described, dim, rows, bytes);
    if (made != NULL && !describe(self, made, result)) {
        PyErr_SetString(PyExc_TypeError, "the result's memory is not plain");
        Py_CLEAR(made);
    }
    return made;
}

/* Goes on with the plan. Steals `result`; returns it, or None if blocked. */
static PyObject *run(Comm *self, PyObject *source, PyObject *result, uint64_t bytes) {
    if (comm_run(self, bytes, SPIN_NS) == STEPS_DONE) return result;
    stamp_state(self, STATE_BUSY);
    Py_XDECREF(self->source);
    Py_XDECREF(self->result);
    self->source = Py_NewRef(source);
    self->result = result;
    Py_RETURN_NONE;
}

PyObject *direct_finish(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Comm *self = (Comm *)object;
    PyObject *result = self->result;
    self->result = NULL;
    Py_CLEAR(self->source);
    stamp_state(self, STATE_IDLE);
    if (result == NULL) PyErr_SetString(PyExc_RuntimeError, "no call is blocked");
    return result;
}

static bool callable(Comm *self, Py_ssize_t given, Py_ssize_t wanted) {
    return given == wanted && self->reader != NULL && !aborted(self);
}

/* all_reduce(x, op, out) */
PyObject *direct_all_reduce(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    tensor x, result;
    int op;
    if (!callable(self, n, 3) || !describe(self, args[0], &x) || !read_op(self, args[1], &x, &op))
        Py_RETURN_NOTIMPLEMENTED;
    bool in_place = args[2] == args[0];
    if (in_place)
        result = x;
    else if (args[2] != Py_None && !fits(self, args[2], &x, -1, 0, &result))
        Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = bytes_of(&x);
    plan *p = new_plan(self, VERB_ALL_REDUCE, &x, op, 0, bytes);
    p->kind = bytes <= self->steps.whole_bytes ? KIND_REDUCE : KIND_ALL_REDUCE;
    p->puts = true;
    p->gives[0] = (span){x.data, bytes};
    PyObject *filled = begin(self, VERB_ALL_REDUCE, args[0], &x, args[2], -1, 0, bytes, &result);
    if (filled == NULL) return NULL;
    p->takes[0] = (span){result.data, bytes};
    return run(self, args[0], filled, bytes);
}

/* all_gather(x, dim, out) */
PyObject *direct_all_gather(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    if (!callable(self, n, 3) || !describe(self, args[0], &x)) Py_RETURN_NOTIMPLEMENTED;
    int dim = leading_dim(args[1], &x);
    if (dim < 0) Py_RETURN_NOTIMPLEMENTED;
    uint64_t rows = (uint64_t)x.shape[dim] * s->n, bytes = bytes_of(&x);
    if (args[2] != Py_None && !fits(self, args[2], &x, dim, rows, &result)) Py_RETURN_NOTIMPLEMENTED;
    plan *p = new_plan(self, VERB_ALL_GATHER, &x, NO_OP, 0, bytes);
    p->puts = true;
    p->gives[0] = (span){x.data, bytes};
    PyObject *filled =
        begin(self, VERB_ALL_GATHER, args[0], &x, args[2], dim, rows, bytes * s->n, &result);
    if (filled == NULL) return NULL;
    for (size_t rank = 0; rank < s->n; rank++)
        p->takes[rank] = (span){result.data + rank * bytes, bytes};
    return run(self, args[0], filled, bytes * s->n);
}

/* reduce_scatter(x, dim, op, out) */
PyObject *direct_reduce_scatter(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    int op;
    if (!callable(self, n, 4) || !describe(self, args[0], &x) || !read_op(self, args[2], &x, &op))
        Py_RETURN_NOTIMPLEMENTED;
    int dim = leading_dim(args[1], &x);
    if (dim < 0 || (uint64_t)x.shape[dim] % s->n) Py_RETURN_NOTIMPLEMENTED;
    uint64_t rows = (uint64_t)x.shape[dim] / s->n, bytes = bytes_of(&x) / s->n;
    if (args[3] != Py_None && !fits(self, args[3], &x, dim, rows, &result)) Py_RETURN_NOTIMPLEMENTED;
    plan *p = new_plan(self, VERB_REDUCE_SCATTER, &x, op, 0, bytes);
    p->kind = KIND_REDUCE;
    p->puts = p->addressed = true;
    p->own = x.data + s->rank * bytes;
    for (size_t rank = 0; rank < s->n; rank++) p->gives[rank] = (span){x.data + rank * bytes, bytes};
    PyObject *filled =
        begin(self, VERB_REDUCE_SCATTER, args[0], &x, args[3], dim, rows, bytes, &result);
    if (filled == NULL) return NULL;
    p->takes[0] = (span){result.data, bytes};
    return run(self, args[0], filled, bytes * s->n);
}

/* broadcast(x, src, out) */
PyObject *direct_broadcast(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    if (!callable(self, n, 3) || !describe(self, args[0], &x) || !PyLong_CheckExact(args[1]))
        Py_RETURN_NOTIMPLEMENTED;
    size_t root = (size_t)PyLong_AsLong(args[1]);
    bool in_place = args[2] == args[0];
    if (in_place)
        result = x;
    else if (args[2] != Py_None && !fits(self, args[2], &x, -1, 0, &result))
        Py_RETURN_NOTIMPLEMENTED;
    if (root >= s->n) Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = bytes_of(&x);
    bool gives = root == s->rank;
    plan *p = new_plan(self, VERB_BROADCAST, &x, NO_OP, (int)root, bytes);
    memset(p->awaits, 0, s->n);
    p->awaits[root] = !gives;
    p->puts = gives;
    p->gives[0] = (span){x.data, bytes};
    PyObject *filled = begin(self, VERB_BROADCAST, args[0], &x, args[2], -1, 0, bytes, &result);
    if (filled == NULL) return NULL;
    if (!gives || !in_place) p->takes[root] = (span){result.data, bytes};
    return run(self, args[0], filled, bytes);
}

/* barrier() */
PyObject *direct_barrier(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t n) {
    Comm *self = (Comm *)object;
    if (!callable(self, n, 0)) Py_RETURN_NOTIMPLEMENTED;
    new_plan(self, VERB_BARRIER, NULL, NO_OP, 0, 0);
    stamp(self, VERB_BARRIER);
    steps_begin(&self->steps);
    return run(self, Py_True, Py_NewRef(Py_True), 0);
}
