"""The table on the README's first screen, made of the figures of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.harness import UNITS
from benchmarks.page import figure, spread, table
from benchmarks.targets import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from benchmarks.harness import Row

BEGIN: Final = "<!-- Written by make bench, as is all up to the next such line. -->\n\n"
END: Final = "\n\n<!-- Up to here. -->"

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "group-coordinator": ("ours",),
    "vLLM": (
        *("vLLM", "vLLM (arena)", "vLLM's C++", "vLLM's C++, tensors only"),
        "vLLM's executor loop",
    ),
    "SGLang": ("SGLang",),
    "gloo": ("gloo", "gloo broadcast_object_list"),
    "MPI": ("Open MPI", "MPICH", "Intel MPI"),
    "Ray": ("Ray actors", "Ray's compiled graph"),
}
"""What stands in each column; of several the quickest."""

_QUEUE, _RPC = "message_queue", "no-op collective_rpc"
LINES: Final = {
    "queue: a dict to a reader, and back": Figure(_QUEUE, "echo", "dict, 1 reader"),
    "queue: the same with 3 readers": Figure(_QUEUE, "echo", "dict, 3 readers"),
    "queue: 64 MiB to a reader": Figure(_QUEUE, "one_way", "64MiB, 1 reader"),
    "queue: CPU of an idle reader": Figure(_QUEUE, "idle_cpu", "share of a core, 1 reader"),
    "all-reduce of 1 KiB, in place": Figure("collectives", "all_reduce_", "fp32 1KiB 2 ranks"),
    "all-reduce of 1 MiB, in place": Figure("collectives", "all_reduce_", "fp32 1MiB 2 ranks"),
    "all-reduce of 1 MiB, into new memory": Figure(
        "collectives", "all_reduce", "fp32 1MiB 2 ranks"
    ),
    "a tensor dict of 4 MiB to a rank": Figure(
        "tensor_dict", "tensor dict send/recv", "4 MiB, 2 ranks"
    ),
    "a call of two workers, one after another": Figure("pool", _RPC, "back to back"),
    "a call of two workers, once in 20 ms": Figure("pool", _RPC, "every 20 ms"),
    "SmolLM2 on a pool with tp=2, 8 answers under way": Figure(
        "decoder", "engine, ms a token", "8 answers, tp=2"
    ),
}
RATES: Final = {"SmolLM2 on a pool with tp=2, 8 answers under way": "tokens/s"}
"""Lines that show how many a second there are, not how long one takes."""


def front(reports: Mapping[str, Sequence[Row]]) -> str:
    """The table, with nothing where a run has no such figure."""
    return table(
        ("", *COLUMNS),
        [
            (what, *(_cell(what, line.of(*systems).find(reports)) for systems in COLUMNS.values()))
            for what, line in LINES.items()
        ],
    )


def _cell(what: str, row: Row | None) -> str:
    if row is None or what not in RATES:
        return figure(row)
    return f"{UNITS[row.unit] / row.median:.3g} {RATES[what]} {spread(row)}"


def rewrite(page: Path, shown: str) -> None:
    """Put the table into a page, in the place of the one that is there.

    Raises:
        ValueError: the page has no place for one.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no place for the table")
    page.write_text("".join((before, begin, shown, end, after)), encoding="utf-8")
