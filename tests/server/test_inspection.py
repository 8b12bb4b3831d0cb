"""The commands `status`, `explain` and `trace`, and the command line itself."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from server import WorkerLostError
from server.cli import COMMANDS, main
from server.config import PoolConfig
from server.hosts.link import facts_here
from server.launchers import boot
from server.pool import WorkerPool
from shm_broadcast import DRIVER_RANK, Board, MessageQueue
from shm_broadcast.state import stacks
from tests.commands import run_code, run_to_end, waiting
from tests.pages.blocks import block_of
from tests.patience import PATIENCE_SECONDS, until
from tests.server.test_explain_hangs import run_command, shown
from tests.server.workers import Gate, Worker

# --- the command line ---------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
ENTRY = [sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())"]
WITHOUT_TORCH = """
import sys
from server.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def said(*arguments: str) -> str:
    return run_code(WITHOUT_TORCH, *arguments).stdout


def test_a_deleted_folder_is_an_error_before_torch_is_loaded(tmp_path: Path) -> None:
    go = 'cd "$0" && rmdir "$0" && exec "$@"'
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}){WITHOUT_TORCH}"
    here = (sys.executable, "-c", code, "serve")
    done = run_to_end("sh", "-c", go, tmp_path, *here, status=2)
    tmp_path.mkdir()
    told = "error: the current folder was deleted: go to another one"
    assert done.stderr == f"group-coordinator serve: {told}\n"


def test_help_loads_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("--help")
    for name, each in COMMANDS.items():
        assert name in text and " ".join(each.summary.split()[:4]) in text
        with pytest.raises(SystemExit):
            main([name, "--help"])
        of_one = capsys.readouterr().out
        assert f"usage: group-coordinator {name}" in of_one
        assert len(of_one.splitlines()) > 5


def test_an_unknown_option_is_an_error_with_the_way_to_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--ports", "8000"])
    assert left.value.code == 2
    told = "unrecognized arguments: --ports 8000; see group-coordinator serve --help"
    assert capsys.readouterr().err == f"group-coordinator serve: error: {told}\n"


def test_output_that_is_closed_or_full_is_an_error_of_one_line_at_most() -> None:
    code = "import sys; from server.cli import main; sys.exit(main(['status']))"
    shell = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, code]
    done = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr == ""
    shell[2] = '"$0" -c "$1" >/dev/full'
    full = run_to_end(*shell, status=1, cwd=ROOT)
    why = "OSError: [Errno 28] No space left on device"
    assert full.stderr == f"group-coordinator status: {why}\n"


def test_the_version_is_one_everywhere_and_loads_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    setup = run_to_end(sys.executable, "-W", "ignore", "setup.py", "--version")
    built = setup.stdout.strip()
    module = run_to_end(sys.executable, "-m", "server", "--version")
    assert said("--version") == module.stdout == f"group-coordinator {built}\n"
    assert facts_here({})["group-coordinator"] == built
    for package in ("coordinator", "device_comm", "group_coordinator", "server", "shm_broadcast"):
        assert importlib.import_module(package).__version__ == built


def test_the_modules_of_a_command_are_frozen_for_the_collector() -> None:
    code = "import gc; from server.cli import main; main()\n"
    run_code(f"{code}assert gc.isenabled() and gc.get_freeze_count() > 1000", "status")


# --- `status` and `explain` ---------------------------------------------------------------------


def test_status_shows_a_pool_by_its_axes(tmp_path: Path) -> None:
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


def test_nothing_slow_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from server.cli import main\n"
        "main(['status', '--json']); main(['explain'])\n"
        f"main(['trace', '-o', {str(tmp_path / 't')!r}])\n"
        "sys.exit(str({'torch', 'numpy', 'zmq', 'asyncio'} & {*sys.modules}))"
    )
    with Board.create(1, 0, "here"):
        done = run_code(code, status=1)
    assert done.stderr.splitlines()[-1] == "set()"


def test_all_programs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
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
        assert run_command("explain") == 1
        assert capsys.readouterr().err.startswith("Which one? There are programs with pid ")


def test_a_process_that_takes_part_in_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting("print(flush=True); input()") as other:
        for command in (["status"], ["explain"], ["trace", "-o", str(tmp_path / "trace")]):
            assert run_command(*command, other) == 1
            assert capsys.readouterr().err == (
                f"pid {other}: it is in no pool or group of ours, and has started no process "
                "that is\n"
            )
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(("fork", "ranks"), [(True, ["0 tp0", "1 tp1"]), (False, ["0"])])
def test_ps_shows_which_worker_it_is(fork: bool, ranks: list[str]) -> None:
    with WorkerPool(Worker, tp=len(ranks), dp=1, config=PoolConfig(fork=fork)) as pool:
        lines = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in pool.status()]
    titles = [line.rstrip(b"\0").decode() for line in lines]
    assert titles == [f"group-coordinator worker {rank}" for rank in ranks]


@pytest.mark.parametrize("command", ["status", "explain"])
@pytest.mark.parametrize("pid", ["4194305", "-1", "0", "x"])
def test_a_wrong_pid_is_refused(command: str, pid: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, pid])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert pid in error


def watching(*options: str) -> subprocess.Popen[str]:
    command = [*ENTRY, "status", "--watch", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_watch_ends_with_its_reader_or_by_an_interrupt_in_silence() -> None:
    with Board.create(1, 0, "here"), watching(str(os.getpid()), "--json") as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        for _ in range(2):
            assert json.loads(watch.stdout.readline())["programs"]
        watch.stdout.close()
        assert watch.wait(PATIENCE_SECONDS) == -signal.SIGPIPE
        assert watch.stderr.read() == ""
    with Board.create(1, 0, "here"), watching() as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        _, error = watch.communicate(timeout=PATIENCE_SECONDS)
        assert (watch.returncode, error) == (130, "")


def test_spawned_workers_have_the_signal_of_stacks() -> None:
    assert boot.STACK_SIGNAL == stacks.STACK_SIGNAL


def test_a_queue_is_shown_with_its_slowest_reader() -> None:
    with (
        Board.create(2, 1, "pool", (0, DRIVER_RANK)) as board,
        MessageQueue.on_board(board, 1, [0]) as queue,
        MessageQueue.on_board(board, 1, [0]),
    ):
        board.publish_place("tp", 0)
        queue.enqueue(b"message")
        text = shown("status", os.getpid())
    assert "the driver -> rank 0: 1 message, 1 not read by rank 0, 64 B of 4.0 MiB used" in text
    assert "1 more queue, all read" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("  the driver  tp 0"))
    assert (row[4], row[6:8]) == (str(os.getpid()), ["enqueue", "#1"])


# --- `trace` ------------------------------------------------------------------------------------


class Reducing(Worker):
    def reduce(self, times: int) -> None:
        import torch

        for _ in range(times):
            self.groups.tp.all_reduce_(torch.ones(256))

    def stay_away(self) -> None:
        if self.groups.tp.rank_in_group == 1:
            signal.pause()
        self.reduce(1)


def traced(pid: int, file: Path) -> tuple[list[dict[str, Any]], dict[tuple[int, int], str]]:
    """The operations in the trace of a program, and the names of the tracks."""
    shown("trace", pid, "-o", file)
    events = json.loads(file.read_text())["traceEvents"]
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in events
        if each["name"] in ("process_name", "thread_name")
    }
    operations = [each for each in events if each["ph"] == "X"]
    assert len(operations) == sum("ts" in each for each in events)
    return operations, names


def assert_drawable(operations: list[dict[str, Any]]) -> None:
    """They are in order, none ends before it begins, and those of one track do not overlap."""
    starts = [each["ts"] for each in operations]
    assert starts == sorted(starts)
    assert all(each["dur"] >= 0 for each in operations)
    for track in {(each["pid"], each["tid"]) for each in operations}:
        for one, next_one in pairwise(e for e in operations if (e["pid"], e["tid"]) == track):
            # In floats of microseconds.
            assert one["ts"] + one["dur"] <= next_one["ts"] + 0.01


def test_a_trace_has_the_operations_of_a_pool(tmp_path: Path) -> None:
    with WorkerPool(Reducing, tp=2) as pool:
        pool.call("reduce", 20)
        operations, names = traced(os.getpid(), tmp_path / "trace.json")
        pids = [status.pid for status in pool.status()]
        printed = json.loads(shown("trace", os.getpid(), "-o", "-"))["traceEvents"]
    assert [e for e in operations if e["name"] == "all_reduce"] == [
        e for e in printed if e["name"] == "all_reduce"
    ]
    assert_drawable(operations)
    assert names[pids[0], 0] == "rank 0, tp 0"
    assert names[os.getpid(), 0].startswith("the driver")
    reductions: list[list[dict[str, Any]]] = []
    for pid in pids:
        mine = [e for e in operations if e["pid"] == pid and e["name"] == "all_reduce"]
        assert [each["args"]["number"] for each in mine] == [*range(1, 21)]
        assert {names[pid, each["tid"]] for each in mine} == {"tp"}
        assert {each["args"]["bytes"] for each in mine} == {1024}
        (call,) = (e for e in operations if e["pid"] == pid and e["name"] == "reduce")
        assert names[pid, call["tid"]] == "calls"
        assert call["ts"] <= mine[0]["ts"]
        assert mine[-1]["ts"] + mine[-1]["dur"] <= call["ts"] + call["dur"]
        reductions.append(mine)
    for one, other in zip(*reductions, strict=True):
        assert one["ts"] <= other["ts"] + other["dur"]
        assert other["ts"] <= one["ts"] + one["dur"]
    waiting = [e for e in operations if e["pid"] in pids and e["name"] == "dequeue, under way"]
    assert len(waiting) == 2


def test_a_trace_has_the_last_operation_of_a_killed_worker(tmp_path: Path) -> None:
    with WorkerPool(Reducing, tp=2) as pool:
        pool.call("reduce", 3)
        call = pool.submit("stay_away")
        pid = pool.status()[0].pid

        def latest() -> list[dict[str, Any]]:
            operations, _ = traced(os.getpid(), tmp_path / "before.json")
            return [e for e in operations if e["pid"] == pid and "under way" in e["name"]]

        until(lambda: any(each["name"] == "all_reduce, under way" for each in latest()))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            call.result(PATIENCE_SECONDS)
        operations, names = traced(os.getpid(), tmp_path / "after.json")
    assert_drawable(operations)
    assert names[pid, 0] == "rank 0, tp 0, ended"
    mine = [each for each in operations if each["pid"] == pid]
    assert [e["args"]["number"] for e in mine if e["name"] == "all_reduce"] == [1, 2, 3]
    (last,) = (each for each in mine if each["name"] == "all_reduce, under way")
    assert last["args"]["number"] == 4
    assert last["args"]["outcome"] == "its process ended in it"
    done = next(each for each in mine if each["name"] == "all_reduce")
    lines = block_of("docs/debugging.md", '"args": {"group": "tp"').splitlines()
    for documented, found in zip(map(json.loads, lines), (done, last), strict=True):
        assert documented.keys() == found.keys()
        same = {name: found["args"][name] for name in ("group", "bytes", "dtype", "outcome")}
        assert documented["args"].keys() == found["args"].keys()
        assert documented["args"].items() >= same.items()


def test_a_trace_needs_a_file_that_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, why in (
        ([], "the following arguments are required: -o"),
        (["-o", str(tmp_path / "no" / "file")], "no/file: not a file in an existing folder"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["trace", *given])
        assert left.value.code == 2
        assert why in capsys.readouterr().err
    with Board.create(1, 0, "here"):
        assert main(["trace", str(os.getpid()), "-o", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Is a directory" in error
