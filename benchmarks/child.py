"""A peer that runs in a process of its own, asked line by line.

Whatever becomes of it or of the benchmark, its processes and files go: see `benchmarks.keeper`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ANSWER = "samples "
FOLDER = "{folder}"
"""Stands for the peer's own folder, which is in shared memory, in the values of its variables."""
_SHARED_MEMORY = Path("/dev/shm")
ANSWER_SECONDS = 120.0
"""How long a peer may take for an answer, its start included."""
END_SECONDS = 20.0
"""How long it may take to end."""

TIDY_SECONDS = 3.0
"""How long what it has started may take after that."""


class PeerError(RuntimeError):
    """A peer has ended, or does not answer in time."""


class Child:
    """A program that reads a JSON request a line, and answers each with a line of samples.

    Attributes:
        answer_seconds: how long it may take for an answer.

    Args:
        name: for errors.
        command: the program.
        environment: what it has besides this process's variables.
        stopped: stop its processes between two requests: some spin while they are idle, and the
            others would miss the core.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: dict[str, str],
        *,
        stopped: bool = False,
    ) -> None:
        self.name = name
        self._stopped = stopped
        self.answer_seconds = ANSWER_SECONDS
        self._said = b""
        self._folder = Path(tempfile.mkdtemp(prefix="peer-", dir=_SHARED_MEMORY))
        own = {name: text.replace(FOLDER, str(self._folder)) for name, text in environment.items()}
        with self._complaints.open("wb") as complaints:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self._folder), **own},
                start_new_session=True,
            )
        keeper = [sys.executable, "-S", "-m", "benchmarks.keeper"]
        self._keeper = subprocess.Popen(
            [*keeper, str(self._process.pid), str(self._folder)],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )

    @property
    def _complaints(self) -> Path:
        return self._folder / "stderr"

    def ask(self, request: Any) -> Any:
        """Its answer.

        Raises:
            PeerError: it has ended, or does not answer in time.
        """
        self.tell(request)
        return self.answer()

    def tell(self, request: Any) -> None:
        """Ask, and do not wait."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            raise self._ended()
        if self._stopped:
            os.killpg(self._process.pid, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self) -> Any:
        """What it says next.

        Raises:
            PeerError: it has ended, or says nothing in time.
        """
        deadline = time.monotonic() + self.answer_seconds
        while True:
            line = self._line(deadline)
            if line.startswith(ANSWER):
                break
        if self._stopped:
            os.killpg(self._process.pid, signal.SIGSTOP)
        return json.loads(line.removeprefix(ANSWER))

    def _line(self, deadline: float) -> str:
        assert self._process.stdout is not None
        while b"\n" not in self._said:
            patience = max(deadline - time.monotonic(), 0)
            if not select.select([self._process.stdout], [], [], patience)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)  # or it answers the next request late
                raise PeerError(f"{self.name} said nothing for {self.answer_seconds:g} s")
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            if not more:
                raise self._ended()
            self._said += more
        line, _, self._said = self._said.partition(b"\n")
        return line.decode(errors="replace")

    def _ended(self) -> PeerError:
        said = self._complaints.read_text(errors="replace").strip().splitlines()
        return PeerError(f"{self.name} has ended: {said[-1][:200] if said else 'it said no why'}")

    def _wait_for_others(self) -> None:
        """Leave those that it has started time to tidy up, as multiprocessing's trackers do."""
        deadline = time.monotonic() + TIDY_SECONDS
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.01)

    def close(self) -> None:
        """End its input, and with it the program; kill what does not end in time. Idempotent."""
        if self._keeper.poll() is not None:
            return
        assert self._process.stdin and self._process.stdout and self._keeper.stdin
        if self._stopped and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._wait_for_others()
        self._keeper.stdin.close()
        self._keeper.wait()
