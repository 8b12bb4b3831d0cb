"""The shared memory of a pool: how much, and none of it in /dev/shm."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.memory import shared_bytes
from server.pool import WorkerPool
from tests.server.workers import Worker
from tests.unshared import run_unshared

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def test_all_groups_of_a_pool_of_four_share_at_most_64_mib() -> None:
    gc.collect()  # memory that earlier tests' pools had mapped
    with WorkerPool(Worker, tp=2, pp=2) as pool:
        pool.collective_rpc("total", args=(1.0,))
        workers = [status.pid for status in pool.status()]
        shared = shared_bytes([os.getpid(), *workers])
        assert 0 < shared <= 64 * MIB


LARGE_CALLS = """
import sys, torch
from server.pool import WorkerPool
from tests.server.workers import Worker

if __name__ == "__main__":
    with WorkerPool(Worker, tp=2, pp=2) as pool:
        x = torch.arange(25 << 20, dtype=torch.int32)
        for reply in pool.collective_rpc("echo", args=(x,)):
            assert torch.equal(reply, x)
        assert pool.collective_rpc("total", args=(1.0,)) == [4.0] * 4
    print("served")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small /dev/shm")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is missing")
def test_a_pool_works_beside_a_full_dev_shm(tmp_path: Path) -> None:
    """A container's /dev/shm of 64 MiB, and not a byte of it free."""
    script = tmp_path / "serve_large_calls.py"
    script.write_text(LARGE_CALLS)
    commands = (
        "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
        "head -c 64M /dev/zero > /dev/shm/full && "
        'exec "$0" "$1"'
    )
    ended = run_unshared(
        ["--mount"],
        *("sh", "-c", commands, sys.executable, str(script)),
        timeout=120,
        OMP_NUM_THREADS="1",
    )
    assert (ended.stdout, ended.stderr) == ("served\n", "")
