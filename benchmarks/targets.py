"""What has to be reached, and whether a run reached it.

A target compares a figure of ours with a peer's of the same run: how many times as fast ours has to
be. Where there is no peer it is a bound in the row's own unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness import Row


@dataclass(frozen=True)
class Figure:
    """Names a row of a report.

    Attributes:
        report: the benchmark.
        work: the row's work.
        params: the row's parameters.
        systems: the row's system; of several, the quickest counts.
    """

    report: str
    work: str
    params: str
    systems: tuple[str, ...] = ("ours",)

    def of(self, *systems: str) -> Figure:
        """The same work of other systems."""
        return Figure(self.report, self.work, self.params, systems)

    def find(self, reports: Mapping[str, Sequence[Row]]) -> Row | None:
        """The row; ``None`` if the run has none."""
        found = [
            row
            for row in reports.get(self.report, ())
            if (row.work, row.params) == (self.work, self.params) and row.system in self.systems
        ]
        return min(found, key=lambda row: row.median, default=None)


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        what: in words.
        ours: our figure.
        peer: what it is compared with.
        times: how many times as fast as the peer ours has to be.
        at_most: the bound where there is no peer, in the row's unit.
    """

    what: str
    ours: Figure
    peer: Figure | None = None
    times: float = 1.0
    at_most: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """A target and what came of it; without rows where the run has no such figure."""

    target: Target
    ours: Row | None
    peer: Row | None

    @property
    def measured(self) -> bool:
        """Whether the run has what the target needs."""
        return self.ours is not None and (self.target.peer is None or self.peer is not None)

    @property
    def times(self) -> float:
        """How many times as fast as the peer ours was."""
        assert self.ours is not None and self.peer is not None
        return self.peer.median / self.ours.median

    @property
    def met(self) -> bool:
        """Whether the target was reached."""
        if not self.measured:
            return False
        if self.target.peer is None:
            return self.ours is not None and self.ours.median <= self.target.at_most
        return self.times >= self.target.times


def judge(targets: Sequence[Target], reports: Mapping[str, Sequence[Row]]) -> list[Verdict]:
    """What came of each target in a run, by the rows of its benchmarks."""
    return [
        Verdict(target, target.ours.find(reports), target.peer and target.peer.find(reports))
        for target in targets
    ]


def _beside(what: str, ours: Figure, times: float, *systems: str) -> Target:
    return Target(what, ours, ours.of(*systems), times)


def _collective(verb: str, size: str, ranks: int) -> Figure:
    return Figure("collectives", verb, f"fp32 {size} {ranks} ranks")


def _queue(work: str, params: str, *systems: str) -> Figure:
    return Figure("message_queue", work, params, systems or ("ours",))


def _start(what: str) -> Figure:
    return Figure("start", "start", "a fresh process", (what,))


_RPC: Final = "no-op collective_rpc"
_SIZES: Final = ("1KiB", "16KiB", "128KiB", "1MiB", "16MiB", "64MiB")
_MPIS: Final = ("Open MPI", "MPICH", "Intel MPI")

TARGETS: Final = (
    _beside("queue, pickled dict, echo", _queue("echo", "dict, 1 reader"), 3, "vLLM"),
    _beside("queue, typed dict, echo", _queue("echo", "dict, 1 reader", "ours (typed)"), 5, "vLLM"),
    *(
        _beside(f"queue, {size}, one way", _queue("one_way", f"{size}, 1 reader"), times, *peers)
        for size, times, *peers in (
            ("1MiB", 1 / 0.6, "vLLM", "vLLM (arena)"),
            ("16MiB", 1 / 0.8, "vLLM (arena)"),
            ("64MiB", 1 / 0.6, "vLLM (arena)"),
        )
    ),
    *(
        _beside(
            f"typed messages, {readers}",
            _queue("flood", f"dict, {readers}", "ours (typed)"),
            times,
            "zmq ipc (msgspec)",
        )
        for readers, times in (("1 reader", 1.5), ("3 readers", 1.2))
    ),
    *(
        _beside(
            f"queue, {kind} dict, {work}, beside iceoryx2",
            _queue(work, "dict, 1 reader", system),
            1,
            "iceoryx2 (polling)",
            "iceoryx2 (event)",
        )
        for kind, system in (("pickled", "ours"), ("typed", "ours (typed)"))
        for work in ("echo", "flood")
    ),
    *(
        _beside(
            f"wake-up after 5 s, beside {peer}",
            _queue("wake", "after idling, 1 reader"),
            times,
            peer,
        )
        for peer, times in (("vLLM", 5), ("a bare futex", 1 / 1.5))
    ),
    Target("idle reader", _queue("idle_cpu", "share of a core, 1 reader"), at_most=0.5),
    Target("no-op call, back to back", Figure("pool", _RPC, "back to back"), at_most=30),
    *(
        _beside(f"no-op call, {rhythm}, beside {peer}", Figure("pool", _RPC, rhythm), times, peer)
        for rhythm, peer, times in (
            ("every 20 ms", "vLLM's executor loop", 2),
            ("every 20 ms", "a bare futex", 1 / 1.5),
            ("after idling", "vLLM's executor loop", 3),
            ("after idling", "a bare futex", 1 / 1.5),
        )
    ),
    *(
        _beside(
            f"no-op call, {rhythm}, beside actors",
            Figure("pool", _RPC, rhythm),
            1,
            *("Ray actors", "Ray's compiled graph", "Monarch actors"),
        )
        for rhythm in ("back to back", "every 20 ms", "after idling")
    ),
    *(
        Target(
            f"all_reduce, out of place beside in place, {size}",
            _collective("all_reduce", size, 2),
            _collective("all_reduce_", size, 2),
            1 / 1.2,
        )
        for size in _SIZES
    ),
    *(
        _beside(
            f"all_reduce in place, {size}", _collective("all_reduce_", size, 2), 1, "vLLM's C++"
        )
        for size in _SIZES
    ),
    *(
        _beside(
            f"all_reduce in place, {size}, beside the best MPI",
            _collective("all_reduce_", size, 2),
            1,
            *_MPIS,
        )
        for size in _SIZES
    ),
    *(
        _beside(
            f"tensor dict, send/recv, beside {peer}",
            Figure("tensor_dict", "tensor dict send/recv", "4 MiB, 2 ranks"),
            times,
            peer,
        )
        for peer, times in (("gloo", 6), ("vLLM's C++, tensors only", 1))
    ),
    _beside(
        "tensor dict, broadcast",
        Figure("tensor_dict", "tensor dict broadcast", "4 MiB, 2 ranks"),
        5,
        "gloo",
    ),
    *(
        _beside(
            f"barrier, 4 ranks on 2 cores, beside {peer}",
            Figure("collectives", "barrier", "fp32  4 ranks"),
            1,
            peer,
        )
        for peer in ("Open MPI", "Open MPI, yielding")
    ),
    *(
        _beside(
            f"{verb.rstrip('_')}, {size}, 4 ranks on 2 cores",
            _collective(verb, size, 4),
            1,
            "Open MPI",
        )
        for verb in ("broadcast_", "scatter_", "gather_", "all_to_all_", "all_gather_")
        for size in ("1MiB", "16MiB")
    ),
    *(
        Target(f"{what}, beside importing torch", _start(what), _start("import torch"), 1 / 1.1)
        for what in ("import group_coordinator", "a pool's first answer")
    ),
)
