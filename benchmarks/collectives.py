"""CPU collectives beside gloo and MPI: python -m benchmarks.collectives [--quick].

A verb with an underscore works in place or into memory that is ready, as gloo and MPI always do;
one without makes its result, as callers mostly want. MPIs, which need mpi4py, and vLLM's C++ take
part where they are: ``--peers DIR``, see `benchmarks.peers`.

Where there are cores enough each rank is tied to one, as MPIs do by default; of ours there are rows
of untied ranks beside.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.child import PeerError
from benchmarks.collective_ranks import serve
from benchmarks.harness import Figure, Report, drawing, machine, parser
from benchmarks.peers import Peers
from benchmarks.rank_processes import RankProcesses
from shm_broadcast import Board

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.child import Child
    from benchmarks.harness import Row

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    "64B": 64,
    "1KiB": KIB,
    "16KiB": 16 * KIB,
    "128KiB": 128 * KIB,
    "1MiB": MIB,
    "16MiB": 16 * MIB,
    "64MiB": 64 * MIB,
}
VERBS = (
    "all_reduce_",
    "all_reduce",
    "all_gather_",
    "all_gather",
    "reduce_scatter_",
    "all_to_all_",
    "broadcast_",
    "reduce_",
    "gather_",
    "scatter_",
    "send/recv",
)
UNTIED = "ours, untied"
COLOURS = {
    "ours": "tab:blue",
    UNTIED: "tab:cyan",
    "gloo": "tab:orange",
    "vLLM's C++": "tab:red",
    "Open MPI": "tab:green",
    "Open MPI, yielding": "tab:olive",
    "MPICH": "tab:purple",
    "Intel MPI": "tab:brown",
}
QUICK_VERBS = ("all_reduce_", "all_reduce", "all_gather_", "broadcast_")
FEW_SIZES = ("1KiB", "1MiB", "16MiB")
QUICK_SIZES = ("1KiB", "128KiB", "1MiB")
HERE = ("ours", "gloo")
"""The systems of this interpreter."""
REPEATS = 5
MOST_SECONDS = 1.0
"""What a system may take for a figure before it gets no more repeats."""
PROBE_SECONDS = 0.005
Samples = list[float]


def compare(
    report: Report,
    n: int,
    ranks: RankProcesses,
    untied: RankProcesses | None,
    peers: Mapping[str, Child],
    works: Sequence[tuple[str, str, int]],
    seconds: float,
) -> None:
    """Measure each (verb, dtype, size) with every system that has it."""
    figures = []
    for verb, dtype, size in works:
        request = (verb, dtype, size, seconds)
        asks: dict[str, Callable[..., Samples | None]] = {
            system: partial(ranks.ask, system) for system in HERE
        }
        if untied is not None:
            asks[UNTIED] = partial(untied.ask, "ours")
        asks |= {title: _asking(peer) for title, peer in peers.items()}
        able = [name for name, ask in asks.items() if _has(report, name, ask, request)]
        name = next((label for label, value in SIZES.items() if value == size), "")
        figures.append(
            Figure(
                verb,
                f"{dtype} {name} {n} ranks".strip(),
                {each: partial(_samples, asks[each], request) for each in able},
                repeats=REPEATS,
                warm_up=False,
                seconds=MOST_SECONDS,
            )
        )
    report.measure(*figures)


def _has(
    report: Report, name: str, ask: Callable[..., Samples | None], request: tuple[Any, ...]
) -> bool:
    """Whether a system has the verb; if so, it has warmed up."""
    try:
        return ask(*request) is not None
    except PeerError as error:
        report.left_out[f"{name}, {request[0]}"] = str(error)
        return False


def _asking(peer: Child) -> Callable[..., Samples | None]:
    return lambda *request: peer.ask(request)


def _samples(ask: Callable[..., Samples | None], request: tuple[Any, ...]) -> Samples:
    return ask(*request) or []


def draw(rows: Sequence[Row], path: str) -> None:
    """A log-log panel for each verb, by rows, and number of ranks: bytes against microseconds."""
    pyplot = drawing()
    lines: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        dtype, size, *ranks = row.params.split(" ", 2)
        if size in SIZES:
            panel = lines.setdefault((row.work, " ".join(ranks)), {})
            panel.setdefault(f"{row.system} {dtype}", []).append((SIZES[size], row.median))
    works, groups = (list(dict.fromkeys(each)) for each in zip(*lines, strict=True))
    figure, axes = pyplot.subplots(
        len(works),
        len(groups),
        figsize=(5.5 * len(groups), 3.2 * len(works)),
        squeeze=False,
    )
    for axis in axes.flat:
        axis.axis("off")
    named = {}
    for (work, ranks), panel in lines.items():
        axis = axes[works.index(work), groups.index(ranks)]
        axis.axis("on")
        for name, points in sorted(panel.items()):
            system, dtype = name.rsplit(" ", 1)
            style = {"marker": "o", "markersize": 3, "linestyle": "-" if dtype == "fp32" else ":"}
            style |= {"linewidth": 2.5, "zorder": 3} if system == "ours" else {"linewidth": 1}
            (named[name],) = axis.loglog(*zip(*points, strict=True), color=COLOURS[system], **style)
        axis.set(title=f"{work}, {ranks}", ylabel="µs")
        shown = {size: name for name, size in SIZES.items() if size in axis_sizes(panel)}
        axis.set_xticks(list(shown), list(shown.values()), fontsize=7)
        axis.minorticks_off()
        axis.grid(visible=True, alpha=0.3)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.6 / figure.get_figheight()))
    figure.legend(named.values(), named, ncols=5, fontsize=8, loc="upper center")
    figure.savefig(path)


def axis_sizes(panel: Mapping[str, Sequence[tuple[int, float]]]) -> set[int]:
    """The sizes of a panel."""
    return {size for points in panel.values() for size, _ in points}


def all_works(n: int, options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Each (verb, dtype, bytes) of ``n`` ranks; fewer where the ranks share cores."""
    verbs = QUICK_VERBS if options.quick else VERBS
    few = QUICK_SIZES if options.quick else FEW_SIZES
    sizes = few if n > len(os.sched_getaffinity(0)) or options.quick else options.sizes
    works = [(verb, "fp32", SIZES[size]) for verb in verbs for size in sizes]
    works += [("all_reduce_", "bf16", SIZES[size]) for size in sizes if not options.quick]
    return [("barrier", "fp32", 0), *works]


def run(report: Report, options: argparse.Namespace, n: int) -> None:
    """All works of ``n`` ranks."""
    works = [work for work in all_works(n, options) if options.only in work[0]]
    peers = Peers(options.peers)
    with (
        peers.mpis(n, report.left_out) as mpis,
        peers.collectives_of_vllm(n, report.left_out) as vllm,
        tempfile.TemporaryDirectory() as folder,
        Board.create(n, None) as board,
        Board.create(n, None) as other_board,
        RankProcesses(n, serve, n, board.handle(), f"{folder}/s", HERE, True) as ranks,
        RankProcesses(n, serve, n, other_board.handle(), f"{folder}/u", ("ours",), False) as untied,
    ):
        enough = n <= len(os.sched_getaffinity(0))
        report.probe = partial(_line_there_and_back, ranks) if enough else None
        compare(report, n, ranks, untied if enough else None, {**mpis, **vllm}, works, 0.05)


def _line_there_and_back(ranks: RankProcesses) -> float:
    """Seconds of a barrier of ours: each rank writes a cache line that the other reads."""
    return min(ranks.ask("ours", "barrier", "fp32", 0, PROBE_SECONDS))


def main() -> None:
    arguments = parser(__doc__ or "")
    add = arguments.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="how many ranks")
    add("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="bytes of x")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report(machine(), file=options.json)
    try:
        for n in options.ranks[:1] if options.quick else options.ranks:
            run(report, options, n)
    finally:
        report.finish(options, draw)


if __name__ == "__main__":
    main()
