"""Measures the candidates on the ranks that will use them.

Every rank makes the same calls in the same order; rank 0's times count. Calls are timed in a row,
as a model makes them: some to warm up, then several with one wait for the device at the end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from device_comm.choosing.selection import Measured, Table
from device_comm.communicator import Communicator
from device_comm.cuda.device.streams import CudaStreams
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from device_comm.choosing.selection import Candidate

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
"""The sizes that are measured, in bytes of the whole tensor, by verb."""

_WARM_UP: Final = 3
_CALLS: Final = 10
_SECONDS: Final = 60.0
"""The time limit of each wait."""


def measure(
    candidates: Sequence[Candidate],
    key: Mapping[str, str],
    sizes: Mapping[str, Sequence[int]] = SIZES,
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Time the candidates for each verb and size that at least two of them offer.

    Args:
        candidates: the same on all ranks.
        key: the machine and the group, for the table.
        sizes: the sizes to measure, in bytes of the whole tensor, by verb.
        clock: returns a time in seconds.

    Returns:
        This rank's times. The caller must hand rank 0's table to all ranks.

    Collective: yes, every member.
    """
    comms = {each.name: Communicator(each.backend) for each in candidates if each.backend}
    meeting = next(comm for comm in comms.values() if "barrier" in comm.capabilities.verbs)
    verbs: dict[str, list[Measured]] = {}
    for verb, sizes_of_verb in sizes.items():
        for size in sizes_of_verb:
            able = [each for each in candidates if not each.objection(verb, size)]
            if len(able) < 2:
                continue
            seconds = {
                each.name: _time(comms[each.name], meeting, verb, size, clock) for each in able
            }
            verbs.setdefault(verb, []).append(Measured(size, seconds))
    return Table(dict(key), verbs)


def _time(
    comm: Communicator,
    meeting: Communicator,
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


def _settle(comm: Communicator) -> None:
    """Wait until the device has finished all operations."""
    comm.flush(_SECONDS)
    if comm.device.type == "cuda":
        mark = CudaStreams(comm.device).current().mark()
        deadline = Deadline.after(_SECONDS)
        comm.watch.wait(
            mark.passed, deadline, f"{comm.name} measure", lambda: comm.peers, poll=0.0001
        )


def _call(comm: Communicator, verb: str, size: int) -> Callable[[], Any]:
    """A function that carries out ``verb`` once, on tensors of about ``size`` bytes as a whole."""
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
