"""The service over two hosts, as users start it: by options, and by torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

from benchmarks.http_served import COMMAND, ROOT, Served
from coordinator.secret import SECRET_FILE
from server.workers.minilm import MiniLMWorker, ModelFolder, SentenceTokenizer, packaged_model
from tests.coordinator.hosts import NAMES, move_to
from tests.netns import Host, two_hosts
from tests.ranks import run_ranks
from tests.server.fake_groups import run_threads
from tests.server.over_hosts import living_children, note, noted
from tests.server.served import embed

if TYPE_CHECKING:
    from collections.abc import Sequence

Hosts = tuple[Host, Host]

pytestmark = pytest.mark.namespaces

LINES = ["The harbour wakes before the sun does.", "", "short", "Ünïcödé ✓"]
FOUR = ("--tp", "2", "--pp", "2")
PATIENT = ("--silence-timeout", "7")
"""Longer than the machine stalls: these tests are not about that."""
START_SECONDS = 90.0


def by_options(rank: int, hosts: Hosts) -> tuple[Sequence[str], Sequence[str]]:
    options = ("--nnodes", "2", "--node-rank", str(rank), "--master-addr", hosts[0].address)
    return (), (*options, *PATIENT, *(("--headless",) if rank else FOUR))


def by_torchrun(rank: int, hosts: Hosts) -> tuple[Sequence[str], Sequence[str]]:
    before = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--node-rank", str(rank), "--master-addr", hosts[0].address, "--master-port", "29421"),
        "--no-python",
    )
    return before, ("--launcher", "torchrun", *PATIENT, *FOUR)


def served(rank: int, n: int, folder: str, hosts: Hosts, how: Any, end: str) -> Any:
    del n
    move_to(folder, hosts, rank)
    secret = Path(folder) / f"secret {rank}"
    secret.touch(0o600)
    secret.write_text("known to both hosts, and to no one else")
    os.environ[SECRET_FILE] = str(secret)
    before, options = how(rank, hosts)
    if rank:
        command = [*before, sys.executable, "-c", COMMAND, "serve", *options]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        note(folder, "headless", process.pid)
        errors = process.communicate(timeout=START_SECONDS)[1]
        return process.returncode, errors, living_children()
    with Served(*options, before=before) as head:
        head.wait_until_ready(START_SECONDS)
        answer = embed(head, LINES)
        vectors = np.array([each["embedding"] for each in answer.json()["data"]], np.float32)
        at = [each.get("host", "") for each in head.get("/status")[1]["workers"]]
        started = psutil.Process(head.process.pid).children() if before else []
        serving = [each.pid for each in started if "serve" in each.cmdline()]
        victim = int(noted(folder, "headless")) if end == "headless" else serving[0]
        os.kill(victim, signal.SIGTERM)
        status, errors = head.finish()
    return vectors, at, status, errors


def test_minilm_is_served_by_two_hosts_until_the_head_is_stopped(tmp_path: Path) -> None:
    folder = packaged_model()
    tokens = SentenceTokenizer(ModelFolder.open(folder)).encode(LINES, truncate=True).tokens
    (expected,) = run_threads(1, 1, lambda context: MiniLMWorker(context, folder).embed(tokens))
    with two_hosts("IPv4") as hosts:
        head, (status, errors, left) = run_ranks(
            2, served, str(tmp_path), hosts, by_torchrun, "head", timeout=2 * START_SECONDS
        )
    vectors, at, head_status, _ = head
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
    assert at == ["", "", NAMES[1], NAMES[1]]
    assert (head_status, status) == (0, 0)
    assert left == [], errors


def test_a_headless_host_that_is_stopped_ends_the_service_which_names_it(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        head, (status, _, left) = run_ranks(
            2, served, str(tmp_path), hosts, by_options, "headless", timeout=2 * START_SECONDS
        )
    vectors, at, head_status, errors = head
    assert (len(vectors), at) == (len(LINES), ["", "", NAMES[1], NAMES[1]])
    assert head_status == 1
    assert re.search(
        rf"WorkerLostError: .* host {NAMES[1]} \({hosts[1].address}\) has ended", errors
    )
    assert status == 128 + signal.SIGTERM
    assert left == []
