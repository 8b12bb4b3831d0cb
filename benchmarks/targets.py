"""What has to be reached, and whether a run reached it.

A target compares a figure of ours with a peer's of the same run: how many times as fast ours has to
be. Where cores were near and apart in a run, in both. Where there is no peer it is a bound in the
row's own unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.harness import STATES

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

    def find(self, reports: Mapping[str, Sequence[Row]], state: str = "median") -> Row | None:
        """The row with the least median, of all or in a state; ``None`` if the run has none."""
        found = [
            row
            for row in reports.get(self.report, ())
            if (row.work, row.params) == (self.work, self.params)
            and row.system in self.systems
            and getattr(row, state) is not None
        ]
        return min(found, key=lambda row: float(getattr(row, state)), default=None)


@dataclass(frozen=True)
class Target:
    """One line of the table.

    Attributes:
        what: in words.
        ours: our figure.
        peer: what it is compared with.
        times: how many times as fast as the peer ours has to be.
        at_most: the bound where there is no peer, in the row's unit.
        limit: where it is not judged, for the machine alone takes as long: what it takes.
    """

    what: str
    ours: Figure
    peer: Figure | None = None
    times: float = 1.0
    at_most: float = 0.0
    limit: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """A target and what came of it; without rows where the run has no such figure."""

    target: Target
    ours: Row | None
    peer: Row | None
    times: float = 0.0
    """How many times as fast as the peer ours was; in the state where it was least."""

    @property
    def judged(self) -> bool:
        """Whether the target counts, and the run has what it needs."""
        return self.measured and not self.target.limit

    @property
    def measured(self) -> bool:
        """Whether the run has what the target needs."""
        return self.ours is not None and (self.target.peer is None or self.peer is not None)

    @property
    def met(self) -> bool:
        """Whether the target was reached."""
        if not self.judged:
            return False
        if self.target.peer is None:
            return self.ours is not None and self.ours.median <= self.target.at_most
        return self.times >= self.target.times


def judge(targets: Sequence[Target], reports: Mapping[str, Sequence[Row]]) -> list[Diagnosis]:
    """What came of each target in a run, by the rows of its benchmarks."""
    return [_verdict(target, reports) for target in targets]


def _verdict(target: Target, reports: Mapping[str, Sequence[Row]]) -> Diagnosis:
    ours = target.ours.find(reports)
    if target.peer is None:
        return Diagnosis(target, ours, None)
    times = {}
    for state in ("median", *STATES):
        one, other = target.ours.find(reports, state), target.peer.find(reports, state)
        if one is not None and other is not None:
            times[state] = getattr(other, state) / getattr(one, state)
    by_state = [times[state] for state in STATES if state in times] or list(times.values())
    return Diagnosis(target, ours, target.peer.find(reports), min(by_state, default=0.0))


_FUTEX: Final = "a bare futex"


def _beside(what: str, ours: Figure, *systems: str) -> Target:
    return Target(what, ours, ours.of(*systems))


def _waking(what: str, ours: Figure, *systems: str) -> Target:
    """What a wake-up by the kernel decides, which a bare futex shows."""
    return Target(what, ours, ours.of(*systems), limit=_FUTEX)


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
    _beside("queue, pickled dict, echo", _queue("echo", "dict, 1 reader"), "vLLM"),
    _beside("queue, typed dict, echo", _queue("echo", "dict, 1 reader", "ours (typed)"), "vLLM"),
    *(
        _beside(f"queue, {size}, one way", _queue("one_way", f"{size}, 1 reader"), *peers)
        for size, *peers in (
            ("1MiB", "vLLM", "vLLM (arena)"),
            ("16MiB", "vLLM (arena)"),
            ("64MiB", "vLLM (arena)"),
        )
    ),
    *(
        _beside(
            f"typed messages, {readers}",
            _queue("flood", f"dict, {readers}", "ours (typed)"),
            "zmq ipc (msgspec)",
        )
        for readers in ("1 reader", "3 readers")
    ),
    *(
        _beside(
            f"queue, {kind} dict, {work}, beside iceoryx2",
            _queue(work, "dict, 1 reader", system),
            "iceoryx2 (polling)",
            "iceoryx2 (event)",
        )
        for kind, system in (("pickled", "ours"), ("typed", "ours (typed)"))
        for work in ("echo", "flood")
    ),
    *(
        _waking(f"wake-up after 5 s, beside {peer}", _queue("wake", "after idling, 1 reader"), peer)
        for peer in ("vLLM", _FUTEX)
    ),
    Target("idle reader", _queue("idle_cpu", "share of a core, 1 reader"), at_most=0.5),
    *(
        _waking(f"no-op call, {rhythm}, beside {told}", Figure("pool", _RPC, rhythm), *peer)
        for rhythm in ("back to back", "every 20 ms", "after idling")
        for told, *peer in (
            ("vLLM", "vLLM's executor loop"),
            ("actors", "Ray actors", "Ray's compiled graph", "Monarch actors"),
            (_FUTEX, _FUTEX),
        )
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
        _beside(f"all_reduce in place, {size}", _collective("all_reduce_", size, 2), "vLLM's C++")
        for size in _SIZES
    ),
    *(
        _beside(
            f"all_reduce in place, {size}, beside the best MPI",
            _collective("all_reduce_", size, 2),
            *_MPIS,
        )
        for size in _SIZES
    ),
    *(
        _beside(
            f"tensor dict, send/recv, beside {peer}",
            Figure("tensor_dict", "tensor dict send/recv", "4 MiB, 2 ranks"),
            peer,
        )
        for peer in ("gloo", "vLLM's C++, tensors only")
    ),
    _beside(
        "tensor dict, broadcast",
        Figure("tensor_dict", "tensor dict broadcast", "4 MiB, 2 ranks"),
        "gloo",
    ),
    *(
        _beside(
            f"barrier, 4 ranks on 2 cores, beside {peer}",
            Figure("collectives", "barrier", "fp32  4 ranks"),
            peer,
        )
        for peer in ("Open MPI", "Open MPI, yielding")
    ),
    *(
        _beside(
            f"{verb.rstrip('_')}, {size}, 4 ranks on 2 cores",
            _collective(verb, size, 4),
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
