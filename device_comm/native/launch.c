#define PY_SSIZE_T_CLEAN
#include "launch.h"

#define CAPTURE_NONE 0
#define CAPTURE_INVALIDATED 2
#define ERROR_STREAM_CAPTURE_INVALIDATED 901

/* Signatures of cuda.h. Nothing is linked: the addresses come from the driver's library, if any. */
typedef int (*get_current)(void **context);
typedef int (*set_current)(void *context);
typedef int (*is_capturing)(void *stream, int *status);
typedef int (*launch_kernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                             unsigned block_x, unsigned block_y, unsigned block_z,
                             unsigned shared_bytes, void *stream, void **arguments, void **extra);

typedef struct {
    PyObject_HEAD
    get_current get_current;
    set_current set_current;
    is_capturing is_capturing;
    launch_kernel launch_kernel;
    void *context;
    PyObject *failed; /* raises the error of (call, CUresult) */
    PyObject *launch_type;
} Cuda;

typedef struct {
    PyObject_HEAD
    Cuda *cuda;
    PyObject *name, *job;
    void *function;
    unsigned grid, block;
} Launch;

/* Makes the context current in this thread; stores the previous one in `before`, for leave. */
static int enter(const Cuda *cuda, void **before) {
    int result = cuda->get_current(before);
    if (result || *before == cuda->context) return result;
    return cuda->set_current(cuda->context);
}

static int leave(const Cuda *cuda, void *before) {
    return before == cuda->context ? 0 : cuda->set_current(before);
}

static PyObject *report(const Cuda *cuda, PyObject *call, int result) {
    PyObject *never = PyObject_CallFunction(cuda->failed, "Oi", call, result);
    if (never != NULL) PyErr_Format(PyExc_SystemError, "CUresult %d raised nothing", result);
    Py_XDECREF(never);
    return NULL;
}

/* --- Launch ------------------------------------------------------------------------------- */

/* Releases the GIL: cuLaunchKernel blocks while the stream's queue is full, and a thread of this
 * process may have to drain it. */
static PyObject *launch_on(PyObject *object, PyObject *address) {
    const Launch *self = (const Launch *)object;
    void *stream = PyLong_AsVoidPtr(address);
    if (stream == NULL && PyErr_Occurred()) return NULL;
    const Cuda *cuda = self->cuda;
    void *arguments[] = {PyBytes_AsString(self->job)}, *before;
    int result, left;
    Py_BEGIN_ALLOW_THREADS
    result = enter(cuda, &before);
    if (result == 0) {
        result = cuda->launch_kernel(self->function, self->grid, 1, 1, self->block, 1, 1, 0, stream,
                                     arguments, NULL);
        left = leave(cuda, before);
        if (result == 0) result = left;
    }
    Py_END_ALLOW_THREADS
    if (result) return report(cuda, self->name, result);
    Py_RETURN_NONE;
}

static void launch_dealloc(PyObject *object) {
    Launch *self = (Launch *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF((PyObject *)self->cuda);
    Py_XDECREF(self->name);
    Py_XDECREF(self->job);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef launch_methods[] = {
    {"on", launch_on, METH_O, "on(stream): launch the kernel; during capture, add it to the graph."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_dealloc, launch_dealloc},
    {Py_tp_methods, launch_methods},
    {Py_tp_doc, "A kernel with its argument; CUDA copies the argument at each launch."},
    {0, NULL},
};

static PyType_Spec launch_spec = {
    .name = "device_comm._native.Launch",
    .basicsize = sizeof(Launch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = launch_slots,
};

PyObject *launch_type(PyObject *module) {
    return PyType_FromModuleAndSpec(module, &launch_spec, NULL);
}

/* --- Cuda --------------------------------------------------------------------------------- */

/* (name, function, grid, block, job) */
static PyObject *cuda_prepare(PyObject *object, PyObject *args) {
    PyObject *name, *job;
    unsigned long long function;
    unsigned grid, block;
    if (!PyArg_ParseTuple(args, "UKIIS", &name, &function, &grid, &block, &job)) return NULL;
    PyTypeObject *type = (PyTypeObject *)((Cuda *)object)->launch_type;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Launch *self = (Launch *)make(type, 0);
    if (self == NULL) return NULL;
    self->cuda = (Cuda *)Py_NewRef(object);
    self->name = Py_NewRef(name);
    self->job = Py_NewRef(job);
    self->function = (void *)(uintptr_t)function;
    self->grid = grid;
    self->block = block;
    return (PyObject *)self;
}

static PyObject *cuda_is_capturing(PyObject *object, PyObject *address) {
    const Cuda *self = (const Cuda *)object;
    void *stream = PyLong_AsVoidPtr(address), *before;
    if (stream == NULL && PyErr_Occurred()) return NULL;
    int result, left, status = CAPTURE_NONE;
    Py_BEGIN_ALLOW_THREADS
    result = enter(self, &before);
    if (result == 0) {
        result = self->is_capturing(stream, &status);
        left = leave(self, before);
        if (result == 0) result = left;
    }
    Py_END_ALLOW_THREADS
    if (result == 0 && status == CAPTURE_INVALIDATED) result = ERROR_STREAM_CAPTURE_INVALIDATED;
    if (result == 0) return PyBool_FromLong(status != CAPTURE_NONE);
    PyObject *call = PyUnicode_FromString("cuStreamIsCapturing");
    if (call == NULL) return NULL;
    report(self, call, result);
    Py_DECREF(call);
    return NULL;
}

/* (context, addresses of cuCtxGetCurrent, cuCtxSetCurrent, cuStreamIsCapturing, cuLaunchKernel,
 * failed) */
static PyObject *cuda_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    unsigned long long context, get, set, look, launch;
    PyObject *failed;
    if (!PyArg_ParseTuple(args, "KKKKKO", &context, &get, &set, &look, &launch, &failed)) return NULL;
    PyObject *module = PyType_GetModule(type);
    if (module == NULL) return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Cuda *self = (Cuda *)make(type, 0);
    if (self == NULL) return NULL;
    self->context = (void *)(uintptr_t)context;
    self->get_current = (get_current)(uintptr_t)get;
    self->set_current = (set_current)(uintptr_t)set;
    self->is_capturing = (is_capturing)(uintptr_t)look;
    self->launch_kernel = (launch_kernel)(uintptr_t)launch;
    self->failed = Py_NewRef(failed);
    self->launch_type = PyObject_GetAttrString(module, "Launch");
    if (self->launch_type == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void cuda_dealloc(PyObject *object) {
    Cuda *self = (Cuda *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->failed);
    Py_XDECREF(self->launch_type);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef cuda_methods[] = {
    {"prepare", cuda_prepare, METH_VARARGS,
     "prepare(name, function, grid, block, job) -> Launch; the kernel's only argument is job."},
    {"is_capturing", cuda_is_capturing, METH_O,
     "is_capturing(stream) -> bool: return True if the stream is captured into a graph."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot cuda_slots[] = {
    {Py_tp_new, cuda_new},
    {Py_tp_dealloc, cuda_dealloc},
    {Py_tp_methods, cuda_methods},
    {Py_tp_doc, "The CUDA driver's functions, called in one context."},
    {0, NULL},
};

static PyType_Spec cuda_spec = {
    .name = "device_comm._native.Cuda",
    .basicsize = sizeof(Cuda),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = cuda_slots,
};

PyObject *cuda_type(PyObject *module) {
    return PyType_FromModuleAndSpec(module, &cuda_spec, NULL);
}
