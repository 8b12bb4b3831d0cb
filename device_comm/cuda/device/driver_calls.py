"""Calls CUDA's driver through the C extension, for what every eager operation needs.

The functions' addresses are taken from the library that is loaded anyway; nothing is linked. Each
call is made in the device's context, and the thread's own context is put back after it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from device_comm.cuda.errors import DeviceError
from shm_broadcast.extension import extension_of

if TYPE_CHECKING:
    from device_comm._native import Cuda

_CALLED = ("cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamIsCapturing", "cuLaunchKernel")


def driver_calls(libcuda: ctypes.CDLL) -> Cuda | None:
    """Calls in the thread's current context; None without the C extension.

    Args:
        libcuda: the driver's library, with a context of the device as the current one.

    Raises:
        DeviceError: there is no current context.
    """
    native = extension_of("device_comm")
    if native is None:
        return None

    def failed(call: str, result: int) -> None:
        raise DeviceError(call, _said(libcuda, result))

    context = ctypes.c_void_p()
    result = libcuda.cuCtxGetCurrent(ctypes.byref(context))
    if result:
        failed("cuCtxGetCurrent", result)
    if not context.value:
        raise DeviceError("cuCtxGetCurrent", "the device has no context")
    found = [ctypes.cast(getattr(libcuda, name), ctypes.c_void_p).value for name in _CALLED]
    made: Cuda = native.Cuda(context.value, *found, failed)
    return made


def _said(libcuda: ctypes.CDLL, result: int) -> str:
    name = ctypes.c_char_p()
    libcuda.cuGetErrorName(result, ctypes.byref(name))
    return f"error {result}" if name.value is None else name.value.decode()
