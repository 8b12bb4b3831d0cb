"""`trace`: what it writes of pools and groups, dead ranks included, and what torch makes of it."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from server import WorkerLostError
from server.cli import main
from server.pool import WorkerPool
from shm_broadcast import Board
from shm_broadcast.errors import DRIVER_RANK, MemberStatus
from shm_broadcast.inspection import trace
from shm_broadcast.inspection.snapshot import MemberSnapshot
from shm_broadcast.inspection.trace import MemberHistory, chrome_trace, flight_dumps
from shm_broadcast.state.flight_recorder import OperationRecord
from shm_broadcast.state.status import Membership
from tests.commands import run_code, run_to_end, waiting
from tests.pages.blocks import block_of
from tests.patience import PATIENCE_SECONDS, until
from tests.programs import Program, run_module
from tests.server.scenes import ENTRY, playing, shown, told
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


def analysed(pid: int, folder: Path) -> str:
    """What torch's analyser says about a program."""
    shown("trace", pid, "--flight-recorder", folder)
    program = Program(run_module, "torch.distributed.flight_recorder.fr_trace", ".", str(folder))
    stdout, stderr = program.communicate()
    assert program.returncode == 0, stderr
    return stdout + stderr


def test_torch_names_the_rank_that_stays_away(tmp_path: Path) -> None:
    with playing("sleeping", 3, tmp_path) as pids:
        told(pids[0], f"Rank 1 (pid {pids[1]}) holds up others", "Rank 0", "Rank 2")
        said = analysed(pids[0], tmp_path / "dumps")
    assert sorted(each.name for each in (tmp_path / "dumps").iterdir()) == [
        "rank_0",
        "rank_1",
        "rank_2",
    ]
    _, _, documented = block_of("docs/debugging.md", "fr_trace").partition("fr_trace dumps\n")
    assert "missing ranks: {1}" in documented
    assert [line for line in documented.splitlines() if line not in said] == []


def test_torch_names_the_rank_in_another_collective(tmp_path: Path) -> None:
    with playing("divergent", 2, tmp_path) as pids:
        told(pids[0], "DivergenceError", "all_reduce SUM float32[4]", "all_gather float32[4]")
        said = analysed(pids[0], tmp_path / "dumps")
    assert "Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH" in said
    assert "'all_reduce' does not match found collective type: 'all_gather'" in said


def test_torch_names_both_of_two_receives_that_cross(tmp_path: Path) -> None:
    with playing("crossed", 2, tmp_path) as pids:
        told(pids[0], "wait for each other", "All of them receive, and none has sent.")
        said = analysed(pids[0], tmp_path / "dumps")
    assert "collective: gloo:recv 0<-1" in said
    assert "collective: gloo:recv 1<-0" in said
    assert "missing ranks: {0}" in said
    assert "missing ranks: {1}" in said


def test_torch_finds_nothing_wrong_where_nothing_is(tmp_path: Path) -> None:
    """Although each rank has forgotten other operations."""
    with playing("busy", 2, tmp_path) as pids:

        def done() -> bool:
            operations, _ = traced(pids[0], tmp_path / "trace.json")
            last = {each["pid"]: each for each in operations}
            return [last[pid]["args"].get("number") for pid in pids] == [1500] * 2 and all(
                each["args"]["outcome"] == "done" for each in last.values()
            )

        until(done)
        said = analysed(pids[0], tmp_path / "dumps")
    assert "Not all ranks" not in said
    assert "errors" not in said


# --- what is refused -------------------------------------------------------------------------


def test_something_has_to_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["trace"])
    assert left.value.code == 2
    assert "give -o FILE or --flight-recorder DIR" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "from shm_broadcast import Board; it = Board.create(1, 0); it.record_begin('load')",
            "no group whose members are all on this host",
        ),
        ("pass", "it is in no pool or group of ours"),
    ],
)
def test_where_there_is_nothing_to_dump(code: str, why: str, tmp_path: Path) -> None:
    kept = f"{code}\nprint(flush=True); input()"
    with waiting(kept) as other:
        dumps = ("--flight-recorder", tmp_path / "dumps")
        done = run_to_end(*ENTRY, "trace", str(other), *dumps, status=1)
    assert why in done.stderr
    assert list((tmp_path / "dumps").iterdir()) == []


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


def member(rank: int, *did: OperationRecord, groups: tuple[Membership, ...] = ()) -> MemberHistory:
    seen = MemberSnapshot(MemberStatus(rank, 100 + rank, "busy"), "", "running", 0, (), None)
    return MemberHistory(seen, groups, did)


def pair(rank: int, *did: OperationRecord, size: int = 2) -> MemberHistory:
    return member(rank, *did, groups=(Membership("tp", rank, size, 0),))


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


def test_a_dump_begins_where_all_remember() -> None:
    first = [past("all_reduce", n, n + 1, number=n, sequence=n) for n in range(5, 9)]
    second = [past("all_reduce", n, n + 1, number=n, sequence=n) for n in range(7, 10)]
    dumps = flight_dumps([pair(0, *first), pair(1, *second)], 1000)
    assert [each["collective_seq_id"] for each in dumps[0]["entries"]] == [7, 8]
    assert [each["collective_seq_id"] for each in dumps[1]["entries"]] == [7, 8, 9]
    assert [each["record_id"] for each in dumps[1]["entries"]] == [0, 1, 2]
    assert dumps[0]["entries"][0]["time_created_ns"] == 1007
    assert dumps[0]["pg_config"] == {"tp": {"name": "tp", "desc": "tp", "ranks": "[0, 1]"}}


def test_a_dump_forgets_an_earlier_group_of_the_name() -> None:
    did = [past("all_reduce", n, n + 1, number=n, sequence=n) for n in (1, 2, 3)]
    again = [past("barrier", 10 + n, 11 + n, number=n, sequence=9 + n) for n in (1, 2)]
    dumps = flight_dumps([pair(0, *did, *again), pair(1, *again)], 0)
    names = [[e["profiling_name"] for e in dumps[rank]["entries"]] for rank in (0, 1)]
    assert names == [["gloo:barrier"] * 2] * 2


def test_a_group_with_members_elsewhere_has_no_dump() -> None:
    did = past("all_reduce", 1, 2)
    assert flight_dumps([pair(0, did, size=3), pair(1, did, size=3)], 0) == {}


@pytest.mark.parametrize(
    ("verb", "peer", "given", "got"),
    [
        ("all_reduce", None, 4, 4),
        ("all_gather", None, 4, 8),
        ("reduce_scatter", None, 4, 2),
        ("gather", 0, 4, 8),
        ("gather", 1, 4, 0),
        ("scatter", 0, 4, 2),
        ("scatter", 1, 0, 4),
        ("all_gatherv", None, 0, 0),
    ],
)
def test_the_sizes_in_a_dump(verb: str, peer: int | None, given: int, got: int) -> None:
    dumps = flight_dumps([pair(0, past(verb, 1, 2, peer=peer)), pair(1)], 0)
    (entry,) = dumps[0]["entries"]
    assert (entry["input_sizes"], entry["output_sizes"]) == ([[given]], [[got]])
    assert entry["state"] == "completed"


def test_transfers_of_both_directions_are_told_apart() -> None:
    did = [past("send", 1, 2, peer=1), past("recv", 3, 4, peer=1, sequence=2)]
    theirs = [past("recv", 1, 2, peer=0), past("send", 3, 4, peer=0, sequence=2)]
    dumps = flight_dumps([pair(0, *did), pair(1, *theirs)], 0)
    told = [
        [(e["profiling_name"], e["p2p_seq_id"], e["process_group"]) for e in dumps[r]["entries"]]
        for r in (0, 1)
    ]
    group = ("tp 0:1", "tp 0:1")
    assert told[0] == [("gloo:send 0->1", 2, group), ("gloo:recv 0<-1", 3, group)]
    assert told[1] == [("gloo:recv 1<-0", 2, group), ("gloo:send 1->0", 3, group)]


@pytest.mark.parametrize(
    ("dtype", "elements"), [("float8_e4m3fn", 1024), ("bfloat16", 512), ("bool", 1024)]
)
def test_elements_are_counted_by_the_bits_that_a_dtype_is_named_for(
    dtype: str, elements: int
) -> None:
    past: Any = SimpleNamespace(dtype=dtype, size=1024, verb="all_reduce")
    assert trace._counts(past, 2, root=False) == (elements, elements)
