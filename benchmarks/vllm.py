"""Stock vLLM and vLLM with our parts inside, interleaved: ``python -m benchmarks.vllm``.

Needs the environment of ``make vllm-test``. For each layout two engines run side by side, and take
turns: while one generates, the other idles. With ``--gloo`` the stock engine's groups go over
torch's gloo, as they do where ranks do not share vLLM's name for shared memory. Reported are the
medians of the rounds, with the spread of the rounds as a share of it. "Others" are all processes
but the engine's: where they want as much as a core, times say how the kernel shares the cores out,
rather than what an engine can do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from benchmarks.memory import shared_bytes
from benchmarks.vllm_served import LAYOUTS, ROOT, environment, keywords

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SYSTEMS = {"stock": "", "ours": "1"}
BATCHES = (1, 8, 32)
IDLE_SECONDS = 20.0
SETTLE_SECONDS = 5.0
REST_SECONDS = 2.0
"""Before each round: stock's workers go on spinning for a second after their last step."""


@dataclass(frozen=True)
class Row:
    """One figure of one system.

    Attributes:
        layout: how the model is cut.
        what: what was measured, with its unit.
        system: ``"stock"`` or ``"ours"``.
        median: of the rounds.
        spread: the largest less the smallest, as a share of the median.
    """

    layout: str
    what: str
    system: str
    median: float
    spread: float

    @classmethod
    def of(cls, layout: str, what: str, system: str, samples: list[float]) -> Self:
        median = statistics.median(samples)
        return cls(layout, what, system, median, (max(samples) - min(samples)) / (median or 1))


class Engine:
    """An engine in a process of its own, which does one thing at a time as it is told."""

    def __init__(self, layout: str, system: str, folder: Path, more: Mapping[str, str]) -> None:
        answers, told = os.pipe()
        self.log = folder / f"{layout}-{system}.log"
        with self.log.open("w") as log:
            begun = time.monotonic()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.vllm", "--engine", layout, str(told)],
                env=environment(SYSTEMS[system], {"TMPDIR": str(folder), **more}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[told],
                text=True,
            )
        os.close(told)
        self._answers = os.fdopen(answers)
        self._answer()
        self.start_seconds = time.monotonic() - begun

    def tell(self, **what: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)

    def _answer(self) -> float:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"the engine has ended:\n{self.log.read_text()[-4000:]}")
        return float(line)

    def generate(self, batch: int, tokens: int) -> float:
        """Seconds for ``tokens`` new tokens of each of ``batch`` prompts."""
        self.tell(batch=batch, tokens=tokens)
        return self._answer()

    def family(self) -> list[psutil.Process]:
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def cpu_seconds(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self.family())

    def kill_a_worker(self) -> float:
        """Seconds from the SIGKILL of a worker until the client gets an error."""
        self.tell(batch=1, tokens=400)
        time.sleep(1.0)
        workers = [each for each in self.family() if "VLLM::Worker" in "".join(each.cmdline())]
        killed = time.monotonic()
        os.kill(max(each.pid for each in workers), signal.SIGKILL)
        self._answer()
        return time.monotonic() - killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        family = self.family() if self.process.poll() is None else []
        self.process.stdin.close()  # it ends by itself, and leaves nothing behind
        for end in (None, psutil.Process.terminate, psutil.Process.kill):
            for each in family:
                if end is not None and each.is_running():
                    end(each)
            _, family = psutil.wait_procs(family, 10)
        self.process.wait()


def be_an_engine(layout: str, told: int) -> None:
    """Do what lines of the standard input say, and write the seconds that it took."""
    from vllm import LLM, SamplingParams

    make, arguments = LAYOUTS[layout]
    llm = LLM(str(make()), **keywords(arguments))
    with os.fdopen(told, "w", buffering=1) as answers:
        print(0, file=answers)
        for line in sys.stdin:
            wanted = json.loads(line)
            sampling = SamplingParams(temperature=0, max_tokens=wanted["tokens"], ignore_eos=True)
            prompts = [f"Number {each}: once upon a time" for each in range(wanted["batch"])]
            begun = time.perf_counter()
            try:
                llm.generate(prompts, sampling, use_tqdm=False)
            finally:
                print(time.perf_counter() - begun, file=answers)


def measure(layout: str, options: argparse.Namespace, say: Callable[[Row], None]) -> None:
    """Measure one layout, and tell each figure."""
    rounds, tokens = options.rounds, options.tokens
    with tempfile.TemporaryDirectory() as folder:
        bound = {"VLLM_CPU_OMP_THREADS_BIND": options.bind}
        gloo = {"PYTHONPATH": f"{ROOT}:{over_gloo(Path(folder))}"} if options.gloo else {}
        more = {"stock": {**bound, **gloo}, "ours": bound}
        engines = {system: Engine(layout, system, Path(folder), more[system]) for system in SYSTEMS}
        with engines["stock"], engines["ours"]:
            for system, engine in engines.items():
                say(Row(layout, "start, s", system, engine.start_seconds, 0.0))
            for batch in BATCHES:
                _take_turns(layout, batch, rounds, tokens, engines, say)
            for system, engine in engines.items():
                mib = shared_bytes(each.pid for each in engine.family()) / 2**20
                say(Row(layout, "shared memory mapped, MiB", system, mib, 0.0))
            time.sleep(SETTLE_SECONDS)
            before = {system: engine.cpu_seconds() for system, engine in engines.items()}
            time.sleep(IDLE_SECONDS)
            for system, engine in engines.items():
                share = (engine.cpu_seconds() - before[system]) / IDLE_SECONDS * 100
                say(Row(layout, "idle, % of a core", system, share, 0.0))
            for system, engine in engines.items():
                seconds = engine.kill_a_worker()
                say(Row(layout, "SIGKILL to the client's error, s", system, seconds, 0.0))


def over_gloo(folder: Path) -> Path:
    """A folder for ``PYTHONPATH`` with a plug-in that has vLLM do without its shared memory."""
    information = folder / "over_gloo-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: over-gloo\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nover_gloo = over_gloo:register\n"
    (information / "entry_points.txt").write_text(entry)
    (folder / "over_gloo.py").write_text(
        "def register():\n"
        "    from vllm.distributed.device_communicators import cpu_communicator\n"
        "    here = cpu_communicator.CpuCommunicator\n"
        "    here._all_group_ranks_share_shm_group_name = lambda self: False\n"
    )
    return folder


def _take_turns(
    layout: str,
    batch: int,
    rounds: int,
    tokens: int,
    engines: dict[str, Engine],
    say: Callable[[Row], None],
) -> None:
    seconds: dict[str, list[float]] = {system: [] for system in engines}
    cpu: dict[str, list[float]] = {system: [] for system in engines}
    others: dict[str, list[float]] = {system: [] for system in engines}
    for number in range(rounds + 1):
        for system, engine in engines.items():
            time.sleep(REST_SECONDS)
            machine, before = _busy_seconds(), engine.cpu_seconds()
            took = engine.generate(batch, tokens)
            used, wanted = engine.cpu_seconds() - before, _busy_seconds() - machine
            if number:  # the first one warms up
                seconds[system].append(took)
                cpu[system].append(used)
                others[system].append(max(wanted - used, 0) / took * 100)
    for system in engines:
        each = [took / tokens * 1e3 for took in seconds[system]]
        say(Row.of(layout, f"batch {batch}: ms/token", system, each))
        per_second = [batch * tokens / took for took in seconds[system]]
        say(Row.of(layout, f"batch {batch}: tokens/s", system, per_second))
        cost = [used / (batch * tokens) * 1e3 for used in cpu[system]]
        say(Row.of(layout, f"batch {batch}: CPU s per 1000 tokens", system, cost))
        say(Row.of(layout, f"batch {batch}: others, % of a core", system, others[system]))


def _busy_seconds() -> float:
    """Seconds that all processes of the machine have had a core."""
    spent = psutil.cpu_times()
    return sum(spent) - spent.idle - spent.iowait


def table(rows: list[Row]) -> str:
    """Stock and ours beside each other, in Markdown."""
    lines = ["| layout | | stock | ours | stock / ours |", "|---|---|---|---|---|"]
    found = {(row.layout, row.what, row.system): row for row in rows}
    for layout, what in dict.fromkeys((row.layout, row.what) for row in rows):
        stock, ours = (found.get((layout, what, system)) for system in SYSTEMS)
        if stock and ours:
            cells = [
                f"{row.median:.3g}" + (f" ±{row.spread / 2:.0%}" if row.spread else "")
                for row in (stock, ours)
            ]
            ratio = stock.median / ours.median if ours.median else float("inf")
            lines.append(f"| {layout} | {what} | {cells[0]} | {cells[1]} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--bind", default="nobind", help="the cores of each rank, such as 0|1: vLLM's variable"
    )
    parser.add_argument("--gloo", action="store_true", help="stock without its shared memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        be_an_engine(options.engine[0], int(options.engine[1]))
        return
    rows: list[Row] = []

    def say(row: Row) -> None:
        rows.append(row)
        print(f"{row.layout} {row.what} {row.system}: {row.median:.3g}", file=sys.stderr)

    load = os.getloadavg()[0]
    for layout in options.layouts.split(","):
        measure(layout, options, say)
    print(table(rows))
    print(f"\nranks on cores: {options.bind}; stock over gloo: {options.gloo}")
    print(f"load of the machine before: {load:.1f}, after: {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
