#include "tensors.h"

#include "reduce.h"

#include <stdlib.h>

/* The part of the ABI of DLPack 1.x that is used here. */
typedef struct {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    struct {
        uint32_t major, minor;
    } version;
    void *context;
    void (*release)(struct dl_managed *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed;

struct tensor_reader {
    struct {
        uint32_t major, minor;
        struct tensor_reader *previous;
    } header;
    void *allocate, *from_object;
    int (*to_object)(dl_managed *tensor, void **object);
    int (*view)(void *object, dl_tensor *view);
    void *current_stream;
};

enum { DL_CPU = 1 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };

const tensor_reader *tensor_reader_of(PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (capsule == NULL) {
        PyErr_Clear();
        return NULL;
    }
    const tensor_reader *reader = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    while (reader != NULL && reader->header.major != 1) reader = reader->header.previous;
    PyErr_Clear();
    return reader != NULL && reader->view != NULL && reader->to_object != NULL ? reader : NULL;
}

#define DL_DTYPE(code, bits) ((code) << 8 | (bits))

static int dtype_of(const dl_tensor *view) {
    if (view->dtype.lanes != 1) return 0;
    switch (DL_DTYPE(view->dtype.code, view->dtype.bits)) {
    case DL_DTYPE(DL_FLOAT, 16): return DTYPE_FLOAT16;
    case DL_DTYPE(DL_BFLOAT, 16): return DTYPE_BFLOAT16;
    case DL_DTYPE(DL_FLOAT, 32): return DTYPE_FLOAT32;
    case DL_DTYPE(DL_FLOAT, 64): return DTYPE_FLOAT64;
    case DL_DTYPE(DL_UINT, 8): return DTYPE_UINT8;
    case DL_DTYPE(DL_INT, 8): return DTYPE_INT8;
    case DL_DTYPE(DL_INT, 16): return DTYPE_INT16;
    case DL_DTYPE(DL_INT, 32): return DTYPE_INT32;
    case DL_DTYPE(DL_INT, 64): return DTYPE_INT64;
    case DL_DTYPE(DL_UINT, 16): return DTYPE_UINT16;
    case DL_DTYPE(DL_UINT, 32): return DTYPE_UINT32;
    case DL_DTYPE(DL_BOOL, 8): return DTYPE_BOOL;
    case DL_DTYPE(DL_COMPLEX, 64): return DTYPE_COMPLEX64;
    case DL_DTYPE(DL_COMPLEX, 128): return DTYPE_COMPLEX128;
    default: return 0;
    }
}

/* Steals `answer`, of a method of a tensor. */
static bool is_false(PyObject *answer) {
    bool negative = answer == Py_False;
    Py_XDECREF(answer);
    PyErr_Clear();
    return negative;
}

/* Returns true if a tensor is negated or conjugated lazily, for example the imaginary part of a
 * conjugated tensor; DLPack has no flag for that. */
static bool is_lazy(PyObject *is_neg, PyObject *object, bool complex) {
    return !is_false(PyObject_CallFunctionObjArgs(is_neg, object, NULL)) ||
           (complex && !is_false(PyObject_CallMethod(object, "is_conj", NULL)));
}

bool tensor_read(const tensor_reader *reader, PyObject *type, PyObject *is_neg, PyObject *object,
                 tensor *described) {
    if ((PyObject *)Py_TYPE(object) != type) return false;
    dl_tensor view;
    if (reader->view(object, &view) != 0) {
        PyErr_Clear();
        return false;
    }
    int dtype = dtype_of(&view);
    if (view.device.type != DL_CPU || dtype == 0 || view.ndim > TENSOR_DIMS) return false;
    uint64_t numel = 1;
    for (int32_t dim = view.ndim - 1; dim >= 0; dim--) {
        bool strided = view.shape[dim] != 1 && view.strides != NULL;
        if (strided && view.strides[dim] != (int64_t)numel) return false;
        numel *= (uint64_t)view.shape[dim];
    }
    if (numel != 0 && view.data == NULL) return false; /* autograd's zeros, functorch's wrappers */
    if (is_lazy(is_neg, object, view.dtype.code == DL_COMPLEX)) return false;
    *described = (tensor){.data = (char *)view.data + view.byte_offset,
                          .dtype = dtype,
                          .code = view.dtype.code,
                          .bits = view.dtype.bits,
                          .itemsize = reduce_itemsize(dtype),
                          .ndim = view.ndim,
                          .shape = view.shape,
                          .numel = numel};
    return numel > 0;
}

/* Header before the data of a tensor from tensor_new. */
typedef struct {
    dl_managed managed;
    int64_t shape[TENSOR_DIMS], strides[TENSOR_DIMS];
} block;

/* torch's alignment of CPU tensors. */
#define DATA_ALIGN 64

/* torch calls it on any thread, with or without the GIL. */
static void release(dl_managed *managed) { free(managed->context); }

PyObject *tensor_new(const tensor_reader *reader, shape wanted, char **data) {
    const tensor *like = wanted.like;
    block *made = malloc(sizeof(block) + DATA_ALIGN + shape_bytes(wanted));
    if (made == NULL) return PyErr_NoMemory();
    *data = (char *)(((uintptr_t)(made + 1) + DATA_ALIGN - 1) / DATA_ALIGN * DATA_ALIGN);
    made->managed = (dl_managed){
        .version = {1, 1},
        .context = made,
        .release = release,
        .tensor = {.data = *data,
                   .device = {.type = DL_CPU},
                   .ndim = like->ndim,
                   .dtype = {.code = like->code, .bits = like->bits, .lanes = 1},
                   .shape = made->shape,
                   .strides = made->strides},
    };
    int64_t stride = 1;
    for (int i = like->ndim - 1; i >= 0; i--) {
        made->shape[i] = (int64_t)shape_size(wanted, i);
        made->strides[i] = stride;
        stride *= made->shape[i];
    }
    void *object;
    if (reader->to_object(&made->managed, &object) == 0) return object;
    free(made);
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch could not make a tensor");
    return NULL;
}

uint64_t tensor_bytes(const tensor *x) { return x->numel * x->itemsize; }

bool tensor_overlaps(const tensor *a, const tensor *b) {
    return a->data < b->data + tensor_bytes(b) && b->data < a->data + tensor_bytes(a);
}

int tensor_dim(PyObject *object, const tensor *x) {
    if (!PyLong_CheckExact(object)) return -1;
    int overflow;
    long dim = PyLong_AsLongAndOverflow(object, &overflow);
    if (dim < 0) dim += x->ndim;
    return overflow || dim < 0 || dim >= x->ndim ? -1 : (int)dim;
}

shape shape_of(const tensor *x) { return (shape){.like = x, .dim = -1}; }

uint64_t shape_size(shape s, int dim) {
    return dim == s.dim ? s.rows : (uint64_t)s.like->shape[dim];
}

uint64_t shape_bytes(shape s) {
    uint64_t bytes = s.like->itemsize;
    for (int i = 0; i < s.like->ndim; i++) bytes *= shape_size(s, i);
    return bytes;
}
