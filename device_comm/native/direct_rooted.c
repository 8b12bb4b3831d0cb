/* Fast path of the verbs with a root. */
#include "direct.h"

#include <string.h>

/* broadcast(x, src, out) */
PyObject *direct_broadcast(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    if (!direct_accepts(self, n, 3, args[0], &x)) Py_RETURN_NOTIMPLEMENTED;
    size_t root = direct_read_rank(self, args[1]);
    if (root == s->n || !direct_lands(self, args[2], args[0], &x, &result))
        Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&x);
    bool gives = root == s->rank;
    plan *p = direct_plan(self, VERB_BROADCAST, shape_of(&x), NO_OP, root, bytes);
    direct_await_only(self, root);
    if (gives) direct_give(p, &x);
    PyObject *filled = direct_make(self, VERB_BROADCAST, args[0], args[2], shape_of(&x), &result);
    if (filled == NULL) return NULL;
    if (!gives || args[2] != args[0]) p->takes[root] = (span){result.data, bytes};
    return direct_run(self, args[0], filled, bytes);
}

/* Reduce and gather at a rank other than the root: puts `x`, returns None. */
static PyObject *give_to_root(Comm *self, int verb, PyObject *object, const tensor *x, int op,
                              size_t root) {
    direct_give(direct_plan(self, verb, shape_of(x), op, root, tensor_bytes(x)), x);
    memset(self->steps.plan.awaits, 0, self->steps.n);
    direct_start(self, verb);
    return direct_run(self, object, Py_NewRef(Py_None), tensor_bytes(x));
}

/* reduce(x, dst, op, out) */
PyObject *direct_reduce(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    tensor x, result;
    int op;
    if (!direct_accepts(self, n, 4, args[0], &x) || !direct_read_op(self, args[2], &x, &op))
        Py_RETURN_NOTIMPLEMENTED;
    size_t root = direct_read_rank(self, args[1]);
    bool takes = root == self->steps.rank;
    if (root == self->steps.n || (!takes && args[3] != Py_None) ||
        !direct_lands(self, args[3], args[0], &x, &result))
        Py_RETURN_NOTIMPLEMENTED;
    if (!takes) return give_to_root(self, VERB_REDUCE, args[0], &x, op, root);
    uint64_t bytes = tensor_bytes(&x);
    plan *p = direct_plan(self, VERB_REDUCE, shape_of(&x), op, root, bytes);
    p->kind = KIND_REDUCE;
    PyObject *filled = direct_make(self, VERB_REDUCE, args[0], args[3], shape_of(&x), &result);
    if (filled == NULL) return NULL;
    p->takes[0] = (span){result.data, bytes};
    return direct_run(self, args[0], filled, bytes);
}

/* gather(x, dst, dim, out) */
PyObject *direct_gather(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    if (!direct_accepts(self, n, 4, args[0], &x)) Py_RETURN_NOTIMPLEMENTED;
    size_t root = direct_read_rank(self, args[1]);
    int dim = tensor_leading_dim(args[2], &x);
    bool takes = root == s->rank;
    if (root == s->n || dim < 0 || (!takes && args[3] != Py_None)) Py_RETURN_NOTIMPLEMENTED;
    if (!takes) return give_to_root(self, VERB_GATHER, args[0], &x, NO_OP, root);
    shape wanted = {.like = &x, .dim = dim, .rows = (uint64_t)x.shape[dim] * s->n};
    if (!direct_fits(self, args[3], &x, wanted, &result)) Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&x);
    direct_plan(self, VERB_GATHER, shape_of(&x), NO_OP, root, bytes);
    PyObject *filled = direct_make(self, VERB_GATHER, args[0], args[3], wanted, &result);
    if (filled == NULL) return NULL;
    direct_take_in_a_row(self, &result, bytes);
    return direct_run(self, args[0], filled, bytes * s->n);
}

/* Scatter at the root. */
static PyObject *scatter_parts(Comm *self, PyObject *const *args) {
    steps *s = &self->steps;
    tensor x, result;
    if (!direct_describe(self, args[0], &x)) Py_RETURN_NOTIMPLEMENTED;
    int dim = tensor_leading_dim(args[2], &x);
    if (dim < 0 || (uint64_t)x.shape[dim] % s->n) Py_RETURN_NOTIMPLEMENTED;
    shape wanted = {.like = &x, .dim = dim, .rows = (uint64_t)x.shape[dim] / s->n};
    if (!direct_fits(self, args[3], &x, wanted, &result)) Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&x) / s->n;
    plan *p = direct_plan(self, VERB_SCATTER, wanted, NO_OP, s->rank, bytes);
    direct_await_only(self, s->rank);
    direct_give_parts(self, &x, bytes);
    PyObject *filled = direct_make(self, VERB_SCATTER, args[0], args[3], wanted, &result);
    if (filled == NULL) return NULL;
    p->takes[s->rank] = (span){result.data, bytes};
    return direct_run(self, args[0], filled, bytes * s->n);
}

/* scatter(x, src, dim, out) */
PyObject *direct_scatter(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    tensor result;
    size_t root = n == 4 ? direct_read_rank(self, args[1]) : self->steps.n;
    if (!direct_callable(self, n, 4) || root == self->steps.n) Py_RETURN_NOTIMPLEMENTED;
    if (root == self->steps.rank) return scatter_parts(self, args);
    if (args[0] != Py_None || !direct_describe(self, args[3], &result) ||
        tensor_dim(args[2], &result) < 0)
        Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&result);
    plan *p = direct_plan(self, VERB_SCATTER, shape_of(&result), NO_OP, root, bytes);
    p->addressed = true;
    direct_await_only(self, root);
    p->takes[root] = (span){result.data, bytes};
    direct_start(self, VERB_SCATTER);
    return direct_run(self, args[3], Py_NewRef(args[3]), bytes);
}
