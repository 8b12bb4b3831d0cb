"""Stock vLLM with our parts inside: real engines, real models, the official client.

Each test starts ``vllm.entrypoints.openai.api_server``; all need ``make vllm-test``.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import itertools
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

from benchmarks.vllm_served import LAYOUTS, Served, environment
from coordinator.plugins.vllm.__main__ import report
from tests.patience import NAMED_WITHIN, quickest, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm-test"
)

FRONT_SOCKETS = 3
"""What vLLM leaves of the sockets between its front end and its engine; queues of its own add 8."""

PROMPTS = [f"{count} facts about the sea at night:" for count in range(1, 21)]


def greedy(served: Served, max_tokens: int = 16) -> list[str]:
    answer = served.client().completions.create(
        model="model",
        prompt=PROMPTS,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    ordered = sorted(answer.choices, key=lambda choice: choice.index)
    return [str(choice.token_ids) for choice in ordered]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, arguments = LAYOUTS["TP=3"]
    with Served(model(), arguments, tmp_path_factory.mktemp("ours"), "1") as served:
        yield served


def stock_tokens(layout: str, folder: Path) -> list[str]:
    model, arguments = LAYOUTS[layout]
    with Served(model(), arguments, folder / "stock") as served:
        return greedy(served)


def test_three_ranks_give_the_tokens_of_stock(ours: Served, tmp_path: Path) -> None:
    expected = stock_tokens("TP=3", tmp_path)
    assert len(set(expected)) > 10
    assert greedy(ours) == expected


def test_chat_is_streamed(ours: Served) -> None:
    client = ours.client()
    asked = {
        "model": "model",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len(pieces) > 3
    assert "".join(pieces) == whole != ""


def test_log_probabilities_come_with_the_tokens(ours: Served) -> None:
    answer = ours.client().completions.create(
        model="model", prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=3
    )
    found = answer.choices[0].logprobs
    assert len(found.token_logprobs) == 4
    assert all(value <= 0 for value in found.token_logprobs)
    assert all(len(top) >= 3 for top in found.top_logprobs)


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
    group, *members = report(ours.process.pid).splitlines()
    assert group == "tp"
    pids = [int(line.partition("pid ")[2].partition(")")[0]) for line in members]
    assert pids == list(ours.workers().values())
    assert all("last seen in tp " in line for line in members)


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


def test_two_stages_give_the_tokens_of_stock(tmp_path: Path) -> None:
    expected = stock_tokens("PP=2", tmp_path)
    model, arguments = LAYOUTS["PP=2"]
    with Served(model(), arguments, tmp_path / "ours", "1") as served:
        assert greedy(served) == expected


def test_two_ranks_give_the_tokens_of_stock_and_a_killed_one_is_named(tmp_path: Path) -> None:
    expected = stock_tokens("TP=2", tmp_path)
    model, arguments = LAYOUTS["TP=2"]
    folders = (tmp_path / f"ours{count}" for count in itertools.count())

    def attempt() -> float:
        folder = next(folders)
        with Served(model(), arguments, folder, "1") as served:
            assert greedy(served) == expected
            pid, seconds = kill_one_of_two(served)
        said = f"vLLM's engine has ended: worker rank 1 (pid {pid}) was killed by SIGKILL"
        assert last_line(folder / "log") == said
        return seconds

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


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
    served.process.wait(30)
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


FROM_PYTHON = """
import os, psutil
from coordinator.plugins.vllm.executor import GroupCoordinatorExecutor
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        {model!r},
        tensor_parallel_size=2,
        distributed_executor_backend=GroupCoordinatorExecutor,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        compilation_config={{"mode": 2, "backend": "eager"}},
    )
    answer = llm.generate("Once", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    print("tokens", len(answer[0].outputs[0].token_ids))
    maps = [open(f"/proc/{{each.pid}}/maps").read() for each in psutil.Process().children(True)]
    print("queues of vLLM", any("/dev/shm/psm_" in text for text in maps))
    print("boards of ours", sum("/memfd:" in text for text in maps))
"""


def test_an_executor_puts_our_parts_in_place_from_python_also_in_a_traced_model(
    tmp_path: Path,
) -> None:
    make, _ = LAYOUTS["TP=2"]
    script = tmp_path / "script.py"
    script.write_text(FROM_PYTHON.format(model=str(make())))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(""),
        capture_output=True,
        check=False,
        text=True,
        timeout=420,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if line.startswith(("tok", "que", "boa"))]
    assert said == ["tokens 4", "queues of vLLM False", "boards of ours 3"]
