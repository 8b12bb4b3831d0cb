"""The model of `benchmarks.model`, fitted to a run, as a section of its page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.harness import UNITS
from benchmarks.model import (
    Level,
    Measured,
    all_reduce,
    error,
    fit,
    reduce_and_broadcast,
    ring,
    taking_turns,
    turn,
)
from benchmarks.page import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness import Row

KIB, MIB = 1 << 10, 1 << 20
CACHED = {"1KiB": KIB, "128KiB": 128 * KIB}
"""Sizes by which the shared cache is fitted; the memory by the largest."""
LARGEST = {"64MiB": 64 * MIB}
PREDICTED = {"64B": 64, "16KiB": 16 * KIB, "1MiB": MIB, "16MiB": 16 * MIB}
"""Sizes that the fit has not seen."""
SHARED_BYTES = 16 * KIB
"""What `benchmarks.growth` reduces."""
CACHE_BYTES = 8 * MIB
"""Up to this size the ranks' tensors are taken to stay in a shared cache."""

RANKS, SOCKETS, HOSTS = 64, 8, 16
ELSEWHERE = ("1KiB", KIB), ("1MiB", MIB), ("64MiB", 64 * MIB)
LINE, FAR_LINE = 50e-9, 150e-9
"""Assumed: seconds to see that one more rank has arrived, on this socket and on another."""
SOCKET_BANDWIDTH = 200e9
"""Assumed: bytes a second of a socket's memory."""
NETWORK = Level(alpha=30e-6, beta=8 / 100e9)
"""Assumed: 30 µs for a message, 100 Gbit/s."""

INTRODUCTION = f"""\
alpha for each meeting of the ranks, beta for each byte that a rank reads of others (Hockney 1994;
the ring: Thakur, Rabenseifner and Gropp 2005; `benchmarks/model.py`), fitted to `all_reduce_` of
two ranks. What there is none of here is assumed: {LINE * 1e9:.0f} ns to see one more rank arrive,
{FAR_LINE * 1e9:.0f} on another socket; {SOCKET_BANDWIDTH / 1e9:.0f} GB/s of memory for each
socket; between hosts {NETWORK.alpha * 1e6:.0f} µs and {8e-9 / NETWORK.beta:.0f} Gbit/s."""

CHANGES = """\
What would have to change there. The slots of a group have 4 MiB together, so that 64 ranks send
64 MiB in 2,048 chunks and meet for each: slots have to grow with the ranks. In a meeting each rank
looks at each other one, over all sockets: ranks of a socket have to meet first, and one of them
for all. Between hosts, `hierarchical=True` has one rank of each host read all that the others
have, and send all of it: a reduce-scatter within the host, as many rings between hosts as it has
ranks, and an all-gather share that out among them (the last column, with slots of 128 KiB)."""


def section(reports: Mapping[str, Sequence[Row]], cores: int) -> str:
    """The section of a run on so many cores; empty if the run lacks what it is fitted to."""
    found = {
        row.params.split()[1]: row.median / UNITS[row.unit]
        for row in reports.get("collectives", ())
        if (row.work, row.system) == ("all_reduce_", "ours")
        and row.params.startswith("fp32 ")
        and row.params.endswith(" 2 ranks")
    }
    if not found.keys() >= CACHED.keys() | LARGEST.keys():
        return ""
    cache = fit(Measured(size, found[name]) for name, size in CACHED.items())
    memory = fit((Measured(size, found[name]) for name, size in LARGEST.items()), cache.alpha)
    return "\n\n".join(
        (
            "## A model of all_reduce",
            INTRODUCTION,
            f"alpha {cache.alpha * 1e6:.2f} µs, beta {cache.beta * 1e12:.0f} ps through the shared "
            f"cache and {memory.beta * 1e12:.0f} ps through memory.",
            _checked(found, cache, memory),
            *_sharing_cores(reports.get("growth", ()), cores),
            elsewhere(cache, memory),
            CHANGES,
        )
    )


def _checked(found: Mapping[str, float], cache: Level, memory: Level) -> str:
    lines = []
    for name, size in {**CACHED, **LARGEST, **PREDICTED}.items():
        if name in found:
            level = cache if size <= CACHE_BYTES else memory
            use = "predicted" if name in PREDICTED else "fitted"
            lines.append(
                f"| {name} | {use} | {_compared(found[name], all_reduce(level, 2, size))} |"
            )
    return "\n".join(
        ("| two ranks |  | measured | model | off by |", "| --- | --- | --- | --- | --- |", *lines)
    )


def _compared(measured: float, said: float) -> str:
    """Cells of a line: what was measured, what the model says, and by how much that is off."""
    off = f"{round(100 * error(said, measured)):+d} %"
    return f"{duration(measured)} | {duration(said)} | {off}"


def _sharing_cores(rows: Sequence[Row], cores: int) -> tuple[str, ...]:
    """How ranks that share cores come out; nothing if none were measured."""
    barriers, reduced = (
        {
            int(row.params): row.median / UNITS[row.unit]
            for row in rows
            if (row.work, row.system) == (f"{verb} of n ranks", "ours") and int(row.params) > cores
        }
        for verb in ("barrier", "all_reduce")
    )
    if not barriers or not reduced:
        return ()
    each = turn(barriers)
    lines = ["| ranks that share cores | measured | model | off by |", "| --- | --- | --- | --- |"]
    for n, seconds in reduced.items():
        lines.append(f"| {n} | {_compared(seconds, taking_turns(each, n, SHARED_BYTES))} |")
    told = (
        f"Of ranks that share cores, one's turn in a meeting takes {each * 1e6:.2g} µs, by their "
        "barriers; all-reduces of 16 KiB are predicted:"
    )
    return told, "\n".join(lines)


def elsewhere(cache: Level, memory: Level) -> str:
    """What the model says of machines that are not here."""
    near = replace(cache, line=LINE)
    large = replace(memory, line=LINE, bandwidth=SOCKET_BANDWIDTH)
    far = replace(memory, line=FAR_LINE, bandwidth=SOCKETS * SOCKET_BANDWIDTH)
    lines = []
    for name, size in ELSEWHERE:
        one = near if size * RANKS <= CACHE_BYTES else large
        between = ring(NETWORK, HOSTS, size)
        times = (
            all_reduce(one, RANKS, size),
            all_reduce(far, RANKS, size),
            reduce_and_broadcast(one, RANKS, size) + between,
            shared_out(one, size) + between,
        )
        lines.append(f"| {name} | {' | '.join(duration(each) for each in times)} |")
    head = (
        "",
        f"{RANKS} cores",
        f"{RANKS} ranks on {SOCKETS} sockets",
        f"{HOSTS} hosts of {RANKS}, `hierarchical=True`",
        "the same, shared out",
    )
    return "\n".join((f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *lines))


def shared_out(level: Level, size: int) -> float:
    """Seconds of a reduce-scatter and an all-gather of a host's ranks, with slots of 128 KiB."""
    steps = max(-(-size // (128 * KIB)), 1) + 1
    return steps * level.meeting(RANKS) + level.reading(2 * (RANKS - 1) / RANKS * size, RANKS)
