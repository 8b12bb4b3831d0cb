"""Measuring candidates against each other, on the ranks that will use them.

Every rank runs the same calls in the same order; rank 0's times are the ones that count. A call
is timed among others like it, as a model issues them: first some to warm up, then a run of them
with one wait for the device at the end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from device_comm.cuda.streams import CudaStreams
from device_comm.select import Measured, Table
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from device_comm.base import DeviceCommunicator
    from device_comm.select import Candidate

KIB: Final = 1 << 10
MIB: Final = 1 << 20
SIZES: Final[dict[str, tuple[int, ...]]] = {
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
"""Bytes of the whole tensor, for each verb that is measured."""

_WARM_UP: Final = 3
_CALLS: Final = 10
_SECONDS: Final = 60.0
"""For one run."""


def measure(
    candidates: Sequence[Candidate],
    key: Mapping[str, str],
    sizes: Mapping[str, Sequence[int]] = SIZES,
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Time every candidate that can do it, for each verb and size that several can do.

    Args:
        candidates: the same on all ranks.
        key: what the table is good for.
        sizes: bytes, by verb.
        clock: seconds.

    Returns:
        This rank's times. Rank 0's have to become those of all.

    Collective: yes, every member.
    """
    comms = [each.comm for each in candidates if each.comm is not None]
    meeting = next(comm for comm in comms if "barrier" in comm.capabilities.verbs)
    verbs: dict[str, list[Measured]] = {}
    for verb, sizes_of_verb in sizes.items():
        for size in sizes_of_verb:
            able = [each for each in candidates if not each.objection(verb, size)]
            if len(able) < 2:
                continue
            seconds = {
                each.name: _time(each.comm, meeting, verb, size, clock)
                for each in able
                if each.comm is not None
            }
            verbs.setdefault(verb, []).append(Measured(size, seconds))
    return Table(dict(key), verbs)


def _time(
    comm: DeviceCommunicator,
    meeting: DeviceCommunicator,
    verb: str,
    size: int,
    clock: Callable[[], float],
) -> float:
    call = _call(comm, verb, size)
    for _ in range(_WARM_UP):
        call()
    _settle(comm)
    meeting.barrier(timeout=_SECONDS)
    began = clock()
    for _ in range(_CALLS):
        call()
    _settle(comm)
    return max(clock() - began, 1e-9) / _CALLS


def _settle(comm: DeviceCommunicator) -> None:
    """Wait until the device has done what it was given."""
    comm.flush(_SECONDS)
    if comm.device.type == "cuda":
        mark = CudaStreams(comm.device).current().mark()
        deadline = Deadline.after(_SECONDS)
        comm.watch.wait(
            mark.passed, deadline, f"{comm.name} measure", lambda: comm.peers, poll=0.0001
        )


def _call(comm: DeviceCommunicator, verb: str, size: int) -> Callable[[], Any]:
    """One operation of ``verb`` on tensors that are ready, about ``size`` bytes as a whole."""
    n, rank = comm.world_size, comm.rank
    count = max(size // 4 // n * n, n)
    whole = torch.zeros(count, device=comm.device)
    other = torch.zeros(count, device=comm.device)
    part = torch.zeros(count // n, device=comm.device)
    root = rank == 0

    def shift() -> None:
        sent = comm.isend(whole, (rank + 1) % n)
        comm.irecv(out=other, src=(rank - 1) % n).wait(_SECONDS)
        sent.wait(_SECONDS)

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


__all__ = ["SIZES", "measure"]
