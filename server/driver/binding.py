"""Which cores each worker of this host is bound to: `PoolConfig.bind`.

The setting is one of

    none             the kernel puts the workers where it likes
    auto             every worker gets cores of its own, an equal share of those that may be used
    numa             every worker gets a whole node (NUMA), which it may share with others
    0-3|4-7          cores of each worker, as Linux numbers them
    node0|node1      a node of each worker

Cores are assigned in the order of the ranks, so the workers of a tensor-parallel group are
neighbours. Every host does this for its own workers.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeAlias

from shm_broadcast.machine.core_map import cores_of, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shm_broadcast.machine.core_map import Core

Bound: TypeAlias = tuple[tuple[int, ...], ...]
"""The CPUs of each worker of a host, in the order of the ranks; ``()``: they are not bound."""

_WORDS: Final = ("none", "auto", "numa")
_RANGE: Final = r"\d+(-\d+)?"
_PLACE: Final = rf"(node\d+|{_RANGE}(,{_RANGE})*)"


def check_bind(bind: str) -> None:
    """Raise ValueError unless ``bind`` is written as the module says."""
    if bind not in _WORDS and not re.fullmatch(rf"{_PLACE}(\|{_PLACE})*", bind):
        raise ValueError(
            "bind must be none, auto, numa, or the cores or node of each worker, such as "
            f"'0-3|4-7' or 'node0|node1'; got {bind!r}"
        )


def bound_here(bind: str, n_workers: int) -> Bound:
    """As `cpus_of_workers`, of the cores that this process may use now."""
    if bind == "none":
        return ()
    return cpus_of_workers(bind, n_workers, cores_of(os.sched_getaffinity(0)))


def cpus_of_workers(bind: str, n_workers: int, cores: Sequence[Core]) -> Bound:
    """What ``bind`` gives each of a host's workers.

    Args:
        bind: as the module says.
        n_workers: of this host.
        cores: those that may be used, node by node.

    Raises:
        ValueError: it is written in another way, is for another number of workers, names what may
            not be used, or there are fewer CPUs than workers that want some of their own.
    """
    check_bind(bind)
    if bind == "none" or n_workers == 0:
        return ()
    if bind == "auto":
        return _own_cores(n_workers, cores)
    nodes = {
        node: tuple(cpu for core in cores if core.node == node for cpu in core.cpus)
        for node in dict.fromkeys(core.node for core in cores)
    }
    if bind == "numa":
        counts = _counts(n_workers, [len(cpus) for cpus in nodes.values()])
        return tuple(cpus for cpus, n in zip(nodes.values(), counts, strict=True) for _ in range(n))
    places = bind.split("|")
    if len(places) != n_workers:
        raise ValueError(
            f"bind={bind!r} is for {len(places)} workers, and this host has {n_workers}"
        )
    return tuple(_named(place, nodes) for place in places)


def written(bound: Bound) -> str:
    """What to give as `PoolConfig.bind` to get ``bound``."""
    return "|".join(",".join(map(str, cpus)) for cpus in bound) or "none"


def threads_of(bound: Bound) -> int:
    """How many threads the worker with the least CPUs can keep busy; others may share them."""
    users = Counter(cpu for cpus in bound for cpu in cpus)
    return max(math.floor(min(sum(Fraction(1, users[cpu]) for cpu in cpus) for cpus in bound)), 1)


def _own_cores(n_workers: int, cores: Sequence[Core]) -> Bound:
    """Whole cores while there are enough, else threads of cores."""
    parts = list(cores)
    if n_workers > len(cores):
        parts = [core._replace(cpus=(cpu,)) for core in cores for cpu in core.cpus]
    if n_workers > len(parts):
        raise ValueError(
            f"bind='auto': {n_workers} workers cannot each have a core of their own, since this "
            f"process may use {len(parts)}"
        )
    shares = _within_nodes(n_workers, parts)
    # A worker that needs memory of several nodes is better than one that has half of the cores.
    if 2 * min(map(len, shares)) <= len(parts) // n_workers:
        shares = _equally(n_workers, parts)
    return tuple(tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in shares)


def _within_nodes(n_workers: int, cores: Sequence[Core]) -> list[Sequence[Core]]:
    """Shares that lie within a node each, of which the smallest is as large as can be."""
    sizes = Counter(core.node for core in cores)
    shares: list[Sequence[Core]] = []
    for node, n in zip(sizes, _counts(n_workers, list(sizes.values())), strict=True):
        shares += _equally(n, [core for core in cores if core.node == node])
    return shares


def _counts(n_workers: int, sizes: Sequence[int]) -> list[int]:
    """How many workers go to nodes of so many cores: each to where most is left for it."""
    counts = [0] * len(sizes)
    for _ in range(n_workers):
        node = max(range(len(sizes)), key=lambda node: Fraction(sizes[node], counts[node] + 1))
        counts[node] += 1
    return counts


def _equally(n_workers: int, cores: Sequence[Core]) -> list[Sequence[Core]]:
    """Shares beside each other; the first ones have one core more if it does not come out even."""
    size, more = divmod(len(cores), max(n_workers, 1))
    ends = [size * n + min(n, more) for n in range(n_workers + 1)]
    return [cores[begin:end] for begin, end in pairwise(ends)]


def _named(place: str, nodes: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    if place.startswith("node"):
        node = int(place.removeprefix("node"))
        if node not in nodes:
            there = ", ".join(map(str, nodes))
            raise ValueError(f"bind: no core of {place} may be used; there are those of {there}")
        return nodes[node]
    cpus = listed(place)
    usable = {cpu for each in nodes.values() for cpu in each}
    if wrong := sorted(cpus - usable):
        raise ValueError(
            f"bind={place!r}: this process may not use core {', '.join(map(str, wrong))}, but "
            f"{', '.join(map(str, sorted(usable)))}"
        )
    if not cpus:
        raise ValueError(f"bind={place!r} names no core")
    return tuple(sorted(cpus))
