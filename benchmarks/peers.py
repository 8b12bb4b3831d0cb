"""What ours is measured beside, as `make bench-peers` installs it into a folder.

    venv/bin/python     an interpreter that imports vLLM
    sgl/sglang          the package of SGLang
    mpi/NAME            a prefix for each MPI: bin/mpiexec, lib

Nothing of it is imported by the benchmarks' own interpreter, but mpi4py: it runs in children, which
are asked line by line.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
ANSWER = "samples "
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have this process be told to end when its parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A program that reads a JSON request a line, and answers each with a line of samples.

    Args:
        name: for errors.
        command: the program.
        environment: what it has besides this process's variables.
        stopped: stop its processes between two requests: some spin while they are idle, and the
            others would miss the core.
    """

    def __init__(
        self, name: str, command: list[str], environment: dict[str, str], *, stopped: bool = False
    ) -> None:
        self.name = name
        self._stopped = stopped
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def ask(self, request: Any) -> Any:
        """Its answer.

        Raises:
            RuntimeError: it has ended.
        """
        self.tell(request)
        return self.answer()

    def tell(self, request: Any) -> None:
        """Ask, and do not wait."""
        if self._stopped:
            os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What it says next."""
        for line in self._process.stdout or ():
            if line.startswith(ANSWER):
                if self._stopped:
                    os.killpg(self._process.pid, signal.SIGSTOP)
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{self.name} has ended")

    def close(self) -> None:
        """End its input, and with it the program; kill what has not ended after 20 s."""
        if self._stopped:
            os.killpg(self._process.pid, signal.SIGCONT)
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


class Mpi(NamedTuple):
    """An MPI, and how it is started on one host, without the network, by root too."""

    title: str
    folder: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    yields: bool = False

    def start(self, prefix: Path, n: int) -> Child:
        """Its ``n`` ranks."""
        command = [str(prefix / "bin/mpiexec"), "-n", str(n), *self.arguments]
        command += [sys.executable, "-m", "benchmarks.collective_mpi"]
        there = {
            "PATH": f"{prefix / 'bin'}:{os.environ.get('PATH', '')}",
            "LD_LIBRARY_PATH": str(prefix / "lib"),
            "OPAL_PREFIX": str(prefix),
        }
        return Child(self.title, command, {**there, **self.environment})


_OPEN_MPI = (
    *("--oversubscribe", "--allow-run-as-root", "--bind-to", "none"),
    *("--mca", "btl", "self,sm", "--mca", "mpi_yield_when_idle"),
)
MPIS = (
    Mpi("Open MPI", "openmpi", (*_OPEN_MPI, "0")),
    Mpi("Open MPI, yielding", "openmpi", (*_OPEN_MPI, "1"), yields=True),
    Mpi("MPICH", "mpich"),
    Mpi("Intel MPI", "impi-rt", environment={"I_MPI_FABRICS": "shm", "I_MPI_PIN": "0"}),
)


class Peers:
    """The folder; any part of it may be missing.

    Args:
        folder: ``None`` if there is none.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).absolute()

    def why_no_vllm(self) -> str:
        """What is missing for vLLM; empty if nothing is."""
        if self._folder is None:
            return "give --peers DIR"
        python = self._folder / "venv/bin/python"
        return "" if python.exists() else f"{python} does not exist"

    def vllm(self, name: str, module: str, *arguments: str, stopped: bool = False) -> Child:
        """Run a module of the benchmarks in the interpreter that imports vLLM."""
        assert self._folder is not None
        command = [str(self._folder / "venv/bin/python"), "-m", module, *arguments]
        variables = {
            "PEERS": str(self._folder),
            "PYTHONPATH": f"{ROOT}:{self._folder / 'vllm'}",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return Child(name, command, variables, stopped=stopped)

    @contextmanager
    def collectives_of_vllm(self, n: int, left_out: dict[str, str]) -> Iterator[dict[str, Child]]:
        """The ``n`` ranks of vLLM's C++, if it is there."""
        name, missing = "vLLM's C++", self.why_no_vllm()
        if missing:
            left_out[name] = missing
            yield {}
            return
        with closing(self.vllm(name, "benchmarks.collective_vllm", str(n))) as child:
            yield {name: child}

    @contextmanager
    def mpis(self, n: int, left_out: dict[str, str]) -> Iterator[dict[str, Child]]:
        """Each MPI's ``n`` ranks, by its title; told to yield only where cores are few."""
        few = n > len(os.sched_getaffinity(0))
        with ExitStack() as stack:
            running = {}
            for mpi in MPIS:
                prefix = self._folder and self._folder / "mpi" / mpi.folder
                if mpi.yields and not few:
                    continue
                if prefix is None or not prefix.is_dir():
                    left_out[mpi.title] = "give --peers DIR" if prefix is None else f"no {prefix}"
                    continue
                running[mpi.title] = stack.enter_context(closing(mpi.start(prefix, n)))
            yield running
