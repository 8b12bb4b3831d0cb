"""A pool over two hosts: its answers, and who learns what of whose end, within which time."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
import zmq

from coordinator import connect_store
from server.errors import (
    CallTimeoutError,
    HostError,
    WorkerError,
    WorkerLostError,
    WorkerStartError,
    with_notes,
)
from server.hosts import remote_hosts
from server.hosts.host_supervisor import serve_host
from server.hosts.link import LINK_NONCE, HostHello
from server.pool import WorkerPool
from shm_broadcast import CoordinatorError
from shm_broadcast.net.keys import writer_key
from tests.coordinator.hosts import NAMES, move_to
from tests.netns import Host, two_hosts
from tests.patience import PATIENCE_SECONDS, quickest, until
from tests.ranks import run_ranks
from tests.server.over_hosts import (
    PORT,
    SECRET,
    is_gone,
    kill,
    living_children,
    note,
    noted,
    over_hosts,
    place,
)
from tests.server.workers import Restored, Unlucky, Worker, pids_of
from tests.warm_forks import warm_fork_servers

Hosts = tuple[Host, Host]

pytestmark = pytest.mark.namespaces

NAMED_WITHIN = 2.0
"""Seconds in which, as promised, the end of a host is named on the others."""
ABORTED_WITHIN = 0.2
"""Seconds in which, as promised, an abort crosses to the other host."""
HEADLESS_END_WITHIN = 5.0
"""Seconds in which the workers of all hosts end when the head does."""

SLOW = (0.02, 0.01)
"""A cable of 20 ms, which loses 1 % of the packets."""


# --- what works as on one host -----------------------------------------------------------


def uses(pool: WorkerPool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "total": pool.collective_rpc("total", args=(1.0,)),
        "ranks": [rank for rank, _ in pool.collective_rpc("where")],
        "large": len(pool.call("echo", b"x" * (9 << 20))),
        "items": list(pool.stream("count", 5)),
        "many": [
            call.result(PATIENCE_SECONDS) for call in [pool.submit("echo", i) for i in range(50)]
        ],
    }
    with pytest.raises(WorkerError, match=r"rank 3 .*fail: .*bad input") as caught:
        pool.call("fail", [3])
    found["traceback"] = caught.value.traceback
    found["after"] = pool.call("total", 1.0)
    until(lambda: {each.state for each in pool.status()} == {"idle"})
    found["hosts"] = [each.host for each in pool.status()]
    found["pids"] = [each.pid for each in pool.status()] == pids_of(pool)
    return found


@pytest.mark.parametrize("cable", [(0.0, 0.0), SLOW], ids=["fast", "slow"])
def test_calls_streams_errors_and_status_are_those_of_one_host(
    cable: tuple[float, float], tmp_path: Path
) -> None:
    options = {"tp": 2, "pp": 2}
    with two_hosts("IPv4", *cable) as hosts:
        found, end = run_ranks(2, over_hosts, str(tmp_path), hosts, uses, (), options)
    assert found["total"] == [4.0] * 4
    assert found["ranks"] == [0, 1, 2, 3]
    assert found["large"] == 9 << 20
    assert found["items"] == [0, 1, 2, 3, 4]
    assert found["many"] == list(range(50))
    assert "in fail" in found["traceback"]
    assert found["after"] == 4.0
    assert found["hosts"] == ["", "", NAMES[1], NAMES[1]]
    assert found["pids"]
    assert end[0] == "dismissed"
    assert end[2] == []


def test_hosts_with_addresses_of_ipv6_only_work_as_well(tmp_path: Path) -> None:
    with two_hosts("IPv6") as hosts:
        total, end = run_ranks(2, over_hosts, str(tmp_path), hosts, total_of_ones)
    assert total == [2.0, 2.0]
    assert end[0] == "dismissed"


def total_of_ones(pool: WorkerPool) -> Any:
    return pool.collective_rpc("total", args=(1.0,))


def is_seen_at_rest(pool: WorkerPool) -> None:
    board = pool._driver._shared.board
    until(lambda: board.member_status(1).state == "idle")
    pool.call("echo")
    until(lambda: board.member_status(1).operation == "echo")
    until(lambda: board.member_status(1).state == "idle")


def test_a_worker_on_another_host_that_waits_for_a_call_is_seen_at_rest(tmp_path: Path) -> None:
    """Not in its ``__init__`` still, or in the last call."""
    with two_hosts("IPv4") as hosts:
        run_ranks(2, over_hosts, str(tmp_path), hosts, is_seen_at_rest)


def stands_still(pool: WorkerPool) -> tuple[str, list[int], Any]:
    """Of a late call the stack of the rank on the other host is shown, and it can be cancelled."""
    with pytest.raises(CallTimeoutError) as caught:
        pool.call("sleep", 3.0, [1], timeout=0.5)
    return str(caught.value), sorted(caught.value.stacks), pool.call("echo", "goes on")


def test_a_late_rank_on_another_host_shows_its_stack(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        (text, ranks, after), _ = run_ranks(2, over_hosts, str(tmp_path), hosts, stands_still)
    assert "rank 1 (pid " in text
    assert f" on {NAMES[1]})" in text
    assert "in sleep" in text
    assert ranks == [1]
    assert after == "goes on"


# --- what ends, and who learns it --------------------------------------------------------


def loses_a_worker(pool: WorkerPool, rank: int) -> tuple[str, float, list[int]]:
    pids = pids_of(pool)
    call = pool.submit("hang_in_group", rank)
    until(lambda: [each.operation for each in pool.status()] == ["hang_in_group"] * 2
          or all(each.state == "busy" for each in pool.status()))  # fmt: skip
    killed = kill(pids[rank])
    with pytest.raises(WorkerLostError) as caught:
        call.result(PATIENCE_SECONDS)
    seconds = time.monotonic() - killed
    until(lambda: all(map(is_gone, pids)), "workers are left")
    with pytest.raises(WorkerLostError):
        pool.call("echo")
    return str(caught.value), seconds, [caught.value.rank, caught.value.pid, pids[rank]]


@pytest.mark.parametrize(
    ("victim", "cable"), [(0, (0.0, 0.0)), (1, (0.0, 0.0)), (1, SLOW)], ids=["0", "1", "1 slow"]
)
def test_a_killed_worker_is_named_and_all_hosts_workers_end(
    victim: int, cable: tuple[float, float], tmp_path: Path
) -> None:
    def attempt() -> float:
        with two_hosts("IPv4", *cable) as hosts:
            (text, seconds, found), end = run_ranks(
                2, over_hosts, mkdtemp(dir=tmp_path), hosts, loses_a_worker, (victim,)
            )
        where = f" on host {NAMES[1]}" if victim else ""
        assert f"killed by SIGKILL{where}" in text
        assert found == [victim, found[2], found[2]]
        assert end[0] == "dismissed"
        assert end[2] == []
        return float(seconds)

    assert quickest(attempt, 1.0) < 1.0


def is_aborted(pool: WorkerPool, folder: str, rank: int) -> None:
    call = pool.submit("abort_and_note", rank, Path(folder))
    with pytest.raises(WorkerError):
        call.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_crosses_to_the_other_host(rank: int, tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            run_ranks(2, over_hosts, folder, hosts, is_aborted, (folder, rank))
        return noted(folder, f"aborted-{1 - rank}") - noted(folder, f"aborted-{rank}")

    assert quickest(attempt, ABORTED_WITHIN) < ABORTED_WITHIN


def replaces(pool: WorkerPool, victim: int) -> tuple[list[list[str]], int]:
    before = pids_of(pool)
    for generation in (2, 3):
        kill(before[victim])
        until(lambda: pool.generation == generation)  # noqa: B023
        assert pool.call("total", 1.0) == 4.0
        after = pids_of(pool)
        same = [one == other for one, other in zip(before, after, strict=True)]
        assert same == [rank != victim for rank in range(4)]
        before = after
    return pool.collective_rpc("holds"), pool.restarts


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_worker_is_replaced_on_its_host_and_the_others_stay(
    victim: int, tmp_path: Path
) -> None:
    options = {"worker": Restored, "tp": 2, "pp": 2, "restart": "worker"}
    with two_hosts("IPv4") as hosts:
        (held, restarts), end = run_ranks(
            2, over_hosts, str(tmp_path), hosts, replaces, (victim,), options
        )
    stayed = ["made in 1", "restored in 2", "restored in 3"]
    assert held == [["made in 3"] if rank == victim else stayed for rank in range(4)]
    assert restarts == 2
    assert end[0] == "dismissed"


def loses_the_host(pool: WorkerPool, folder: str) -> tuple[str, float]:
    supervisor = int(noted(folder, "supervisor"))
    pid = pids_of(pool)[1]
    call = pool.submit("hang_in_group", 1)
    killed = kill(supervisor)
    with pytest.raises(WorkerLostError) as caught:
        call.result(PATIENCE_SECONDS)
    seconds = time.monotonic() - killed
    assert (caught.value.rank, caught.value.pid) == (1, pid)
    until(lambda: is_gone(pid), "a worker of the lost host is left")
    return str(caught.value), seconds


def test_a_killed_supervisor_is_named_and_its_workers_end(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            (text, seconds), _ = run_ranks(
                2, over_hosts, folder, hosts, loses_the_host, (folder,), may_die=[1]
            )
        assert f"host {NAMES[1]} ({hosts[1].address}) has ended" in text
        return float(seconds)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def is_unplugged(pool: WorkerPool, folder: str, hosts: Hosts) -> tuple[str, float]:
    call = pool.submit("hang_in_group", 1)
    until(lambda: all(each.state == "busy" for each in pool.status()))
    note(folder, "unplugged", time.monotonic())
    hosts[0].unplug()
    hosts[1].unplug()
    with pytest.raises(WorkerLostError) as caught:
        call.result(PATIENCE_SECONDS)
    seconds = time.monotonic() - noted(folder, "unplugged")
    until(lambda: pool.failure is not None)
    return str(caught.value), seconds


def test_a_cut_cable_is_named_on_both_hosts(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            (text, seconds), (end, ended_at, left) = run_ranks(
                2,
                over_hosts,
                folder,
                hosts,
                is_unplugged,
                (folder, hosts),
                {},
                {"silence_seconds": 1.5},
            )
        assert f"host {NAMES[1]} ({hosts[1].address})" in text
        assert "the head" in end
        assert left == []
        return max(float(seconds), ended_at - noted(folder, "unplugged"))

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def is_cut_at_the_calls_port(pool: WorkerPool, head: Host) -> str:
    links = pool._driver._shared
    assert links is not None
    remote = links.calls.export_handle().remote
    assert remote is not None
    port = str(urlsplit(remote.address).port)
    head.ip("rule", "add", "pref", "1", "ipproto", "tcp", "sport", port, "blackhole")
    with pytest.raises(CoordinatorError) as caught:
        pool.call("total", 1.0)
    return with_notes(caught.value)


@pytest.mark.parametrize("restart", ["never", "worker"])
def test_a_worker_that_only_the_calls_do_not_reach_says_so(restart: str, tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        told, *_ = run_ranks(
            2,
            over_hosts,
            str(tmp_path),
            hosts,
            is_cut_at_the_calls_port,
            (hosts[0],),
            {"restart": restart},
            {"silence_seconds": 1.5},
        )
    assert "the worker of rank 1" in told and f"on host {NAMES[1]}" in told
    assert "PeerLostError: dequeue: lost the driver" in told


def ends_suddenly(pool: WorkerPool, folder: str) -> None:
    note(folder, "pid", pids_of(pool)[1])
    note(folder, "killed", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def test_when_the_head_is_killed_all_hosts_workers_end(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            _, (end, ended_at, left) = run_ranks(
                2, over_hosts, folder, hosts, ends_suddenly, (folder,), may_die=[0]
            )
        assert "the head has ended" in end
        assert left == []
        assert is_gone(int(noted(folder, "pid")))
        return ended_at - noted(folder, "killed")

    assert quickest(attempt, HEADLESS_END_WITHIN) < HEADLESS_END_WITHIN


def is_plugged_in_again(pool: WorkerPool, folder: str, hosts: Hosts, named: bool) -> Any:
    (Path(folder) / "unplugged").touch()
    for host in hosts:
        host.unplug()
    until(lambda: pool.restarting is not None)
    if named:
        noted(folder, "asked in vain")
    for host in hosts:
        host.plug()
    (Path(folder) / "unplugged").unlink()
    until(lambda: pool.generation == 2)
    return pool.collective_rpc("holds"), pool.collective_rpc("total", args=(1.0,))


def by_name(rank: int, n: int, folder: str, hosts: Hosts, *others: Any) -> Any:
    """As `over_hosts`; the head's name is known where the cable leads to."""
    look_up = socket.getaddrinfo

    def looked_up(name: str, *how: Any, **more: Any) -> Any:
        if name == "head.example" and (Path(folder) / "unplugged").exists():
            note(folder, "asked in vain", 1)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return look_up(hosts[0].address if name == "head.example" else name, *how, **more)

    socket.getaddrinfo = looked_up
    return over_hosts(rank, n, folder, hosts, *others)


@pytest.mark.parametrize("named", [False, True], ids=["address", "name"])
def test_a_host_that_was_only_cut_off_comes_back_by_itself(named: bool, tmp_path: Path) -> None:
    options = {"worker": Restored, "restart": "worker"}
    changes: dict[str, Any] = {"silence_seconds": 1.5}
    if named:
        changes["master_addr"] = "head.example"
    body = by_name if named else over_hosts
    with two_hosts("IPv4") as hosts:
        (held, totals), end = run_ranks(
            *(2, body, str(tmp_path), hosts, is_plugged_in_again, (str(tmp_path), hosts, named)),
            options,
            changes,
        )
    assert held == [["made in 1", "restored in 2"], ["made in 2"]]
    assert totals == [2.0, 2.0]
    assert end[0] == "dismissed"


def comes_again(rank: int, n: int, folder: str, hosts: Hosts) -> Any:
    """Rank 1 is killed; rank 2 is started in its place, as an operator's tools would."""
    if rank == 2:
        noted(folder, "killed")
        return over_hosts(1, n, folder, hosts, goes_on)
    options = {"worker": Restored, "restart": "worker"}
    return over_hosts(rank, n, folder, hosts, goes_on, (folder,), options)


def goes_on(pool: WorkerPool, folder: str) -> Any:
    before = pids_of(pool)
    note(folder, "killed", kill(int(noted(folder, "supervisor"))))
    until(lambda: pool.generation == 2)
    assert pool.call("total", 1.0) == 2.0
    after = pids_of(pool)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
    return pool.collective_rpc("holds")


def test_a_host_that_comes_again_takes_part_again(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        held, _, end = run_ranks(3, comes_again, str(tmp_path), hosts, may_die=[1])
    assert held == [["made in 1", "restored in 2"], ["made in 2"]]
    assert end[0] == "dismissed"


def is_lost_for_good(pool: WorkerPool, folder: str) -> str:
    kill(int(noted(folder, "supervisor")))
    until(lambda: pool.failure is not None)
    return f"{type(pool.failure).__name__}: {pool.failure}"


def test_a_host_that_does_not_come_again_is_the_end_of_the_pool(tmp_path: Path) -> None:
    """Though not so many restarts fit into the window."""
    options = {"restart": "worker", "start_timeout": 6.0, "window": 10.0}
    with two_hosts("IPv4") as hosts:
        failure, _ = run_ranks(
            *(2, over_hosts, str(tmp_path), hosts, is_lost_for_good, (str(tmp_path),)),
            options,
            may_die=[1],
        )
    late = "HostError: node 1 did not connect in 6 s; the head listens at "
    assert failure == f"{late}{hosts[0].address}:{PORT}"


# --- who takes no part -------------------------------------------------------------------


def meets(
    rank: int, n: int, folder: str, hosts: Hosts, mine: list[dict[str, Any]], seconds: float
) -> str:
    """Hosts whose attributes differ; what each raises."""
    move_to(folder, hosts, min(rank, 1))
    warm_fork_servers()
    remote_hosts._LINE_SECONDS = 0.5
    here = place(min(rank, 1), hosts, **mine[rank])
    try:
        if rank:
            serve_host(here, seconds)
        else:
            WorkerPool(Worker, tp=2, launcher="hosts", hosts=here, start_timeout=seconds)
    except HostError as error:
        return f"{error.node}: {error}"
    finally:
        assert living_children() == []
    return "met"


def test_hosts_that_differ_are_told_in_what(tmp_path: Path) -> None:
    facts = [{"facts": {"--tp": "2"}}, {"facts": {"--tp": "4"}}]
    with two_hosts("IPv4") as hosts:
        head, other = run_ranks(2, meets, str(tmp_path), hosts, facts, PATIENCE_SECONDS)
    differs = "--tp is 4 there, and 2 on the head"
    assert head == f"1: host {NAMES[1]} ({hosts[1].address}), node 1: {differs}"
    assert other == f"1: the head has refused this host: {differs}"


def test_a_host_with_another_secret_takes_no_part(tmp_path: Path) -> None:
    secrets = [{}, {"secret": b"not the one that the head has"}]
    with two_hosts("IPv4") as hosts:
        head, other = run_ranks(2, meets, str(tmp_path), hosts, secrets, 2.0)
    assert head.startswith("1: node 1 did not connect in 2 s; the head listens at ")
    assert other.startswith("1: the head has not answered in 2 s: at tcp://")
    assert other.endswith("is the secret the same?")


def test_a_host_that_another_one_is_already_is_refused(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        results = run_ranks(3, twice, str(tmp_path), hosts)
    assert results[0] == [2.0, 2.0]
    assert results[1][0] == "dismissed"
    assert f"node 1 is connected already: host {NAMES[1]}" in results[2]


def twice(rank: int, n: int, folder: str, hosts: Hosts) -> Any:
    if rank == 2:
        noted(folder, "started")
        try:
            return meets(rank, n, folder, hosts, [{}, {}, {}], PATIENCE_SECONDS)
        finally:
            note(folder, "refused", 1)
    return over_hosts(rank, n, folder, hosts, waits_for_the_refusal, (folder,))


def waits_for_the_refusal(pool: WorkerPool, folder: str) -> Any:
    note(folder, "started", 1)
    noted(folder, "refused")
    return pool.collective_rpc("total", args=(1.0,))


def test_a_pool_whose_worker_cannot_start_on_another_host_says_why(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        head, end = run_ranks(2, cannot_start, str(tmp_path), hosts)
    assert "the worker of rank 1 did not start" in head
    assert "no luck in 1" in head
    assert end[0] == "dismissed"
    assert end[2] == []


def cannot_start(rank: int, n: int, folder: str, hosts: Hosts) -> Any:
    options = {"worker": Unlucky, "worker_kwargs": {"raises": [1], "hangs": []}}
    try:
        return over_hosts(rank, n, folder, hosts, pids_of, (), options)
    except WorkerStartError as error:
        return str(error)


# --- strangers ---------------------------------------------------------------------------


def is_attacked(pool: WorkerPool) -> tuple[int, list[bytes], list[float]]:
    """A stranger on the network tries all ports of this host but gloo's: rubbish, and zmq without
    a key, with a key of his own, and with the right server key.
    """
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    ports = {
        connection.laddr.port
        for process in family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and speaks_zmq(connection.laddr)
    }
    answers = [answer for port in ports for answer in attack(pool, port)]
    return len(ports), answers, pool.collective_rpc("total", args=(1.0,))


def speaks_zmq(at: Any) -> bool:
    """Whether a zmq greeting comes; gloo says nothing before it is spoken to."""
    with socket.create_connection((at.ip, at.port), 5) as connection:
        connection.settimeout(2.0)
        with suppress(TimeoutError):
            return connection.recv(1) == b"\xff"
    return False


def attack(pool: WorkerPool, port: int) -> list[bytes]:
    hosts = pool._plan.hosts
    assert hosts is not None
    with socket.create_connection((hosts.master_addr, port), 5) as connection:
        connection.sendall(os.urandom(4096))
    server = writer_key(SECRET, LINK_NONCE).public
    public, secret = zmq.curve_keypair()
    answers = []
    with zmq.Context() as context:
        for keys in (None, (public, secret, zmq.curve_keypair()[0]), (public, secret, server)):
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 0
                if keys is not None:
                    stranger.curve_publickey, stranger.curve_secretkey = keys[:2]
                    stranger.curve_serverkey = keys[2]
                stranger.connect(f"tcp://{hosts.master_addr}:{port}")
                evil = msgspec.msgpack.encode(HostHello("evil", "10.93.0.2", 1, 1, {}))
                with suppress(zmq.Again):  # refused already: there is nobody to send to
                    stranger.send(evil, zmq.NOBLOCK)
                if stranger.poll(500):
                    answers.append(stranger.recv())
    return answers


class Bomb:
    """An object that leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def has_its_store_overwritten(pool: WorkerPool, bomb: Path) -> tuple[int, list[str], list[float]]:
    """A stranger on the network writes to all keys of the ranks' store."""
    ports = [
        connection.laddr.port
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and not speaks_zmq(connection.laddr)
    ]
    hosts = pool._plan.hosts
    assert hosts is not None
    stranger = connect_store(hosts.master_addr, ports[0], PATIENCE_SECONDS)
    keys = [key.removeprefix("/") for key in stranger.list_keys()]
    for key in keys:
        stranger.set(key, pickle.dumps(Bomb(bomb)))
    return len(ports), keys, pool.collective_rpc("total", args=(1.0,))


def test_what_a_stranger_writes_to_the_store_of_the_ranks_is_not_used(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    with two_hosts("IPv4") as hosts:
        (ports, keys, totals), end = run_ranks(
            2, over_hosts, str(tmp_path), hosts, has_its_store_overwritten, (bomb,)
        )
    assert ports == 1
    assert any("beat/" in key for key in keys)
    assert totals == [2.0, 2.0]
    assert not bomb.exists()
    assert end[0] == "dismissed"


def test_a_stranger_gets_nothing_at_any_port_and_the_pool_goes_on(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        (ports, answers, totals), end = run_ranks(2, over_hosts, str(tmp_path), hosts, is_attacked)
    assert ports == 2  # the link, the calls' queue
    assert answers == []
    assert totals == [2.0, 2.0]
    assert end[0] == "dismissed"
