"""Assign cores and devices to the workers of a host, before any worker starts.

The setting ``bind`` is one of

    none             no binding
    auto             an exclusive, equal share of the usable cores for each worker
    0-3|4-7          cores of each worker, as Linux numbers them

Cores are assigned in rank order, so workers of a tensor-parallel group are neighbours. Every host
assigns its own workers.

Usable are the cores of the process's affinity; its control group may limit its processor time (a
quota, as in containers). More threads than that slow each other down.

The driver only counts the GPUs: it creates no CUDA context, so it takes none of their memory. If
all workers use the CPU, it does not load torch.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

from shm_broadcast.arguments import text, texts
from shm_broadcast.cpu import Core, cgroups, cores_of, listed
from shm_broadcast.errors import counted

Bound: TypeAlias = tuple[tuple[int, ...], ...]
"""The CPUs of each worker of a host, in rank order; ``()``: no binding."""

_RANGE: Final = r"\d+(-\d+)?"
_PLACE: Final = rf"{_RANGE}(,{_RANGE})*"
_BIND: Final = re.compile(rf"none|auto|{_PLACE}(\|{_PLACE})*")


def checked_bind(name: str, bind: Any) -> str:
    """Return ``bind`` if it has a form in the module's list; see `CheckArgument`."""
    if not _BIND.fullmatch(text(name, bind)):
        raise ValueError(
            f"{name} must be none, auto, or the cores of each worker, such as '0-3|4-7'; "
            f"got {bind!r}"
        )
    return str(bind)


def bound_here(bind: str, n_workers: int) -> Bound:
    """Return `cpus_of_workers` for the cores that this process may use now."""
    if bind == "none":
        return ()
    return cpus_of_workers(bind, n_workers, cores_of(os.sched_getaffinity(0)))


def cpus_of_workers(bind: str, n_workers: int, cores: Sequence[Core]) -> Bound:
    """Return the CPUs of each worker of a host for the setting ``bind``.

    ``cores`` are the usable cores, node by node.

    Raises:
        ValueError: ``bind`` has another form, lists another number of workers, names unusable
            cores, or there are fewer CPUs than workers with exclusive shares.
    """
    if bind == "none" or n_workers == 0:
        return ()
    if bind == "auto":
        return _own_cores(n_workers, cores)
    places = checked_bind("bind", bind).split("|")
    if len(places) != n_workers:
        raise ValueError(
            f"bind={bind!r} is for {len(places)} workers, and this host has {n_workers}"
        )
    usable = {cpu for core in cores for cpu in core.cpus}
    return tuple(_listed(place, usable) for place in places)


def written(bound: Bound) -> str:
    """Return the `PoolConfig.bind` that stands for ``bound``."""
    return "|".join(",".join(map(str, cpus)) for cpus in bound) or "none"


def threads_of(bound: Bound) -> int:
    """Return the number of threads that the worker with the least CPUs can keep busy.

    A shared CPU counts in part.
    """
    users = Counter(cpu for cpus in bound for cpu in cpus)
    return max(math.floor(min(sum(Fraction(1, users[cpu]) for cpu in cpus) for cpus in bound)), 1)


def _own_cores(n_workers: int, cores: Sequence[Core]) -> Bound:
    parts = list(cores)
    if n_workers > len(cores):  # hardware threads instead of whole cores
        parts = [core._replace(cpus=(cpu,)) for core in cores for cpu in core.cpus]
    if n_workers > len(parts):
        raise ValueError(
            f"bind='auto': {n_workers} workers cannot each have a core of their own, since this "
            f"process may use {len(parts)}"
        )
    shares = _within_nodes(n_workers, parts)
    # Memory of several nodes costs a worker less than half of its cores.
    if 2 * min(map(len, shares)) <= len(parts) // n_workers:
        shares = _equally(n_workers, parts)
    return tuple(tuple(sorted(cpu for core in share for cpu in core.cpus)) for share in shares)


def _within_nodes(n_workers: int, cores: Sequence[Core]) -> list[Sequence[Core]]:
    """Return shares within a node each, with the smallest share as large as possible."""
    sizes = Counter(core.node for core in cores)
    shares: list[Sequence[Core]] = []
    for node, n in zip(sizes, _counts(n_workers, list(sizes.values())), strict=True):
        shares += _equally(n, [core for core in cores if core.node == node])
    return shares


def _counts(n_workers: int, sizes: Sequence[int]) -> list[int]:
    """Return the number of workers on each node, of ``sizes`` cores, with fair shares."""
    counts = [0] * len(sizes)
    for _ in range(n_workers):
        node = max(range(len(sizes)), key=lambda node: Fraction(sizes[node], counts[node] + 1))
        counts[node] += 1
    return counts


def _equally(n_workers: int, cores: Sequence[Core]) -> list[Sequence[Core]]:
    size, more = divmod(len(cores), max(n_workers, 1))
    ends = [size * n + min(n, more) for n in range(n_workers + 1)]
    return [cores[begin:end] for begin, end in pairwise(ends)]


def _listed(place: str, usable: set[int]) -> tuple[int, ...]:
    cpus = listed(place)
    if wrong := sorted(cpus - usable):
        raise ValueError(
            f"bind={place!r}: this process may not use core {', '.join(map(str, wrong))}, but "
            f"{', '.join(map(str, sorted(usable)))}"
        )
    if not cpus:
        raise ValueError(f"bind={place!r} names no core")
    return tuple(sorted(cpus))


MOST_THREADS: Final = 8192
"""Linux's limit of cores (CONFIG_NR_CPUS). OpenMP ends a process that asks for far more threads."""


def worker_threads(
    n_workers: int, bound: Bound = (), environment: Mapping[str, str] = os.environ
) -> int:
    """Return CPU threads for each of a host's workers: ``OMP_NUM_THREADS``, or an equal share.

    The share is limited by the cores ``bound``; a variable above `MOST_THREADS` is ignored.
    """
    number = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if number.isdecimal() and 0 < int(number) <= MOST_THREADS:
        return int(number)
    share = max(1, usable_cores() // n_workers)
    return min(share, threads_of(bound)) if bound else share


def usable_cores() -> int:
    """Return the number of cores that this process may use in full, at least 1."""
    allowed = min(len(os.sched_getaffinity(0)), cpu_quota())
    return max(1, math.floor(allowed))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the processor time that control groups allow, in cores; ``inf``: no limit."""
    quota = math.inf
    for unified, folder in cgroups("cpu", root):
        files = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = min(quota, _ratio(*(folder / file for file in files)))
    return quota


def _ratio(*files: Path) -> float:
    try:
        quota, period = (int(word) for file in files for word in file.read_text().split())
    except (OSError, ValueError):  # the file is missing, or has "max"
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


CPU: Final = "cpu"
_CUDA: Final = re.compile(r"cuda(?::(\d{1,4}))?", re.ASCII)


def assign(device: str | Sequence[str], ranks: int, gpus: int, share_gpu: bool) -> tuple[str, ...]:
    """Return the device of each rank; ``device`` and ``share_gpu`` are as for `pool.WorkerPool`.

    Raises:
        ValueError: a device does not exist, or ranks would share a GPU without ``share_gpu``.
    """
    if not isinstance(device, str):
        if len(device) != ranks:
            raise ValueError(f"device: {len(device)} devices for {ranks} ranks")
        return tuple(assign(each, 1, gpus, share_gpu)[0] for each in device)
    if device == CPU:
        if share_gpu:
            raise ValueError(f"sharing a GPU is for device 'cuda'; got {device!r}")
        return (CPU,) * ranks
    match = _CUDA.fullmatch(device)
    if match is None:
        raise ValueError(f"device must be 'cpu', 'cuda' or one GPU as 'cuda:0'; got {device!r}")
    index = None if match[1] is None else int(match[1])
    if not gpus:
        raise ValueError(f"device {device!r}: torch sees no CUDA device")
    if index is not None and index >= gpus:
        raise ValueError(f"device {device!r}: there are {counted(gpus, 'GPU')}, numbered from 0")
    usable = 1 if index is not None else gpus
    if ranks > usable and not share_gpu:
        raise ValueError(
            f"device {device!r}: {ranks} ranks for {counted(usable, 'GPU')}: several ranks on one "
            "need share_gpu=True or --share-gpu"
        )
    first = index or 0
    return tuple(f"cuda:{first + rank % usable}" for rank in range(ranks))


def share_of_a_host(n_workers: int, nnodes: int) -> int:
    """Return the number of workers on each host; raise ValueError if it is not whole."""
    if n_workers % nnodes:
        raise ValueError(f"{nnodes} hosts cannot share {n_workers} workers evenly")
    return n_workers // nnodes


def checked_device(device: str | Sequence[str]) -> str | tuple[str, ...]:
    """Return the argument ``device`` of a pool, a sequence as a tuple, or raise TypeError."""
    return device if isinstance(device, str) else texts("device", device)


def count_gpus(device: str | Sequence[str]) -> int:
    """Return the number of GPUs of this host; 0, without torch, if only the CPU is asked for."""
    if all(each == CPU for each in ([device] if isinstance(device, str) else device)):
        return 0
    import torch  # noqa: PLC0415

    return torch.cuda.device_count()
