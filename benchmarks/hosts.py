"""A pool over two hosts (network namespaces): what its calls cost, and how soon a fault is known.

    python -m benchmarks.hosts [--rounds N] [--vllm PYTHON]

Needs root, for the namespaces. Times are medians and worst cases over the rounds. With an
interpreter that has vLLM, its queue between hosts is measured beside ours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Any

from server.errors import WorkerLostError
from server.pool import WorkerPool
from tests.netns import Host, two_hosts
from tests.patience import until
from tests.ranks import run_ranks
from tests.server.over_hosts import is_gone, kill, note, noted, over_hosts
from tests.server.workers import Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS = 1000
FOUR = {"worker": Restored, "tp": 2, "pp": 2}
SILENCE = {"silence_seconds": 1.5}
VLLM_SECONDS = 120.0
"""How long vLLM's queues may take for all their calls."""
SLOW = (0.02, 0.01)
"""A cable of 20 ms, which loses 1 % of the packets."""


def main() -> None:
    """Measure everything, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds (default 5)")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    options = parser.parse_args()
    rounds = options.rounds
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for what, seconds in (*_calls(), *_vllm_calls(options.vllm), *_ray_calls(), *_faults()):
            found.setdefault(what, []).append(seconds)
        sys.stderr.write(f"round {number + 1} of {rounds}\n")
    for what, times in found.items():
        median, worst = (1e3 * each for each in (statistics.median(times), max(times)))
        print(f"{what:58} median {median:9.2f} ms   worst {worst:9.2f} ms")


def _calls() -> list[tuple[str, float]]:
    with WorkerPool(Restored, tp=2, pp=2) as pool:
        here = no_ops(pool)
    began = time.monotonic()
    there, ready = _over(no_ops_and_start)
    slow = _over(slow_no_ops, cable=SLOW)
    return [
        ("no-op call, four workers on one host", here),
        ("no-op call, four workers on two hosts", there),
        ("the same over 20 ms and 1 % loss", slow),
        ("from nothing to the first answer, two hosts", ready - began),
    ]


def _vllm_calls(python: str | None) -> list[tuple[str, float]]:
    """Beside them, vLLM's queues: the head and two workers on one host, two on the other."""
    if python is None:
        return []
    with two_hosts("IPv4") as hosts, TemporaryDirectory() as folder, ExitStack() as stack:
        for rank in range(4):
            host = hosts[rank // 2]
            local = str(int(host is hosts[0]))
            stack.callback(_end, _vllm(python, host, folder, str(rank), local))
        head = _vllm(python, hosts[0], folder, str(CALLS), stdout=subprocess.PIPE)
        stack.callback(_end, head)
        answer, _ = head.communicate(timeout=VLLM_SECONDS)
    return [("no-op call, vLLM's queues, four workers on two hosts", float(answer.split()[-1]))]


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for a process that ends by itself if all went well; make it end otherwise."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _vllm(
    python: str, host: Host, folder: str, *arguments: str, stdout: int | None = None
) -> subprocess.Popen[str]:
    there = ["nsenter", "--net", f"--target={host.pid}"]
    command = [*there, python, "-m", "benchmarks.hosts_vllm", folder, host.address, *arguments]
    return subprocess.Popen(
        command, stdout=stdout, text=True, env={**os.environ, "VLLM_HOST_IP": host.address}
    )


def _ray_calls() -> list[tuple[str, float]]:
    """Beside them, where Ray is installed: four of its actors on this host, each called once."""
    if find_spec("ray") is None:
        return []
    import ray

    class Actor:
        def echo(self) -> None:
            """Do nothing."""

    with _ray_at_work(ray):
        actors = [ray.remote(Actor).remote() for _ in range(4)]
        ray.get([actor.echo.remote() for actor in actors])
        times = []
        for _ in range(CALLS):
            began = time.perf_counter()
            ray.get([actor.echo.remote() for actor in actors])
            times.append(time.perf_counter() - began)
    return [("no-op call, four Ray actors on one host", statistics.median(times))]


@contextmanager
def _ray_at_work(ray: Any) -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _faults() -> list[tuple[str, float]]:
    stays = {**FOUR, "restart": "worker"}
    error, answer = _over(loses_a_worker, stays)
    slow_error, _ = _over(loses_a_worker, stays, cable=SLOW)
    host_error = _over(loses_a_host, FOUR, may_die=[1])
    folder = mkdtemp()
    _over(ends, FOUR, may_die=[0], folder=folder)
    gone = noted(folder, "gone") - noted(folder, "ended")
    cut = _over(is_cut, FOUR, changes=SILENCE)
    return [
        ("a worker on the other host is killed: the caller's error", error),
        ("  the first right answer (restart='worker')", answer),
        ("a rank aborts: the rank on the other host has the error", _abort()),
        ("the same over 20 ms and 1 % loss", _abort(*SLOW)),
        ("a worker is killed, over 20 ms and 1 % loss: the caller's error", slow_error),
        ("the other host's process is killed: the caller's error", host_error),
        ("the head is killed: the other host's workers have ended", gone),
        ("the cable is cut (silence_seconds=1.5): the caller's error", cut),
    ]


def _over(
    body: Callable[..., Any],
    options: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    may_die: list[int] | None = None,
    folder: str = "",
    cable: tuple[float, float] = (0.0, 0.0),
) -> Any:
    """What ``body(pool, folder, hosts)`` gives."""
    folder = folder or mkdtemp()
    try:
        with two_hosts("IPv4", *cable) as hosts:
            return run_ranks(
                *(2, _rank, folder, hosts, body, options or FOUR, changes),
                may_die=may_die or [],
            )[0]
    finally:
        if body is not ends:
            shutil.rmtree(folder)


def _rank(rank: int, n: int, folder: str, hosts: tuple[Host, Host], *rest: Any) -> Any:
    body, options, changes = rest
    ended = over_hosts(rank, n, folder, hosts, body, (folder, hosts), options, changes)
    if rank and body is ends:
        until(lambda: is_gone(int(noted(folder, "pid"))))
        note(folder, "gone", time.monotonic())
    return ended


def _abort(*cable: float) -> float:
    """Seconds until the abort of a rank has ended the wait of the rank on the other host."""
    with TemporaryDirectory() as folder, two_hosts("IPv4", *cable) as hosts:
        run_ranks(2, over_hosts, folder, hosts, is_aborted, (folder,))
        return noted(folder, "aborted-0") - noted(folder, "aborted-1")


def is_aborted(pool: WorkerPool, folder: str) -> None:
    """Rank 1 aborts."""
    pool.submit("abort_and_note", 1, Path(folder)).exception(60)


def no_ops(pool: WorkerPool, *_: Any, calls: int = CALLS) -> float:
    """The median seconds of a call."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        pool.call("echo")
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def slow_no_ops(pool: WorkerPool, *_: Any) -> float:
    """The median seconds of a call that takes long."""
    return no_ops(pool, calls=CALLS // 10)


def no_ops_and_start(pool: WorkerPool, *_: Any) -> tuple[float, float]:
    """The median seconds of a call, and the moment of the first answer."""
    pool.call("echo")
    ready = time.monotonic()
    return no_ops(pool), ready


def loses_a_worker(pool: WorkerPool, *_: Any) -> tuple[float, float]:
    """Seconds until the error, and until the next right answer."""
    call = pool.submit("hang_in_group", 3)
    until(lambda: all(each.state == "busy" for each in pool.status()))
    killed = kill(pool.status()[3].pid)
    error = _error_of(call) - killed
    assert pool.call("total", 1.0) == 4.0
    return error, time.monotonic() - killed


def loses_a_host(pool: WorkerPool, folder: str, _: Any) -> float:
    """Seconds until the error."""
    call = pool.submit("hang_in_group", 3)
    until(lambda: all(each.state == "busy" for each in pool.status()))
    killed = kill(int(noted(folder, "supervisor")))
    return _error_of(call) - killed


def ends(pool: WorkerPool, folder: str, _: Any) -> None:
    """The head kills itself."""
    note(folder, "pid", pool.status()[3].pid)
    note(folder, "ended", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def is_cut(pool: WorkerPool, _: str, hosts: tuple[Host, Host]) -> float:
    """Seconds until the error."""
    call = pool.submit("hang_in_group", 3)
    until(lambda: all(each.state == "busy" for each in pool.status()))
    began = time.monotonic()
    hosts[0].unplug()
    hosts[1].unplug()
    return _error_of(call) - began


def _error_of(call: Any) -> float:
    """The moment at which ``call`` fails because a worker is lost."""
    assert isinstance(call.exception(60), WorkerLostError)
    return time.monotonic()


if __name__ == "__main__":
    main()
