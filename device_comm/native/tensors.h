/* Reads torch tensors in C without linking to torch: through torch's function table for the DLPack
 * C exchange (`torch.Tensor.__dlpack_c_exchange_api__`, DLPack 1.3). */
#ifndef GC_TENSORS_H
#define GC_TENSORS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    char *data;
    int dtype; /* as in reduce.h */
    uint8_t code, bits; /* DLPack's form of the dtype */
    size_t itemsize;
    int ndim;
    const int64_t *shape;
    uint64_t numel;
} tensor;

/* The shape of `like`, with `rows` in dimension `dim` unless that is negative. */
typedef struct {
    const tensor *like;
    int dim;
    uint64_t rows;
} shape;

/* Tensors of more dimensions are not read. */
#define TENSOR_DIMS 16

typedef struct tensor_reader tensor_reader;

/* Returns a reader of exactly `type`; NULL, without an error set, if it has no table of major
 * version 1. */
const tensor_reader *tensor_reader_of(PyObject *type);

/* Describes `object` if it is of exactly the reader's type, on the CPU, dense, with contiguous
 * strides, of a dtype that can be reduced, not negated (the type's method `is_neg`) or conjugated
 * lazily, and not empty. Otherwise returns false, without an error set. The description is valid until the
 * object changes. Other threads may run during the call. */
bool tensor_read(const tensor_reader *reader, PyObject *type, PyObject *is_neg, PyObject *object,
                 tensor *described);

/* Makes a tensor of shape `wanted` and the dtype of its model, and stores its address in `data`.
 * Returns a new reference, or NULL with an error set. For small tensors: the memory is malloc's. */
PyObject *tensor_new(const tensor_reader *reader, shape wanted, char **data);

uint64_t tensor_bytes(const tensor *x);
bool tensor_overlaps(const tensor *a, const tensor *b);

/* Reads a dimension, counted from the front; returns -1 if `object` is not one. */
int tensor_dim(PyObject *object, const tensor *x);

shape shape_of(const tensor *x);
uint64_t shape_size(shape s, int dim);
uint64_t shape_bytes(shape s);

#endif
