"""The fake NCCL: compiling it, its stream, and communicators over it on CPU tensors."""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from device_comm import Communicator
from device_comm.cuda.nccl import core as nccl_core
from device_comm.cuda.nccl.library import NcclLibrary
from device_comm.cuda.nccl.nccl_backend import NcclBackend
from shm_broadcast import Board, BoardHandle
from tests.device_comm.cuda.fake_library import compile_library
from tests.device_comm.shm_ranks import share_through

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SOURCE = Path(__file__).with_name("fake_nccl.c")
_STREAM = 42
"""The stream that the fake insists on."""


def compile_fake(folder: Path, *options: str) -> str:
    """The path of the library, made in ``folder``; ``-DBEFORE_WINDOWS``: one that has none."""
    return compile_library(SOURCE, folder / "libnccl.so.2", "-O1", "-pthread", *options)


class HostMark:
    """How much the stream had been given."""

    def __init__(self, fake: ctypes.CDLL) -> None:
        self._fake = fake
        fake.fakeMark.restype = ctypes.c_uint64
        self._at = fake.fakeMark()

    def query(self) -> bool:
        return bool(self._fake.fakePassed(ctypes.c_uint64(self._at)))

    def stream_wait(self) -> None:
        """There is one stream."""


class HostStreams:
    """The fake's stream. With ``patient``, a mark returns once all before it is done, so that
    what torch does on the CPU afterwards is in stream order."""

    address = _STREAM

    def __init__(self, library: str, patient: bool) -> None:
        self.fake = ctypes.CDLL(library)
        self.patient = patient
        self.mark_type = HostMark
        self.captures = False

    def current(self) -> HostStreams:
        return self

    def capturing(self) -> bool:
        return self.captures

    def mark(self) -> HostMark:
        mark = self.mark_type(self.fake)
        if self.patient:
            self.synchronize(mark)
        return mark

    def synchronize(self, mark: HostMark | None = None, seconds: float = 20.0) -> None:
        """What a user calls, who knows nothing of groups."""
        mark = mark or HostMark(self.fake)
        end = time.monotonic() + seconds
        while not mark.query():
            assert time.monotonic() < end, "the stream hangs"
            time.sleep(0.0002)

    def device(self) -> AbstractContextManager[object]:
        return nullcontext()


def make_nccl(
    rank: int,
    n: int,
    board: BoardHandle | Board | None,
    library: str,
    path: str,
    *,
    patient: bool = True,
    hold: float = 5.0,
    **options: Any,
) -> tuple[Communicator, HostStreams]:
    """This rank's end of a group, and its stream.

    ``hold``: seconds that messages are held back; so many that ranks which are stalled between a
    send and a receive still issue them together.
    """
    pytest.MonkeyPatch().setattr(nccl_core, "HOLD_SECONDS", hold)
    streams = HostStreams(library, patient)
    watch = Board.attach(board, rank) if isinstance(board, BoardHandle) else board
    backend = NcclBackend.create(
        rank,
        n,
        share_through(path),
        device="cpu",
        name="tp",
        timeout=20.0,
        watch=watch,
        library=NcclLibrary(library),
        streams=streams,
        **options,
    )
    return Communicator(backend), streams


def nccl_of(comm: Communicator) -> NcclBackend:
    """The backend of what `make_nccl` made."""
    assert isinstance(comm.backend, NcclBackend)
    return comm.backend
