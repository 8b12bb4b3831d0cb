"""Where the system gives less than usual: no /proc, or system calls that a container refuses."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from shm_broadcast import MessageDecodeError, PeerLostError, SharedMemoryError
from shm_broadcast.process import describe_os_error
from shm_broadcast.segment import Segment
from tests.patience import STALL_SECONDS
from tests.ranks import run_ranks
from tests.refusals import refuse
from tests.shm_broadcast.members import LIMIT, joined
from tests.unshared import run_unshared

SHARE = """
from shm_broadcast import SharedMemoryError
from shm_broadcast.segment import Segment
try:
    with Segment.create(4096, "test") as segment:
        print(Segment.attach(segment.handle()).size)
except SharedMemoryError as error:
    print(error)
"""


def shared_within(*namespace: str, mount: str = "true") -> str:
    """What comes of sharing memory in a namespace after ``mount``, a command."""
    command = f'{mount} && exec "$0" -c "$1"'
    done = run_unshared([*namespace], "sh", "-c", command, sys.executable, SHARE, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_proc_the_error_says_so() -> None:
    told = shared_within("--mount", mount="mount -t tmpfs none /proc")
    assert told.startswith("no memory can be shared: /proc is not mounted here")


def test_the_proc_of_another_pid_namespace_does_not_do() -> None:
    assert "is that of another pid namespace" in shared_within("--pid", "--fork")


def test_a_proc_that_shows_processes_only_does() -> None:
    assert shared_within("--mount", mount="mount -t proc -o subset=pid proc /proc") == "4096"


def create(_: int, __: int, name: str, number: int) -> str:
    before = len([*Path("/proc/self/fd").iterdir()])
    refuse(number, name)
    with pytest.raises(SharedMemoryError) as caught:
        Segment.create(4096, "test")
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    return str(caught.value)


@pytest.mark.parametrize("name", ["memfd_create", "fallocate"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_system_call_that_is_refused_is_named(name: str, number: int) -> None:
    (told,) = run_ranks(1, create, name, number)
    assert told == f"cannot reserve 4096 bytes: {name} is refused here: {os.strerror(number)}"


def test_an_error_without_a_number_says_its_text() -> None:
    assert describe_os_error(OSError("no route")) == "no route"
    assert describe_os_error(OSError(errno.EMFILE, "full")) == "full (RLIMIT_NOFILE, ulimit -n)"


def lose_the_writer(rank: int, n: int, folder: str, number: int) -> int | None:
    refuse(number, "pidfd_open")
    with joined(rank, n, folder, writer=1) as (_, queue):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            queue.dequeue(timeout=LIMIT)
        assert time.monotonic() - began < 1 + STALL_SECONDS
    return caught.value.rank


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOMEM])
def test_without_pidfd_open_a_peer_that_ends_is_noticed_in_time(
    number: int, tmp_path: Path
) -> None:
    assert run_ranks(2, lose_the_writer, str(tmp_path), number, may_die=[1])[0] == 1


def read_without_room(rank: int, n: int, folder: str) -> tuple[str, str] | None:
    with joined(rank, n, folder, writer=1) as (_, queue):
        if rank == 1:
            queue.enqueue(b"x" * (256 << 20), timeout=LIMIT)
            queue.enqueue("next", timeout=LIMIT)
            return None
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), hard))
        with pytest.raises(MessageDecodeError) as caught:
            queue.dequeue(timeout=LIMIT)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        return str(caught.value), queue.dequeue(timeout=LIMIT)


def test_a_reader_without_room_for_a_message_says_so_and_reads_the_next(tmp_path: Path) -> None:
    told, then = run_ranks(2, read_without_room, str(tmp_path))[0]
    assert "message 1 of rank 1: MemoryError" in told
    assert then == "next"
