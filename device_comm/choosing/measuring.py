"""Measures the candidates on the ranks that will use them, in the way they will be used.

Operations that can be captured are timed in a CUDA graph, in bfloat16; the rest, and messages,
which use other streams than the current one, as eager calls. Every rank makes the same calls in the
same order; rank 0's times count.
"""

from __future__ import annotations

import math
import struct
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from device_comm.choosing.selection import Measured, Table
from device_comm.choosing.stopwatch import SECONDS, GraphStopwatch, HostStopwatch
from device_comm.communicator import Communicator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from device_comm.choosing.selection import Candidate
    from device_comm.cuda.agree import Swap

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
"""The sizes that are measured, in bytes of the whole tensor, by verb."""

_DTYPE: Final = torch.bfloat16
_WARM_UP: Final = 3
_CALLS: Final = 20
_REPEATS: Final = 5
_SERIES: Final = 0.02
"""Seconds of a series of calls, above which there are fewer in it: ranks that take turns on a
device need milliseconds for each."""
_FEWEST: Final = 2


def measure_candidates(
    candidates: Sequence[Candidate],
    key: Mapping[str, str],
    swap: Swap,
    sizes: Mapping[str, Sequence[int]] = MEASURED_SIZES,
    clock: Callable[[], float] = time.perf_counter,
    known: Table | None = None,
    limit: float = math.inf,
) -> Table:
    """Time the candidates for each verb and size that at least two of them offer.

    Args:
        candidates: the same on all ranks.
        key: the machine and the group, for the table.
        swap: gives this rank's bytes to all ranks, and returns all ranks' bytes, by rank.
        sizes: the sizes to measure, in bytes of the whole tensor, by verb.
        clock: returns a time in seconds.
        known: what was measured before, and is not again; the same on all ranks.
        limit: seconds after which rank 0 has no other size begun. Where calls are slow, as on a
            device that ranks take turns on, a table grows with each set-up.

    Returns:
        What was known, and this rank's times. The caller must hand rank 0's table to all ranks.

    Collective: yes, every member.
    """
    comms = {each.name: Communicator(each.backend) for each in candidates if each.backend}
    meeting = next(comm for comm in comms.values() if "barrier" in comm.capabilities.verbs)

    def seconds(comm: Communicator, verb: str, size: int) -> float:
        call, eager = _call(comm, verb, size), HostStopwatch(comm, meeting, clock)
        calls, repeats = _effort(_of_rank_0(swap, eager.time(call, _WARM_UP, 1)))
        captured = _is_captured(comm, verb)
        return (GraphStopwatch(comm) if captured else eager).time(call, calls, repeats)

    end = clock() + limit
    before = {} if known is None else known.verbs
    rows = {verb: {row.size: row for row in found} for verb, found in before.items()}
    for verb, size in _in_order(sizes):
        able = [each for each in candidates if not each.objection(verb, size)]
        if len(able) < 2 or size in rows.get(verb, ()):
            continue
        if _of_rank_0(swap, end - clock()) <= 0:
            break
        times = {each.name: seconds(comms[each.name], verb, size) for each in able}
        rows.setdefault(verb, {})[size] = Measured(size, times)
    ascending = {verb: [found[size] for size in sorted(found)] for verb, found in rows.items()}
    return Table(dict(key), ascending)


def _in_order(sizes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int]]:
    """Of each verb the ends first: what lies beyond them would be judged by the nearest one."""
    for verb, sizes_of_verb in sizes.items():
        for size in dict.fromkeys((*sizes_of_verb[:1], *sizes_of_verb[-1:], *sizes_of_verb)):
            yield verb, size


def _of_rank_0(swap: Swap, seconds: float) -> float:
    return float(struct.unpack("<d", swap(struct.pack("<d", seconds))[0])[0])


def _effort(seconds: float) -> tuple[int, int]:
    """How many calls to make in a series, and how many series, of calls that take so long."""
    calls = max(min(int(_SERIES / seconds), _CALLS), _FEWEST)
    return calls, _REPEATS if calls == _CALLS else _FEWEST


def _is_captured(comm: Communicator, verb: str) -> bool:
    """Whether a model would have it in a CUDA graph."""
    return comm.device.type == "cuda" and comm.capabilities.stream_ordered and verb != "send"


def _call(comm: Communicator, verb: str, size: int) -> Callable[[], Any]:
    """A function that carries out ``verb`` once, on tensors of about ``size`` bytes as a whole."""
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
