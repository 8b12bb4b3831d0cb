"""Call NCCL by ctypes: its functions, types and reductions.

Names, argument orders and enumeration values are those of NCCL's C interface, the same from 2.18 to
2.30. Non-blocking communicators are created in the background, until `async_result` is no longer
``IN_PROGRESS``. A call on a blocking one (`begin_split`) may wait for peers, and only `abort` ends
it.

Windows of memory, which all ranks of a communicator access, need 2.27; an older library is used
without them. The configuration has the layout of NCCL 2.14, the first with one: later libraries
read its ``size`` and ``version`` and use defaults for newer fields.

    int8, int32, int64, uint8, uint32                    unchanged
    floats, SUM, PRODUCT and AVG                         unchanged
    int16, uint16                                        widened to int32
    bool                                                 as uint8; SUM, BOR as MAX, PRODUCT,
                                                         BAND as MIN
    complex, SUM and AVG                                 as pairs of reals

For bitwise operations on integers, BXOR of bools, PRODUCT of complex numbers, and MIN and MAX of
floats, in which NCCL loses NaN, `nccl_reduction` returns None. NCCL may round sums of float16 and
bfloat16 over more than two ranks after each addition, and its AVG divides before it adds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final, Self

import torch

from device_comm.operation import ReduceOp
from shm_broadcast.errors import CoordinatorError

UNIQUE_ID_BYTES: Final = 128
_CONFIG_MAGIC: Final = 0xCAFEBEEF
_CONFIG_VERSION: Final = 2 * 10000 + 14 * 100
_OLDEST: Final = (2, 18, 1)
_COLL_SYMMETRIC: Final = 1
"""NCCL_WIN_COLL_SYMMETRIC: all ranks pass the same window offsets to a collective."""
_MAPS = Path("/proc/self/maps")


class NcclResult(IntEnum):
    """NCCL's result codes."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7


class Op(IntEnum):
    """NCCL's reductions."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


TYPES: Final[dict[torch.dtype, int]] = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""NCCL's numbers of dtypes."""


class NcclError(CoordinatorError):
    """NCCL refused a call of ``function``, or an operation failed in the background.

    ``result`` is NCCL's result code, a `NcclResult` if possible; ``detail`` is NCCL's text.
    """

    def __init__(self, function: str, result: int, detail: str = "") -> None:
        self.function = function
        self.result = result
        self.detail = detail
        is_known = any(result == each for each in NcclResult)
        name = NcclResult(result).name if is_known else f"error {result}"
        super().__init__(f"{function}: {name}{detail and ': '}{detail}")


class NcclUnavailableError(CoordinatorError):
    """This process has no usable NCCL; the message has the reason."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


_POINTER, _COUNT, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: Final[dict[str, tuple[type, ...]]] = {
    "ncclGetVersion": (ctypes.POINTER(_INT),),
    "ncclGetUniqueId": (ctypes.POINTER(_UniqueId),),
    "ncclCommInitRankConfig": (
        ctypes.POINTER(_POINTER), _INT, _UniqueId, _INT, ctypes.POINTER(_Config),
    ),
    "ncclCommSplit": (
        _POINTER, _INT, _INT, ctypes.POINTER(_POINTER), ctypes.POINTER(_Config),
    ),
    "ncclCommGetAsyncError": (_POINTER, ctypes.POINTER(_INT)),
    "ncclCommFinalize": (_POINTER,),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (_POINTER, _POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER),
    "ncclReduce": (_POINTER, _POINTER, _COUNT, _INT, _INT, _INT, _POINTER, _POINTER),
    "ncclReduceScatter": (_POINTER, _POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER),
    "ncclAllGather": (_POINTER, _POINTER, _COUNT, _INT, _POINTER, _POINTER),
    "ncclBroadcast": (_POINTER, _POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER),
    "ncclSend": (_POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER),
    "ncclRecv": (_POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER),
}  # fmt: skip

_WINDOWS: Final[dict[str, tuple[type, ...]]] = {
    "ncclMemAlloc": (ctypes.POINTER(_POINTER), _COUNT),
    "ncclMemFree": (_POINTER,),
    "ncclCommWindowRegister": (_POINTER, _POINTER, _COUNT, ctypes.POINTER(_POINTER), _INT),
    "ncclCommWindowDeregister": (_POINTER, _POINTER),
}
"""Functions of NCCL 2.27; `ncclMemAlloc` and `ncclMemFree` are older."""


def loaded_library(maps: Iterable[str]) -> str | None:
    """Return the path of the loaded libnccl, from the lines of /proc/PID/maps."""
    for line in maps:
        path = line.rstrip("\n").partition("/")
        if Path(path[2]).name.startswith("libnccl.so"):
            return f"/{path[2]}"
    return None


class NcclLibrary:
    """A loaded libnccl. Addresses, communicators and streams are ints; counts are in elements.

    All methods raise `NcclError`. ``version`` is such as (2, 28, 9).
    """

    def __init__(self, path: str) -> None:
        """Bind the library at ``path``, or its loaded copy.

        Raises:
            NcclUnavailableError: the library cannot be loaded, or is too old.
        """
        self.path = path
        try:
            library = ctypes.CDLL(path)
            self._functions = {name: getattr(library, name) for name in _SIGNATURES}
            self._error_string = library.ncclGetErrorString
            self._last_error = library.ncclGetLastError
        except (OSError, AttributeError) as error:
            raise NcclUnavailableError(f"{path} cannot be used: {error}") from error
        self._functions |= {
            name: getattr(library, name) for name in _WINDOWS if hasattr(library, name)
        }
        for name, function in self._functions.items():
            function.argtypes, function.restype = (_SIGNATURES | _WINDOWS)[name], _INT
        self._error_string.argtypes, self._error_string.restype = (_INT,), ctypes.c_char_p
        self._last_error.argtypes, self._last_error.restype = (_POINTER,), ctypes.c_char_p
        code = _INT()
        self._call("ncclGetVersion", ctypes.byref(code))
        self.version = (code.value // 10000, code.value // 100 % 100, code.value % 100)
        if self.version < _OLDEST:
            raise NcclUnavailableError(
                f"{path} is older than NCCL 2.18: its version is {code.value}"
            )

    @classmethod
    def of_torch(cls) -> Self:
        """Return torch's loaded library; raise `NcclUnavailableError` if none is usable."""
        with _MAPS.open() as maps:
            path = loaded_library(maps)
        if path is None:
            raise NcclUnavailableError(f"torch {torch.__version__} has loaded no libnccl")
        return cls(path)

    # --- communicators -------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """Return the unique id of a new communicator, of `UNIQUE_ID_BYTES`, for all its ranks."""
        unique = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique))
        return bytes(unique)

    def begin_init(self, world_size: int, unique_id: bytes, rank: int) -> int:
        """Start the creation of a non-blocking communicator on the current CUDA device.

        It can be split when `async_result` is no longer ``IN_PROGRESS``. Raises `ValueError` unless
        ``unique_id`` has `UNIQUE_ID_BYTES`.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"a unique id has {UNIQUE_ID_BYTES} bytes; got {len(unique_id)}")
        config, comm = _configuration(blocking=False), _POINTER()
        self._call(
            "ncclCommInitRankConfig",
            ctypes.byref(comm),
            world_size,
            _UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        if comm.value is None:
            raise NcclError("ncclCommInitRankConfig", NcclResult.INTERNAL_ERROR, "no communicator")
        return comm.value

    def begin_split(self, comm: int, rank: int) -> Callable[[], int]:
        """Start the creation of a blocking communicator of all ranks of a non-blocking one.

        Returns a function for the new one, to be called when `async_result` of ``comm`` is no
        longer ``IN_PROGRESS``.
        """
        config, split = _configuration(blocking=True), _POINTER()
        self._call("ncclCommSplit", comm, 0, rank, ctypes.byref(split), ctypes.byref(config))

        def result() -> int:
            if split.value is None:
                raise NcclError("ncclCommSplit", NcclResult.INTERNAL_ERROR, "no communicator")
            return split.value

        return result

    def async_result(self, comm: int) -> int:
        """Return the `NcclResult` of the communicator's background work."""
        state = _INT()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(state))
        return state.value

    def error(self, function: str, result: int, comm: int | None = None) -> NcclError:
        """Return the error for a result code, with NCCL's text."""
        texts = [self._error_string(result), None if comm is None else self._last_error(comm)]
        words = [each.decode(errors="replace").strip() for each in texts if each]
        return NcclError(function, result, "; ".join(filter(None, words)))

    def finalize(self, comm: int) -> None:
        """Complete all issued operations; in the background if non-blocking."""
        self._call("ncclCommFinalize", comm)

    def destroy(self, comm: int) -> None:
        """Free a finalized communicator."""
        self._call("ncclCommDestroy", comm)

    def abort(self, comm: int) -> None:
        """End the communicator's operations, also on the device, and free it."""
        self._call("ncclCommAbort", comm)

    # --- windows -------------------------------------------------------------------------

    def check_windows(self) -> None:
        """Raise `NcclUnavailableError` if the library is too old for windows."""
        if not _WINDOWS.keys() <= self._functions.keys():
            version = ".".join(map(str, self.version))
            raise NcclUnavailableError(f"NCCL {version} has no windows; 2.27 has")

    def mem_alloc(self, size: int) -> int:
        """Return new memory for windows on the current device."""
        memory = _POINTER()
        self._call("ncclMemAlloc", ctypes.byref(memory), size)
        if memory.value is None:
            raise NcclError("ncclMemAlloc", NcclResult.INTERNAL_ERROR, "no memory")
        return memory.value

    def mem_free(self, address: int) -> None:
        """Free memory of `mem_alloc`."""
        self._call("ncclMemFree", address)

    def window_register(self, comm: int, address: int, size: int) -> int:
        """Register a window of equal size on all ranks. Collective: yes, every member.

        Raises:
            NcclUnavailableError: NCCL has no windows for these devices.
        """
        window = _POINTER()
        self._call(
            "ncclCommWindowRegister", comm, address, size, ctypes.byref(window), _COLL_SYMMETRIC
        )
        if window.value is None:
            raise NcclUnavailableError("NCCL makes no window of these devices' memory")
        return window.value

    def window_deregister(self, comm: int, window: int) -> None:
        """Undo `window_register`, after the device's last use."""
        self._call("ncclCommWindowDeregister", comm, window)

    # --- groups of calls -----------------------------------------------------------------

    def group_start(self) -> None:
        """Begin a group: collect this thread's following calls."""
        self._call("ncclGroupStart")

    def group_end(self) -> None:
        """Issue the group's calls as one."""
        self._call("ncclGroupEnd")

    # --- operations ----------------------------------------------------------------------

    def all_reduce(
        self, source: int, output: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        """Reduce ``count`` elements of all ranks; in place if both addresses are equal."""
        self._call("ncclAllReduce", source, output, count, dtype, op, comm, stream)

    def reduce(
        self,
        source: int,
        output: int,
        count: int,
        dtype: int,
        op: int,
        root: int,
        comm: int,
        stream: int,
    ) -> None:
        """Reduce ``count`` elements into the root's ``output``; 0 on other ranks."""
        self._call("ncclReduce", source, output, count, dtype, op, root, comm, stream)

    def reduce_scatter(
        self, source: int, output: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        """Reduce; rank r receives ``count`` elements from element ``r * count`` on."""
        self._call("ncclReduceScatter", source, output, count, dtype, op, comm, stream)

    def all_gather(
        self, source: int, output: int, count: int, dtype: int, comm: int, stream: int
    ) -> None:
        """Concatenate ``count`` elements of each rank, in rank order, in ``output``."""
        self._call("ncclAllGather", source, output, count, dtype, comm, stream)

    def broadcast(
        self, source: int, output: int, count: int, dtype: int, root: int, comm: int, stream: int
    ) -> None:
        """Copy the root's ``source`` to every rank's ``output``."""
        self._call("ncclBroadcast", source, output, count, dtype, root, comm, stream)

    def send(self, source: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        """Send ``count`` elements to ``peer``."""
        self._call("ncclSend", source, count, dtype, peer, comm, stream)

    def recv(self, output: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> None:
        """Receive ``count`` elements from ``peer``."""
        self._call("ncclRecv", output, count, dtype, peer, comm, stream)

    def _call(self, name: str, *arguments: object) -> None:
        result = self._functions[name](*arguments)
        if result not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
            raise self.error(name, result)


def _configuration(*, blocking: bool) -> _Config:
    return _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, blocking)


_OPS = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.PRODUCT: Op.PROD,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.AVG: Op.AVG,
}
_BOOL_OPS = {
    ReduceOp.SUM: Op.MAX,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.BOR: Op.MAX,
    ReduceOp.PRODUCT: Op.MIN,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.BAND: Op.MIN,
}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
BYTE = TYPES[torch.uint8]


@dataclass(frozen=True, slots=True)
class NcclReduction:
    """A reduction as NCCL runs it, on NCCL's ``dtype``.

    Each element of the tensor has ``width`` values. The tensor is converted to ``wider`` first;
    None: no conversion.
    """

    op: Op
    dtype: int
    width: int = 1
    wider: torch.dtype | None = None


@cache
def nccl_reduction(op: ReduceOp, dtype: torch.dtype) -> NcclReduction | None:
    """Return NCCL's form of ``op`` on ``dtype``; None: gather, and reduce with torch."""
    if dtype is torch.bool:
        supported = _BOOL_OPS.get(op)
        return None if supported is None else NcclReduction(supported, BYTE)
    supported = _OPS.get(op)
    if supported is None:
        return None
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_floating_point:
        return None
    if dtype.is_complex:
        return None if op is ReduceOp.PRODUCT else NcclReduction(supported, TYPES[_REAL[dtype]], 2)
    wider = _WIDER.get(dtype)
    return NcclReduction(supported, TYPES[wider or dtype], 1, wider)
