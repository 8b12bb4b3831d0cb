"""The launcher of CONTRIBUTING.md: its program, and a command that fails."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest

from server.errors import HostError
from server.hosts.place import Hosts
from server.pool import WorkerPool
from tests.commands import run_to_end
from tests.packages import ROOT
from tests.server.workers import Worker


def test_its_program_adds_up_on_two_hosts() -> None:
    done = run_to_end(
        *(sys.executable, "examples/launcher.py"),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert done.stdout == "the sum is 40 on 2 hosts\n"


def test_a_command_that_fails_is_in_the_error() -> None:
    example: Any = importlib.import_module("examples.launcher")
    launcher = example.CommandLauncher(lambda _: ["false"])
    hosts = Hosts(2, 0, "127.0.0.1", 0, b"0123456789abcdef", provisioner=launcher)
    with pytest.raises(
        HostError, match="node 1 did not connect: its process has ended with status 1"
    ):
        WorkerPool(Worker, tp=2, launcher="hosts", hosts=hosts)
