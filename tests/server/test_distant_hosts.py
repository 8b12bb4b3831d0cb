"""A pool's other hosts as its driver sees them, without any."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from server.config import PoolConfig
from server.control.pool_memory import create_pool_board
from server.control.protocol import Hello
from server.driver.pool_plan import PoolPlan
from server.errors import HostError
from server.hosts import remote_hosts
from server.hosts.link import (
    HostAdmitted,
    HostHello,
    HostRefused,
    HostState,
    OfWorker,
    WorkerEnded,
    WorkerStack,
)
from server.hosts.place import Hosts
from server.hosts.remote_hosts import RemoteHosts
from server.inspection.snapshot import BoardSnapshot
from server.pool import WorkerPool
from shm_broadcast import NEVER, Deadline
from shm_broadcast.state.stacks import StackFile
from tests.patience import PATIENCE_SECONDS
from tests.server.workers import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = "127.0.0.1"


class HostProvisioner:
    """Is asked for processes, and starts none."""

    def __init__(self) -> None:
        self.closed = 0

    def start(self, hosts: Hosts, address: str, port: int) -> None:
        pass

    def problem(self, node: int) -> str:
        return f"node {node} cannot be started"

    def close(self) -> None:
        self.closed += 1


def two_hosts(summoner: HostProvisioner, port: int) -> Hosts:
    return Hosts(2, 0, HERE, port, b"0123456789abcdef", provisioner=summoner)


@pytest.fixture
def port_in_use() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as other:
        yield other.getsockname()[1]


def test_a_head_that_cannot_listen_ends_what_was_summoned(port_in_use: int) -> None:
    summoner = HostProvisioner()
    with pytest.raises(OSError, match=str(port_in_use)):
        WorkerPool(Worker, tp=2, launcher="hosts", hosts=two_hosts(summoner, port_in_use))
    assert summoner.closed == 1


def test_a_host_that_cannot_be_summoned_ends_the_pool_and_what_was_summoned() -> None:
    summoner = HostProvisioner()
    with pytest.raises(HostError, match="node 1 cannot be started"):
        WorkerPool(Worker, tp=2, launcher="hosts", hosts=two_hosts(summoner, 0))
    assert summoner.closed == 1


@pytest.fixture
def head() -> Iterator[RemoteHosts]:
    with head_of(2) as made:
        yield made


@contextmanager
def head_of(tp: int) -> Iterator[RemoteHosts]:
    hosts = two_hosts(HostProvisioner(), 0)
    plan = PoolPlan(
        "tests.server.workers:Worker",
        tp=tp,
        pp=1,
        dp=1,
        pcp=1,
        dcp=1,
        axes=None,
        worker_kwargs=None,
        device="cpu",
        share_gpu=False,
        launcher="hosts",
        hosts=hosts,
        start_timeout=None,
        on_progress=None,
        restart="worker",
        max_restarts=1,
        window=1.0,
        stuck_after=None,
        config=PoolConfig(),
    )
    made = RemoteHosts(hosts, plan, NEVER)
    with closing(made):
        yield made


def test_workers_before_one_that_cannot_be_made_are_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever employs them closes them."""
    files = iter([StackFile(), None])

    def make() -> StackFile:
        if (file := next(files)) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return file

    monkeypatch.setattr(remote_hosts, "StackFile", make)
    employed: list[int] = []
    with head_of(4) as head, pytest.raises(OSError, match="Too many open files"):
        employed.extend(worker.rank for worker in head.launch([2, 3], 1, NEVER))
    assert employed == [2]


OTHER = HostHello("other", HERE, 4242, 1, {})


def test_a_stray_host_is_refused_and_disturbs_nobody_who_comes_later(
    head: RemoteHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostProvisioner, "problem", lambda *_: "")

    def comes_again() -> float:
        assert isinstance(head.admit(OTHER), HostAdmitted)
        return 1.0

    comes_again()
    for stray, why in (
        (replace(OTHER, node=2), "node must be in 1..1; got 2"),
        (replace(OTHER, node=0), "node must be in 1..1; got 0"),
        (replace(OTHER, facts={"nnodes": "3"}), "nnodes is 3 there, and 2 on the head"),
    ):
        assert head.admit(stray) == HostRefused(why)
    head.on_lost(1, "is gone")
    shown: list[list[int]] = []
    head.meet(Deadline.after(PATIENCE_SECONDS), comes_again, lambda ranks: shown.append([*ranks]))
    assert shown == [[1]]


def test_what_is_said_of_a_worker_is_not_taken_for_its_replacements(head: RemoteHosts) -> None:
    assert isinstance(head.admit(OTHER), HostAdmitted)
    (first,) = head.launch([1], 1, NEVER)
    (second,) = head.launch([1], 2, NEVER)
    for since in (1, 2):
        head.on_message(1, OfWorker(1, since, Hello(since)))
        head.on_message(1, WorkerStack(1, since, f"stack {since}"))
    assert second.channel.take() == Hello(2)
    assert second.channel.take() is None
    assert second.stack_file.read() == "stack 2"
    head.on_message(1, WorkerEnded(1, 1, "killed by SIGKILL", ""))
    assert not second.ended()
    head.on_message(1, WorkerEnded(1, 2, "killed by SIGKILL", ""))
    assert second.wait() == "killed by SIGKILL on host other"
    first.close()
    second.close()


def test_hosts_are_asked_what_they_see_and_one_that_ends_is_not_waited_for(
    head: RemoteHosts,
) -> None:
    assert isinstance(head.admit(OTHER), HostAdmitted)
    deadline = Deadline.after(PATIENCE_SECONDS)
    there = BoardSnapshot("", (), None, (), "at other")
    with create_pool_board(2, 1, "") as board:
        head.begin(1, board)
        head.query_state()
        head.on_message(1, HostState(0, "at other", (there,)))  # of a question before
        head.on_message(1, HostState(1, "at other", (there,)))
        (seen,) = head.seen(deadline)
        assert (seen.host, seen.there, seen.beside) == ("other", there, ())
        head.query_state()
        head.on_lost(1, "it has ended")
        assert head.seen(deadline) == []
        head.leave(1)
        head.query_state()
        assert head.seen(deadline) == []
    assert not deadline.expired
