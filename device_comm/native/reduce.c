/* All ranks of a host run the same version of a loop, and no version contracts or reorders floating
 * point (compiler flags of pyproject.toml), so results are bit-identical on all ranks. Integers
 * wrap. */
#include "reduce.h"

#include <stdint.h>
#include <string.h>

#include "half.h"
#include "versions.h"

/* Bytes that are reduced at a time: with accumulators, they fit into the L1 cache. Not a power of
 * two: accumulators at a distance of 4 KiB suffer from 4K aliasing. */
#define BLOCK 1536

#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define MINIMUM(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define MAXIMUM(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))
#define XOR(a, b) ((a) ^ (b))

#define COMBINE(T, COMBINED)                                                                       \
    INDEPENDENT                                                                                    \
    for (size_t i = 0; i < count; i++) total[i] = (T)COMBINED(a[i], b[i]);                         \
    break;

#define ARITHMETIC(T)                                                                              \
    case OP_SUM:                                                                                   \
    case OP_AVG: COMBINE(T, ADD)                                                                   \
    case OP_PRODUCT: COMBINE(T, MULTIPLY)                                                          \
    case OP_MIN: COMBINE(T, MINIMUM)                                                               \
    case OP_MAX: COMBINE(T, MAXIMUM)

#define ARITHMETIC_AND_BITS(T)                                                                     \
    ARITHMETIC(T)                                                                                  \
    case OP_BOR: COMBINE(T, OR)                                                                    \
    case OP_BAND: COMBINE(T, AND)                                                                  \
    case OP_BXOR: COMBINE(T, XOR)

#define LOGIC(T)                                                                                   \
    case OP_SUM:                                                                                   \
    case OP_MAX:                                                                                   \
    case OP_BOR: COMBINE(T, OR)                                                                    \
    case OP_PRODUCT:                                                                               \
    case OP_MIN:                                                                                   \
    case OP_BAND: COMBINE(T, AND)                                                                  \
    case OP_BXOR: COMBINE(T, XOR)

#define COMPLEX_PRODUCT(T)                                                                         \
    case OP_PRODUCT:                                                                               \
        for (size_t i = 0; i < count; i += 2) {                                                    \
            T real = a[i] * b[i] - a[i + 1] * b[i + 1];                                            \
            T imaginary = a[i] * b[i + 1] + a[i + 1] * b[i];                                       \
            total[i] = real;                                                                       \
            total[i + 1] = imaginary;                                                              \
        }                                                                                          \
        break;

/* total[i] = a[i] op b[i]; `total` may be `a` or `b`. */
#define FOLD(name, T, OPERATIONS)                                                                  \
    VERSIONED static void fold_##name(void *to, const void *from, const void *other, size_t count, \
                                      int op) {                                                    \
        T *total = to;                                                                             \
        const T *a = from, *b = other;                                                             \
        switch (op) { OPERATIONS(T) }                                                              \
    }

#define DIVIDE(name, T)                                                                            \
    VERSIONED static void divide_##name(void *numbers, size_t count, size_t ranks) {               \
        T *total = numbers;                                                                        \
        INDEPENDENT                                                                                \
        for (size_t i = 0; i < count; i++) total[i] /= (T)ranks;                                   \
    }

FOLD(float, float, ARITHMETIC)
FOLD(double, double, ARITHMETIC)
FOLD(uint8, uint8_t, ARITHMETIC_AND_BITS)
FOLD(int8, int8_t, ARITHMETIC_AND_BITS)
FOLD(int16, int16_t, ARITHMETIC_AND_BITS)
FOLD(int32, int32_t, ARITHMETIC_AND_BITS)
FOLD(int64, int64_t, ARITHMETIC_AND_BITS)
FOLD(uint16, uint16_t, ARITHMETIC_AND_BITS)
FOLD(uint32, uint32_t, ARITHMETIC_AND_BITS)
FOLD(bool, uint8_t, LOGIC)
FOLD(complex_float, float, COMPLEX_PRODUCT)
FOLD(complex_double, double, COMPLEX_PRODUCT)
DIVIDE(float, float)
DIVIDE(double, double)

static void fold_complex64(void *to, const void *a, const void *b, size_t count, int op) {
    (op == OP_PRODUCT ? fold_complex_float : fold_float)(to, a, b, count, op);
}

static void fold_complex128(void *to, const void *a, const void *b, size_t count, int op) {
    (op == OP_PRODUCT ? fold_complex_double : fold_double)(to, a, b, count, op);
}

#define BIT(op) (1u << (op))
#define ORDERED (BIT(OP_SUM) | BIT(OP_PRODUCT) | BIT(OP_MIN) | BIT(OP_MAX))
#define INTEGER (ORDERED | BIT(OP_BOR) | BIT(OP_BAND) | BIT(OP_BXOR))
#define REAL (ORDERED | BIT(OP_AVG))
#define COMPLEX (BIT(OP_SUM) | BIT(OP_PRODUCT) | BIT(OP_AVG))

typedef struct {
    void (*load)(const uint16_t *from, float *to, size_t n);
    void (*store)(const float *from, uint16_t *to, size_t n);
    void (*add)(const uint16_t *a, const uint16_t *b, uint16_t *to, size_t n);
} half_precision;

static const half_precision float16 = {load_float16, store_float16, add_float16};
static const half_precision bfloat16 = {load_bfloat16, store_bfloat16, add_bfloat16};

typedef struct {
    size_t itemsize;
    size_t numbers; /* per element: 2 if complex */
    unsigned operations;
    void (*fold)(void *to, const void *a, const void *b, size_t count, int op);
    void (*divide)(void *numbers, size_t count, size_t ranks);
    const half_precision *half;
} arithmetic;

static const arithmetic dtypes[] = {
    [DTYPE_FLOAT16] = {2, 1, REAL, fold_float, divide_float, &float16},
    [DTYPE_BFLOAT16] = {2, 1, REAL, fold_float, divide_float, &bfloat16},
    [DTYPE_FLOAT32] = {4, 1, REAL, fold_float, divide_float, NULL},
    [DTYPE_FLOAT64] = {8, 1, REAL, fold_double, divide_double, NULL},
    [DTYPE_UINT8] = {1, 1, INTEGER, fold_uint8, NULL, NULL},
    [DTYPE_INT8] = {1, 1, INTEGER, fold_int8, NULL, NULL},
    [DTYPE_INT16] = {2, 1, INTEGER, fold_int16, NULL, NULL},
    [DTYPE_INT32] = {4, 1, INTEGER, fold_int32, NULL, NULL},
    [DTYPE_INT64] = {8, 1, INTEGER, fold_int64, NULL, NULL},
    [DTYPE_UINT16] = {2, 1, INTEGER, fold_uint16, NULL, NULL},
    [DTYPE_UINT32] = {4, 1, INTEGER, fold_uint32, NULL, NULL},
    [DTYPE_BOOL] = {1, 1, INTEGER, fold_bool, NULL, NULL},
    [DTYPE_COMPLEX64] = {8, 2, COMPLEX, fold_complex64, divide_float, NULL},
    [DTYPE_COMPLEX128] = {16, 2, COMPLEX, fold_complex128, divide_double, NULL},
};

size_t reduce_itemsize(int dtype) {
    size_t known = sizeof dtypes / sizeof *dtypes;
    return dtype > 0 && (size_t)dtype < known ? dtypes[dtype].itemsize : 0;
}

bool reduce_defined(int dtype, int op) {
    return reduce_itemsize(dtype) != 0 && op >= 0 && op < 32 && (dtypes[dtype].operations & BIT(op));
}

/* Reduces a block of half precision; accumulates in single precision. */
static void reduce_halves(const arithmetic *type, const char *const *parts, size_t n, size_t offset,
                          int op, size_t count, char *output) {
    float total[BLOCK / 2], next[BLOCK / 2];
    if (n == 2 && op == OP_SUM) {
        type->half->add((const uint16_t *)(parts[0] + offset), (const uint16_t *)(parts[1] + offset),
                  (uint16_t *)(output + offset), count);
        return;
    }
    type->half->load((const uint16_t *)(parts[0] + offset), total, count);
    for (size_t part = 1; part < n; part++) {
        type->half->load((const uint16_t *)(parts[part] + offset), next, count);
        type->fold(total, total, next, count, op);
    }
    if (op == OP_AVG) type->divide(total, count, n);
    type->half->store(total, (uint16_t *)(output + offset), count);
}

/* Reduces a block of any other type. If the output aliases a part after the first two, it is reduced
 * in a temporary block. */
static void reduce_block(const arithmetic *type, const char *const *parts, size_t n, size_t offset,
                         int op, size_t bytes, char *output) {
    _Alignas(64) char block[BLOCK];
    size_t count = bytes / type->itemsize * type->numbers;
    bool aliased = false;
    for (size_t part = 2; part < n; part++) aliased |= parts[part] == output;
    char *total = aliased ? block : output + offset;
    type->fold(total, parts[0] + offset, parts[1] + offset, count, op);
    for (size_t part = 2; part < n; part++) type->fold(total, total, parts[part] + offset, count, op);
    if (op == OP_AVG) type->divide(total, count, n);
    if (aliased) memcpy(output + offset, block, bytes);
}

void reduce(const char *const *parts, size_t n, int dtype, int op, size_t count, char *output) {
    const arithmetic *type = &dtypes[dtype];
    size_t size = count * type->itemsize;
    for (size_t offset = 0; offset < size; offset += BLOCK) {
        size_t bytes = size - offset < BLOCK ? size - offset : BLOCK;
        if (type->half != NULL)
            reduce_halves(type, parts, n, offset, op, bytes / 2, output);
        else
            reduce_block(type, parts, n, offset, op, bytes, output);
    }
}
