"""Peers in processes of their own: asked line by line, and gone with the benchmark."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.child import Child
from benchmarks.http_served import runs
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


@pytest.mark.parametrize("idle", ["stopped", "running"])
def test_a_killed_benchmark_leaves_no_peer(idle: str) -> None:
    command = [sys.executable, "-c", BENCHMARK, STAYING, idle]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        *pids, folder = benchmark.stdout.readline().split()
        assert all(runs(int(pid)) for pid in pids)
        assert Path(folder).is_dir()
        benchmark.kill()
    until(lambda: not any(runs(int(pid)) for pid in pids))
    until(lambda: not Path(folder).exists())


def test_an_ended_peer_leaves_no_process_and_no_file() -> None:
    with closing(Child("a peer", [sys.executable, "-c", LEAVING], {})) as child:
        _, other, folder = child.ask("who")
        assert runs(other)
    assert not runs(other)
    assert not Path(folder).exists()
    child.close()  # once more is nothing
