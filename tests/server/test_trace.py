"""`trace`: what it writes of pools and groups, dead ranks included."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from server import WorkerLostError
from server.cli import main
from server.inspection.snapshot import MemberSnapshot
from server.inspection.trace import MemberHistory, chrome_trace
from server.pool import WorkerPool
from shm_broadcast import Board
from shm_broadcast.errors import DRIVER_RANK, MemberStatus
from shm_broadcast.state.flight_recorder import OperationRecord
from tests.commands import run_code, run_to_end, waiting
from tests.pages.blocks import block_of
from tests.patience import PATIENCE_SECONDS, until
from tests.server.scenes import ENTRY, shown
from tests.server.workers import Worker

if TYPE_CHECKING:
    from pathlib import Path


class Reducing(Worker):
    """Has something to do in a group, or leaves the others alone in it."""

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


def test_a_trace_of_a_pool(tmp_path: Path) -> None:
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


def test_a_worker_that_was_killed_in_an_all_reduce(tmp_path: Path) -> None:
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


# --- what is refused -------------------------------------------------------------------------


def test_something_has_to_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["trace"])
    assert left.value.code == 2
    assert "the following arguments are required: -o" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["trace", "-o", str(tmp_path / "no" / "file")])
    assert left.value.code == 2
    assert "no/file: not a file in an existing folder" in capsys.readouterr().err
    with Board.create(1, 0, "here"):
        assert main(["trace", str(os.getpid()), "-o", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Is a directory" in error


def test_a_process_without_boards_has_no_trace(tmp_path: Path) -> None:
    with waiting("print(flush=True); input()") as other:
        done = run_to_end(*ENTRY, "trace", str(other), "-o", tmp_path / "trace", status=1)
    assert "it is in no pool or group of ours" in done.stderr
    assert not (tmp_path / "trace").exists()


def test_nothing_slow_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from server.cli import main\n"
        f"main(['trace', '-o', {str(tmp_path / 't')!r}])\n"
        "sys.exit(str({'torch', 'numpy', 'zmq', 'asyncio'} & {*sys.modules}))"
    )
    with Board.create(1, 0, "here"):
        done = run_code(code, status=1)
    assert done.stderr.splitlines()[-1] == "set()"


# --- how it is converted ---------------------------------------------------------------------


def past(verb: str, begin: int, end: int | None = None, **about: Any) -> OperationRecord:
    known = {"group": "tp", "outcome": "done" if end else "under way", "sequence": 1, "number": 1}
    told = known | {"size": 16, "peer": None, "dtype": "float32"} | about
    return OperationRecord(verb=verb, begin=begin, end=end, **told)


def member(rank: int, *did: OperationRecord) -> MemberHistory:
    seen = MemberSnapshot(MemberStatus(rank, 100 + rank, "busy"), "", "running", 0, (), None)
    return MemberHistory(seen, did)


def test_operations_that_overlap_get_tracks_of_their_own() -> None:
    did = [past("send", 1000, 5000), past("recv", 2000, 3000), past("send", 3000)]
    events = chrome_trace([[member(0, *did)]], 9000)["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    drawn = [(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        ("tp", "send", 1.0, 4.0),
        ("tp (2)", "recv", 2.0, 1.0),
        ("tp (2)", "send, under way", 3.0, 6.0),
    ]


@pytest.mark.parametrize("pools", [("thinker", "talker"), ("thinker",)])
def test_workers_of_several_pools_are_called_by_their_pools(pools: tuple[str, ...]) -> None:
    def of(rank: int, pool: str) -> MemberHistory:
        return replace(member(rank, past("send", 1, 2)), pool=pool)

    workers = [of(rank, pool) for rank, pool in enumerate(pools)]
    events = chrome_trace([workers, [of(DRIVER_RANK, pools[0])], [of(7, "")]], 9)["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    called = ["rank 0 of thinker", "rank 1 of talker"] if len(pools) > 1 else ["rank 0"]
    assert names == [*called, "the driver", "rank 7"]
