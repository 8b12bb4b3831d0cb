"""The link between the head of a pool and another host: either end by itself."""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import os
import re
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import Mock

import psutil
import pytest
from msgspec.structs import replace

import coordinator
from coordinator.rank_grid import RankGrid
from server.config import PoolConfig
from server.control.pool_memory import create_pool_board
from server.control.protocol import Handles, Hello, Start
from server.driver.pool_plan import PoolPlan
from server.errors import HostError
from server.hosts import discovery, host_supervisor
from server.hosts.discovery import discover_port, publish_port
from server.hosts.host_supervisor import serve_host
from server.hosts.link import (
    BeginGeneration,
    HeadLink,
    HeartbeatMessage,
    HostAdmitted,
    HostHello,
    HostLink,
    HostRefused,
    HostShutdown,
    HostState,
    OfWorker,
    SignalWorker,
    ToWorker,
    WorkerEnded,
    WorkerStack,
)
from server.hosts.place import Hosts
from server.hosts.remote_hosts import RemoteHosts
from server.inspection.snapshot import BoardSnapshot
from server.pool import WorkerPool
from shm_broadcast import NEVER, Deadline, GroupTimeoutError, MessageQueue
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
from tests.server.workers import Worker
from tests.standing_store import store_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.hosts.link import FromHead, FromHost, HostLinkHandler


# --- both ends, stepped by hand: who may take whose place ---------------------------------------


HERE = "127.0.0.1"
SILENCE = 1.0
HELLO = HostHello("other", HERE, 4242, 1, {}, "the first process")
ADMITTED = HostAdmitted(2, (1,), PoolConfig(), stays=True)


class Heard:
    """Either side: keeps what it hears."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.heard: list[Any] = []

    def heartbeat_message(self) -> HeartbeatMessage:
        return HeartbeatMessage(0, b"")

    def admit(self, _: HostHello) -> HostAdmitted:
        return ADMITTED

    def on_message(self, _: int, message: FromHost) -> None:
        self.heard.append(message)

    def on_lost(self, _: int, why: str) -> None:
        self.lost.append(why)

    def hear(self, message: FromHead) -> None:
        if not isinstance(message, HeartbeatMessage):
            self.heard.append(message)

    def lose(self, why: str) -> None:
        self.lost.append(why)


class Ends:
    """A head, and hosts that come. Nothing happens but in `step`."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.at_head = Heard()
        hosts = Hosts(2, 0, HERE, 0, b"0123456789abcdef", silence_seconds=SILENCE)
        self._hosts = hosts
        self.head = HeadLink(hosts, ipaddress.ip_address(HERE), self.at_head)
        undo.callback(self.head.close)

    def come(self, hello: HostHello) -> tuple[HostLink, Heard]:
        heard = Heard()
        link = HostLink(self._hosts, HERE, self.head.port, hello, heard)
        self._undo.callback(link.close)
        return link, heard

    def step(self, *links: HostLink) -> None:
        for each in (self.head, *links):
            each._step()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as undo:
        yield Ends(undo)


def admitted(ends: Ends, hello: HostHello) -> HostLink:
    link, heard = ends.come(hello)
    until(lambda: ends.step(link) or ends.at_head.heard)
    assert heard.heard == [ADMITTED]
    return link


def test_a_host_that_connects_again_is_not_refused_for_its_old_links_late_messages(
    ends: Ends,
) -> None:
    old = admitted(ends, HELLO)
    new, heard = ends.come(HELLO)
    until(lambda: ends.step(new) or heard.heard or ends.head._pending)
    old.heartbeat_now()
    old._step()
    until(lambda: ends.step(new) or heard.heard)
    assert heard.heard == [ADMITTED]
    assert ends.at_head.lost == ["host other (127.0.0.1) has closed the link, and connected again"]


def test_another_process_is_refused_while_the_first_one_speaks(ends: Ends) -> None:
    first = admitted(ends, HELLO)
    other, heard = ends.come(replace(HELLO, instance_id="another process"))
    until(lambda: ends.step(first, other) or heard.heard)
    assert [type(each) for each in heard.heard] == [HostRefused]
    assert ends.at_head.lost == []


def test_a_host_that_waited_for_a_silent_ones_place_may_be_silent_as_long(ends: Ends) -> None:
    admitted(ends, HELLO)
    began = time.monotonic()
    other, heard = ends.come(replace(HELLO, instance_id="another process"))
    until(lambda: ends.step(other) or heard.heard)
    assert heard.heard == [ADMITTED]
    assert time.monotonic() - began >= SILENCE / 2
    ends.step(other)
    assert len(ends.at_head.lost) == 1


def test_a_process_that_ended_while_it_waited_keeps_no_other_out(ends: Ends) -> None:
    admitted(ends, HELLO)
    second, _ = ends.come(replace(HELLO, instance_id="the second process"))
    until(lambda: ends.step(second) or ends.head._pending)
    second.close()
    third, heard = ends.come(replace(HELLO, instance_id="the third process"))
    until(lambda: ends.step(third) or heard.heard)
    assert heard.heard == [ADMITTED]
    assert len(ends.at_head.lost) == 1


def test_a_head_that_was_stopped_receives_why_the_host_gave_it_up(ends: Ends) -> None:
    link, heard = ends.come(HELLO)
    until(lambda: ends.step(link) or heard.heard)
    until(lambda: link._step() or heard.lost)
    link.close()
    until(lambda: ends.step() or ends.at_head.lost)
    (end,), (lost,) = heard.lost, ends.at_head.lost
    seconds = end.removeprefix("the head has sent nothing for ")
    why = f"having received nothing from the head for {seconds}"
    assert lost == f"host other ({HERE}) has ended its workers, {why}"


# --- the head's end, without a host -------------------------------------------------------------


def provisioner(problem: str = "") -> Mock:
    return Mock(**{"problem.return_value": problem})


def of_two(summoner: Mock, port: int) -> Hosts:
    return Hosts(2, 0, HERE, port, b"0123456789abcdef", provisioner=summoner)


def test_a_head_that_cannot_start_ends_what_it_summoned() -> None:
    with socket.create_server((HERE, 0)) as other:
        in_use = other.getsockname()[1]
        for port, error, why in (
            (in_use, OSError, str(in_use)),
            (0, HostError, "node 1 cannot be started"),
        ):
            summoner = provisioner("node 1 cannot be started")
            with pytest.raises(error, match=why):
                WorkerPool(Worker, tp=2, launcher="hosts", hosts=of_two(summoner, port))
            summoner.close.assert_called_once()


@pytest.fixture
def head() -> Iterator[RemoteHosts]:
    hosts = of_two(provisioner(), 0)
    plan = PoolPlan(
        "tests.server.workers:Worker",
        **{"tp": 2, **dict.fromkeys(("pp", "dp", "pcp", "dcp", "max_restarts"), 1)},
        **dict.fromkeys(("axes", "worker_kwargs", "start_timeout", "on_progress", "stuck_after")),
        device="cpu",
        share_gpu=False,
        launcher="hosts",
        hosts=hosts,
        restart="worker",
        window=1.0,
        config=PoolConfig(),
    )
    with closing(RemoteHosts(hosts, plan, NEVER)) as made:
        yield made


OTHER = HostHello("other", HERE, 4242, 1, {})


def test_a_stray_host_is_refused_and_keeps_no_later_one_out(head: RemoteHosts) -> None:
    def comes_again() -> float:
        assert isinstance(head.admit(OTHER), HostAdmitted)
        return 1.0

    comes_again()
    for node in (2, 0):
        why = f"node must be in 1..1; got {node}"
        assert head.admit(replace(OTHER, node=node)) == HostRefused(why)
    head.on_lost(1, "is gone")
    shown: list[list[int]] = []
    head.meet(Deadline.after(PATIENCE_SECONDS), comes_again, lambda ranks: shown.append([*ranks]))
    assert shown == [[1]]


def test_messages_of_a_worker_are_not_taken_for_its_replacements(head: RemoteHosts) -> None:
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


def test_a_host_that_ends_is_not_waited_for_with_its_boards(head: RemoteHosts) -> None:
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


# --- the host's end, with a head by script ------------------------------------------------------


SECRET: Final = b"known to both hosts"
ELSEWHERE = Hosts(nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=1, secret=SECRET)
TAKEN_IN = HostAdmitted(2, (1,), PoolConfig(threads=1), stays=False)
LOST: Final = "the head has ended, or closed the link"


class BriefLink:
    """Brings messages and its own end before the host's main thread looks at any of them."""

    says: tuple[Any, ...] = ()

    def __init__(self, *args: Any) -> None:
        self._handler: HostLinkHandler = args[-1]

    def begin(self) -> None:
        for message in self.says:
            self._handler.hear(message)
        self._handler.lose(LOST)

    def close(self) -> None:
        pass


class Scripted(BriefLink):
    """Begins a generation; does ``goes_on(self)`` when its worker has come; keeps what ends."""

    def __init__(self, goes_on: Callable[[Scripted], None], *args: Any) -> None:
        super().__init__(*args)
        self.goes_on, self.hear = goes_on, self._handler.hear
        self.pids: list[int] = []
        self.ended: list[WorkerEnded] = []

    def begin(self) -> None:
        self.hear(TAKEN_IN)
        self.hear(BeginGeneration(1, (1,), 2, PATIENCE_SECONDS))

    def post(self, message: Any) -> None:
        match message:
            case OfWorker(1, generation, Hello(pid)) if generation == len(self.pids) + 1:
                self.pids.append(pid)
                self.goes_on(self)
            case WorkerEnded():
                self.ended.append(message)
                self.hear(HostShutdown())

    def heartbeat_now(self) -> None:
        pass


def serve(goes_on: Callable[[Scripted], None], monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Run a host to its end; its link."""
    made: list[Scripted] = []

    def make(*args: Any) -> Scripted:
        made.append(Scripted(goes_on, *args))
        return made[0]

    monkeypatch.setattr(host_supervisor, "HostLink", make)
    serve_host(ELSEWHERE, PATIENCE_SECONDS)
    assert not any(map(psutil.pid_exists, made[0].pids))
    return made[0]


def no_file_is_left(link: Scripted) -> None:
    """For a second generation, of no worker: the head waits for all hosts."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path("/dev/null").open() as next_one:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno(), most))
    link.hear(BeginGeneration(2, (), 2, PATIENCE_SECONDS))


def the_worker_stands_still(link: Scripted) -> None:
    os.kill(link.pids[0], signal.SIGSTOP)
    with MessageQueue(1, 1) as queue:
        handles = Handles(queue.export_handle())
    grid = RankGrid.of_job(tp=2, pp=1, dp=1, pcp=1, axes=None)
    start = Start(
        *(1, 1, False, 1, grid, 1, "cpu", SECRET, handles, False),
        *("tests.server.workers:Worker", b"x" * (4 << 20), None, 0.5, ""),
    )
    link.hear(ToWorker(1, start))


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (no_file_is_left, r"not started: this process may have \d+ files open"),
        (
            the_worker_stands_still,
            "it received nothing: control channel send: timed out after 0.5",
        ),
    ],
)
def test_a_host_that_cannot_begin_a_generation_says_why(
    trouble: Callable[[Scripted], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        (ended,) = serve(trouble, monkeypatch).ended
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (ended.rank, ended.since) == (1, 1)
    assert re.match(why, ended.how)


def is_replaced_before_its_end_is_seen(link: Scripted) -> None:
    def dismiss() -> None:
        until(lambda: not psutil.pid_exists(link.pids[0]))
        link.hear(HostShutdown())

    if len(link.pids) == 1:
        link.hear(SignalWorker(1, signal.SIGKILL))
        link.hear(BeginGeneration(2, (1,), 2, PATIENCE_SECONDS))
    else:
        threading.Thread(target=dismiss).start()


def test_the_end_of_a_worker_is_not_taken_for_its_replacements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = serve(is_replaced_before_its_end_is_seen, monkeypatch)
    assert (len(link.pids), link.ended) == (2, [])


def ends_behind(monkeypatch: pytest.MonkeyPatch, *says: Any) -> None:
    monkeypatch.setattr(BriefLink, "says", says)
    monkeypatch.setattr(host_supervisor, "HostLink", BriefLink)


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ((HostRefused("--tp is 4 there"),), "refused this host: --tp is 4 there"),
        ((), LOST),
        ((TAKEN_IN,), LOST),
    ],
)
def test_the_last_message_counts_although_the_link_ends_behind_it(
    says: tuple[Any, ...], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_behind(monkeypatch, *says)
    with pytest.raises(HostError, match=f"{error}$"):
        serve_host(ELSEWHERE, PATIENCE_SECONDS)
    ends_behind(monkeypatch, TAKEN_IN, HostShutdown())
    serve_host(ELSEWHERE, PATIENCE_SECONDS)


# --- how a host finds the head -----------------------------------------------------------


def torchruns(store: Any, monkeypatch: pytest.MonkeyPatch, world: int = 2) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("MASTER_PORT", str(store.port))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = coordinator.host_store()
    torchruns(made, monkeypatch)
    return made


@pytest.mark.usefixtures("store")
def test_a_host_that_connects_again_knows_the_port_that_the_head_published_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports: list[int] = []
    visits = iter([(replace(TAKEN_IN, stays=True),), (TAKEN_IN, HostShutdown())])

    class Again(BriefLink):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            ports.append(args[2])
            self.says = next(visits)

    monkeypatch.setattr(host_supervisor, "HostLink", Again)
    unknown = dataclasses.replace(ELSEWHERE, master_port=0)
    head = dataclasses.replace(unknown, node_rank=0)
    publish_port(head, 4321, Deadline.after(PATIENCE_SECONDS))
    serve_host(unknown, PATIENCE_SECONDS)
    assert ports == [4321, 4321]


def test_a_host_receives_the_port_where_another_gave_up(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchruns(store, monkeypatch, 3)
    head, patient, hasty = (
        dataclasses.replace(ELSEWHERE, nnodes=3, node_rank=rank, master_port=0) for rank in range(3)
    )
    with ThreadPoolExecutor(1) as threads:
        port = threads.submit(discover_port, patient, Deadline.after(PATIENCE_SECONDS))
        until(lambda: store.check(["group-coordinator/hosts/0/rounds/1"]))
        with pytest.raises(GroupTimeoutError, match="the head has not published its port"):
            discover_port(hasty, Deadline.after(0.2))
        publish_port(head, 4321, Deadline.after(PATIENCE_SECONDS))
        assert port.result(PATIENCE_SECONDS) == 4321


def test_a_store_of_torchrun_that_does_not_answer_is_an_error_of_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with store_elsewhere() as store:
        torchruns(store, monkeypatch)
        threading.Timer(0.5, store.stop).start()
        began = time.monotonic()
        with pytest.raises(HostError, match=rf"the store at \S+:{store.port} does not answer"):
            serve_host(dataclasses.replace(ELSEWHERE, master_port=0), 2.0)
        assert time.monotonic() - began < 2.0 + STALL_SECONDS


def test_a_way_to_the_head_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    no_way = OSError(errno.ENETUNREACH, "no way")
    found = [no_way, OSError(errno.ENETDOWN, "down"), "10.0.0.2", no_way]
    found.append(OSError(errno.EACCES, "forbidden"))
    monkeypatch.setattr(discovery, "own_address", Mock(side_effect=found))
    monkeypatch.setattr(discovery, "_RETRY_SECONDS", 0.0)
    way = partial(discovery.address_on_route, 1, "10.0.0.1", 5)
    assert way(Deadline.after(PATIENCE_SECONDS)) == "10.0.0.2"
    with pytest.raises(HostError, match=r"no way to the head at 10.0.0.1 in 0 s: .*no way"):
        way(Deadline.after(0.0))
    with pytest.raises(PermissionError):
        way(Deadline.after(PATIENCE_SECONDS))


def test_a_name_of_the_head_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    again, no_name, no_data, fail = (
        socket.gaierror(getattr(socket, f"EAI_{name}"), "no such name")
        for name in ("AGAIN", "NONAME", "NODATA", "FAIL")
    )
    look_up = Mock(side_effect=[again, no_name, no_data, resolved, no_name, fail])
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(discovery, "_RETRY_SECONDS", 0.0)
    address = partial(discovery.address_of_head, 1, "head.example")
    assert str(address(Deadline.after(PATIENCE_SECONDS))) == "127.0.0.1"
    why = r"no way to the head at head.example in 0 s: .*no such name"
    with pytest.raises(HostError, match=why):
        address(Deadline.after(0.0))
    with pytest.raises(OSError, match=r"cannot resolve 'head\.example': no such name"):
        address(Deadline.after(PATIENCE_SECONDS))
    assert {call.args[0] for call in look_up.call_args_list} == {"head.example"}
