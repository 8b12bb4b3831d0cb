"""Ranks on two hosts that have the launcher's secret, or have none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.secret import SECRET_FILE
from shm_broadcast import CoordinatorError
from shm_broadcast.queue import rendezvous
from tests.coordinator.hosts import groups_over, move_to
from tests.netns import Host, two_hosts
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

Hosts = tuple[Host, Host]

pytestmark = pytest.mark.namespaces


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(b"copied to every host")
    return str(path)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts("IPv4") as hosts:
        yield hosts


def engine(rank: int, n: int, folder: str, hosts: Hosts, secret: str) -> tuple[bool, object, float]:
    """What an engine written for vLLM does, one rank on each host."""
    from coordinator.compat.vllm import parallel_state as ps

    if secret:
        os.environ[SECRET_FILE] = secret
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    move_to(folder, hosts, rank)
    rendezvous._attaches = lambda _: False  # as it is where hosts do not share a kernel
    ps.init_distributed_environment(n, rank, f"tcp://{hosts[0].address}:29401", 0, "gloo")
    ps.initialize_model_parallel(tensor_model_parallel_size=n)
    tp = ps.get_tp_group()
    total = tp.all_reduce(torch.ones(2))
    told = tp.broadcast_object({"step": 1, "ids": [1, 2]} if rank == 0 else None)
    has_queue = tp.mq_broadcaster is not None
    tp.barrier()
    ps.cleanup_dist_env_and_memory()
    return has_queue, told, float(total[0])


@pytest.mark.parametrize("with_secret", [True, False])
def test_the_groups_of_a_model_start_across_hosts(
    with_secret: bool, tmp_path: Path, hosts: Hosts, secret: str
) -> None:
    """They always made a queue, which had nowhere to take a secret from."""
    path = secret if with_secret else ""
    results = run_ranks(2, engine, str(tmp_path), hosts, path)
    assert results == [(with_secret, {"step": 1, "ids": [1, 2]}, 2.0)] * 2


def one_has_another(rank: int, n: int, folder: str, hosts: Hosts, secret: str) -> str:
    if rank == 0:
        os.environ[SECRET_FILE] = secret
    else:
        os.environ[SECRET_FILE] = f"{folder}/other"
        Path(f"{folder}/other").touch(mode=0o600)
        Path(f"{folder}/other").write_bytes(b"another job's secret")
    try:
        with groups_over(rank, n, folder, hosts, timeout=4.0):
            return "met"
    except CoordinatorError as error:
        return str(error)


def test_ranks_with_different_secrets_do_not_meet(
    tmp_path: Path, hosts: Hosts, secret: str
) -> None:
    first, second = run_ranks(2, one_has_another, str(tmp_path), hosts, secret)
    assert "ranks [1] do not have the secret of rank 0" in first
    assert "ranks [0] do not have the secret of rank 1" in second
