/* Reductions of several ranks' numbers in rank order, as defined in device_comm/operation.py. */
#ifndef GC_REDUCE_H
#define GC_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

/* The numbers of Bagua's ReduceOp, as in device_comm/operation.py. */
enum { OP_SUM = 0, OP_PRODUCT = 1, OP_MIN = 2, OP_MAX = 3, OP_BOR = 7, OP_BAND = 8, OP_BXOR = 9, OP_AVG = 10 };

/* As in device_comm/shm/signature.py. Codes after these are moved, not reduced. */
enum {
    DTYPE_FLOAT16 = 1, DTYPE_BFLOAT16, DTYPE_FLOAT32, DTYPE_FLOAT64, DTYPE_UINT8, DTYPE_INT8,
    DTYPE_INT16, DTYPE_INT32, DTYPE_INT64, DTYPE_UINT16, DTYPE_UINT32, DTYPE_BOOL,
    DTYPE_COMPLEX64, DTYPE_COMPLEX128,
};

/* Returns the bytes of an element; 0 for a dtype that is not reduced. */
size_t reduce_itemsize(int dtype);

/* Returns true if `op` is defined for `dtype`. */
bool reduce_defined(int dtype, int op);

/* Reduces `n` >= 2 parts of `count` elements into `output`, which may be one of the parts. */
void reduce(const char *const *parts, size_t n, int dtype, int op, size_t count, char *output);

#endif
