"""Implement `Driver` with CuPy, and with CUDA's driver API through the C extension.

The functions' addresses come from the loaded library; nothing is linked. Each call runs in the
device's context and restores the thread's own.

Memory comes from cudaMalloc, not from CuPy's pool: an IPC handle names a whole allocation, and the
pool would give parts of shared memory to other users. No work uses the default stream, which
synchronises with all other streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from device_comm._native import Cuda
from device_comm.cuda.driver import (
    CudaEvent,
    DeviceError,
    Exported,
    HostBlock,
    NotShareableError,
    PreparedLaunch,
    device_errors,
    kernel_source,
)

_CALLED = ("cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamIsCapturing", "cuLaunchKernel")


def driver_calls(libcuda: ctypes.CDLL) -> Cuda:
    """Return calls in the thread's current context.

    ``libcuda`` must have a context of the device as the current one, else it raises `DeviceError`.
    """

    def failed(call: str, result: int) -> None:
        raise DeviceError(call, _error_name(libcuda, result))

    context = ctypes.c_void_p()
    result = libcuda.cuCtxGetCurrent(ctypes.byref(context))
    if result:
        failed("cuCtxGetCurrent", result)
    if not context.value:
        raise DeviceError("cuCtxGetCurrent", "the device has no context")
    get_current, set_current, is_capturing, launch = (
        ctypes.cast(getattr(libcuda, name), ctypes.c_void_p).value or 0 for name in _CALLED
    )
    return Cuda(context.value, get_current, set_current, is_capturing, launch, failed)


def _error_name(libcuda: ctypes.CDLL, result: int) -> str:
    name = ctypes.c_char_p()
    libcuda.cuGetErrorName(result, ctypes.byref(name))
    return f"error {result}" if name.value is None else name.value.decode()


_missing: str = ""
try:
    import cupy
except ImportError as error:
    _missing = str(error)

_BUFFER_ID = 7
_IPC_CAPABLE = 10
_RANGE_START = 11
"""Numbers of CUpointer_attribute in cuda.h."""

_PEER_ACCESS_ALREADY_ENABLED = 704

_OPTIONS = ("--std=c++17",)

LIBCUDA = "libcuda.so.1"


class CupyDriver:
    """A CUDA device, for one thread. Close it after its communicators."""

    def __init__(self, device: torch.device | str | int) -> None:
        """Use ``device``, as torch numbers it.

        Raises:
            DeviceError: CuPy is missing, or does not support this device.
        """
        if _missing:
            raise DeviceError("import cupy", _missing)
        if isinstance(device, int):
            device = torch.device("cuda", device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = torch.device(device)
        self._index: int = self.device.index
        self._functions: dict[str, int] = {}
        self._module: Any = None
        try:
            self._libcuda = ctypes.CDLL(LIBCUDA)
        except OSError as error:
            raise DeviceError(f"dlopen {LIBCUDA}", str(error)) from error
        with self._on("open device"):
            self.identity = str(cupy.cuda.runtime.deviceGetPCIBusId(self._index))
            self._stream: int = cupy.cuda.runtime.streamCreateWithFlags(
                cupy.cuda.runtime.streamNonBlocking
            )
            self._calls = driver_calls(self._libcuda)

    def close(self) -> None:
        """Release the kernels and the stream."""
        self._functions.clear()
        self._module = None
        if self._stream:
            with self._on("cudaStreamDestroy"):
                cupy.cuda.runtime.streamDestroy(self._stream)
            self._stream = 0

    # --- memory --------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Call cudaMalloc, and zero the memory."""
        with self._on("cudaMalloc"):
            pointer = int(cupy.cuda.runtime.malloc(nbytes))
            cupy.cuda.runtime.memsetAsync(pointer, 0, nbytes, self._stream)
            cupy.cuda.runtime.streamSynchronize(self._stream)
        return pointer

    def free(self, pointer: int) -> None:
        """Call cudaFree."""
        with self._on("cudaFree"):
            cupy.cuda.runtime.free(pointer)

    def write(self, pointer: int, data: bytes) -> None:
        """Copy from the host and synchronise."""
        host = ctypes.create_string_buffer(data, len(data))
        kind = cupy.cuda.runtime.memcpyHostToDevice
        self._copy(pointer, ctypes.addressof(host), len(data), kind)

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Copy to the host and synchronise."""
        host = ctypes.create_string_buffer(nbytes)
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        self._copy(ctypes.addressof(host), pointer, nbytes, kind)
        return host.raw

    def why_not_shareable(self, pointer: int) -> str:
        """See `Driver.why_not_shareable`; tests if cudaIpcGetMemHandle accepts the address."""
        capable = self._attribute(_IPC_CAPABLE, pointer)
        if capable is None:
            return "it is not the memory of a CUDA device"
        if not capable:
            return "it is not from cudaMalloc, but from expandable segments or a memory pool"
        return ""

    def why_pool_not_shareable(self) -> str:
        """See `Driver.why_pool_not_shareable`; tests a new tensor."""
        return self.why_not_shareable(
            torch.empty(1, dtype=torch.uint8, device=self.device).data_ptr()
        )

    def allocation(self, pointer: int) -> int:
        """Return CUDA's buffer id."""
        return self._attribute(_BUFFER_ID, pointer) or 0

    def export(self, pointer: int) -> Exported:
        """Return the handle of the allocation around ``pointer``."""
        reason = self.why_not_shareable(pointer)
        if reason:
            raise NotShareableError(pointer, reason)
        base = self._attribute(_RANGE_START, pointer) or pointer
        try:
            with self._on("cudaIpcGetMemHandle"):
                handle = bytes(cupy.cuda.runtime.ipcGetMemHandle(base))
        except DeviceError as error:
            raise NotShareableError(pointer, str(error)) from error
        return Exported(handle, pointer - base, self.allocation(pointer))

    def map(self, handle: bytes) -> int:
        """Call cudaIpcOpenMemHandle, with access to the peer's device."""
        with self._on("cudaIpcOpenMemHandle"):
            return int(
                cupy.cuda.runtime.ipcOpenMemHandle(
                    handle, cupy.cuda.runtime.cudaIpcMemLazyEnablePeerAccess
                )
            )

    def unmap(self, base: int) -> None:
        """Call cudaIpcCloseMemHandle."""
        with self._on("cudaIpcCloseMemHandle"):
            cupy.cuda.runtime.ipcCloseMemHandle(base)

    def reach(self, identity: str) -> None:
        """Call cudaDeviceEnablePeerAccess."""
        with self._on("cudaDeviceEnablePeerAccess"):
            count = cupy.cuda.runtime.getDeviceCount()
            visible = [cupy.cuda.runtime.deviceGetPCIBusId(index) for index in range(count)]
            if identity not in visible:
                raise DeviceError("cudaDeviceEnablePeerAccess", f"device {identity} is not visible")
            other = visible.index(identity)
            if not cupy.cuda.runtime.deviceCanAccessPeer(self._index, other):
                raise DeviceError("cudaDeviceEnablePeerAccess", f"no peer access to {identity}")
            try:
                cupy.cuda.runtime.deviceEnablePeerAccess(other)
            except cupy.cuda.runtime.CUDARuntimeError as error:
                if error.status != _PEER_ACCESS_ALREADY_ENABLED:
                    raise

    def host_allocate(self, nbytes: int) -> HostBlock:
        """Allocate pinned memory, at the same address on host and device."""
        flags = cupy.cuda.runtime.hostAllocMapped | cupy.cuda.runtime.hostAllocPortable
        with self._on("cudaHostAlloc"):
            pointer = int(cupy.cuda.runtime.hostAlloc(nbytes, flags))
        ctypes.memset(pointer, 0, nbytes)
        return HostBlock(
            memoryview((ctypes.c_char * nbytes).from_address(pointer)).cast("B"), pointer
        )

    def host_free(self, block: HostBlock) -> None:
        """Call cudaFreeHost."""
        with self._on("cudaFreeHost"):
            cupy.cuda.runtime.freeHost(block.pointer)

    # --- kernels -------------------------------------------------------------------------

    def load(self, kernels: Iterable[str]) -> None:
        """Compile with NVRTC, or load from CuPy's cache."""
        with self._on("load kernels"):
            try:
                if self._module is None:
                    self._module = cupy.RawModule(
                        code=kernel_source(), options=_OPTIONS, backend="nvrtc"
                    )
                for kernel in kernels:
                    self._functions[kernel] = self._module.get_function(kernel).kernel.ptr
            except (cupy.cuda.compiler.CompileException, OSError, RuntimeError) as error:
                raise DeviceError("compile kernels", str(error)) from error

    def prepare(self, kernel: str, grid: int, block: int, args: Sequence[bytes]) -> PreparedLaunch:
        """Prepare a cuLaunchKernel, in the C extension."""
        (job,) = args
        return self._calls.prepare(kernel, self._functions[kernel], grid, block, job).on

    # --- streams -------------------------------------------------------------------------

    def current_stream(self) -> int:
        """Return torch's current stream, without creating an object."""
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def is_capturing(self, stream: int) -> bool:
        """Call cudaStreamIsCapturing."""
        return self._calls.is_capturing(stream)

    def make_stream(self) -> int:
        """Create a stream that does not synchronise with the default stream."""
        with self._on("cudaStreamCreate"):
            return int(cupy.cuda.runtime.streamCreateWithFlags(cupy.cuda.runtime.streamNonBlocking))

    def free_stream(self, stream: int) -> None:
        """Call cudaStreamDestroy."""
        with self._on("cudaStreamDestroy"):
            cupy.cuda.runtime.streamDestroy(stream)

    def order(self, before: int, after: int) -> None:
        """See `Driver.order`; uses an event."""
        with device_errors("cudaStreamWaitEvent"):
            self._external(after).wait_stream(self._external(before))

    def mark(self, stream: int) -> CudaEvent:
        """See `Driver.mark`; uses an event."""
        return CudaEvent(self._external(stream))

    # --- common --------------------------------------------------------------------------

    def _external(self, stream: int) -> torch.cuda.Stream:
        # Not ExternalStream: for 0, the default stream, it creates a new stream.
        return torch.cuda.get_stream_from_external(stream, self.device)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        with self._on("cudaMemcpyAsync"):
            cupy.cuda.runtime.memcpyAsync(target, source, nbytes, kind, self._stream)
            cupy.cuda.runtime.streamSynchronize(self._stream)

    def _attribute(self, number: int, pointer: int) -> int | None:
        """Return an attribute of a device address; None if the driver rejects the address."""
        value = ctypes.c_uint64(0)
        status = self._libcuda.cuPointerGetAttribute(
            ctypes.byref(value), ctypes.c_int(number), ctypes.c_uint64(pointer)
        )
        return None if status else value.value

    def _on(self, call: str) -> _OnDevice:
        return _OnDevice(self._index, call)


class _OnDevice:
    """Makes a device current, and translates CuPy's errors to `DeviceError`.

    A reusable context manager. A generator would cost a microsecond per launch.
    """

    __slots__ = ("_before", "_call", "_index")

    def __init__(self, index: int, call: str) -> None:
        self._index = index
        self._call = call
        self._before = index

    def __enter__(self) -> None:
        try:
            self._before = cupy.cuda.runtime.getDevice()
            if self._before != self._index:
                cupy.cuda.runtime.setDevice(self._index)
        except RuntimeError as error:
            raise DeviceError(self._call, str(error)) from error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._before != self._index:
            cupy.cuda.runtime.setDevice(self._before)
        # CuPy's errors are subclasses; for an invalid capture it is a plain RuntimeError.
        if isinstance(error, RuntimeError):
            raise DeviceError(self._call, str(error)) from error
