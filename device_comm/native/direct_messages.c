/* Fast path of send and recv. They return None when all bytes are moved, else the number of bytes
 * moved so far; the caller then moves the rest, and publishes the operation on the board. */
#include "direct.h"

#include "pipe_object.h"

/* (tensor, pipe, peer, further arguments) */
static PyObject *move(PyObject *object, PyObject *const *args, Py_ssize_t n, int operation,
                      mover step, uint64_t wait_ns) {
    Comm *self = (Comm *)object;
    tensor x;
    self->halfway = false;
    if (n < 3 || !direct_open(self) ||
        !tensor_read(self->reader, self->tensor_type, self->is_neg, args[0], &x) ||
        (PyObject *)Py_TYPE(args[1]) != self->pipe_type)
        Py_RETURN_NOTIMPLEMENTED;
    size_t peer = direct_read_rank(self, args[2]);
    if (peer == self->steps.n) Py_RETURN_NOTIMPLEMENTED;
    uint64_t begin = self->history ? gc_pace_now(&self->pace) : 0;
    message whole = {.data = x.data,
                     .total = tensor_bytes(&x),
                     .dtype = x.dtype,
                     .call = comm_call(self)};
    uint64_t done = pipe_move((Pipe *)args[1], step, whole, 0, wait_ns);
    if (done < whole.total) {
        self->halfway = done > 0;
        return PyLong_FromUnsignedLongLong(done);
    }
    size_t place = 1 + peer + (operation == OPERATION_RECV ? self->steps.n : 0);
    self->about.number = ++((uint32_t *)self->numbers.buf)[place];
    self->about.peer = (uint16_t)peer;
    self->about.dtype = (uint8_t)x.dtype;
    direct_stamp(self, operation, whole.total, begin, gc_pace_now(&self->pace));
    Py_RETURN_NONE;
}

/* send(x, pipe, peer) */
PyObject *direct_send(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    return move(self, args, n, OPERATION_SEND, pipe_push, 0);
}

/* recv(out, pipe, peer, background) */
PyObject *direct_recv(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    bool waits = n > 3 && args[3] == Py_False;
    return move(self, args, n, OPERATION_RECV, pipe_pull, waits ? SPIN_NS : 0);
}
