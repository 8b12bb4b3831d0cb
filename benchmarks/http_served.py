"""The service as its users run it: a process of ``group-coordinator serve``, at a free port."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.error import HTTPError, URLError

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
COMMAND = "import sys; from server.cli import main; sys.exit(main())"


class Served:
    """A server process and its workers. Use it in a ``with`` block.

    Attributes:
        process: it.
        url: where it listens, as it says itself.
    """

    def __init__(self, *options: str, host: str = "127.0.0.1", before: Sequence[str] = ()) -> None:
        """Start it; returns once it listens, before its workers have loaded.

        Args:
            options: of ``serve``.
            host: where to listen.
            before: a command that runs the one that follows it, and its options.
        """
        self._before = before
        self.process = self._begin(["serve", "--host", host, "--port", "0", *options])
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise RuntimeError(f"the server ended: {self.process.communicate()[1]}")
        self.url = line.split()[-1]

    def _begin(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._before, sys.executable, "-c", COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a route."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                return error.code, json.load(error)

    def wait_until_ready(self, seconds: float = 120.0) -> None:
        """Wait for the workers.

        Raises:
            TimeoutError: they take longer.
            RuntimeError: the server has ended.
        """
        end = time.monotonic() + seconds
        while (answer := self._ready())[0] != 200:
            if time.monotonic() > end:
                raise TimeoutError(f"not ready after {seconds} s: {answer}")
            time.sleep(0.1)

    def _ready(self) -> tuple[int, Any]:
        try:
            return self.get("/ready")
        except OSError:
            if self.process.poll() is None:
                raise
            raise RuntimeError(f"the server has ended: {self.process.communicate()[1]}") from None

    def worker_pids(self) -> list[int]:
        """The workers' process ids, by rank."""
        return [worker["pid"] for worker in self.get("/status")[1]["workers"]]

    def memory_bytes(self) -> int:
        """What the server and its workers have in memory; each shared page counts once."""
        server = psutil.Process(self.process.pid)
        total = 0
        for each in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += each.memory_full_info().pss
        return total

    def finish(self, seconds: float = 60.0) -> tuple[int, str]:
        """Wait for its end; the exit status, and what it wrote to stderr."""
        errors = self.process.communicate(timeout=seconds)[1]
        return self.process.returncode, errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class FastApi:
    """The peer of `benchmarks.http_fastapi`, in a process of its own. Use it in a ``with`` block.

    Attributes:
        url: where it listens, once it is ready.

    Args:
        python: the interpreter of its environment.
    """

    def __init__(self, python: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        server = ("-m", "uvicorn", "benchmarks.http_fastapi:app", "--port", str(port))
        self._process = subprocess.Popen(
            [python, *server, "--no-access-log", "--log-level", "warning"], cwd=ROOT
        )

    def wait_until_ready(self, seconds: float = 120.0) -> None:
        """Wait until it answers.

        Raises:
            TimeoutError: it takes longer.
            RuntimeError: it ended.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/ready", timeout=60).close()
            except URLError as error:
                if self._process.poll() is not None:
                    raise RuntimeError("the FastAPI server ended") from error
                if time.monotonic() > end:
                    raise TimeoutError(f"not ready after {seconds} s") from error
                time.sleep(0.1)
            else:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def gone(pids: Sequence[int], seconds: float = 10.0) -> bool:
    """Whether these processes have ended, within some seconds."""
    end = time.monotonic() + seconds
    while any(map(runs, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def runs(pid: int) -> bool:
    """Whether a process runs; one that init has not reaped yet does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
