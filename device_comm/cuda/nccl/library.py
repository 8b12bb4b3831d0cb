"""Call NCCL by ctypes: its functions, types and reductions.

The names, argument orders and enumeration values are those of NCCL's C interface, the same from
2.18 to 2.30. Communicators are made in the background: `async_result` tells when that has ended. A
call on a blocking communicator, which `begin_split` makes, returns when NCCL has taken it over.
Until then it may wait for peers, and only `abort` makes it return.

Windows of memory, which all ranks of a communicator reach, came with 2.27. An older library lacks
their functions, and is used without them.

The configuration has the layout of NCCL 2.14, the first with one: later libraries look at its
``size`` and ``version`` and use defaults for newer fields.

    int8, int32, int64, uint8, uint32                    as they are
    floats, SUM, PRODUCT and AVG                         as they are
    int16, uint16                                        widened to int32
    bool                                                 as uint8; SUM, BOR as MAX, PRODUCT,
                                                         BAND as MIN
    complex, SUM and AVG                                 as pairs of reals

NCCL cannot do bitwise operations on integers, BXOR of bools, and PRODUCT of complex numbers, and
loses NaN in MIN and MAX of floats: `nccl_reduction` returns None for them. Sums of float16 and
bfloat16 over more than two ranks may be rounded by NCCL after each addition. AVG is NCCL's own,
which divides before it adds.
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
"""NCCL_WIN_COLL_SYMMETRIC: all ranks pass the same places of their windows to a collective."""
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
    """The reductions that NCCL has."""

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
"""NCCL's number of each dtype that it computes with."""


class NcclError(CoordinatorError):
    """NCCL refused a call, or an operation failed in the background.

    Attributes:
        function: the function that was called.
        result: NCCL's result code, a `NcclResult` if it is a known one.
        detail: NCCL's error text.
    """

    def __init__(self, function: str, result: int, detail: str = "") -> None:
        self.function = function
        self.result = result
        self.detail = detail
        known = any(result == each for each in NcclResult)
        name = NcclResult(result).name if known else f"error {result}"
        super().__init__(f"{function}: {name}{detail and ': '}{detail}")


class NcclUnavailableError(CoordinatorError):
    """This process has no usable NCCL; the message says why."""


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
"""What NCCL has from 2.27 on; `ncclMemAlloc` and `ncclMemFree` before."""


def loaded_library(maps: Iterable[str]) -> str | None:
    """The path of the libnccl that a process has loaded, from the lines of its /proc/PID/maps."""
    for line in maps:
        path = line.rstrip("\n").partition("/")
        if Path(path[2]).name.startswith("libnccl.so"):
            return f"/{path[2]}"
    return None


class NcclLibrary:
    """A loaded libnccl. Addresses, communicators and streams are ints; counts are in elements.

    All methods raise `NcclError`.

    Attributes:
        path: the library's file.
        version: its version, such as (2, 28, 9).
    """

    def __init__(self, path: str) -> None:
        """Bind the library at ``path``; if it is loaded already, that copy is used.

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
        """The library that torch has loaded into this process.

        Raises:
            NcclUnavailableError: torch has loaded none, or one that cannot be used.
        """
        with _MAPS.open() as maps:
            path = loaded_library(maps)
        if path is None:
            raise NcclUnavailableError(f"torch {torch.__version__} has loaded no libnccl")
        return cls(path)

    # --- communicators -------------------------------------------------------------------

    def unique_id(self) -> bytes:
        """A new communicator's unique id, of `UNIQUE_ID_BYTES`; all its ranks need it."""
        made = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def begin_init(self, world_size: int, unique_id: bytes, rank: int) -> int:
        """Begin to make a non-blocking communicator on the current CUDA device; returns it at once.

        It can be split when `async_result` is no longer ``IN_PROGRESS``.

        Raises:
            NcclError: NCCL refuses.
            ValueError: ``unique_id`` has not `UNIQUE_ID_BYTES`.
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
            raise NcclError("ncclCommInitRankConfig", NcclResult.INTERNAL_ERROR, "made nothing")
        return comm.value

    def begin_split(self, comm: int, rank: int) -> Callable[[], int]:
        """Begin to make a blocking communicator of all ranks of a non-blocking one.

        Args:
            comm: the non-blocking one.
            rank: this process's rank in both.

        Returns:
            A function that returns the new one when `async_result` of ``comm`` is no longer
            ``IN_PROGRESS``.
        """
        config, made = _configuration(blocking=True), _POINTER()
        self._call("ncclCommSplit", comm, 0, rank, ctypes.byref(made), ctypes.byref(config))

        def result() -> int:
            if made.value is None:
                raise NcclError("ncclCommSplit", NcclResult.INTERNAL_ERROR, "made nothing")
            return made.value

        return result

    def async_result(self, comm: int) -> int:
        """The state of the communicator's background work: a `NcclResult`."""
        found = _INT()
        self._call("ncclCommGetAsyncError", comm, ctypes.byref(found))
        return found.value

    def error(self, function: str, result: int, comm: int | None = None) -> NcclError:
        """The error for a result code, with NCCL's text."""
        said = [self._error_string(result), None if comm is None else self._last_error(comm)]
        words = [each.decode(errors="replace").strip() for each in said if each]
        return NcclError(function, result, "; ".join(filter(None, words)))

    def finalize(self, comm: int) -> None:
        """Complete all issued operations; of a non-blocking communicator, begin to."""
        self._call("ncclCommFinalize", comm)

    def destroy(self, comm: int) -> None:
        """Free a communicator that was finalized."""
        self._call("ncclCommDestroy", comm)

    def abort(self, comm: int) -> None:
        """End the communicator's operations, also on the device, and free it."""
        self._call("ncclCommAbort", comm)

    # --- windows -------------------------------------------------------------------------

    def check_windows(self) -> None:
        """Raise if there are none.

        Raises:
            NcclUnavailableError: the library is older than they are.
        """
        if not _WINDOWS.keys() <= self._functions.keys():
            version = ".".join(map(str, self.version))
            raise NcclUnavailableError(f"NCCL {version} has no windows; 2.27 has")

    def mem_alloc(self, size: int) -> int:
        """The address of new memory on the current device, as windows need it."""
        made = _POINTER()
        self._call("ncclMemAlloc", ctypes.byref(made), size)
        if made.value is None:
            raise NcclError("ncclMemAlloc", NcclResult.INTERNAL_ERROR, "made nothing")
        return made.value

    def mem_free(self, address: int) -> None:
        """Free what `mem_alloc` has made."""
        self._call("ncclMemFree", address)

    def window_register(self, comm: int, address: int, size: int) -> int:
        """Make a window of memory of all ranks, as large on all. Collective: yes, every member.

        Raises:
            NcclUnavailableError: NCCL has no windows for these devices.
        """
        made = _POINTER()
        self._call(
            "ncclCommWindowRegister", comm, address, size, ctypes.byref(made), _COLL_SYMMETRIC
        )
        if made.value is None:
            raise NcclUnavailableError("NCCL makes no window of these devices' memory")
        return made.value

    def window_deregister(self, comm: int, window: int) -> None:
        """Undo `window_register`, when the device does not use it any more."""
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
        """Reduce ``count`` elements into the root's ``output``, which is 0 on other ranks."""
        self._call("ncclReduce", source, output, count, dtype, op, root, comm, stream)

    def reduce_scatter(
        self, source: int, output: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> None:
        """Reduce; rank r gets ``count`` elements of the result, from element ``r * count`` on."""
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
    """A reduction as NCCL does it.

    Attributes:
        op: NCCL's reduction.
        dtype: NCCL's number of the dtype to compute with.
        width: how many values of that dtype an element of the tensor has.
        wider: the dtype to convert the tensor to first; None: its memory is used as it is.
    """

    op: Op
    dtype: int
    width: int = 1
    wider: torch.dtype | None = None


@cache
def nccl_reduction(op: ReduceOp, dtype: torch.dtype) -> NcclReduction | None:
    """How NCCL does ``op`` on ``dtype``; None if it cannot: gather, and reduce with torch."""
    if dtype is torch.bool:
        asked = _BOOL_OPS.get(op)
        return None if asked is None else NcclReduction(asked, BYTE)
    asked = _OPS.get(op)
    if asked is None:
        return None
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_floating_point:
        return None
    if dtype.is_complex:
        return None if op is ReduceOp.PRODUCT else NcclReduction(asked, TYPES[_REAL[dtype]], 2)
    wider = _WIDER.get(dtype)
    return NcclReduction(asked, TYPES[wider or dtype], 1, wider)
