"""Boards that other processes look at: published waits, stacks, which boards are found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from server.inspection.diagnosis import WaitNode, stacks_of
from server.inspection.snapshot import BoardSnapshot, Program, of_process, programs, scan
from shm_broadcast import Board, Deadline, GroupTimeoutError, MessageQueue, layout
from shm_broadcast.state import stacks
from shm_broadcast.state.stacks import (
    StackFile,
    read_stacks,
    write_stacks_when_asked,
)
from shm_broadcast.state.status import (
    MAX_GROUPS,
    MAX_NAMED,
    MAX_WAITS,
    PLACE_BYTES,
    PublishedStatus,
    StatusPublisher,
    Wait,
    read_status,
)
from tests.commands import run_code, waiting
from tests.forked import in_a_child
from tests.patience import PATIENCE_SECONDS, until
from tests.shm_broadcast.members import status_of
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from collections.abc import Iterator


def program_of(pid: int) -> Program:
    seen = scan()
    (found,) = of_process(pid, seen, programs(seen))
    return found


def boards_here(of: str) -> list[BoardSnapshot]:
    """The boards ``of`` this test that this process holds: others may not be collected yet."""
    seen = scan()
    found = of_process(os.getpid(), seen, programs(seen))
    return [board for each in found for board in each.boards if board.name.startswith(of)]


def names_here(of: str = "one that is") -> list[str]:
    return [board.name for board in boards_here(of)]


# --- what a board publishes --------------------------------------------------------


def test_a_wait_is_published_while_it_lasts() -> None:
    """Of as many threads as have room."""
    with Board.create(3, 0, "tp") as board:
        ended = threading.Event()
        threads = [
            Running(lambda: board.wait(ended.is_set, Deadline.after(60), "verb", lambda: (0, 2, 1)))
            for _ in range(MAX_WAITS + 2)
        ]
        until(lambda: len(status_of(board, 0).waits) == MAX_WAITS)
        for wait in status_of(board, 0).waits:
            assert (wait.operation, wait.members, wait.count) == ("verb", (2, 1), 2)
            assert 0 < wait.seconds < 60
        ended.set()
        board.notify_self()
        for each in threads:
            each.result()
        assert status_of(board, 0).waits == ()


def test_a_wait_that_fails_is_taken_back() -> None:
    with Board.create(2, 0) as board:
        seen: list[tuple[Wait, ...]] = []

        def never() -> bool:
            seen.append(status_of(board, 0).waits)
            return False

        with pytest.raises(GroupTimeoutError):
            board.wait(never, Deadline.after(1), "verb", lambda: (1,))
        assert any(seen)
        assert status_of(board, 0).waits == ()


def test_a_wait_that_is_interrupted_while_it_is_published_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say = StatusPublisher.publish_wait

    def interrupted(*args: Any) -> None:
        say(*args)
        raise KeyboardInterrupt

    with Board.create(2, 0) as board:
        monkeypatch.setattr(StatusPublisher, "publish_wait", interrupted)
        for _ in range(MAX_WAITS + 1):
            with pytest.raises(KeyboardInterrupt):
                board.wait(bool, Deadline.after(60), "verb", lambda: (1,))
            assert status_of(board, 0).waits == ()


def test_a_wait_outside_of_the_board_is_shown() -> None:
    with Board.create(4, 1) as board, suppress(KeyboardInterrupt):
        with board.published_wait("the start") as show:
            assert status_of(board, 1).waits == ()
            for late in ((0, 1, 3), (3,), (1,), (0,)):
                show(late)
                seen = [each.members for each in status_of(board, 1).waits]
                assert seen == [each for each in [tuple({*late} - {1})] if each]
            raise KeyboardInterrupt
        assert status_of(board, 1).waits == ()
    with Board.create(2, None) as onlooker, onlooker.published_wait("the start") as show:
        show([0])


def test_a_wait_for_many_names_the_first() -> None:
    with Board.create(100, 0) as board:
        assert board._published is not None
        for members in (range(1, 100), [7]):
            board._published.publish_wait("a wait", "verb", 1, members)
            (wait,) = status_of(board, 0).waits
            assert (wait.members, wait.count) == (tuple(members[:MAX_NAMED]), len(members))


def test_a_successor_publishes_nothing_of_its_predecessor() -> None:
    with Board.create(2, 0) as board:
        pid = os.fork()
        if pid == 0:
            other = Board.attach(board.handle(), 1)
            other.publish_place("tp", 1)
            assert other._published is not None
            other._published.publish_wait("a wait", "verb", 1, [0])
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert status_of(board, 1).waits
        successor = Board.attach(board.handle(), 1)
        assert status_of(board, 1).waits == ()
        assert status_of(board, 1).place == ""
        successor.close()


def test_a_status_that_is_being_written_is_not_read() -> None:
    with Board.create(1, 0) as board:
        board.publish_place("tp", 3)
        slot = layout.status_slot(0, 1)
        written = bytes(board.memory[slot : slot + layout.STATUS_STRIDE])
        board.publish_place("pp", 1)
        half = bytes(board.memory[slot : slot + 12]) + written[12:]
        reads = iter([half, half, written])
        assert read_status(lambda _, __: next(reads), 0, 1).place == "tp 3"
        assert read_status(lambda _, __: half, 0, 1) == PublishedStatus()


def test_a_wait_that_begins_while_another_ends_is_shown() -> None:
    with Board.create(2, 0) as board:
        words = Mock(wraps=board.words)
        published = StatusPublisher(Mock(memory=board.memory, words=words), 0, 2, None)

        def swap_later(*given: int) -> bool:
            published.publish_wait("second", "recv", 1, [1])
            return bool(board.words.compare_and_swap32(*given))

        words.compare_and_swap32 = swap_later
        published.publish_wait("first", "send", 1, [1])
        published.publish_wait("first", "send", 1, ())
        assert [each.operation for each in status_of(board, 0).waits] == ["recv"]


def test_the_longest_status_has_room() -> None:
    with Board.create(4096, 4095) as board, Board.create(1, 0) as other:
        published = board._published
        assert published is not None
        board.publish_place("\N{SNOWMAN}" * 16, 4095)
        for number in range(MAX_GROUPS):
            name = f"{number:02}" + "\N{SNOWMAN}" * 99
            published.publish_group(name, 4095, 4096, -(1 << 31) + number, 1)
        for number in range(MAX_WAITS + 1):
            members = range(4000, 4096)
            published.publish_wait(number, "\N{SNOWMAN}" * 99, 1 << 62, members)
        status = status_of(board, 4095)
        assert (len(status.groups), len(status.waits)) == (MAX_GROUPS, MAX_WAITS)
        for axis, coordinate in (("tp", 3), ("tp", 3), ("g" * PLACE_BYTES, 1), ("pp", 1)):
            other.publish_place(axis, coordinate)
        assert status_of(other, 0).place == "tp 3, pp 1"


# --- stacks ----------------------------------------------------------------------------------


def test_a_forked_member_has_a_file_of_its_own() -> None:
    ours = write_stacks_when_asked()
    assert ours is not None
    pid = os.fork()
    if pid == 0:
        theirs = write_stacks_when_asked()
        assert theirs is not None
        os._exit(int(os.stat(theirs).st_ino == os.stat(ours).st_ino))  # noqa: PTH116
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_program_keeps_the_signal_that_it_uses_itself() -> None:
    code = (
        "import signal; from shm_broadcast import Board\n"
        "signal.signal(signal.SIGRTMIN + 10, lambda *_: print('mine'))\n"
        "with Board.create(1, 0): signal.raise_signal(signal.SIGRTMIN + 10)\n"
        "from shm_broadcast.state.stacks import write_stacks_when_asked as asked; print(asked())"
    )
    done = run_code(code)
    assert done.stdout.split() == ["mine", "None"]


def test_a_busy_process_writes_its_stack_again_and_again() -> None:
    code = (
        "import threading; from shm_broadcast import Board\n"
        "def deep(n): return n and deep(n - 1) + len([exec('x = 1', {}) for _ in range(3)])\n"
        "def busy():\n"
        "  while True:\n"
        "    for n in (1, 50, 400, 5): deep(n)\n"
        "board = Board.create(1, 0, 'busy')\n"
        "for _ in range(3): threading.Thread(target=busy, daemon=True).start()\n"
        "print('made', flush=True); busy()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        try:
            party = WaitNode("rank 0", [program_of(process.pid).boards[0].members[0]])
            for _ in range(50):
                assert stacks_of([party], Deadline.after(30))["rank 0"].startswith("Stack")
                assert process.poll() is None
        finally:
            process.kill()


def test_a_stack_is_whole_when_its_process_has_run_and_written_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = [7, 7, 7, 400_007, 2_000_007, 2_000_007, 3_500_007]
    file = StackFile()

    def ran_for(pid: int | None) -> int:
        assert pid == 4242
        now = ran.pop(0)
        if now == 400_007:
            os.write(file.fd, b" the second")
        return now

    monkeypatch.setattr(stacks, "_ran_for", ran_for)
    found = read_stacks(
        *({0: file}, {0: 4242}),
        lambda _: bool(os.write(file.fd, b"The first half,")),
        Deadline.after(PATIENCE_SECONDS),
    )
    assert found == {0: "The first half, the second"}
    assert ran == []
    file.close()


def test_a_process_that_does_not_catch_the_signal_does_not_get_it() -> None:
    code = (
        "import signal; from shm_broadcast import Board\n"
        "board = Board.create(1, 0, 'deaf')\n"
        "signal.signal(signal.SIGRTMIN + 10, signal.SIG_DFL)\n"
        "print('made', flush=True); input(); board.close()"
    )
    with waiting(code) as deaf:
        party = WaitNode("rank 0", [program_of(deaf).boards[0].members[0]])
        told = stacks_of([party], Deadline.after(30))
        assert told == {"rank 0": "it catches no signal for that"}


def test_another_file_is_not_taken_for_stacks(tmp_path: os.PathLike[str]) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(FileNotFoundError, match="not for stacks"):
        StackFile.of(os.getpid(), fd)
    os.close(fd)


# --- what is found ---------------------------------------------------------------------------


def test_a_programs_parent_leads_to_it() -> None:
    code = (
        "import subprocess, sys\n"
        "worker = 'from shm_broadcast import Board\\n'\n"
        'worker += \'with Board.create(1, 0, "below"): print("made", flush=True); input()\'\n'
        "subprocess.run([sys.executable, '-c', worker])"
    )
    with waiting(code) as launcher:
        found = program_of(launcher)
        assert [board.name for board in found.boards] == ["below"]
        assert launcher not in found.pids


def test_hundreds_of_boards_are_found() -> None:
    boards = [Board.create(2, 0, f"group {number}") for number in range(200)]
    names = {*names_here("group ")}
    for board in boards:
        board.close()
    assert names >= {f"group {number}" for number in range(200)}


def test_a_process_that_was_killed_is_lost() -> None:
    with Board.create(2, 0, "a killed one") as board:
        pid = os.fork()
        if pid == 0:
            Board.attach(board.handle(), 1).record_begin("verb")
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        (seen,) = boards_here("a killed one")
        gone = seen.members[1]
        assert (gone.status.state, gone.status.operation) == ("lost", "verb")
        assert gone.condition == ""
        os.waitpid(pid, 0)
        (seen,) = boards_here("a killed one")
        assert seen.members[1].status.state == "lost"


@contextmanager
def damaged(*words: tuple[int, int]) -> Iterator[None]:
    with Board.create(2, 0, "one that is well"), Board.create(2, 0, "one that is not") as board:
        for offset, value in words:
            board.words.store32(offset, value)
        yield
        for offset, _ in words:
            board.words.store32(offset, 0)


@pytest.mark.parametrize(
    "words",
    [
        [(layout.SEGMENT_MAGIC, 0)],
        [(layout.SEGMENT_VERSION, 99)],
        [(layout.SEGMENT_SIZE, 8)],
        [(layout.BOARD_MEMBERS, 0)],
        [(layout.BOARD_MEMBERS, 1 << 31)],
        [(layout.BOARD_ABORT, 7)],
        [(layout.BOARD_ABORT, 1), (layout.failure_slot(0, 2) + layout.FAILURE_CULPRIT, 9)],
        [(layout.member_slot(1) + layout.MEMBER_STATE, 1 << 20)],
    ],
)
def test_a_board_that_is_not_finished_is_left_out(words: list[tuple[int, int]]) -> None:
    with damaged(*words):
        assert names_here() == ["one that is well"]


def test_what_others_write_into_our_places_is_only_text() -> None:
    with Board.create(1, 0, "a text\x1b[2J\x00rest") as board:
        board.record_begin("\xff" * 30)
        (seen,) = boards_here("a text")
        assert seen.name == "a text\x1b[2J"


@pytest.mark.parametrize(
    "field", [layout.RING_WRITER, layout.reader_line(0) + layout.READER_MEMBER]
)
def test_a_ring_of_strange_members_is_left_out(field: int) -> None:
    with Board.create(2, 0, "a ring") as board, MessageQueue.on_board(board, 0, [1]) as queue:
        assert queue._ring is not None
        queue._ring.words.store32(field, 5)
        (seen,) = boards_here("a ring")
        assert seen.queues == ()


def test_a_memfd_that_is_no_segment_is_left_out() -> None:
    fd = os.memfd_create(layout.BOARD_LABEL, os.MFD_CLOEXEC)
    with Board.create(1, 0, "one that is well"):
        for content in (b"", b"\xff" * 4096):
            os.pwrite(fd, content, 0)
            assert names_here() == ["one that is well"]
    os.close(fd)


@pytest.mark.parametrize("size", [0, 4096])
def test_a_descriptor_that_is_another_file_by_now_is_left_out(size: int) -> None:
    with Board.create(1, 0, "gone") as board, Board.create(1, 0, "there"):
        nonce = board._segment.nonce
        seen = scan()
        segment = seen.processes[os.getpid()].held[nonce]
        numbers = [int(path.rpartition("/")[2]) for path in segment.paths]
        kept = os.dup(numbers[0])
        other = os.memfd_create("another", os.MFD_CLOEXEC)
        os.truncate(other, size)
        try:
            for number in numbers:
                os.dup2(other, number)
            with pytest.raises(FileNotFoundError, match="no process holds it any more"):
                segment.read(100)
            names = {each.name for found in programs(seen) for each in found.boards}
        finally:
            for number in numbers:
                os.dup2(kept, number)
            os.close(kept)
            os.close(other)
    assert "there" in names
    assert "gone" not in names


def test_a_board_that_another_descriptor_holds_is_found() -> None:
    with Board.create(1, 0, "kept") as board:
        number = board._segment.handle().fd
        kept = os.dup(number)
        seen = scan()
        try:
            os.close(number)
            names = {each.name for found in programs(seen) for each in found.boards}
        finally:
            os.dup2(kept, number)
            os.close(kept)
    assert "kept" in names


def test_processes_end_while_they_are_looked_at() -> None:
    with Board.create(1, 0, "one that is well"):
        code = "import os\nwhile True:\n  if os.fork() == 0: os._exit(0)\n  os.wait()"
        with subprocess.Popen([sys.executable, "-c", code]) as churn:
            try:
                for _ in range(30):
                    assert names_here() == ["one that is well"]
            finally:
                churn.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_sees_nothing() -> None:
    parent = os.getpid()

    def look() -> None:
        seen = scan()
        assert parent not in seen.processes
        assert programs(seen) == []

    with Board.create(1, 0, "our own") as board:
        assert names_here("our own") == ["our own"]
        descriptor = board._segment.handle().fd
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600
        in_a_child(look, as_nobody=True)
