"""Ranks on CUDA devices for benchmarks: as processes, or as threads of one, on a stream each.

As processes, ranks that share a device take turns on it, some milliseconds each, unless NVIDIA's
MPS runs. As threads their kernels truly run side by side, which is what kernel timings need.

    python -m benchmarks.gpu_world [--facts]    say what is missing to run anything on a GPU, if it
                                                is; with --facts, print what the device is
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.gpu_environment import CONNECTIONS, LOADING, MPS_FOLDER, variables
from benchmarks.gpu_symmetric import (
    BLOCKS,
    MOST_ON_A_DEVICE,
    SHARED_DEVICE,
    SHOTS,
    TorchShots,
    shared_memory,
)
from device_comm import Communicator, ShmBackend, TorchBackend
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.cuda.cupy_driver import CupyDriver
from device_comm.cuda.ipc.abi import Limits
from device_comm.cuda.ipc.ipc_backend import IpcBackend
from device_comm.cuda.nccl.library import NcclUnavailableError
from device_comm.cuda.nccl.nccl_backend import NcclBackend, NcclWindow
from device_comm.cuda.symmetric_backend import SymmetricBackend
from shm_broadcast import Board, BoardHandle, CoordinatorError, Deadline

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from device_comm import Backend
    from device_comm.cuda.agree import AllGatherBytes

Body = Callable[..., Any]
WAYS = ("streams", "processes")
APART = ("NCCL", "NCCL in windows", "torch's NCCL", "torch's multimem")
"""Other systems that need a device for each rank."""
OTHERS = (*APART, *SHOTS)
WORLD_SECONDS = 8.0
"""Seconds in which the ranks of a world come to be, and go, as a rule."""
_SET_UP = 60.0
KERNEL_WAIT = 60.0
"""Seconds that a kernel waits for those of other ranks."""

_BEFORE_THE_END = 0.9
"""The part of a rank's time after which it shows where it is."""


@dataclass
class Rank:
    """One rank of a world.

    Attributes:
        rank: its number.
        n: how many there are.
        comm: kernels that reach into the peers' memory.
        stream: its own; the current one.
        swap: gives bytes to all ranks, and returns those of all: also a barrier.
        others: what else moves tensors of these ranks, by name.
        left_out: what does not, with the reason.
        turn: held while a graph is captured: one at a time in a process.
    """

    rank: int
    n: int
    comm: Communicator
    stream: torch.cuda.Stream
    swap: AllGatherBytes
    others: dict[str, Communicator] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def capture(self, call: Callable[[], object], times: int = 1) -> torch.cuda.CUDAGraph:
        """A graph of ``call``, several times over. All ranks capture the same."""
        graph = torch.cuda.CUDAGraph()
        with self.comm.graph_capture(), self.turn:
            self.stream.synchronize()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for _ in range(times):
                    call()
        return graph

    def least(self, value: int) -> int:
        """The least ``value`` of all ranks."""
        rows = self.swap(value.to_bytes(8, "little"))
        return min(int.from_bytes(row, "little") for row in rows)

    def meet(self) -> None:
        """Wait on the host until every rank is here and its stream is idle."""
        self.stream.synchronize()
        self.swap(b"")


def require_gpu() -> str:
    """What is missing to run anything on a GPU, in one line; ``""`` if nothing is."""
    if not torch.cuda.is_available():
        return "no GPU: torch sees no CUDA device"
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        return f"no CuPy: {error}"
    return ""


def device_facts() -> dict[str, object]:
    """The device, for reports."""
    properties = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver.read_text().splitlines()[0].strip() if driver.exists() else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def run_world(
    way: str,
    n: int,
    body: Body,
    *args: Any,
    seconds: float = 600.0,
    kernel_wait: float = KERNEL_WAIT,
) -> list[Any]:
    """``body(rank, *args)`` on n ranks; their results, by rank.

    Args:
        way: one of `WAYS`.
        n: how many ranks, on as many devices as there are, in turn.
        body: at the top level of its module; as the arguments and results, picklable.
        args: for it.
        seconds: for all of it. Shortly before they are over, the stacks of the ranks that have not
            ended are written to stderr.
        kernel_wait: seconds that a kernel waits for those of other ranks.

    Raises:
        RuntimeError: a rank raised, or did not end in time; with the tracebacks.
    """
    run = _run_threads if way == "streams" else _run_processes
    return run(n, body, args, Deadline.after(seconds), kernel_wait)


@contextmanager
def _showing_stacks_before(deadline: Deadline) -> Iterator[None]:
    """Write the stacks of all threads of this process if it is still inside then."""
    faulthandler.dump_traceback_later(max(deadline.remaining() * _BEFORE_THE_END, 0.1))
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# --- threads -----------------------------------------------------------------------------


class _ThreadSwap:
    def __init__(self, n: int) -> None:
        self._rows = [b""] * n
        self._barrier = threading.Barrier(n, timeout=_SET_UP)

    def of(self, rank: int) -> AllGatherBytes:
        def swap(payload: bytes) -> list[bytes]:
            self._rows[rank] = payload
            self._barrier.wait()
            rows = list(self._rows)
            self._barrier.wait()
            return rows

        return swap

    def abort(self) -> None:
        self._barrier.abort()


def _run_threads(
    n: int, body: Body, args: tuple[Any, ...], deadline: Deadline, kernel_wait: float
) -> list[Any]:
    swaps, turn = _ThreadSwap(n), threading.Lock()
    results: list[Any] = [None] * n
    failures: dict[int, str] = {}

    def work(number: int) -> None:
        try:
            swap = swaps.of(number)
            device = torch.device("cuda", number % torch.cuda.device_count())
            with ExitStack() as closing, _own_stream(device) as stream:
                driver = CupyDriver(device)
                closing.callback(driver.close)
                ipc = IpcBackend.create(driver, number, n, swap, name="bench", timeout=kernel_wait)
                comm = closing.enter_context(Communicator(ipc))
                rank = Rank(number, n, comm, stream, swap, turn=turn)
                rank.left_out = dict.fromkeys(OTHERS, "ranks are threads of one process")
                results[number] = body(rank, *args)
                rank.meet()
        except BaseException:  # noqa: BLE001 - told by the caller
            failures[number] = traceback.format_exc()
            swaps.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(n)]
    with _showing_stacks_before(deadline):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline.remaining())
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late or failures:
        raise RuntimeError(_tell(failures, late))
    return results


# --- processes ---------------------------------------------------------------------------


def _run_processes(
    n: int, body: Body, args: tuple[Any, ...], deadline: Deadline, kernel_wait: float
) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        Board.create(n, None) as board,
        variables({LOADING: "LAZY"} | _sharing(n)),
    ):
        pipes, processes = [], []
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_be_rank,
                args=(rank, n, board.handle(), folder, theirs, body, args, deadline, kernel_wait),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, deadline)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _crowd(n: int) -> int:
    """The largest number of ranks that share a device."""
    return -(-n // torch.cuda.device_count())


def _as_torch_has(n: int) -> Limits | None:
    """As many blocks as torch's kernels where ranks share a device; None: the default."""
    crowd = _crowd(n)
    if not 1 < crowd <= MOST_ON_A_DEVICE:
        return None
    return replace(Limits.for_ranks(n, ranks_on_device=crowd), max_blocks=BLOCKS)


def _sharing(n: int) -> dict[str, str]:
    return {SHARED_DEVICE: "1"} if _crowd(n) > 1 else {}


def _collect(pipes: Sequence[Connection], deadline: Deadline) -> list[Any]:
    results: list[Any] = []
    failures: dict[int, str] = {}
    late: list[int] = []
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(deadline.remaining(15.0 if failures else math.inf)):
            late.append(rank)
            continue
        try:
            done, value = pipe.recv()
        except EOFError:
            done, value = False, "the process ended without a result"
        if done:
            results.append(value)
        else:
            failures[rank] = value
    if late or failures:
        raise RuntimeError(_tell(failures, late))
    return results


def _be_rank(
    number: int,
    n: int,
    handle: BoardHandle,
    folder: str,
    pipe: Connection,
    body: Body,
    args: tuple[Any, ...],
    deadline: Deadline,
    kernel_wait: float,
) -> None:
    try:
        device = torch.device("cuda", number % torch.cuda.device_count())
        with (
            _showing_stacks_before(deadline),
            ExitStack() as closing,
            _own_stream(device) as stream,
        ):
            board = closing.enter_context(Board.attach(handle, number))
            shm = ShmBackend.create(board, range(n), _share(folder))
            over = closing.enter_context(Communicator(shm))
            swap = all_gather_bytes_over(over)
            driver = CupyDriver(device)
            closing.callback(driver.close)
            ipc = IpcBackend.create(
                driver,
                number,
                n,
                swap,
                name="bench",
                timeout=kernel_wait,
                watch=board,
                limits=_as_torch_has(n),
            )
            comm = closing.enter_context(Communicator(ipc))
            rank = Rank(number, n, comm, stream, swap)
            _add_others(rank, board, folder, closing)
            pipe.send((True, body(rank, *args)))
            rank.meet()
    except BaseException:  # noqa: BLE001 - told by the parent
        pipe.send((False, traceback.format_exc()))


def _add_others(rank: Rank, board: Board, folder: str, closing: ExitStack) -> None:
    device = rank.comm.device
    apart = _crowd(rank.n) == 1
    store = dist.FileStore(f"{folder}/store", rank.n)
    kind = "nccl" if apart else "gloo"
    dist.init_process_group(kind, store=store, rank=rank.rank, world_size=rank.n)
    closing.callback(dist.destroy_process_group)
    world = dist.distributed_c10d._get_default_group()
    if apart:
        _add(rank, closing, _needing_devices(rank, board, world))
    else:
        why = f"{rank.n} ranks share {torch.cuda.device_count()} device(s)"
        rank.left_out = dict.fromkeys(APART, why)
        if _crowd(rank.n) > MOST_ON_A_DEVICE:
            hangs = f"its kernels hang where more than {MOST_ON_A_DEVICE} ranks share a device"
            rank.left_out |= dict.fromkeys(SHOTS, hangs)
            return
    try:
        memory = shared_memory(world, device)
        shots = {
            name: partial(TorchShots, world, memory, operator) for name, operator in SHOTS.items()
        }
    except (ImportError, RuntimeError) as error:
        rank.left_out |= dict.fromkeys(SHOTS, str(error).partition("\n")[0])
    else:
        _add(rank, closing, shots)


def _add(rank: Rank, closing: ExitStack, makers: Mapping[str, Callable[[], Backend]]) -> None:
    for name, make in makers.items():
        try:
            rank.others[name] = closing.enter_context(Communicator(make()))
        except (CoordinatorError, AttributeError) as error:
            rank.left_out[name] = str(error)


def _needing_devices(
    rank: Rank, board: Board, world: dist.ProcessGroup
) -> dict[str, Callable[[], Backend]]:
    device = rank.comm.device

    def connect() -> Backend:
        return NcclBackend.create(
            rank.rank,
            rank.n,
            lambda payload: rank.swap(payload or b"")[0],
            device=device,
            name="bench",
            timeout=_SET_UP,
            watch=board,
        )

    def windows() -> Backend:
        nccl = rank.others["NCCL"].backend if "NCCL" in rank.others else None
        if not isinstance(nccl, NcclBackend):
            raise NcclUnavailableError("there is no NCCL")
        return NcclWindow(nccl, NcclWindow.allocate(nccl), Deadline.after(_SET_UP))

    makers: tuple[Callable[[], Backend], ...] = (
        connect,
        windows,
        lambda: TorchBackend(world, device, board, name="bench"),
        lambda: SymmetricBackend(
            world, SymmetricBackend.allocate(device), name="bench", watch=board
        ),
    )
    return dict(zip(APART, makers, strict=True))


def _share(folder: str) -> Callable[[bytes | None], bytes]:
    def share(payload: bytes | None) -> bytes:
        place, whole = Path(folder, "segment"), Path(folder, "whole")
        if payload is not None:
            place.write_bytes(payload)
            whole.touch()
            return payload
        end = threading.Event()
        while not whole.exists():
            end.wait(0.002)
        return place.read_bytes()

    return share


@contextmanager
def _own_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream


def _tell(failures: dict[int, str], late: Sequence[int]) -> str:
    told = [f"--- rank {rank} ---\n{text}" for rank, text in failures.items()]
    told += [f"--- rank {rank} ---\nnot done in time" for rank in late]
    return "\n".join(told)


# --- MPS ---------------------------------------------------------------------------------


@contextmanager
def mps() -> Iterator[str]:
    """Run NVIDIA's MPS for the processes that are started inside; say what became of it."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield "time-sliced: nvidia-cuda-mps-control is not installed"
        return
    connections = "8"  # the server has about 120 for all clients
    with (
        tempfile.TemporaryDirectory() as folder,
        variables({MPS_FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder, CONNECTIONS: connections}),
    ):
        try:
            started = subprocess.run(
                [control, "-d"], capture_output=True, text=True, timeout=20, check=False
            )
            works = started.returncode == 0 and _device_works()
            yield "MPS" if works else f"time-sliced: MPS does not start: {started.stderr.strip()}"
        finally:
            subprocess.run(
                [control], input="quit\n", capture_output=True, text=True, timeout=20, check=False
            )


def _device_works() -> bool:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode == 0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--facts", action="store_true", help="print what the device is")
    arguments = options.parse_args()
    missing = require_gpu()
    if missing:
        print(missing, file=sys.stderr)
        return 2
    if arguments.facts:
        print(json.dumps(device_facts()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
