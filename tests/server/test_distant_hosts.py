"""A pool's other hosts as its driver sees them, without any."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from server.errors import HostError
from server.hosts.place import Hosts
from server.pool import WorkerPool
from tests.server.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "127.0.0.1"


class Summoner:
    """Is asked for processes, and starts none."""

    def __init__(self) -> None:
        self.closed = 0

    def start(self, hosts: Hosts, address: str, port: int) -> None:
        pass

    def trouble(self, node: int) -> str:
        return f"node {node} cannot be started"

    def close(self) -> None:
        self.closed += 1


def two_hosts(summoner: Summoner, port: int) -> Hosts:
    return Hosts(2, 0, HERE, port, b"0123456789abcdef", summoner=summoner)


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as other:
        yield other.getsockname()[1]


def test_a_head_that_cannot_listen_ends_what_was_summoned(port_in_use: int) -> None:
    summoner = Summoner()
    with pytest.raises(OSError, match=str(port_in_use)):
        WorkerPool(Worker, tp=2, launcher="hosts", hosts=two_hosts(summoner, port_in_use))
    assert summoner.closed == 1


def test_a_host_that_cannot_be_summoned_ends_the_pool_and_what_was_summoned() -> None:
    summoner = Summoner()
    with pytest.raises(HostError, match="node 1 cannot be started"):
        WorkerPool(Worker, tp=2, launcher="hosts", hosts=two_hosts(summoner, 0))
    assert summoner.closed == 1
