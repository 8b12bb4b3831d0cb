"""Stock vLLM with our parts inside: real engines, real models, the official client.

``make vllm-test`` runs them. Starting takes most of the time, so they share few engines.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchmarks.vllm_models import random_qwen2, smollm2
from benchmarks.vllm_served import LAYOUTS, Served, environment
from server.inspection.snapshot import of_process, programs, scan
from tests.patience import NAMED_WITHIN, STALL_SECONDS, until
from tests.plugins.vllm_offline import CASES, PROMPTS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm-test"
)

FRONT_SOCKETS = 3
"""What vLLM leaves of the sockets between its front end and its engine; queues of its own add 8."""

LONGEST_SECONDS = 3600
"""After which an engine has hung: a machine that others use makes minutes of seconds."""


def greedy(served: Served, max_tokens: int) -> list[str]:
    answer = served.client().completions.create(
        model="model",
        prompt=list(PROMPTS),
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    ordered = sorted(answer.choices, key=lambda choice: choice.index)
    return [str(choice.token_ids) for choice in ordered]


def offline(whose: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start `tests.plugins.vllm_offline`, which writes into ``folder``."""
    command = [sys.executable, "-m", "tests.plugins.vllm_offline", whose, str(folder / whose)]
    with (folder / f"{whose}.log").open("w") as log:
        return subprocess.Popen(
            command,
            env=environment("", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What stock and ours did in each case. They run side by side: most of it is starting."""
    folder = tmp_path_factory.mktemp("offline")
    smollm2(), random_qwen2()
    with offline("stock", folder) as stock, offline("ours", folder) as ours:
        running = {"stock": stock, "ours": ours}
        try:
            for whose, process in running.items():
                log = folder / f"{whose}.log"
                assert process.wait(LONGEST_SECONDS) == 0, log.read_text()[-4000:]
        finally:
            for process in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return {whose: cases_in(folder / whose) for whose in running}


def cases_in(file: Path) -> dict[str, Any]:
    cases = [json.loads(line) for line in file.read_text().splitlines()]
    return {case["case"]: case for case in cases}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_stock(found: dict[str, dict[str, Any]], case: str) -> None:
    stock, ours = found["stock"][case], found["ours"][case]
    assert len({str(tokens) for tokens in stock["tokens"]}) > 10
    assert ours["tokens"] == stock["tokens"]


@pytest.mark.parametrize("case", CASES)
def test_an_executor_puts_our_parts_in_place_from_python(
    found: dict[str, dict[str, Any]], case: str
) -> None:
    ours = found["ours"][case]
    assert ours["workers with a queue of vLLM's"] == 0
    assert ours["workers with a board of ours"] == int(case[-1])
    assert ours["workers left"] == 0
    assert ours["files left"] == 0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, arguments = LAYOUTS["TP=3"]
    with Served(model(), arguments, tmp_path_factory.mktemp("ours"), "1") as served:
        yield served


def test_an_aborted_request_leaves_the_engine_as_it_was(ours: Served) -> None:
    before = greedy(ours, 4)
    stream = ours.client().completions.create(
        model="model", prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert greedy(ours, 4) == before


def test_thirty_two_requests_at_once_are_answered(ours: Served) -> None:
    client = ours.client()

    def ask(number: int) -> Any:
        return client.completions.create(
            model="model",
            prompt=f"Number {number} is",
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )

    with concurrent.futures.ThreadPoolExecutor(32) as many:
        answers = list(many.map(ask, range(32)))
    assert [answer.usage.completion_tokens for answer in answers] == [8] * 32


def test_workers_sleep_while_there_is_nothing_to_do(ours: Served) -> None:
    """The thread that waits for calls: those of torch's gloo groups, which vLLM makes, do not."""
    greedy(ours, 1)
    time.sleep(3)  # what vLLM itself keeps doing for a while
    workers = list(ours.workers().values())
    assert len(workers) == 3
    before, begun = [seconds(pid) for pid in workers], time.monotonic()
    time.sleep(5)
    took = time.monotonic() - begun
    shares = [(seconds(pid) - old) / took for pid, old in zip(workers, before, strict=True)]
    assert max(shares) < 0.01


def seconds(pid: int) -> float:
    """What the main thread of a process has run for."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def test_what_workers_do_is_seen_from_outside(ours: Served) -> None:
    seen = scan()
    (program,) = of_process(ours.process.pid, seen, programs(seen))
    members = [member for board in program.boards for member in board.members]
    seen_in_tp = {m.status.pid for m in members if m.status.operation.startswith("tp ")}
    assert seen_in_tp == {*ours.workers().values()}


def test_shutting_down_leaves_nothing(ours: Served) -> None:
    family = ours.family()
    assert not any("psm_" in line for each in family for line in mapped(each))
    ours.end()
    until(lambda: not any(running(each) for each in family), "processes are left")
    assert len(list(ours.sockets.iterdir())) <= FRONT_SOCKETS


def mapped(process: psutil.Process) -> list[str]:
    try:
        return [each.path for each in process.memory_maps(grouped=True)]
    except psutil.Error:
        return []


def running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    """Within what is promised, and what a stall adds: vLLM itself waits for 9 s first."""
    make, arguments = LAYOUTS["TP=2"]
    with Served(make(), arguments, tmp_path, "1") as served:
        pid, seconds = kill_one_of_two(served)
    said = f"vLLM's engine has ended: worker rank 1 (pid {pid}) was killed by SIGKILL"
    assert last_line(served.log) == said
    assert seconds < NAMED_WITHIN + STALL_SECONDS


def kill_one_of_two(served: Served) -> tuple[int, float]:
    """The pid of a worker killed while it works, and the seconds until the client's error."""
    victim = served.workers()[1]
    failed: list[tuple[float, Exception]] = []
    asking = threading.Thread(target=ask_for_long, args=(served, failed))
    asking.start()
    time.sleep(1)
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    asking.join()
    served.process.wait(90)
    ((when, error),) = failed
    assert "EngineCore" in str(error)
    return victim, when - killed


def ask_for_long(served: Served, failed: list[tuple[float, Exception]]) -> None:
    import openai

    try:
        served.client().completions.create(
            model="model", prompt="Once", max_tokens=480, extra_body={"ignore_eos": True}
        )
    except openai.OpenAIError as error:
        failed.append((time.monotonic(), error))


def last_line(log: Path) -> str:
    """The last line of vLLM; Python's own process that counts shared memory may add a warning."""
    lines = log.read_text().splitlines()
    return [line for line in lines if "resource_tracker" not in line and line.strip()][-1]
