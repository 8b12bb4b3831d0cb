"""Who takes part in a pool over hosts: hosts that differ, that are double, and strangers."""

from __future__ import annotations

import logging
import os
import pickle
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
import zmq

from coordinator import connect_store
from server.errors import HostError
from server.hosts import host_supervisor, remote_hosts
from server.hosts.host_supervisor import serve_host
from server.hosts.link import LINK_NONCE, HostHello
from server.pool import WorkerPool
from shm_broadcast.net.keys import writer_key
from tests.coordinator.hosts import NAMES, move_to
from tests.netns import Host, two_hosts
from tests.patience import PATIENCE_SECONDS
from tests.ranks import run_ranks
from tests.server.over_hosts import PORT, SECRET, living_children, place, run_over
from tests.server.workers import Worker
from tests.warm_forks import warm_fork_servers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.namespaces

SHORT = 3.0
"""Seconds after which those give up that wait in vain."""
WAITS = {"seconds": SHORT}
LINES_EVERY = 1.0
"""Seconds between two lines of theirs."""
HEAD, OTHER = "10.93.0.1", "10.93.0.2"


# --- hosts with other arguments ----------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def comes(
    rank: int, n: int, folder: str, hosts: tuple[Host, Host], given: list[dict[str, Any]]
) -> tuple[str, str]:
    """One process: the error that it raises, and what it has logged.

    ``given`` has its attributes of `Hosts`, and ``at``, its host, and ``seconds``, its patience.
    """
    mine = {"at": min(rank, 1), "seconds": PATIENCE_SECONDS, **given[rank]}
    at, seconds = mine.pop("at"), mine.pop("seconds")
    move_to(folder, hosts, at)
    warm_fork_servers()
    remote_hosts._LINE_SECONDS = host_supervisor._LINE_SECONDS = LINES_EVERY
    lines = Lines()
    logging.getLogger("server").addHandler(lines)
    here = place(at, hosts, **mine)
    error = "met"
    try:
        if here.is_head:
            options: dict[str, Any] = {"launcher": "hosts", "hosts": here}
            WorkerPool(Worker, tp=here.nnodes, start_timeout=seconds, **options)
        else:
            serve_host(here, seconds)
    except (HostError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
        lines.seen.append(f"of node {getattr(raised, 'node', None)}")
    assert living_children() == []
    return error, "\n".join(lines.seen)


def come(tmp_path: Path, *given: dict[str, Any], unplugged: bool = False) -> list[tuple[str, str]]:
    """What becomes of processes with these arguments; the first is on host a, others on b."""
    with two_hosts("IPv4") as hosts:
        assert (hosts[0].address, hosts[1].address) == (HEAD, OTHER)
        if unplugged:
            hosts[0].unplug()
        found: list[tuple[str, str]]
        found = run_ranks(len(given), comes, str(tmp_path), hosts, list(given))
        return found


def test_a_head_at_a_loopback_address_and_a_host_that_connects_in_vain_say_why(
    tmp_path: Path,
) -> None:
    """As where a host's own name leads to 127.0.1.1 in its /etc/hosts."""
    (head, seen), (other, lines) = come(tmp_path, {"master_addr": "localhost", **WAITS}, WAITS)
    where = (
        f"127.0.0.1:{PORT}, a loopback address, to which 'localhost' leads on this host: "
        "other hosts cannot reach it"
    )
    assert head == f"HostError: node 1 did not connect in 3 s; the head listens at {where}"
    assert f"waiting for node 1, for 1 s now; this host, the head, listens at {where}" in seen
    refused = f"nothing answers at tcp://{HEAD}:{PORT}: Connection refused"
    assert other == f"HostError: the head has not answered in 3 s: {refused}"
    assert re.search(rf"waiting for the head, for \d s now: {refused}", lines)


def test_a_head_with_another_hosts_address_says_so_at_once(tmp_path: Path) -> None:
    there = {"master_addr": OTHER}
    (head, _), (other, _) = come(tmp_path, there, {**there, **WAITS})
    assert head.startswith("OSError: ")
    assert f"the head's address '{OTHER}' is none of this host's, which has {HEAD}" in head
    assert head.endswith("is this node 0, the head?")
    mine = "; that is an address of this host itself: is it the head's?"
    assert other.endswith(f"nothing answers at tcp://{OTHER}:{PORT}: Connection refused{mine}")


@pytest.mark.parametrize("at", [0, 1])
def test_a_second_head_is_refused_as_such(at: int, tmp_path: Path) -> None:
    found = [error for error, _ in come(tmp_path, WAITS, {"at": at, "node_rank": 0, **WAITS})]
    (refused,) = [error for error in found if error.startswith("OSError")]
    (waited,) = [error for error in found if error.startswith("HostError")]
    assert f"did not connect in 3 s; the head listens at {HEAD}:{PORT}" in waited
    ends = f"{HEAD}:{PORT}: Address already in use", "is this node 0, the head?"
    assert refused.endswith(ends[at])


@pytest.mark.parametrize(
    ("head_has", "other_has", "differs"),
    [
        ({}, {"node_rank": 2, "nnodes": 3}, "nnodes is 3 there, and 2 on the head"),
        ({}, {"node_rank": 1, "nnodes": 3}, "nnodes is 3 there, and 2 on the head"),
        ({"facts": {"--tp": "2"}}, {"facts": {"--tp": "4"}}, "--tp is 4 there, and 2 on the head"),
    ],
    ids=["number", "nnodes", "facts"],
)
def test_hosts_that_differ_both_say_in_what(
    head_has: dict[str, Any], other_has: dict[str, Any], differs: str, tmp_path: Path
) -> None:
    (head, seen), (other, lines) = come(tmp_path, head_has, other_has)
    node = other_has.get("node_rank", 1)
    named = f"host {NAMES[1]} ({OTHER}), node {node}: {differs}"
    assert head == f"HostError: {named}"
    assert f"refused {named}" in seen
    assert seen.endswith(f"of node {node}") and lines.endswith(f"of node {node}")
    assert other == f"HostError: the head has refused this host: {differs}"


def test_a_host_with_another_secret_takes_no_part(tmp_path: Path) -> None:
    wrong = {"secret": b"not the one that the head has", **WAITS}
    (head, _), (other, _) = come(tmp_path, WAITS, wrong)
    assert head.startswith("HostError: node 1 did not connect in 3 s; the head listens at ")
    assert other.startswith("HostError: the head has not answered in 3 s: at tcp://")
    assert other.endswith("is the secret the same?")


def test_a_number_that_two_hosts_have_is_named_on_both_sides(tmp_path: Path) -> None:
    twice = {"node_rank": 1, "nnodes": 3}
    found = come(tmp_path, {"nnodes": 3, "seconds": 2 * SHORT}, twice, twice)
    head, seen = found[0]
    assert head.startswith("HostError: node 2 did not connect in 6 s; the head listens at ")
    here = rf"node 1 is connected already: host {NAMES[1]} \({OTHER}\), pid \d+"
    assert re.search(rf"refused host {NAMES[1]} \({OTHER}\), pid \d+: {here}", seen)
    (refused,) = [error for error, _ in found[1:] if "refused" in error]
    assert re.fullmatch(f"HostError: the head has refused this host: {here}", refused)


def test_a_host_whose_packets_are_lost_on_the_way_says_so(tmp_path: Path) -> None:
    _, (other, _) = come(tmp_path, WAITS, WAITS, unplugged=True)
    assert other.endswith(f"nothing answers at tcp://{HEAD}:{PORT}: timed out")


# --- strangers on the network ------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def is_attacked(pool: WorkerPool, bomb: Path) -> dict[str, Any]:
    """A stranger sends rubbish to all ports but gloo's, and writes to all keys of the store."""
    here = psutil.Process()
    ports = listening([here, *here.children(recursive=True)], zmq_speaks=True)
    (store,) = listening([here], zmq_speaks=False)
    stranger = connect_store(HEAD, store, PATIENCE_SECONDS)
    keys = [key.removeprefix("/") for key in stranger.list_keys()]
    for key in keys:
        stranger.set(key, pickle.dumps(Bomb(bomb)))
    answers = [answer for port in ports for answer in attack(port)]
    totals = pool.collective_rpc("total", args=(1.0,))
    return {"ports": len(ports), "keys": keys, "answers": answers, "totals": totals}


def listening(processes: list[psutil.Process], *, zmq_speaks: bool) -> set[int]:
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and speaks_zmq(connection.laddr) is zmq_speaks
    }


def speaks_zmq(at: Any) -> bool:
    """Whether a zmq greeting comes; gloo sends nothing first."""
    with socket.create_connection((at.ip, at.port), 5) as connection:
        connection.settimeout(2.0)
        with suppress(TimeoutError):
            return connection.recv(1) == b"\xff"
    return False


def attack(port: int) -> Iterator[bytes]:
    """What is answered to noise, and to zmq without a key, with its own, and to the right one."""
    with socket.create_connection((HEAD, port), 5) as connection:
        connection.sendall(os.urandom(4096))
    server = writer_key(SECRET, LINK_NONCE).public
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context:
        for keys in (None, (public, secret, zmq.curve_keypair()[0]), (public, secret, server)):
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                if keys is not None:
                    stranger.curve_publickey, stranger.curve_secretkey = keys[:2]
                    stranger.curve_serverkey = keys[2]
                stranger.connect(f"tcp://{HEAD}:{port}")
                evil = msgspec.msgpack.encode(HostHello("evil", "10.93.0.2", 1, 1, {}))
                with suppress(zmq.Again):  # refused already
                    stranger.send(evil, zmq.NOBLOCK)
                if stranger.poll(500):
                    yield stranger.recv()


def test_a_stranger_gets_nothing_at_any_port_and_the_pool_goes_on(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    with two_hosts("IPv4") as hosts:
        found, end = run_over(tmp_path, hosts, is_attacked, bomb)
    assert found["ports"] == 2  # the link, the calls' queue
    assert found["answers"] == []
    assert any("beat/" in key for key in found["keys"])
    assert found["totals"] == [2.0, 2.0]
    assert not bomb.exists()
    assert end[0] == "dismissed"
