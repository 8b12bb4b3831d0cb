/* Reading torch tensors in C without linking to torch: through the table of functions that torch
 * publishes for the DLPack C exchange (`torch.Tensor.__dlpack_c_exchange_api__`, DLPack 1.3). */
#ifndef GC_TENSORS_H
#define GC_TENSORS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    char *data;
    int dtype; /* as in reduce.h */
    uint8_t code, bits; /* the same, as DLPack says it */
    size_t itemsize;
    int ndim;
    const int64_t *shape;
    uint64_t numel;
} tensor;

/* The shape of `like`, but with `rows` in dimension `dim`, if that is not negative. */
typedef struct {
    const tensor *like;
    int dim;
    uint64_t rows;
} shape;

/* Tensors of more dimensions are not read. */
#define TENSOR_DIMS 16

typedef struct tensor_reader tensor_reader;

/* A reader of exactly `type`; NULL without an error set if it offers no table that we know. */
const tensor_reader *tensor_reader_of(PyObject *type);

/* Describes `object` if it is of exactly the reader's type, on the CPU, dense, contiguous to the
 * letter, of a dtype that can be reduced, not negated lazily (which the type's method `is_neg`
 * tells), and not empty. Otherwise false, with no error set. The description is valid while the
 * object is not changed. Other threads may run meanwhile. */
bool tensor_read(const tensor_reader *reader, PyObject *type, PyObject *is_neg, PyObject *object,
                 tensor *described);

/* A new tensor of a shape, of the dtype of its model; `data` is where it lies. Returns a new
 * reference, or NULL with an error set. For small tensors: the memory comes from malloc. */
PyObject *tensor_new(const tensor_reader *reader, shape wanted, char **data);

uint64_t tensor_bytes(const tensor *x);
bool tensor_overlaps(const tensor *a, const tensor *b);

/* A dimension from Python, counted from the front; -1 if it is none. */
int tensor_dim(PyObject *object, const tensor *x);

/* As `tensor_dim`; -1 also if parts along it would not be contiguous. */
int tensor_leading_dim(PyObject *object, const tensor *x);

shape shape_of(const tensor *x);
uint64_t shape_size(shape s, int dim);
uint64_t shape_bytes(shape s);

#endif
