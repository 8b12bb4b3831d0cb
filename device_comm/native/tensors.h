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
    size_t itemsize;
    int ndim;
    const int64_t *shape;
    uint64_t numel;
} tensor;

typedef struct tensor_reader tensor_reader;

/* A reader of exactly `type`; NULL without an error set if it offers no table that we know. */
const tensor_reader *tensor_reader_of(PyObject *type);

/* Describes `object` if it is of exactly the reader's type, on the CPU, dense, contiguous to the
 * letter, of a dtype that can be reduced, and not empty. Otherwise false, with no error set. The
 * description is valid while the object is not changed. */
bool tensor_read(const tensor_reader *reader, PyObject *type, PyObject *object, tensor *described);

#endif
