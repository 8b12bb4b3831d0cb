"""Collectives on CUDA devices: ``python -m benchmarks.gpu [--quick]``.

Ours by each algorithm, beside torch's kernels in symmetric memory; where each rank has a device of
its own, also beside NCCL (ours and torch's, and in windows) and the switch (multimem). Eager and
captured, 1 KiB to 64 MiB. Ranks are threads on a stream each (``streams``), and processes under MPS
if that can be started (``processes``; the report says).

With ``--seconds`` it measures as often as fits, and says what it has left out.

Effective bandwidth counts what cannot be avoided: every rank's input read once and its output
written once. With all ranks on one device, it is a share of the device's copy limit.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_environment import run_side_by_side
from benchmarks.gpu_fit import TimeLeft, fits
from benchmarks.gpu_world import (
    WAYS,
    WORLD_SECONDS,
    Rank,
    device_facts,
    mps,
    require_gpu,
    run_world,
)
from benchmarks.harness import Report, machine, parser, summarise
from device_comm import Communicator
from device_comm.cuda.ipc.ipc_backend import IpcBackend, ipc_algorithms
from device_comm.selection import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(KIB << shift for shift in range(0, 17, 2))
QUICK_SIZES = (KIB, 64 * KIB, MIB, 16 * MIB)
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
QUICK_VERBS = ("all_reduce", "all_gather")
CALLS = 20
REPEATS = 5
Timed = dict[tuple[str, str, str], list[list[float]]]
"""Samples in seconds, of each repeat, by mode, work and system."""


@dataclass(frozen=True)
class Work:
    """One verb, on a tensor of so many bytes as a whole."""

    verb: str
    size: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def traffic(self) -> Callable[[int], float]:
        """Bytes that n ranks cannot but read and write, together."""
        whole = self.size
        return {
            "all_reduce": lambda n: 2.0 * n * whole,
            "all_gather": lambda n: (1.0 + n) * whole,
            "reduce_scatter": lambda n: (n + 1.0) * whole,
            "broadcast": lambda n: 1.0 * n * whole,
        }.get(self.verb, lambda _: 0.0)


def measure_all(
    rank: Rank, works: list[Work], repeats: int, seconds: float
) -> tuple[Timed, dict[str, str]]:
    """The body of every rank: samples in seconds, by (mode, work, system); what was left out."""
    found: Timed = {}
    left_out = dict(rank.left_out)
    systems = _systems(rank)
    left = TimeLeft(seconds)
    for place, work in enumerate(works):
        share = left.part(len(works) - place) / (2 * len(systems))
        label = _label(work)
        if not rank.least(int(min(share, 1.0) * 1e9)):
            left_out[label] = "no time was left"
            continue
        for name, system in systems.items():
            call = _bind(system, work)
            if call is None:
                continue
            for _ in range(3):
                call()
            rank.meet()
            found["eager", label, name] = _repeat(rank, _eager, call, repeats, share)
            if work.verb == "barrier":
                continue
            graph = rank.capture(call, CALLS)
            rank.meet()
            found["captured", label, name] = _repeat(rank, _replayed, graph, repeats, share)
            rank.meet()
            del graph
    return found, left_out


def _repeat(
    rank: Rank,
    measure: Callable[[Rank, Any], list[float]],
    what: Any,
    repeats: int,
    seconds: float,
) -> list[list[float]]:
    """Samples, as often as fits: on all ranks as often."""
    began = time.monotonic()
    samples = [measure(rank, what)]
    count = rank.least(fits(repeats, 1, time.monotonic() - began, seconds))
    return samples + [measure(rank, what) for _ in range(1, count)]


def _systems(rank: Rank) -> dict[str, Candidate]:
    ipc = rank.comm.backend
    found = {"ours": Candidate("ours", ipc)}
    for way in ipc_algorithms(ipc) if isinstance(ipc, IpcBackend) else ():
        found[f"ours {way.name.removeprefix('ipc ')}"] = way
    for name, comm in rank.others.items():
        backend = comm.backend
        limit = getattr(backend, "limit", None)
        found[name] = Candidate(name, backend, up_to=limit)
    return found


def _bind(system: Candidate, work: Work) -> Callable[[], Any] | None:
    """The call for ``work``, checked once; None if the system has no such thing."""
    if system.backend is None or system.why_unavailable(work.verb, work.size):
        return None
    comm = Communicator(system.backend)
    n, device = comm.world_size, comm.device
    count = max(work.size // work.dtype.itemsize // n * n, n)
    whole = system.backend.empty((count,), work.dtype).fill_(comm.rank + 1.0)
    other = torch.empty(count, dtype=work.dtype, device=device)
    part = torch.full((count // n,), comm.rank + 1.0, dtype=work.dtype, device=device)
    calls: dict[str, tuple[Callable[[], Any], Tensor | None, float]] = {
        "all_reduce": (lambda: comm.all_reduce(whole, out=other), other, n * (n + 1) / 2),
        "all_gather": (lambda: comm.all_gather(part, out=other), other[-1:], float(n)),
        "reduce_scatter": (lambda: comm.reduce_scatter(whole, out=part), part, n * (n + 1) / 2),
        "broadcast": (lambda: comm.broadcast(whole, out=other), other, 1.0),
        "barrier": (comm.barrier, None, 0.0),
    }
    call, result, expected = calls[work.verb]
    call()
    if result is not None and not bool((result == expected).all()):
        raise RuntimeError(f"{work} is wrong by {comm}: {result[:4].tolist()}, not {expected}")
    return call


def _eager(rank: Rank, call: Callable[[], Any]) -> list[float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rank.meet()
    start.record(rank.stream)
    for _ in range(CALLS):
        call()
    end.record(rank.stream)
    end.synchronize()
    return [start.elapsed_time(end) / 1e3 / CALLS]


def _replayed(rank: Rank, graph: torch.cuda.CUDAGraph) -> list[float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rank.meet()
    graph.replay()  # the ranks are together from here on
    start.record(rank.stream)
    graph.replay()
    end.record(rank.stream)
    end.synchronize()
    return [start.elapsed_time(end) / 1e3 / CALLS]


def copy_limit() -> float:
    """Bytes per second that a copy within device 0 reads and writes."""
    source = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    end.synchronize()
    return float(2 * 10 * source.numel() / (start.elapsed_time(end) / 1e3))


def _label(work: Work) -> str:
    kind = str(work.dtype).removeprefix("torch.")
    size = f"{work.size // MIB} MiB" if work.size >= MIB else f"{work.size // KIB} KiB"
    return work.verb if work.verb == "barrier" else f"{work.verb} {kind} {size}"


def add(report: Report, works: list[Work], found: Timed, where: str, n: int, limit: float) -> None:
    """Put the samples of one world into ``report``, with bandwidths."""
    by_label = {_label(work): work for work in works}
    for (mode, label, system), repeats in found.items():
        work = by_label[label]
        row = summarise(f"{work.verb} {mode}", f"{label}, {n} {where}", system, repeats, "us")
        report.rows.append(row)
        rate = work.traffic(n) / (row.median / 1e6)
        share = f"{rate / 1e9:9.1f} GB/s, {100 * rate / limit:5.1f} % of a copy" if rate else ""
        print(
            f"{row.work:24} {row.params:44} {system:18} {row.median:10.2f} us {share}", flush=True
        )


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--ranks", default="2,4,8", help="how many, such as 2,4 (default 2,4,8)")
    options.add_argument("--ways", default=",".join(WAYS), help="streams, processes or both")
    options.add_argument("--seconds", type=float, default=math.inf, help="for all of it")
    arguments = options.parse_args()
    run_side_by_side()
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu: error: {missing}", file=sys.stderr)
        return 2
    sizes = QUICK_SIZES if arguments.quick else SIZES
    verbs = [verb for verb in (QUICK_VERBS if arguments.quick else VERBS) if arguments.only in verb]
    works = [Work(verb, size) for verb in verbs if verb != "barrier" for size in sizes]
    works += [Work("barrier", 0)] * ("barrier" in verbs)
    left = TimeLeft(arguments.seconds)
    report = Report({**machine(), **device_facts()}, file=arguments.json)
    limit = copy_limit()
    report.machine["copy_gb_per_s"] = round(limit / 1e9, 1)
    print(f"{report.machine['device']}: a copy moves {limit / 1e9:.0f} GB/s, read and written")
    worlds = [
        (int(n), way) for n in arguments.ranks.split(",") for way in arguments.ways.split(",")
    ]
    for place, (n, way) in enumerate(worlds):
        seconds = left.part(len(worlds) - place, WORLD_SECONDS)
        with mps() if way == "processes" else nullcontext("") as how:
            body = (measure_all, works, REPEATS, seconds)
            found, left_out = run_world(way, n, *body, seconds=left.limit())[0]
        where = f"ranks as {way}" + (f" ({how})" if how else "")
        report.left_out |= {f"{name}, {n} {where}": why for name, why in left_out.items()}
        add(report, works, found, where, n, limit)
        report.save()
    report.finish(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
