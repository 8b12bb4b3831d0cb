"""The model of `benchmarks.model`, fitted to a run, as a section of its page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.harness import UNITS
from benchmarks.model import (
    Level,
    Link,
    Measured,
    all_reduce,
    error,
    fit,
    fit_ring,
    flat,
    hierarchical,
    many_rings,
    reduce_and_broadcast,
    ring,
    sockets_first,
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

RANKS, SOCKETS = 64, 8
HOSTS = (2, 4, 8, 16)
ELSEWHERE = ("1KiB", KIB), ("1MiB", MIB), ("64MiB", 64 * MIB)
LINE, FAR_LINE = 50e-9, 150e-9
"""Assumed: seconds to see that one more rank has arrived, on this socket and on another."""
SOCKET_BANDWIDTH = 200e9
"""Assumed: bytes a second of a socket's memory."""
LINKS = (
    Link("25 Gbit/s", 20e-6, 25e9 / 8),
    Link("100 Gbit/s", 10e-6, 100e9 / 8),
    Link("400 Gbit/s", 2e-6, 400e9 / 8),
)
"""Assumed: how long a small message is under way."""
LINK = LINKS[1]
OVER_HOSTS = {"64B": 64, "1KiB": KIB, "64KiB": 64 * KIB, "1MiB": MIB, "16MiB": 16 * MIB}
"""What `benchmarks.between_hosts` reduces, and `LARGEST`."""
FITTED_OVER_HOSTS = ("1KiB", "64MiB")

INTRODUCTION = f"""\
alpha for each meeting of the ranks, beta for each byte that a rank reads of others (Hockney 1994;
the ring: Thakur, Rabenseifner and Gropp 2005; `benchmarks/model.py`), fitted to `all_reduce_` of
two ranks. What there is none of here is assumed: {LINE * 1e9:.0f} ns to see one more rank arrive,
{FAR_LINE * 1e9:.0f} on another socket; {SOCKET_BANDWIDTH / 1e9:.0f} GB/s of memory for each
socket; a small message is {
    ", ".join(f"{link.latency * 1e6:.0f} µs under way at {link.name}" for link in LINKS)
}."""

SOCKETS_CHANGE = """\
What would have to change on one host. The rings of a group have 16 MiB together, so that 64 ranks
send 64 MiB in 1,024 steps and meet for each: rings have to grow with the ranks. In a meeting each
rank looks at each other one, over all sockets: ranks of a socket have to share out first, and each
to reduce its part with one of every other socket. The last column is that, with steps of 128
KiB."""

HOSTS_CHANGE = """\
What would have to change between hosts. `hierarchical=True` has one rank of each host read all that
the others have, and send all of it through one connection, which does not fill the link at the
price that sending has here. A reduce-scatter within the host, as many rings between hosts as it has
ranks, and an all-gather share both out (the last column, with steps of 128 KiB). Small tensors wait
for messages one after the other: 2 (n - 1) in a ring of n hosts, where recursive doubling takes
log2 n of them; and most of a message's time is the transport's, whose ends sleep until the kernel
wakes them, not the link's."""


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
            on_sockets(cache, memory),
            SOCKETS_CHANGE,
            *_over_hosts(reports.get("between_hosts", ()), cache, memory),
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


def on_sockets(cache: Level, memory: Level) -> str:
    """What the model says of hosts with more cores than there are here."""
    far = replace(memory, line=FAR_LINE, bandwidth=SOCKETS * SOCKET_BANDWIDTH)
    lines = []
    for name, size in ELSEWHERE:
        near = _one_socket(cache, memory, size)
        times = (
            all_reduce(near, RANKS, size),
            all_reduce(far, RANKS, size),
            sockets_first(near, far, SOCKETS, RANKS, size),
        )
        lines.append(f"| {name} | {' | '.join(duration(each) for each in times)} |")
    where = f"{RANKS} ranks on {SOCKETS} sockets"
    return _table(("", f"{RANKS} cores", where, "the same, sockets first"), lines)


def _over_hosts(rows: Sequence[Row], cache: Level, memory: Level) -> tuple[str, ...]:
    """What a group over hosts takes; nothing if what the transport takes was not measured."""
    sizes = {**OVER_HOSTS, **LARGEST}
    found = {
        (*row.params.split(" ", 1), row.system): row.median / UNITS[row.unit]
        for row in rows
        if row.work == "all_reduce_ over two hosts"
    }
    two = {
        name: found[name, "2 ranks", "ours"] for name in sizes if (name, "2 ranks", "ours") in found
    }
    if not two.keys() >= {*FITTED_OVER_HOSTS}:
        return ()
    transport = fit_ring(Measured(sizes[name], two[name]) for name in FITTED_OVER_HOSTS)
    told = (
        "Between hosts, by `benchmarks.between_hosts` (network namespaces of this machine, both "
        f"ends on the same cores): alpha {transport.alpha * 1e6:.0f} µs, beta "
        f"{transport.beta * 1e12:.0f} ps, which is {8e-9 / transport.beta:.1f} Gbit/s through one "
        "connection. Of a ring of four ranks here, two share each core: it waits for turns, too."
    )
    lines = []
    for name, seconds in two.items():
        use = "fitted" if name in FITTED_OVER_HOSTS else "predicted"
        said = ring(transport, 2, sizes[name])
        lines.append(f"| one, {name} | {use} | {_compared(seconds, said)} |")
    for system, use in (("ours, hierarchical", "`hierarchical=True`"), ("ours", "one ring")):
        for name in [each for each in sizes if (each, "4 ranks", system) in found]:
            size = sizes[name]
            inner = cache if size <= CACHE_BYTES else memory
            said = (
                ring(transport, 4, size)
                if system == "ours"
                else reduce_and_broadcast(inner, 2, size) + ring(transport, 2, size)
            )
            seconds = found[name, "4 ranks", system]
            lines.append(f"| two, {name} | {use} | {_compared(seconds, said)} |")
    return (
        told,
        _table(("ranks on each of two hosts", "", "measured", "model", "off by"), lines),
        hosts_by_number(transport, cache, memory),
        by_link(transport, cache, memory),
        HOSTS_CHANGE,
    )


def hosts_by_number(transport: Level, cache: Level, memory: Level) -> str:
    """What the model says of 2 to 16 hosts."""
    lines = []
    for name, size in ELSEWHERE:
        inner = _one_socket(cache, memory, size)
        for hosts in HOSTS:
            times = (
                flat(transport, LINK, hosts, RANKS, size),
                hierarchical(inner, transport, LINK, hosts, RANKS, size),
                many_rings(inner, transport, LINK, hosts, RANKS, size),
            )
            cells = " | ".join(duration(each) for each in times)
            lines.append(f"| {name} | {hosts} | {cells} |")
    head = ("", f"hosts of {RANKS} cores, {LINK.name}", "one ring through all ranks")
    return _table((*head, "`hierarchical=True`", "as many rings as ranks"), lines)


def by_link(transport: Level, cache: Level, memory: Level) -> str:
    """What the model says of other links."""
    hosts, lines = HOSTS[-1], []
    for name, size in ELSEWHERE:
        inner = _one_socket(cache, memory, size)
        for way, text in ((hierarchical, "`hierarchical=True`"), (many_rings, "as many rings")):
            times = [way(inner, transport, link, hosts, RANKS, size) for link in LINKS]
            lines.append(f"| {name} | {text} | {' | '.join(map(duration, times))} |")
    return _table((f"{hosts} hosts", "", *(link.name for link in LINKS)), lines)


def _one_socket(cache: Level, memory: Level, size: int) -> Level:
    """The level of ``RANKS`` cores of one socket, each with so much."""
    if size * RANKS <= CACHE_BYTES:
        return replace(cache, line=LINE)
    return replace(memory, line=LINE, bandwidth=SOCKET_BANDWIDTH)


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join((f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *lines))
