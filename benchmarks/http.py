"""The embeddings service under load, and what HTTP adds: python -m benchmarks.http [--quick].

With ``--fastapi PYTHON`` beside a server of FastAPI and sentence-transformers, see
`benchmarks.http_fastapi`: the time of a text while 1, 32 or 100 clients ask for one at a time, and
4 for 32, of one server after the other, on the same cores.

First 100 clients ask for a minute, at tp x pp = 2 x 2 and at 1 x 1: every answer is compared with
the model in one process, and what the server and its workers have in memory is sampled. Then one
client asks for one text at a time, beside the same model called in this process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import coordinator
from benchmarks.harness import Figure, Report, machine, parser, summarise
from benchmarks.http_load import Client, Questions, load, vectors_of
from benchmarks.http_served import FastApi, Served
from benchmarks.minilm import SENTENCES
from benchmarks.queue_base import require
from server.config import PACKAGED_NAME
from server.worker import WorkerContext
from server.workers.minilm import MiniLMWorker, ModelFolder, SentenceTokenizer, packaged_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

GRIDS = ((2, 2), (1, 1))
CLIENTS = 100
BESIDE = ((1, 1), (32, 1), (100, 1), (4, 32))
"""Clients, and texts of each request."""
MIB = 1 << 20


@dataclass(frozen=True)
class Held:
    """Memory of a server and its workers under load, in MiB.

    Attributes:
        params: which server.
        requests, texts: answered in that time.
        texts_per_second: over all of it.
        worst: the largest difference of any element from the model in one process.
        start, end: medians of the first and the last fifth of the samples.
        slope_per_minute: of a line through the second half of the samples.
    """

    params: str
    requests: int
    texts: int
    texts_per_second: float
    worst: float
    start: float
    end: float
    slope_per_minute: float


class Sampler:
    """Samples a server's memory until the block ends."""

    def __init__(self, served: Served, interval: float) -> None:
        self._served = served
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[tuple[float, float]] = []

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self.samples.append((time.monotonic(), self._served.memory_bytes() / MIB))

    def summary(self) -> tuple[float, float, float]:
        """Median at the start, median at the end, and the growth per minute in between."""
        at, held = np.array(self.samples).T
        fifth = max(1, len(held) // 5)
        half = len(held) // 2
        slope = np.polyfit(at[half:] - at[half], held[half:], 1)[0] * 60
        return float(np.median(held[:fifth])), float(np.median(held[-fifth:])), float(slope)


def questions(reference: Any) -> Questions:
    """Texts of different lengths, all different, and their embeddings in one process."""
    text = SENTENCES.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    texts = [" ".join(lines[at : at + 1 + at % 4]) for at in range(len(lines))]
    texts += [f"{line} Once more, from {number}." for number, line in enumerate(lines)]
    return Questions(texts, reference.encode(texts, show_progress_bar=False))


def under_load(report: Report, asked: Questions, served: Served, grid: str, seconds: float) -> Held:
    """100 clients for ``seconds``; every answer is checked."""
    asyncio.run(load(served.url, PACKAGED_NAME, asked, CLIENTS, 0.1 * seconds, seed=1)).check()
    with Sampler(served, seconds / 60) as sampler:
        found = asyncio.run(load(served.url, PACKAGED_NAME, asked, CLIENTS, seconds))
    found.check()
    params = f"{CLIENTS} clients, {seconds:g} s, {grid}"
    row = summarise("request under load", params, "ours", [found.seconds], "ms")
    report.rows.append(row)
    held = Held(
        params,
        len(found.seconds),
        found.texts,
        found.texts / found.elapsed,
        found.worst,
        *sampler.summary(),
    )
    print(
        f"\n{params}: {held.requests} requests, {held.texts} texts, {held.texts_per_second:.0f} "
        f"texts/s, p50 {row.median:.0f} ms, p99 {row.p99:.0f} ms, worst difference {held.worst:.1e}"
        f"\n  memory {held.start:.1f} MiB at first, {held.end:.1f} at last, "
        f"{held.slope_per_minute:+.2f} MiB a minute in the second half",
        flush=True,
    )
    return held


def timed(ask: Callable[[], Any], expected: np.ndarray, count: int) -> list[float]:
    """Seconds of each of ``count`` calls, whose last result is checked."""
    samples = []
    for _ in range(count):
        began = time.perf_counter()
        found = ask()
        samples.append(time.perf_counter() - began)
    require(float(np.abs(found - expected).max()) <= 1e-5, "the embedding differs")
    return samples


def one_at_a_time(
    report: Report, asked: Questions, reference: Any, servers: dict[str, Served], quick: bool
) -> None:
    """One text at a time: over HTTP, and in this process."""
    text, expected = asked.texts[0], asked.vectors[:1]
    loop = asyncio.new_event_loop()
    count = 50 if quick else 150
    with ExitStack() as closing:
        closing.callback(loop.close)
        alone = closing.enter_context(coordinator.init(rank=0, world_size=1))
        context = WorkerContext(alone, torch.device("cpu"), lambda *_: None)
        worker = MiniLMWorker(context, packaged_model())
        tokenizer = SentenceTokenizer(ModelFolder.open(packaged_model()))

        def over_http(served: Served) -> Callable[[], list[float]]:
            client = Client(served.url, PACKAGED_NAME)
            loop.run_until_complete(client.__aenter__())
            closing.callback(lambda: loop.run_until_complete(client.__aexit__()))

            def ask() -> np.ndarray:
                status, answer = loop.run_until_complete(client.embed([text]))
                require(status == 200, f"status {status}: {answer}")
                return vectors_of(answer)

            return lambda: timed(ask, expected, count)

        systems: dict[str, Callable[[], list[float]]] = {
            f"ours, HTTP, {grid}": over_http(served) for grid, served in servers.items()
        }
        systems["ours, in process"] = lambda: timed(
            lambda: worker.embed(tokenizer.encode([text], truncate=False).tokens), expected, count
        )
        systems["sentence-transformers"] = lambda: timed(
            lambda: reference.encode([text], show_progress_bar=False), expected, count
        )
        report.measure(Figure("request", "1 text", systems, unit="ms", repeats=3 if quick else 5))
    medians = {row.system: row.median for row in report.rows if row.work == "request"}
    for grid in servers:
        for peer in ("ours, in process", "sentence-transformers"):
            added = medians[f"ours, HTTP, {grid}"] - medians[peer]
            print(f"  HTTP, {grid}, over {peer}: {added:+.2f} ms at the median")


def beside_fastapi(
    report: Report, asked: Questions, servers: dict[str, Served | FastApi], quick: bool
) -> None:
    """Time of a text under loads that differ in how much can be computed at once."""
    seconds = 2.0 if quick else 8.0

    def asking(url: str, clients: int, texts: int) -> list[float]:
        found = asyncio.run(
            load(url, PACKAGED_NAME, asked, clients, seconds, n_texts=(texts, texts))
        )
        found.check()
        return [found.elapsed / found.texts]

    figures = []
    for clients, texts in BESIDE:
        systems = {
            name: partial(asking, server.url, clients, texts) for name, server in servers.items()
        }
        params = f"{clients} clients, {texts} texts a request"
        repeats = 3 if quick else 5
        figures.append(Figure("time of a text", params, systems, unit="ms", repeats=repeats))
    report.measure(*figures)


def run(report: Report, options: argparse.Namespace) -> list[Held]:
    """All of it."""
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()
    seconds = 5.0 if options.quick else 60.0
    held: list[Held] = []
    with ExitStack() as running:
        servers: dict[str, Served] = {}
        grids = GRIDS[-1:] if options.only and options.only in "time of a text" else GRIDS
        for tp, pp in grids:
            grid = f"tp x pp = {tp} x {pp}"
            servers[grid] = running.enter_context(Served("--tp", str(tp), "--pp", str(pp)))
        reference = SentenceTransformer(str(packaged_model()), device="cpu", local_files_only=True)
        asked = questions(reference)
        for served in servers.values():
            served.wait_until_ready()
        if options.only in "load":
            held = [
                under_load(report, asked, served, grid, seconds) for grid, served in servers.items()
            ]
        if options.only in "request":
            one_at_a_time(report, asked, reference, servers, options.quick)
        if options.fastapi and options.only in "time of a text":
            peer = running.enter_context(FastApi(options.fastapi))
            peer.wait_until_ready()
            ours = servers[f"tp x pp = {GRIDS[-1][0]} x {GRIDS[-1][1]}"]
            beside_fastapi(report, asked, {"ours, 1 x 1": ours, "FastAPI": peer}, options.quick)
    return held


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--fastapi", metavar="PYTHON", help="the peer's interpreter")
    options = arguments.parse_args()
    report = Report(machine())
    held = run(report, options)
    report.machine["memory under load, MiB"] = [asdict(each) for each in held]
    report.finish(options)


if __name__ == "__main__":
    main()
