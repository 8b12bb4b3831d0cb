"""What ours is measured beside, as `make bench-peers` installs it into a folder.

    venv/bin/python     an interpreter that imports vLLM
    sgl/sglang          the package of SGLang
    mpi/NAME            a prefix for each MPI: bin/mpiexec, lib
    NAME                what Python finds iceoryx2, ray or torchmonarch in

Nothing of it is imported by the benchmarks' own process: it runs in children, which are asked line
by line.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.child import FOLDER, ROOT, Child, PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


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
    *("--oversubscribe", "--allow-run-as-root"),
    *("--mca", "btl", "self,sm", "--mca", "mpi_yield_when_idle"),
)
_IN_ITS_FOLDER = {"OMPI_MCA_btl_sm_backing_directory": FOLDER}
"""It leaves its segments where they are."""
MPIS = (
    Mpi("Open MPI", "openmpi", (*_OPEN_MPI, "0"), _IN_ITS_FOLDER),
    Mpi("Open MPI, yielding", "openmpi", (*_OPEN_MPI, "1"), _IN_ITS_FOLDER, yields=True),
    Mpi("MPICH", "mpich"),
    Mpi("Intel MPI", "impi-rt", environment={"I_MPI_FABRICS": "shm"}),
)


class Peers:
    """The folder; any part of it may be missing.

    Args:
        folder: ``None`` if there is none.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).absolute()

    def _part(self, part: str) -> Path:
        """Where a part is.

        Raises:
            PeerError: it is not there.
        """
        if self._folder is None:
            raise PeerError("give --peers DIR")
        if not (self._folder / part).exists():
            raise PeerError(f"the folder of peers has no {part}")
        return self._folder / part

    def vllm(self, name: str, module: str, *arguments: str, stopped: bool = False) -> Child:
        """Run a module of the benchmarks in the interpreter that imports vLLM.

        Raises:
            PeerError: it is not there.
        """
        python = self._part("venv/bin/python")
        command = [str(python), "-m", module, *arguments]
        variables = {
            "PEERS": str(self._folder),
            "PYTHONPATH": str(ROOT),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return Child(name, command, variables, stopped=stopped)

    def package(self, name: str, module: str, *, stopped: bool = False) -> Child:
        """Run a module of the benchmarks where the package ``name`` and what it needs come first.

        Raises:
            PeerError: it is not there.
        """
        variables = {"PYTHONPATH": f"{ROOT}:{self._part(name)}"}
        command = [sys.executable, "-m", module]
        return Child(name, command, variables, stopped=stopped)

    @contextmanager
    def collectives_of_vllm(self, n: int, left_out: dict[str, str]) -> Iterator[dict[str, Child]]:
        """The ``n`` ranks of vLLM's C++, if it is there."""
        name = "vLLM's C++"
        try:
            child = self.vllm(name, "benchmarks.collective_vllm", str(n))
        except PeerError as error:
            left_out[name] = str(error)
            yield {}
            return
        with closing(child):
            yield {name: child}

    @contextmanager
    def mpis(self, n: int, left_out: dict[str, str]) -> Iterator[dict[str, Child]]:
        """Each MPI's ``n`` ranks, by its title; told to yield only where cores are few."""
        few = n > len(os.sched_getaffinity(0))
        with ExitStack() as stack:
            running = {}
            for mpi in MPIS:
                if mpi.yields and not few:
                    continue
                try:
                    child = mpi.start(self._part(f"mpi/{mpi.folder}"), n)
                except PeerError as error:
                    left_out[mpi.title] = str(error)
                else:
                    running[mpi.title] = stack.enter_context(closing(child))
            yield running
