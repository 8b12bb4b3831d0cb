"""Which process it is, whether it runs, on which cores; and children that a member forks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shm_broadcast import Board, GroupClosedError, ProcessId, ProcessWatch, process
from shm_broadcast.cpu import Core, bind_process, cores_of, listed
from shm_broadcast.process import IN_FORKED_CHILD
from tests.forked import in_a_child
from tests.patience import until
from tests.ranks import run_ranks
from tests.shm_broadcast.leaks import no_descriptors, open_descriptors

NOBODY = 2**22 + 1  # above the largest pid that Linux gives
LIMIT = 60.0


# --- identity and life -----------------------------------------------------------------------


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


def test_a_pid_that_was_used_again_is_not_the_process() -> None:
    before, stop = open_descriptors(), threading.Event()
    with pytest.raises(ProcessLookupError, match=str(NOBODY)):
        ProcessId.of(NOBODY)
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert thread.native_id is not None
    for other in (
        ProcessId(NOBODY, 1),
        ProcessId(os.getpid(), ProcessId.current().start_time - 1),
        ProcessId(thread.native_id, 1),
    ):
        watch = ProcessWatch(other)
        assert not watch.alive()
        assert watch.pidfd is None
        watch.close()
    stop.set()
    thread.join()
    assert open_descriptors() == before


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


def test_a_process_without_descriptors_takes_others_for_running() -> None:
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


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_a_watch_leaves_no_descriptor(closes: bool) -> None:
    before = open_descriptors()
    watch = ProcessWatch(ProcessId.current())
    assert watch.alive()
    assert watch.pidfd is not None
    assert not os.get_inheritable(watch.pidfd)
    assert open_descriptors() == before + 1
    if closes:
        watch.close()
        watch.close()
        assert not watch.alive()
    else:
        del watch
    assert open_descriptors() == before


# --- cores -----------------------------------------------------------------------------------


def machine(system: Path, nodes: dict[int, str], siblings: list[str]) -> Path:
    """Nodes by their CPUs, and what each core's threads are."""
    for node, cpus in nodes.items():
        folder = system / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for threads in siblings:
        for cpu in listed(threads):
            folder = system / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(threads + "\n")
    return system


@pytest.mark.parametrize(
    ("nodes", "siblings", "usable", "expected"),
    [
        pytest.param(
            {0: "0-1"}, ["0", "1"], {0, 1}, [Core(0, (0,)), Core(0, (1,))], id="two cores"
        ),
        pytest.param(
            {0: "0-1,4-5", 1: "2-3,6-7"},
            ["0,4", "1,5", "2,6", "3,7"],
            set(range(8)),
            [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))],
            id="two nodes, two threads a core",
        ),
        pytest.param(
            {0: "0,2", 1: "1,3"},
            ["0", "1", "2", "3"],
            set(range(4)),
            [Core(0, (0,)), Core(0, (2,)), Core(1, (1,)), Core(1, (3,))],
            id="numbered by turns",
        ),
        pytest.param(
            {0: "0-1,4-5", 1: "2-3,6-7"},
            ["0,4", "1,5", "2,6", "3,7"],
            {1, 2, 6},
            [Core(0, (1,)), Core(1, (2, 6))],
            id="only some may be used",
        ),
        pytest.param(
            {0: "0-1", 1: ""}, ["0", "1"], {0, 1}, [Core(0, (0,)), Core(0, (1,))], id="memory alone"
        ),
        pytest.param({}, [], {3, 5}, [Core(0, (3,)), Core(0, (5,))], id="nothing is told"),
    ],
)
def test_cores_by_node(
    tmp_path: Path,
    nodes: dict[int, str],
    siblings: list[str],
    usable: set[int],
    expected: list[Core],
) -> None:
    assert cores_of(usable, machine(tmp_path, nodes, siblings)) == tuple(expected)


def test_the_cores_here_are_those_of_this_process() -> None:
    usable = os.sched_getaffinity(0)
    assert {cpu for core in cores_of(usable) for cpu in core.cpus} == usable


def bound(rank: int, n: int) -> list[set[int]]:
    """The affinity of the threads of a process that was bound while it had two, and of a third."""
    tids, over = [], threading.Event()

    def begin() -> threading.Thread:
        started = threading.Event()

        def stay() -> None:
            tids.append(threading.get_native_id())
            started.set()
            over.wait()

        thread = threading.Thread(target=stay)
        thread.start()
        started.wait()
        return thread

    before = begin()
    bind_process({max(os.sched_getaffinity(0))})
    after = begin()
    found = [os.sched_getaffinity(tid) for tid in (0, *tids)]
    over.set()
    before.join()
    after.join()
    return found


def test_all_threads_are_bound() -> None:
    (found,) = run_ranks(1, bound)
    assert found == [{max(os.sched_getaffinity(0))}] * 3


@pytest.mark.parametrize("text", ["0-999999999", "65536", "1,0-70000"])
def test_more_cores_than_any_machine_has_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no machine has so many"):
        listed(text)


# --- forked children -------------------------------------------------------------------------


def test_a_child_is_no_member_of_its_parents_board_and_may_join_others() -> None:
    with Board.create(2) as board, Board.attach(board.handle(), 1) as other:

        def body() -> None:
            for call in (lambda: board.check("wait"), lambda: board.abort("a child's")):
                with pytest.raises(GroupClosedError, match=IN_FORKED_CHILD):
                    call()
            board.close()
            with Board.create(1) as own:
                own.check("wait")

        in_a_child(body)
        board.check("wait")
        assert [each.state for each in other.status()] == ["idle", "idle"]


def test_closed_boards_are_not_kept_for_children() -> None:
    gc.collect()
    before = len(process._fork_aware)
    for _ in range(10):
        Board.create(1).close()
    gc.collect()
    assert len(process._fork_aware) <= before


def test_a_child_forked_while_a_thread_holds_the_members_lock_closes_the_board() -> None:
    looking, forked = threading.Event(), threading.Event()

    def look() -> None:
        with board._members._lock:
            looking.set()
            forked.wait(LIMIT)

    def close() -> None:
        signal.alarm(int(LIMIT / 2))  # ends it, if it hangs
        board.member_status(1)
        board.close()

    with Board.create(2, 0) as board:
        thread = threading.Thread(target=look)
        thread.start()
        looking.wait(LIMIT)
        try:
            in_a_child(close)
        finally:
            forked.set()
            thread.join()
