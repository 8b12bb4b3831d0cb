"""CPU collectives beside gloo and MPI: python -m benchmarks.collectives [--quick].

A verb with an underscore works in place or into memory that is ready, as gloo and MPI always do;
one without makes its result, as callers mostly want. MPI needs mpi4py and mpiexec.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.collective_ranks import serve
from benchmarks.harness import Report, machine, parser
from benchmarks.rank_processes import RankProcesses
from shm_broadcast import Board

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
COLOURS = {"ours": "tab:blue", "gloo": "tab:orange", "MPI": "tab:green"}
QUICK_VERBS = ("all_reduce_", "all_reduce", "all_gather_", "broadcast_")
QUICK_SIZES = ("1KiB", "128KiB", "1MiB")
Samples = list[float]


class MpiRanks:
    """Processes with MPI's ranks, kept off the network."""

    def __init__(self, n: int) -> None:
        command = ["mpiexec", "-n", str(n), "--oversubscribe", "--allow-run-as-root"]
        command += [
            "--mca",
            "btl",
            "self,vader",
            "--bind-to",
            "none",
            sys.executable,
            "-m",
            "benchmarks.collective_mpi",
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *request: Any) -> Samples | None:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("mpiexec has no pipes")
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("samples "):
                samples: Samples | None = json.loads(line.removeprefix("samples "))
                return samples
        raise RuntimeError("mpiexec ended")

    def close(self) -> None:
        self._process.communicate(timeout=20)


def compare(
    report: Report,
    n: int,
    ranks: RankProcesses,
    mpi: MpiRanks | None,
    works: Sequence[tuple[str, str, int]],
    seconds: float,
) -> None:
    """Measure each (verb, dtype, size) with every system that has it."""
    for verb, dtype, size in works:
        request = (verb, dtype, size, seconds)
        asks: dict[str, Callable[..., Samples | None]] = {
            "ours": lambda *given: ranks.ask("ours", *given),
            "gloo": lambda *given: ranks.ask("gloo", *given),
        }
        if mpi is not None:
            asks["MPI"] = mpi.ask
        able = {name: ask for name, ask in asks.items() if ask(*request) is not None}  # warms up
        name = next((label for label, value in SIZES.items() if value == size), "")
        report.measure(
            verb,
            f"{dtype} {name} {n} ranks".strip(),
            {each: partial(_samples, ask, request) for each, ask in able.items()},
            warm_up=False,
        )


def _samples(ask: Callable[..., Samples | None], request: tuple[Any, ...]) -> Samples:
    return ask(*request) or []


def why_no_mpi() -> str:
    """What is missing for MPI; empty if nothing is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return "" if shutil.which("mpiexec") else "mpiexec is not on the path"


def draw(report: Report, path: str) -> None:
    """A log-log panel for each verb, by rows, and number of ranks: bytes against microseconds."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    lines: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in report.rows:
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
    for (work, ranks), panel in lines.items():
        axis = axes[works.index(work), groups.index(ranks)]
        for name, points in sorted(panel.items()):
            system, dtype = name.rsplit(" ", 1)
            style = {"marker": "o", "markersize": 3, "linestyle": "-" if dtype == "fp32" else ":"}
            axis.loglog(*zip(*points, strict=True), color=COLOURS[system], label=name, **style)
        axis.set(title=f"{work}, {ranks}", xlabel="bytes", ylabel="us")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    arguments = parser(__doc__ or "")
    add = arguments.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4], help="how many ranks")
    add("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="bytes of x")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    verbs = QUICK_VERBS if options.quick else VERBS
    sizes = QUICK_SIZES if options.quick else options.sizes
    dtypes = ("fp32",) if options.quick else ("fp32", "bf16")
    works = [(verb, dtype, SIZES[size]) for verb in verbs for dtype in dtypes for size in sizes]
    works = [work for work in [*works, ("barrier", "fp32", 0)] if options.only in work[0]]
    report = Report(machine())
    missing = why_no_mpi()
    if missing:
        report.left_out["MPI"] = missing
    for n in options.ranks[:1] if options.quick else options.ranks:
        mpi = None if missing else MpiRanks(n)
        with (
            tempfile.TemporaryDirectory() as folder,
            Board.create(n, None) as board,
            RankProcesses(n, serve, n, board.handle(), f"{folder}/s") as ranks,
        ):
            compare(report, n, ranks, mpi, works, 0.05 if options.quick else 0.2)
        if mpi is not None:
            mpi.close()
    if options.plot:
        draw(report, options.plot)
        options.plot = None
    report.finish(options)


if __name__ == "__main__":
    main()
