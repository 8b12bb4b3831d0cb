"""Measure candidate backends on the ranks that use them, and cache the tables between runs.

Every rank makes the same calls in the same order; rank 0's times count. Operations that can be
captured are timed in a CUDA graph, in bfloat16; all others, and messages, which use side streams,
as eager calls.

A file that is damaged, or has another key, is ignored. Files are replaced atomically.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from device_comm.communicator import Communicator
from device_comm.cuda.driver import CudaEvent, CudaStreams
from device_comm.selection import Candidate, Measured, Table
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from device_comm.cuda.agree import AllGatherBytes


SECONDS: Final = 60.0
"""The time limit of each wait."""

_POLL: Final = 0.0001


class HostStopwatch:
    """Times consecutive eager calls until the device completes the last one."""

    def __init__(
        self,
        comm: Communicator,
        barrier: Communicator,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time calls of ``comm``; ``barrier`` synchronises its ranks before each series."""
        self._comm = comm
        self._barrier = barrier
        self._clock = clock

    def time(self, call: Callable[[], Any], calls: int, repeats: int) -> float:
        """Return the seconds of one call, in the fastest of ``repeats`` series of ``calls``.

        Collective: yes, every member.
        """
        best = math.inf
        for _ in range(repeats):
            self._settle()
            self._barrier.barrier(timeout=SECONDS)
            began = self._clock()
            for _ in range(calls):
                call()
            self._settle()
            best = min(best, self._clock() - began)
        return max(best, 1e-9) / calls

    def _settle(self) -> None:
        comm = self._comm
        comm.flush(SECONDS)
        if comm.device.type == "cuda":
            _wait_for(CudaStreams(comm.device).current().mark().query, comm)


class GraphStopwatch:
    """Times calls in a CUDA graph, as decoding models make them."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def time(self, call: Callable[[], Any], calls: int, repeats: int) -> float:
        """See `HostStopwatch.time`."""
        device = self._comm.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with self._comm.graph_capture(), torch.cuda.stream(stream):
            # Not torch.cuda.graph, which runs the garbage collector each time.
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(calls):
                call()
            graph.capture_end()
        best = math.inf
        with torch.cuda.stream(stream):
            for _ in range(repeats):
                best = min(best, self._replay(graph, stream))
        torch.cuda.current_stream(device).wait_stream(stream)
        return max(best, 1e-9) / calls

    def _replay(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        graph.replay()  # synchronises the ranks
        start.record(stream)
        graph.replay()
        end.record(stream)
        _wait_for(CudaEvent(stream).query, self._comm)
        self._comm.check()
        return float(start.elapsed_time(end)) / 1e3


def _wait_for(passed: Callable[[], bool], comm: Communicator) -> None:
    deadline = Deadline.after(SECONDS)
    comm.watch.wait(passed, deadline, f"{comm.name} measure", lambda: comm.peers, poll=_POLL)


_FOLDER: Final = "group-coordinator"
_LARGEST: Final = 1 << 20
"""The largest valid file, in bytes."""


@dataclass(frozen=True, slots=True)
class Key:
    """The machine and the group of a table.

    ``version`` is this project's and its kernels' version, ``libraries`` the versions of the
    libraries that move data, ``topology`` such as ``"2 ranks on 1 device of 1 host"``, and
    ``candidates`` the names of the measured candidates.
    """

    version: str
    device: str
    driver: str
    libraries: str
    world_size: int
    topology: str
    candidates: str

    def as_dict(self) -> dict[str, str]:
        """Return the key as `Table.key` stores it."""
        return {name: str(value) for name, value in asdict(self).items()}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the user's folder for tables (XDG_CACHE_HOME, else ~/.cache); None without a home."""
    given = environment.get("XDG_CACHE_HOME", "")
    if given.startswith("/"):
        return Path(given) / _FOLDER
    home = environment.get("HOME", "")
    return Path(home) / ".cache" / _FOLDER if home.startswith("/") else None


@dataclass(frozen=True, slots=True)
class TableCache:
    """The tables in one folder; with ``folder`` None it is always empty."""

    folder: Path | None

    def load(self, key: Key) -> Table | None:
        """Return the valid table for ``key``, or None."""
        if self.folder is None:
            return None
        try:
            with self._path(self.folder, key).open("rb") as file:
                table = msgspec.json.decode(file.read(_LARGEST), type=Table)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return table if table.key == key.as_dict() and table.sound() else None

    def store(self, table: Table, key: Key) -> str:
        """Store ``table`` for ``key``; return ``""``, or the reason of a failure."""
        if self.folder is None:
            return "there is no cache folder"
        path = self._path(self.folder, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        except OSError as error:
            return str(error)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(table), indent=1))
            Path(name).replace(path)
        except OSError as error:
            Path(name).unlink(missing_ok=True)
            return str(error)
        return ""

    @staticmethod
    def _path(folder: Path, key: Key) -> Path:
        words = msgspec.json.encode(key.as_dict(), order="sorted")
        return folder / "selection" / f"{hashlib.sha256(words).hexdigest()[:20]}.json"


KIB: Final = 1 << 10
MIB: Final = 1 << 20
MEASURED_SIZES: Final[dict[str, tuple[int, ...]]] = {
    "all_reduce": tuple(KIB << shift for shift in range(0, 17, 2)),
    "all_gather": (4 * KIB, 64 * KIB, MIB, 16 * MIB),
    "reduce_scatter": (4 * KIB, 64 * KIB, MIB, 16 * MIB),
    "broadcast": (4 * KIB, 64 * KIB, MIB, 16 * MIB),
    "reduce": (4 * KIB, MIB),
    "gather": (4 * KIB, MIB),
    "scatter": (4 * KIB, MIB),
    "all_to_all": (4 * KIB, 64 * KIB, MIB),
    "send": (4 * KIB, 64 * KIB, MIB, 16 * MIB),
    "barrier": (0,),
}
"""The measured sizes of each verb, in bytes of the whole tensor."""

_DTYPE: Final = torch.bfloat16
_WARM_UP: Final = 3
_CALLS: Final = 20
_REPEATS: Final = 5
_SERIES: Final = 0.02
"""Seconds of a series; slow calls make it shorter. Ranks that share a device need milliseconds for
each call."""
_FEWEST: Final = 2


def measure_candidates(
    candidates: Sequence[Candidate],
    key: Mapping[str, str],
    swap: AllGatherBytes,
    sizes: Mapping[str, Sequence[int]] = MEASURED_SIZES,
    clock: Callable[[], float] = time.perf_counter,
    known: Table | None = None,
    limit: float = math.inf,
) -> Table:
    """Time the candidates for each verb and size that at least two of them offer.

    Args:
        candidates, key, known: the same on all ranks. Measurements in ``known`` are not repeated.
        sizes: bytes of the whole tensor, by verb.
        limit: seconds after which rank 0 begins no further size, so that a table may grow over
            several set-ups.

    Returns:
        ``known`` and this rank's times. The caller must broadcast rank 0's table.

    Collective: yes, every member.
    """
    comms = {each.name: Communicator(each.backend) for each in candidates if each.backend}
    synchronised = next(comm for comm in comms.values() if "barrier" in comm.capabilities.verbs)

    def seconds(comm: Communicator, verb: str, size: int) -> float:
        call, eager = _call(comm, verb, size), HostStopwatch(comm, synchronised, clock)
        calls, repeats = _effort(_of_rank_0(swap, eager.time(call, _WARM_UP, 1)))
        captured = _is_captured(comm, verb)
        return (GraphStopwatch(comm) if captured else eager).time(call, calls, repeats)

    end = clock() + limit
    before = {} if known is None else known.verbs
    rows = {verb: {row.size: row for row in measured} for verb, measured in before.items()}
    for verb, size in _in_order(sizes):
        able = [each for each in candidates if not each.why_unavailable(verb, size)]
        if len(able) < 2 or size in rows.get(verb, ()):
            continue
        if _of_rank_0(swap, end - clock()) <= 0:
            break
        times = {each.name: seconds(comms[each.name], verb, size) for each in able}
        rows.setdefault(verb, {})[size] = Measured(size, times)
    ascending = {
        verb: [measured[size] for size in sorted(measured)] for verb, measured in rows.items()
    }
    return Table(dict(key), ascending)


def _in_order(sizes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int]]:
    """Yield the extreme sizes of each verb first: smaller and larger sizes use their times."""
    for verb, sizes_of_verb in sizes.items():
        for size in dict.fromkeys((*sizes_of_verb[:1], *sizes_of_verb[-1:], *sizes_of_verb)):
            yield verb, size


def _of_rank_0(swap: AllGatherBytes, seconds: float) -> float:
    return float(struct.unpack("<d", swap(struct.pack("<d", seconds))[0])[0])


def _effort(seconds: float) -> tuple[int, int]:
    """Return (calls of a series, series) for calls that take ``seconds``."""
    calls = max(min(int(_SERIES / seconds), _CALLS), _FEWEST)
    return calls, _REPEATS if calls == _CALLS else _FEWEST


def _is_captured(comm: Communicator, verb: str) -> bool:
    return comm.device.type == "cuda" and comm.capabilities.stream_ordered and verb != "send"


def _call(comm: Communicator, verb: str, size: int) -> Callable[[], Any]:
    """Return a function that runs ``verb`` once, on about ``size`` bytes as a whole."""
    n, rank = comm.world_size, comm.rank
    count = max(size // _DTYPE.itemsize // n * n, n)
    whole = torch.zeros(count, dtype=_DTYPE, device=comm.device)
    other = torch.zeros_like(whole)
    part = torch.zeros(count // n, dtype=_DTYPE, device=comm.device)
    root = rank == 0

    def shift() -> None:
        sent = comm.isend(whole, (rank + 1) % n)
        comm.irecv(out=other, src=(rank - 1) % n).wait(SECONDS)
        sent.wait(SECONDS)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(whole, out=other),
        "all_gather": lambda: comm.all_gather(part, out=whole),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, out=part),
        "broadcast": lambda: comm.broadcast_(whole),
        "reduce": lambda: comm.reduce(whole, out=other if root else None),
        "gather": lambda: comm.gather(part, out=whole if root else None),
        "scatter": lambda: comm.scatter(whole if root else None, out=part),
        "all_to_all": lambda: comm.all_to_all(whole, out=other),
        "send": shift,
        "barrier": comm.barrier,
    }
    return calls[verb]
