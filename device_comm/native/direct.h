/* What the verbs on tensors as they are have in common: see direct.c. */
#ifndef GC_DIRECT_H
#define GC_DIRECT_H

#include "comm.h"
#include "reduce.h"

/* Nanoseconds to look for the others before the caller is told to sleep. */
#define SPIN_NS 50000

/* Whether a verb with `given` of the `wanted` arguments may be carried out at all. */
bool direct_callable(const Comm *self, Py_ssize_t given, Py_ssize_t wanted);

/* As `direct_callable`, and `object` is a tensor, which is described in `x`. */
bool direct_accepts(const Comm *self, Py_ssize_t given, Py_ssize_t wanted, PyObject *object,
                    tensor *x);

/* Arguments from Python. They return false, or the number of ranks, if one is out of the ordinary;
 * never with an error set. */
bool direct_describe(const Comm *self, PyObject *object, tensor *described);
bool direct_read_op(const Comm *self, PyObject *object, const tensor *x, int *op);
size_t direct_read_rank(const Comm *self, PyObject *object);

/* Whether a result of such a shape, of the dtype of `x`, may be written into `out`, which is None
 * or a tensor; in the latter case it is described. */
bool direct_fits(const Comm *self, PyObject *out, const tensor *x, shape wanted,
                 tensor *described);

/* As `direct_fits` for a result like `x`, but `out` may also be `object`, which is `x` itself. */
bool direct_lands(const Comm *self, PyObject *out, PyObject *object, const tensor *x,
                  tensor *described);

/* Says on the board what begins here, a verb or an OPERATION, on so many bytes; `end` is 0 if it is
 * not done. Returns its number there. */
uint64_t direct_stamp(Comm *self, int operation, uint64_t bytes, uint64_t begin, uint64_t end);

/* A plan in which every rank needs every other, and nothing is put or taken yet. What the ranks
 * must agree on has the shape `agreed`, and the dtype of its model; `place` is the root, or the
 * dimension along which all ranks cut or concatenate. */
plan *direct_plan(Comm *self, int verb, shape agreed, int op, size_t place, uint64_t length);

/* This rank puts all of `x`, for everyone. */
void direct_give(plan *p, const tensor *x);

/* This rank puts its part of `x` for each rank, of `bytes` each. */
void direct_give_parts(Comm *self, const tensor *x, uint64_t bytes);

/* What comes from each rank, `bytes` each, is put in a row. */
void direct_take_in_a_row(Comm *self, const tensor *result, uint64_t bytes);

/* This rank needs what `root` puts, and nothing else. */
void direct_await_only(Comm *self, size_t root);

/* Begins the plan. */
void direct_start(Comm *self, int verb);

/* Begins the plan, and finds room for the result: for a small one while the others come. Returns a
 * new reference to the tensor that is to be filled, `out` if that is not None, and puts its data in
 * `result`; or NULL with an error set. */
PyObject *direct_make(Comm *self, int verb, PyObject *x, PyObject *out, shape wanted,
                      tensor *result);

/* Goes on with the plan. Steals `result`; returns it, or Ellipsis if blocked. */
PyObject *direct_run(Comm *self, PyObject *source, PyObject *result, uint64_t bytes);

#endif
