/* Fast path of the verbs without a root. */
#include "direct.h"

#include "atomics.h"

/* all_reduce(x, op, out) */
PyObject *direct_all_reduce(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    tensor x, result;
    int op;
    if (!direct_accepts(self, n, 3, args[0], &x) || !direct_read_op(self, args[1], &x, &op) ||
        !direct_lands(self, args[2], args[0], &x, &result))
        Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&x);
    plan *p = direct_plan(self, VERB_ALL_REDUCE, shape_of(&x), op, 0, bytes);
    /* Load it each time: a rank may store it when it joins. */
    uint64_t whole = gc_load64(self->steps.group, GROUP_WHOLE_BYTES);
    p->kind = bytes <= whole ? KIND_REDUCE : KIND_ALL_REDUCE;
    direct_give(p, &x);
    PyObject *filled = direct_make(self, VERB_ALL_REDUCE, args[0], args[2], shape_of(&x), &result);
    if (filled == NULL) return NULL;
    p->takes[0] = (span){result.data, bytes};
    return direct_run(self, args[0], filled, bytes);
}

/* all_gather(x, dim, out) */
PyObject *direct_all_gather(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    if (!direct_accepts(self, n, 3, args[0], &x)) Py_RETURN_NOTIMPLEMENTED;
    int dim = tensor_leading_dim(args[1], &x);
    if (dim < 0) Py_RETURN_NOTIMPLEMENTED;
    shape wanted = {.like = &x, .dim = dim, .rows = (uint64_t)x.shape[dim] * s->n};
    if (!direct_fits(self, args[2], &x, wanted, &result)) Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&x);
    direct_give(direct_plan(self, VERB_ALL_GATHER, shape_of(&x), NO_OP, (size_t)dim, bytes), &x);
    PyObject *filled = direct_make(self, VERB_ALL_GATHER, args[0], args[2], wanted, &result);
    if (filled == NULL) return NULL;
    direct_take_in_a_row(self, &result, bytes);
    return direct_run(self, args[0], filled, bytes * s->n);
}

/* reduce_scatter(x, dim, op, out) */
PyObject *direct_reduce_scatter(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    int op;
    if (!direct_accepts(self, n, 4, args[0], &x) || !direct_read_op(self, args[2], &x, &op))
        Py_RETURN_NOTIMPLEMENTED;
    int dim = tensor_leading_dim(args[1], &x);
    if (dim < 0 || (uint64_t)x.shape[dim] % s->n) Py_RETURN_NOTIMPLEMENTED;
    shape wanted = {.like = &x, .dim = dim, .rows = (uint64_t)x.shape[dim] / s->n};
    if (!direct_fits(self, args[3], &x, wanted, &result)) Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&x) / s->n;
    plan *p = direct_plan(self, VERB_REDUCE_SCATTER, shape_of(&x), op, (size_t)dim, bytes);
    p->kind = KIND_REDUCE;
    direct_give_parts(self, &x, bytes);
    PyObject *filled = direct_make(self, VERB_REDUCE_SCATTER, args[0], args[3], wanted, &result);
    if (filled == NULL) return NULL;
    p->takes[0] = (span){result.data, bytes};
    return direct_run(self, args[0], filled, bytes * s->n);
}

/* all_to_all(x, dim, out) */
PyObject *direct_all_to_all(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Comm *self = (Comm *)object;
    steps *s = &self->steps;
    tensor x, result;
    if (!direct_accepts(self, n, 3, args[0], &x)) Py_RETURN_NOTIMPLEMENTED;
    int dim = tensor_leading_dim(args[1], &x);
    if (dim < 0 || (uint64_t)x.shape[dim] % s->n) Py_RETURN_NOTIMPLEMENTED;
    if (!direct_fits(self, args[2], &x, shape_of(&x), &result)) Py_RETURN_NOTIMPLEMENTED;
    uint64_t bytes = tensor_bytes(&x) / s->n;
    direct_plan(self, VERB_ALL_TO_ALL, shape_of(&x), NO_OP, (size_t)dim, bytes);
    direct_give_parts(self, &x, bytes);
    PyObject *filled = direct_make(self, VERB_ALL_TO_ALL, args[0], args[2], shape_of(&x), &result);
    if (filled == NULL) return NULL;
    direct_take_in_a_row(self, &result, bytes);
    return direct_run(self, args[0], filled, bytes * s->n);
}

/* barrier() */
PyObject *direct_barrier(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t n) {
    Comm *self = (Comm *)object;
    if (!direct_callable(self, n, 0)) Py_RETURN_NOTIMPLEMENTED;
    direct_plan(self, VERB_BARRIER, (shape){0}, NO_OP, 0, 0);
    direct_start(self, VERB_BARRIER);
    return direct_run(self, Py_None, Py_NewRef(Py_None), 0);
}
