"""The embeddings service under many clients, with and without workers that are killed.

    python -m benchmarks.http_faults [--seconds S] [--every S] [--clients N] [--dp N] [--json FILE]

Each answer is compared with what the service answered before. Ends with 1 if one was wrong, or if a
request got anything but an answer or 503. The memory is that of all processes of the service, each
shared page counted once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.harness import machine
from benchmarks.http_load import TOLERANCE, Client, Load, Questions, load, vectors_of
from benchmarks.http_served import Served
from server.config import PACKAGED_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

_WEIGH_SECONDS = 10.0
TEXTS = [f"Line {number} repeats itself, {'and again ' * number}." for number in range(12)]


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run (default 300)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    options = ("--dp", str(arguments.dp), "--restart", "worker", "--max-restarts", "1000")
    report: dict[str, Any] = {"machine": machine(), **vars(arguments), "json": None}
    print("kills  requests/s     p50, s     p99, s   worst, s   refused   MiB before, most, after")
    right = True
    for kills in (False, True):
        with Served(*options) as served:
            served.wait_until_ready()
            questions = Questions(TEXTS, asyncio.run(_embeddings(served)))
            memory = [served.memory_bytes() >> 20]
            over = threading.Event()
            beside = [threading.Thread(target=_weigh, args=(served, memory, over))]
            if kills:
                beside.append(threading.Thread(target=_kill, args=(served, arguments.every, over)))
            for thread in beside:
                thread.start()
            found = asyncio.run(
                load(served.url, PACKAGED_NAME, questions, arguments.clients, arguments.seconds)
            )
            over.set()
            for thread in beside:
                thread.join()
            served.wait_until_ready()
            memory.append(served.memory_bytes() >> 20)
        right &= found.worst <= TOLERANCE and {*found.refused} <= {503} and bool(found.seconds)
        report["with kills" if kills else "without"] = _show(found, memory, kills=kills)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if right else 1


async def _embeddings(served: Served) -> np.ndarray:
    async with Client(served.url, PACKAGED_NAME) as client:
        vectors = [vectors_of((await client.embed([text]))[1])[0] for text in TEXTS]
    return np.stack(vectors)


def _weigh(served: Served, memory: list[int], over: threading.Event) -> None:
    while not over.wait(_WEIGH_SECONDS):
        memory.append(served.memory_bytes() >> 20)


def _kill(served: Served, every: float, over: threading.Event) -> None:
    draw = random.Random(0)
    while not over.wait(every):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(draw.choice(served.worker_pids())).kill()


def _show(found: Load, memory: Sequence[int], *, kills: bool) -> dict[str, Any]:
    seconds = np.sort(found.seconds)
    rate = len(seconds) / found.elapsed
    p50, p99, worst = (float(np.quantile(seconds, part)) for part in (0.5, 0.99, 1.0))
    refused = dict(found.refused)
    print(
        f"{'yes' if kills else 'no':5}{rate:12.1f}{p50:11.3f}{p99:11.3f}{worst:11.3f}"
        f"   {refused or 'none'}   {memory[0]}, {max(memory)}, {memory[-1]}",
        flush=True,
    )
    figures = {"requests_per_second": rate, "p50": p50, "p99": p99, "worst": worst}
    return {**figures, "refused": refused, "requests": len(seconds), "mib": list(memory)}


if __name__ == "__main__":
    sys.exit(main())
