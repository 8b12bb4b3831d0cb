"""The commands that look at running programs: what they print, to whom, and what they refuse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from server.cli import main
from server.commands import program_text
from server.config import PoolConfig
from server.inspection.snapshot import BoardSnapshot, MemberSnapshot, Program
from server.launchers import boot
from server.pool import WorkerPool
from shm_broadcast import DRIVER_RANK, Board, MessageQueue
from shm_broadcast.errors import Failure, MemberStatus
from shm_broadcast.state import stacks
from shm_broadcast.state.status import Wait
from tests.commands import run_code, run_to_end, waiting
from tests.patience import PATIENCE_SECONDS, until
from tests.server.scenes import ENTRY, shown
from tests.server.workers import Gate, Worker


def test_a_pool_by_its_axes(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with WorkerPool(Worker, tp=2, pp=2) as pool:
        call = pool.submit("hold", gate, [2])
        until(lambda: gate.reached(2))
        text = shown("status", os.getpid())
        pids = [str(status.pid) for status in pool.status()]
        (row,) = (line for line in text.splitlines() if pids[2] in line.split())
        assert row.split()[:6] == ["rank", "2", "pp", "1,", "tp", "0"]
        assert "hold #" in row
        told = json.loads(shown("status", pids[0], "--json"))
        (seen,) = told["programs"]
        boards = [board["members"] for board in seen["program"]["boards"]]
        (members,) = (each for each in boards if str(each[0]["status"]["pid"]) == pids[0])
        assert members[4]["status"]["pid"] == os.getpid()
        places = [member["place"] for member in members]
        assert places == ["pp 0, tp 0", "pp 0, tp 1", "pp 1, tp 0", "pp 1, tp 1", "generation 1"]
        gate.open()
        call.result()


def test_nothing_slow_is_imported() -> None:
    code = (
        "import sys; from server.cli import main\n"
        "main(['status', '--json']); main(['explain'])\n"
        "sys.exit(str({'torch', 'numpy', 'zmq', 'asyncio'} & {*sys.modules}))"
    )
    done = run_code(code, status=1)
    assert done.stderr.splitlines()[-1] == "set()"


def test_all_programs_are_listed() -> None:
    code = (
        "from shm_broadcast import Board\n"
        "with Board.create(1, 0, 'there'): print('made', flush=True); input()"
    )
    with Board.create(1, 0, "here"), waiting(code) as other:
        short, whole = shown("status"), shown("status", "--all")
        for pid in (os.getpid(), other):
            assert any(line.split()[0] == str(pid) for line in short.splitlines())
            assert f"pid {pid}  " in whole
        assert "`group-coordinator status PID` shows one of them" in short
        which = run_to_end(*ENTRY, "explain", status=1)
        assert which.stderr.startswith("Which one? There are programs with pid ")


def test_a_process_that_takes_part_in_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        for command in ("status", "explain"):
            done = run_to_end(*ENTRY, command, str(other.pid), status=1)
            assert done.stderr == (
                f"pid {other.pid}: it is in no pool or group of ours, and has started no process "
                "that is\n"
            )
        other.communicate(b"\n", timeout=60)


@pytest.mark.parametrize("fork", [True, False])
def test_ps_shows_which_worker_it_is(fork: bool) -> None:
    with WorkerPool(Worker, tp=2, dp=1, config=PoolConfig(fork=fork)) as pool:
        lines = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in pool.status()]
    titles = [line.rstrip(b"\0").decode() for line in lines]
    assert titles == [f"group-coordinator worker {rank} tp{rank}" for rank in range(2)]


@pytest.mark.parametrize("command", ["status", "explain"])
@pytest.mark.parametrize("pid", ["4194305", "-1", "0", "x"])
def test_a_wrong_pid(command: str, pid: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, pid])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert pid in error


def test_watching_ends_with_its_reader() -> None:
    with (
        Board.create(1, 0, "here"),
        subprocess.Popen(
            [*ENTRY, "status", str(os.getpid()), "--watch", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as watching,
    ):
        assert watching.stdout is not None
        assert watching.stderr is not None
        for _ in range(2):
            assert json.loads(watching.stdout.readline())["programs"]
        watching.stdout.close()
        assert watching.wait(PATIENCE_SECONDS) == -signal.SIGPIPE
        assert watching.stderr.read() == ""


def test_a_watch_is_interrupted_in_silence() -> None:
    with (
        Board.create(1, 0, "here"),
        subprocess.Popen(
            [*ENTRY, "status", "--watch"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as watching,
    ):
        assert watching.stdout is not None
        watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, error = watching.communicate(timeout=PATIENCE_SECONDS)
        assert (watching.returncode, error) == (130, "")


def test_the_spawned_side_knows_the_signal() -> None:
    assert boot.STACK_SIGNAL == stacks.STACK_SIGNAL


# --- how it looks ----------------------------------------------------------------------------


def member(rank: int, *waits: int, **status: object) -> MemberSnapshot:
    told = {"pid": 100 + rank, "state": "busy", "operation": "tp all_reduce", "sequence": 7}
    return MemberSnapshot(
        MemberStatus(rank, **(told | {"age": 3.0, "waits_for": waits} | status)),
        f"tp {rank}",
        "sleeping",
        300 << 20,
        (Wait("tp all_reduce", 2.0, waits, len(waits)),) if waits else (),
        None,
    )


def program(*members: MemberSnapshot, failure: Failure | None = None) -> Program:
    return Program(
        7, "python serve.py", (BoardSnapshot("pool", members, failure, ()),), (7,), 5 << 20
    )


def test_a_narrow_terminal_loses_columns_and_no_line_is_longer() -> None:
    seen = program(member(0, 1, 2, 3, 4, 5), *(member(rank) for rank in range(1, 6)))
    wide = program_text.program(seen)
    assert "rank 1, rank 2, rank 3, rank 4 and 1 more" in wide
    for width in (120, 80, 60, 40, 20):
        text = program_text.program(seen, width)
        assert max(map(len, text.splitlines())) <= width
        assert "rank 0" in text
    assert "memory" in wide
    assert "memory" not in program_text.program(seen, 80)


def test_cores_are_shown_where_members_have_others() -> None:
    alike, bound = (
        [replace(member(rank), cores=cores) for rank, cores in enumerate(each)]
        for each in (("0-3", "0-3"), ("0-1", "2-3"))
    )
    assert "cores" not in program_text.program(program(*alike))
    told = program_text.program(program(*bound)).splitlines()
    assert [line.split()[-3] for line in told if line.startswith("  rank ")] == ["0-1", "2-3"]


def test_boards_have_numbers_where_there_are_several() -> None:
    (board,) = program(member(0)).boards
    text = program_text.program(Program(7, "", (board, board), (7,), 0))
    assert "\nboard 1, pool: 1 member\n" in text
    assert "\nboard 2, pool: 1 member\n" in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    hostile = "\x1b[2J\nall clear"
    seen = program(member(0, operation=hostile), failure=Failure(0, hostile, hostile, 0))
    for text in (program_text.program(seen), program_text.overview([seen])):
        assert "\x1b" not in text
        assert "\nall clear" not in text


def test_the_state_of_each_program_is_told_in_a_word() -> None:
    held, well = program(member(0, 1), member(1)), program(member(0), member(1))
    aborted = program(member(0), failure=Failure(0, "ValueError", "no", 0))
    lines = program_text.overview([held, well, aborted]).splitlines()
    words = ("held up", "goes on", "aborted")
    assert [word for word, line in zip(words, lines[1:], strict=True) if word in line] == [*words]


def test_services_are_told_apart_by_their_options_wherever_they_are_installed() -> None:
    command = f"/{'deep/' * 20}python3.11 /opt/bin/group-coordinator serve --model /models/one"
    seen = replace(program(member(0)), command=command)
    told = "python3.11 group-coordinator serve --model /models/one"
    assert program_text.program(seen).startswith(f"pid 7  {told}\n")
    assert program_text.overview([seen]).endswith(told)


def test_a_queue_is_told_with_its_slowest_reader() -> None:
    with (
        Board.create(2, 1, "pool", (0, DRIVER_RANK)) as board,
        MessageQueue.on_board(board, 1, [0]) as queue,
        MessageQueue.on_board(board, 1, [0]),
    ):
        queue.enqueue(b"message")
        text = shown("status", os.getpid())
    assert "the driver -> rank 0: 1 message, 1 not read by rank 0, 64 B of 4.0 MiB used" in text
    assert "1 more queue, all read" in text
