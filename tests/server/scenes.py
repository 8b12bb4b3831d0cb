"""Programs that hang, each in a way of its own: what is looked at from outside.

    with playing("crossed", 2, folder) as pids:
        ...                          # all ranks do what the scene is about, or are about to

The ranks are killed at the end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

import coordinator
from coordinator import host_store
from server.config import PoolConfig
from server.launchers import boot
from server.pool import WorkerPool
from shm_broadcast import CoordinatorError
from tests.commands import run_to_end
from tests.pages.blocks import without_numbers
from tests.patience import until
from tests.ranks import run_ranks
from tests.server.workers import Worker
from tests.shm_broadcast.members import joined
from tests.shm_broadcast.queues import Running
from tests.shm_broadcast.remote_peers import get, put
from tests.warm_forks import warm_fork_servers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from coordinator import GroupCoordinator
    from server.worker import WorkerContext

ENTRY = [sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())"]

_CLONE_VFORK = 0x4000
_PR_SET_PDEATHSIG = 1


def linger() -> None:
    """Wait for nobody until somebody ends this process."""
    while True:
        time.sleep(600)


def sleeping(tp: GroupCoordinator) -> None:
    if tp.rank == 1:
        linger()
    tp.all_reduce(torch.ones(4))


def stopped(tp: GroupCoordinator) -> None:
    if tp.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    tp.all_reduce(torch.ones(4))


def suspended(tp: GroupCoordinator) -> None:
    if tp.rank == 1:
        wait_in_the_kernel()
    tp.all_reduce(torch.ones(4))


def wait_in_the_kernel() -> None:
    """As for a disk: this process goes on when a child ends that was made as by vfork(2)."""
    libc = ctypes.PyDLL(None)  # keeps the GIL, so that the child has it
    sys.setswitchinterval(600)  # nor does the child wait for a thread to take it, having none
    clone = boot._CLONE[os.uname().machine]
    if libc.syscall(clone, _CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        linger()


def crossed(tp: GroupCoordinator) -> None:
    tp.recv((4,), torch.float32, 1 - tp.rank)


def different(tp: GroupCoordinator) -> None:
    if tp.rank == 0:
        tp.all_reduce(torch.ones(4))
    else:
        tp.recv((4,), torch.float32, 0)


def divergent(tp: GroupCoordinator) -> None:
    with suppress(CoordinatorError):
        tp.all_gather(torch.ones(4)) if tp.rank else tp.all_reduce(torch.ones(4))
    linger()


def missing(tp: GroupCoordinator) -> None:
    if tp.rank == 1:
        linger()
    tp.make_sibling_device_group(timeout=None)


def closing(tp: GroupCoordinator) -> None:
    if tp.rank == 1:
        tp.close()
    linger()


def busy(tp: GroupCoordinator) -> None:
    for _ in range(1500):
        tp.all_reduce_(torch.ones(4))
        if tp.rank == 0:
            tp.send(torch.ones(4), 1)
        else:
            tp.recv((4,), torch.float32, 0)
    linger()


GROUPS = {
    each.__name__: each
    for each in (
        *(busy, sleeping, stopped, suspended, crossed, different, divergent, missing, closing),
    )
}


def play(rank: int, n: int, folder: str, port: int, scene: str) -> None:
    if scene in ALONE:
        ALONE[scene](rank, n, folder)
        return
    store = coordinator.connect_store("127.0.0.1", port)
    with coordinator.init(tp=n, rank=rank, store=store, operation_timeout=None) as groups:
        groups.tp.barrier()
        put(folder, f"pid {rank}", os.getpid())
        GROUPS[scene](groups.tp)
        linger()


def fill(rank: int, n: int, folder: str) -> None:
    with joined(rank, n, folder) as (_, queue):
        while rank == 0:
            queue.enqueue(bytes(1000))
        while rank == 1:
            queue.dequeue()
        queue.dequeue()
        linger()


class Wordy(Worker):
    def much(self, folder: str) -> bytes:
        get(folder, "all sent")
        return bytes(1 << 20)


def replies(rank: int, n: int, folder: str) -> None:
    warm_fork_servers()
    config = PoolConfig(in_flight=8, reply_capacity=1 << 16)
    with WorkerPool(Wordy, tp=2, config=config) as pool:
        put(folder, f"pid {rank}", os.getpid())
        calls = [pool.submit("much", folder) for _ in range(8)]
        calls[0].add_done_callback(block_the_pool)
        ring = pool._driver._shared.calls._writer._ring
        until(lambda: ring.sequence == 8)
        put(folder, "all sent", True)  # so what the driver does last is to take a reply
        linger()


def block_the_pool(_: object) -> None:
    linger()


def idle(rank: int, n: int, folder: str) -> None:
    warm_fork_servers()
    with WorkerPool(Worker, tp=2) as pool:
        pool.call("echo")
        put(folder, f"pid {rank}", os.getpid())
        linger()


class Model(Worker):
    """Rank 1 loads for ever."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if self.rank == 1:
            linger()


def starting(rank: int, n: int, folder: str) -> None:
    warm_fork_servers()
    put(folder, f"pid {rank}", os.getpid())
    WorkerPool(Model, tp=2)


ALONE = {"full": fill, "replies": replies, "idle": idle, "starting": starting}


@contextmanager
def playing(scene: str, n: int, folder: Path) -> Iterator[list[int]]:
    """Run a scene; the pids of its ranks."""
    store = host_store()
    arguments: tuple[Any, ...] = (str(folder), store.port, scene)
    ranks = Running(lambda: run_ranks(n, play, *arguments, timeout=120, may_die=range(n)))
    pids = []
    try:
        pids = [get(str(folder), f"pid {rank}") for rank in range(n)]
        yield pids
    finally:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # or those killed last see that others are
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        ranks.result()


def shown(*words: object, check: bool = True) -> str:
    """What a command of ours prints."""
    return run_to_end(*ENTRY, *map(str, words), status=0 if check else None).stdout


def told(pid: int, *wanted: str, like: str = "") -> str:
    """What `explain` prints, once it holds all that is wanted.

    Args:
        pid: of the program.
        wanted: parts of it.
        like: a block of the documentation: what is said of the program are its first sentences,
            and no others, but for numbers.
    """
    sentences = without_numbers(like).strip().split("\n\n")[0]
    latest = [""]

    def look() -> bool:
        latest[0] = shown("explain", pid)
        parts = without_numbers(latest[0]).strip().split("\n\n")
        return all(each in latest[0] for each in wanted) and (not like or parts[1] == sentences)

    try:
        until(look)
    except AssertionError:
        raise AssertionError(f"{wanted} is not in, or not like {like}:\n{latest[0]}") from None
    return latest[0]
