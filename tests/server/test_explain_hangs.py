"""`status` and `explain` name which process holds up a program that hangs."""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys
import time
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import host_store
from server.cli import main
from server.config import PoolConfig
from server.launchers import boot
from server.pool import WorkerPool
from shm_broadcast import CoordinatorError
from tests.pages.blocks import block_of, read, without_numbers
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


# --- programs that hang, each in a way of its own -----------------------------------------------


_CLONE_VFORK = 0x4000
_PR_SET_PDEATHSIG = 1


def linger() -> None:
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


GROUPS = {
    each.__name__: each
    for each in (sleeping, stopped, suspended, crossed, different, divergent, missing, closing)
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
    """Run a scene; the pids of its ranks, which are killed at the end."""
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


def run_command(*words: object) -> int:
    before = signal.getsignal(signal.SIGPIPE)
    try:
        return main([*map(str, words)])
    finally:
        signal.signal(signal.SIGPIPE, before)  # a command ends with its reader


def shown(*words: object, check: bool = True) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        status = run_command(*words)
    assert status == 0 or not check
    return printed.getvalue()


def told(pid: int, *wanted: str, like: str = "") -> str:
    """What `explain` prints, once it holds all that is wanted.

    Its first sentences are those of ``like``, a block of a page, and no others, but for numbers.
    """
    sentences = without_numbers(like).strip().split("\n\n")[0]
    latest = [""]

    def look() -> bool:
        latest[0] = shown("explain", pid, check=False)
        parts = without_numbers(latest[0]).strip().split("\n\n")
        return all(each in latest[0] for each in wanted) and (not like or parts[1] == sentences)

    try:
        until(look)
    except AssertionError:
        raise AssertionError(f"{wanted} is not in, or not like {like}:\n{latest[0]}") from None
    return latest[0]


# --- what is said of them -----------------------------------------------------------------------


LATE = "Rank {0} (pid {{{0}}}) holds up others: it waits for no other process".format
CYCLE = "Rank 0 (pid {0}) and rank 1 (pid {1}) wait for each other"
IN_KERNEL = "it waits in the kernel, for a disk or another device; last seen in tp barrier #"


def assert_status_says(pid: int, *wanted: str) -> None:
    text = shown("status", pid)
    assert all(each in text for each in wanted), text


@pytest.mark.parametrize(
    ("scene", "n", "like", "said", "explained"),
    [
        (
            *("stopped", 3, block_of("docs/debugging.md", "No stack of rank 1")),
            ["Rank 1 (pid {1}) holds up others: its process is stopped"],
            ["Rank 0", "Rank 2", "No stack of rank 1 (pid {1}): its process is stopped"],
        ),
        (
            *("suspended", 2, "", [f"Rank 1 (pid {{1}}) holds up others: {IN_KERNEL}"]),
            ["No stack of rank 1 (pid {1}): it did not answer in time."],
        ),
        (
            *("crossed", 2, block_of("docs/debugging.md", "All of them receive"), [CYCLE]),
            [
                "  Rank 1 (pid {1}) waits for rank 0 in tp recv #",
                "All of them receive, and none has sent.",
            ],
        ),
        (
            *("different", 2, block_of("docs/debugging.md", "Their operations differ")),
            [CYCLE, "Their operations differ; the first ones that do: tp all_reduce #"],
            ["in different"],
        ),
        (
            "replies",
            1,
            block_of("docs/debugging.md", "The queue from rank 0, of 64 KiB, is 99 % full"),
            ["The driver (pid {0}) holds up others: it waits for no other process"],
            ["in replies", "Rank 0", "Rank 1", "waits for the driver in enqueue #"],
        ),
        (
            *("idle", 1, block_of("docs/debugging.md", "Readers wait for messages")),
            ["The driver (pid {0}) sends nothing: it waits for no other process"],
            ["Rank 0", "Rank 1", "in linger", "This is a hang only if one is due:"],
        ),
        (
            *("starting", 1, block_of("docs/debugging.md", "in the start of the pool")),
            ["it waits for no other process; last seen in Model.__init__ #", "the start of the "],
            [
                "  The driver (pid {0}) waits for rank 1 in the start of the pool, ",
                *("Rank 1 (pid ", "in linger", "in __init__"),
            ],
        ),
        (
            *("missing", 3, block_of("docs/debugging.md", "in set-up of tp.")),
            [LATE(1), "set-up of tp.sibling"],
            ["in missing", "  Rank 2 (pid {2}) waits for rank 1 in set-up of tp.sibling, for "],
        ),
        ("closing", 3, "", [block_of("docs/debugging.md", "has closed tp").strip()], []),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_a_hang_is_explained(
    scene: str, n: int, like: str, said: list[str], explained: list[str], tmp_path: Path
) -> None:
    with playing(scene, n, tmp_path) as pids:
        wanted = [each.format(*pids) for each in said]
        text = told(pids[0], *wanted, *(each.format(*pids) for each in explained), like=like)
        assert text.count("in crossed") == (2 if scene == "crossed" else 0)
        assert_status_says(pids[-1], *wanted)
        assert scene != "idle" or "holds up" not in shown("status", pids[0])


def test_a_rank_that_sleeps_is_explained(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "The stack of rank 1 (pid 22264)")
    with playing("sleeping", 3, tmp_path) as pids:
        late = LATE(1).format(*pids)
        text = told(pids[0], late, "Rank 0", "Rank 2", "in linger", like=like)
        assert f"  Rank 0 (pid {pids[0]}) waits for rank 1 in tp all_reduce #" in text
        assert f"The stack of rank 1 (pid {pids[1]}), the latest call first:" in text
        assert "in sleeping" in text
        assert_status_says(pids[2], late, "computing", "waiting", "tp all_reduce #", "tp 1")
        table = block_of("docs/debugging.md", "3 processes, 1.5 MiB shared").splitlines()[3:]
        assert without_numbers("\n".join(table)) in without_numbers(shown("status", pids[0]))
        (seen,) = json.loads(shown("status", pids[0], "--json"))["programs"]
        assert seen["held_up"]
        assert seen["sentences"][0].startswith(late)


def test_a_full_queue_is_explained(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "The queue from rank 0, of 64 KiB, is 97 % full")
    with playing("full", 3, tmp_path) as pids:
        late = LATE(2).format(*pids)
        text = told(pids[0], late, "in linger", " % full: rank 2 has ", like=like)
        assert f"  Rank 0 (pid {pids[0]}) waits for rank 2 in enqueue #" in text
        assert_status_says(pids[1], late, " not read by rank 2, ")
        line = without_numbers(block_of("docs/debugging.md", "60 messages, 59 not read"))
        assert line in without_numbers(shown("status", pids[0]))


def test_ranks_that_diverge_are_explained(tmp_path: Path) -> None:
    with playing("divergent", 2, tmp_path) as pids:
        text = told(pids[0], "The group was aborted: rank ", "DivergenceError: rank ")
        documented = block_of("docs/debugging.md", "The group was aborted").strip()
        said, one, other = documented.replace(" where this rank", "").split(" issued ")
        either = documented, f"{said} issued {other.rstrip('.')} where this rank issued {one}."
        assert any(without_numbers(each) in without_numbers(text) for each in either)
        assert_status_says(pids[1], "The group was aborted", "DivergenceError")


def test_the_readme_shows_what_the_page_explains() -> None:
    shown = block_of("README.md", "group-coordinator explain 4242").replace(" ...", "")
    page = without_numbers(read("docs/debugging.md"))
    command, *sentences = shown.splitlines()
    assert command == "$ group-coordinator explain 4242"
    assert [each for each in sentences if without_numbers(each) not in page] == []
