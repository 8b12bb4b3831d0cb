/* Common parts of the fast path: see direct.c. */
#ifndef GC_DIRECT_H
#define GC_DIRECT_H

#include "comm.h"
#include "reduce.h"

/* Nanoseconds of polling before a verb returns Ellipsis and the caller sleeps. */
#define SPIN_NS 50000

/* Returns true if the fast path may run now, and `given` equals the `wanted` arguments. */
bool direct_callable(const Comm *self, Py_ssize_t given, Py_ssize_t wanted);

/* As `direct_callable`; also requires that `object` is a plain tensor, and describes it in `x`. */
bool direct_accepts(const Comm *self, Py_ssize_t given, Py_ssize_t wanted, PyObject *object,
                    tensor *x);

/* Read arguments from Python. They return false, or the number of ranks, for arguments that the fast
 * path does not take; never with an error set. */
bool direct_describe(const Comm *self, PyObject *object, tensor *described);
bool direct_read_op(const Comm *self, PyObject *object, const tensor *x, int *op);
size_t direct_read_rank(const Comm *self, PyObject *object);

/* Returns true if a result of shape `wanted` and the dtype of `x` may be written into `out`, which is
 * None or a tensor; describes the tensor. */
bool direct_fits(const Comm *self, PyObject *out, const tensor *x, shape wanted,
                 tensor *described);

/* As `direct_fits` for a result like `x`; `out` may also be `object`, the tensor of `x`. */
bool direct_lands(const Comm *self, PyObject *out, PyObject *object, const tensor *x,
                  tensor *described);

/* Publishes an operation (a verb or an OPERATION) of so many bytes on the board; `end` is 0 if it is
 * not done. Returns its sequence number. */
uint64_t direct_stamp(Comm *self, int operation, uint64_t bytes, uint64_t begin, uint64_t end);

/* Returns a plan in which this rank awaits every other, and puts and takes nothing yet. The signature
 * gets the shape `agreed` and the dtype of its model; `place` is the root, or the dimension along
 * which all ranks split or concatenate. */
plan *direct_plan(Comm *self, int verb, shape agreed, int op, size_t place, uint64_t length);

/* Puts all of `x`, for all ranks. */
void direct_give(plan *p, const tensor *x);

/* Puts a part of `x` for each rank, of `bytes` each. */
void direct_give_parts(Comm *self, const tensor *x, uint64_t bytes);

/* Takes `bytes` from each rank, concatenated in `result`. */
void direct_take_in_a_row(Comm *self, const tensor *result, uint64_t bytes);

/* Awaits `root` only. */
void direct_await_only(Comm *self, size_t root);

/* Begins the plan, and publishes the operation on the board. */
void direct_start(Comm *self, int verb);

/* Begins the plan, and allocates the result unless `out` is a tensor; a small result after the begin,
 * while the other ranks arrive. Returns a new reference to the tensor to be filled, and its address
 * in `result`; or NULL with an error set. */
PyObject *direct_make(Comm *self, int verb, PyObject *x, PyObject *out, shape wanted,
                      tensor *result);

/* Runs the plan. Steals `result`; returns it, or Ellipsis if blocked. */
PyObject *direct_run(Comm *self, PyObject *source, PyObject *result, uint64_t bytes);

#endif
