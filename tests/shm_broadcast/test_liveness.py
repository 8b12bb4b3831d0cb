"""Which process it is, and whether it still runs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shm_broadcast.process import ProcessId, ProcessWatch
from tests.forked import in_a_child
from tests.patience import until
from tests.shm_broadcast.leaks import no_descriptors, open_descriptors

NOBODY = 2**22 + 1  # above the largest pid that Linux gives


def test_this_process() -> None:
    me = ProcessId.current()
    assert me.pid == os.getpid()
    assert me == ProcessId.of(os.getpid())
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 < me.start_time <= uptime * os.sysconf("SC_CLK_TCK")


def test_a_command_name_with_spaces_and_parentheses() -> None:
    me, comm = ProcessId.current(), Path("/proc/self/comm")
    name = comm.read_text()
    comm.write_text(") R 1 2 (x y")
    try:
        assert ProcessId.current() == me
    finally:
        comm.write_text(name)


def test_nobody() -> None:
    with pytest.raises(ProcessLookupError, match=str(NOBODY)):
        ProcessId.of(NOBODY)
    watch = ProcessWatch(ProcessId(NOBODY, 1))
    assert not watch.alive()
    assert watch.pidfd is None
    watch.close()


def test_a_pid_that_was_used_again_is_not_the_process() -> None:
    before = open_descriptors()
    watch = ProcessWatch(ProcessId(os.getpid(), ProcessId.current().start_time - 1))
    assert not watch.alive()
    assert watch.pidfd is None
    assert open_descriptors() == before


def test_a_pid_that_was_used_again_as_a_thread() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        assert not ProcessWatch(ProcessId(thread.native_id, 1)).alive()
    finally:
        stop.set()
        thread.join()


def test_a_process_is_alive_until_it_ends_and_a_zombie_is_not() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        watch = ProcessWatch(ProcessId.of(child.pid))
        late = ProcessId.of(child.pid)
        assert watch.alive()
        child.kill()
        until(lambda: not watch.alive())
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        assert stat.rpartition(")")[2].split()[0] == "Z"
        assert ProcessId.of(child.pid) == late
        assert not ProcessWatch(late).alive()
    finally:
        child.kill()
        child.wait()
    assert not watch.alive()
    watch.close()
    assert not ProcessWatch(late).alive()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_process_is_watched_without_a_descriptor_of_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    child = subprocess.Popen(["sleep", "60"])
    try:
        monkeypatch.setattr(os, "pidfd_open", refuse)
        watch = ProcessWatch(ProcessId.of(child.pid))
        other = ProcessWatch(ProcessId(child.pid, watch.process.start_time - 1))
        assert (watch.alive(), other.alive()) == (True, False)
        child.kill()
        until(lambda: not watch.alive())  # as a zombie
    finally:
        child.kill()
        child.wait()
    assert not watch.alive()


def test_a_process_that_cannot_be_looked_at_counts_as_running() -> None:
    in_a_child(look_without_descriptors)


def look_without_descriptors() -> None:
    me, before = ProcessId.current(), open_descriptors()
    with no_descriptors():
        watch, gone = ProcessWatch(me), ProcessWatch(ProcessId(NOBODY, 1))
        assert (watch.alive(), me.is_running()) == (True, True)
    assert (watch.alive(), gone.alive()) == (True, False)
    watch.close()
    assert not watch.alive()
    assert open_descriptors() == before


def test_close_gives_the_descriptor_back_and_is_idempotent() -> None:
    before = open_descriptors()
    watch = ProcessWatch(ProcessId.current())
    assert watch.alive()
    assert watch.pidfd is not None
    assert not os.get_inheritable(watch.pidfd)
    watch.close()
    watch.close()
    assert not watch.alive()
    assert open_descriptors() == before


def test_a_watch_that_was_forgotten_leaves_no_descriptor() -> None:
    before = open_descriptors()
    watch = ProcessWatch(ProcessId.current())
    assert open_descriptors() == before + 1
    del watch
    assert open_descriptors() == before
