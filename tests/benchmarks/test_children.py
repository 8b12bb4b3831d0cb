"""Peers in processes of their own: asked line by line, and gone with the benchmark."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from benchmarks.child import FOLDER, Child, PeerError
from benchmarks.harness import Figure, Report
from benchmarks.http_served import runs
from benchmarks.remote import Remote
from tests.patience import until

BENCHMARK = """
import sys, time
from benchmarks.child import Child
stopped = sys.argv[2] == "stopped"
child = Child("a peer", [sys.executable, "-c", sys.argv[1]], {}, stopped=stopped)
print(*child.ask("who"), flush=True)
time.sleep(3600)
"""

LEAVING = """
import json, os, subprocess, sys, tempfile
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
sys.stdin.readline()
print("samples", json.dumps([os.getpid(), other.pid, tempfile.gettempdir()]), flush=True)
"""

STAYING = f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{LEAVING}
time.sleep(3600)
"""


def echoes(name: str) -> Remote:
    command = [sys.executable, "-m", "tests.benchmarks.echoes"]
    remote = Remote(name, Child(name, command, {}), 2)
    remote.wait_started()
    return remote


@pytest.mark.parametrize("idle", ["stopped", "running"])
def test_whatever_kills_the_benchmark_its_peer_goes_too(idle: str) -> None:
    command = [sys.executable, "-c", BENCHMARK, STAYING, idle]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        *pids, folder = benchmark.stdout.readline().split()
        assert all(runs(int(pid)) for pid in pids)
        assert Path(folder).is_dir()
        benchmark.kill()
    until(lambda: not any(runs(int(pid)) for pid in pids))
    until(lambda: not Path(folder).exists())


def test_what_a_peer_leaves_goes_with_it() -> None:
    with closing(Child("a peer", [sys.executable, "-c", LEAVING], {})) as child:
        _, other, folder = child.ask("who")
        assert runs(other)
    assert not runs(other)
    assert not Path(folder).exists()
    child.close()  # once more is nothing


def test_what_a_peer_shares_where_its_variables_say_goes_with_it() -> None:
    """As Open MPI's segments, which it leaves."""
    shares = (
        "import os, pathlib, sys; file = pathlib.Path(os.environ['SHARED'], 'segment')\n"
        "file.touch(); sys.stdin.readline(); print('samples', f'[\"{file}\"]', flush=True)\n"
    )
    with closing(Child("a peer", [sys.executable, "-c", shares], {"SHARED": FOLDER})) as child:
        segment = Path(*child.ask("where"))
        assert segment.exists()
        assert segment.is_relative_to("/dev/shm")
    assert not segment.exists()


def test_what_a_peer_has_shared_is_tidied_up_behind_it() -> None:
    shares = (
        "import sys; from multiprocessing.shared_memory import SharedMemory\n"
        "shared = SharedMemory(create=True, size=64)\n"
        "sys.stdin.readline(); print('samples', f'[\"{shared.name}\"]', flush=True)\n"
    )
    with closing(Child("a peer", [sys.executable, "-c", shares], {})) as child:
        (name,) = child.ask("what")
        assert Path("/dev/shm", name).exists()
    assert not Path("/dev/shm", name).exists()


def test_a_system_in_a_child_works_as_one_here_and_rests_in_between() -> None:
    remote = echoes("echoes")
    with closing(remote.child):
        assert len(remote.ask("echo", "dict", 5)) == 5
        assert len(remote.ask("wake", None, "any", 0.01, 3)) == 3


def test_why_a_peer_has_ended_is_told_at_every_question() -> None:
    remote = echoes("fails")
    with closing(remote.child):
        for _ in range(2):
            with pytest.raises(PeerError, match="fails has ended: LookupError: no such thing"):
                remote.ask("echo", "dict", 5)


def test_a_peer_that_hangs_is_ended() -> None:
    remote = echoes("hangs")
    remote.child.answer_seconds = 2.0
    with closing(remote.child):
        with pytest.raises(PeerError, match="hangs said nothing for 2 s"):
            remote.ask("echo", "dict", 5)
        until(lambda: _ended(remote))


def _ended(remote: Remote) -> bool:
    try:
        remote.ask("echo", "dict", 5)
    except PeerError as error:
        return "hangs has ended" in str(error)
    return False


def test_a_peer_that_fails_is_left_out_of_its_figure_and_ours_is_not() -> None:
    report = Report({})

    def fails() -> list[float]:
        raise PeerError("it has ended")

    report.measure(Figure("echo", "1 reader", {"ours": lambda: [1.0, 2.0], "theirs": fails}))
    assert [(row.system, row.median) for row in report.rows] == [("ours", 1.5e6)]
    assert report.left_out == {"theirs, echo 1 reader": "it has ended"}
    with pytest.raises(ZeroDivisionError):
        report.measure(Figure("echo", "1 reader", {"ours": lambda: [1 / 0]}))


def test_who_takes_long_has_fewer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.harness.time.monotonic", lambda: clock[0])
    asked = []

    def taking(name: str, seconds: float) -> list[float]:
        clock[0] += seconds
        asked.append(name)
        return [seconds]

    systems = {"ours": lambda: taking("ours", 0.5), "slow": lambda: taking("slow", 9.0)}
    Report({}).measure(Figure("echo", "1 reader", systems, repeats=4, seconds=2.0))
    assert asked == ["ours", "slow", "ours", "slow", "ours", "ours"]


def test_of_one_repeat_the_spread_is_that_of_its_samples() -> None:
    report = Report({})
    report.measure(Figure("echo", "1 reader", {"ours": lambda: [1.0, 2.0, 4.0]}, repeats=1))
    assert report.rows[0].spread == 1.5


def test_what_is_known_is_written_after_each_figure(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = Report({"cores": 2}, file=str(file))
    report.measure(Figure("echo", "1 reader", {"ours": lambda: [1.0]}))
    assert '"echo"' in file.read_text()
    assert '"file"' not in file.read_text()


def test_a_figure_is_repeated_once_all_others_have_had_their_turn() -> None:
    asked = []

    def asking(name: str) -> list[float]:
        asked.append(name)
        return [1.0]

    systems = [{name: partial(asking, name)} for name in ("first", "second")]
    short = Figure("echo", "1 reader", systems[0], repeats=1)
    long = Figure("echo", "2 readers", systems[1], repeats=3, warm_up=False)
    Report({}).measure(short, long)
    assert asked == ["first", "first", "second", "second", "second"]


def test_what_was_measured_before_an_interruption_is_kept() -> None:
    report, asked = Report({}), []

    def asking() -> list[float]:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [float(len(asked))]

    figure = Figure("echo", "1 reader", {"ours": asking}, warm_up=False)
    with pytest.raises(KeyboardInterrupt):
        report.measure(figure)
    assert [row.median for row in report.rows] == [1.5e6]
