"""The full counts of what CI runs with small ones: many messages, many kills.

    python -m benchmarks.soak --seed 1 [--messages N] [--kills N] [--quick] [--json FILE]

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

from benchmarks.harness import machine
from benchmarks.soak_kills import kill_at_random
from benchmarks.soak_messages import stress

MESSAGES = 10_000_000
KILLS = 200
QUICK = 50
"""``--quick`` does this part of it."""


def main() -> int:
    arguments = _arguments()
    part = QUICK if arguments.quick else 1
    messages, kills = arguments.messages // part, max(arguments.kills // part, 10)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.soak_kills", "benchmarks.soak_messages"])
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - started:8.1f} s  {text}", flush=True)

    report: dict[str, object] = {"machine": machine(), "seed": arguments.seed, "messages": []}
    wrong: list[str] = []
    stressed: list[object] = []
    for readers in (1, 3):
        try:
            shown = stress(context, readers, messages, arguments.seed, say)
        except RuntimeError as error:
            wrong.append(str(error))
            continue
        stressed.append(asdict(shown))
        say(f"{readers} readers: {shown.messages:,} messages, {shown.payload_bytes:,} bytes right")
    killed = kill_at_random(context, kills, arguments.seed, say)
    wrong += killed.wrong
    say(f"{killed.rounds} kills: slowest end {killed.slowest:.3f} s, {dict(killed.ends)}")
    report |= {"messages": stressed, "kills": asdict(killed), "wrong": wrong}
    for each in wrong:
        say(f"WRONG: {each}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--messages", type=int, default=MESSAGES, help="for each number of readers")
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--quick", action="store_true", help=f"1/{QUICK} of both")
    parser.add_argument("--json", type=Path, help="write the report there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
