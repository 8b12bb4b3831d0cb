"""The full counts of what CI runs with small ones: many messages, collectives and kills.

    python -m benchmarks.soak [--seed N] [--messages N] [--collectives N] [--kills N] [--json FILE]

Ends with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import machine
from benchmarks.soak_collectives import collect
from benchmarks.soak_kills import kill_at_random
from benchmarks.soak_messages import stress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MESSAGES = 10_000_000
COLLECTIVES = 1_000_000
KILLS = 200
QUICK = 50
"""``--quick`` does one in so many."""


def main() -> int:
    arguments = _arguments()
    part = QUICK if arguments.quick else 1
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.soak_kills", "benchmarks.soak_messages"])
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:8.1f} s  {text}", flush=True)

    report: dict[str, Any] = {"machine": machine(), "seed": arguments.seed}
    wrong: list[str] = []
    report["messages"] = _each(
        arguments.readers,
        arguments.messages // part,
        lambda readers, count: stress(context, readers, count, arguments.seed, say),
        wrong,
    )
    report["collectives"] = _each(
        arguments.ranks,
        arguments.collectives // part,
        lambda ranks, count: collect(ranks, count, arguments.seed, say),
        wrong,
    )
    kills = -(-arguments.kills // part)
    killed = kill_at_random(context, kills, arguments.seed, say)
    wrong += killed.wrong
    say(f"{killed.rounds} kills: slowest end {killed.slowest:.3f} s, {dict(killed.ends)}")
    report |= {"kills": asdict(killed), "wrong": wrong}
    for each in wrong:
        say(f"WRONG: {each}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if wrong else 0


def _each(
    sizes: Sequence[int], count: int, run: Callable[[int, int], Any], wrong: list[str]
) -> list[dict[str, Any]]:
    """What each size has shown; what went wrong goes into ``wrong``."""
    shown = []
    for size in sizes if count else ():
        try:
            shown.append(asdict(run(size, count)))
        except RuntimeError as error:
            wrong.append(str(error))
    return shown


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--messages", type=int, default=MESSAGES, help="for each number of readers")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--collectives", type=int, default=COLLECTIVES, help="for each number of ranks"
    )
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--quick", action="store_true", help=f"1/{QUICK} of all")
    parser.add_argument("--json", type=Path, help="write the report there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
