"""A host's part of a pool: what it heard last counts, also if the link ends right behind it."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psutil
import pytest
from msgspec.structs import replace

import coordinator
from coordinator.rank_grid import RankGrid
from server.config import PoolConfig
from server.control.protocol import Handles, Hello, Start
from server.errors import HostError
from server.hosts import discovery, host_supervisor
from server.hosts.discovery import discover_port, publish_port
from server.hosts.host_supervisor import serve_host
from server.hosts.link import (
    BeginGeneration,
    HostAdmitted,
    HostRefused,
    HostShutdown,
    OfWorker,
    SignalWorker,
    ToWorker,
    WorkerEnded,
    WorkerStack,
)
from server.hosts.place import Hosts
from shm_broadcast import Deadline, GroupTimeoutError, MessageQueue
from shm_broadcast.state.stacks import STACK_SIGNAL
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
from tests.refused_threads import refusing_threads
from tests.standing_store import store_elsewhere

if TYPE_CHECKING:
    from server.hosts.link import HostLinkHandler

SECRET: Final = b"known to both hosts"
HERE = Hosts(nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=1, secret=SECRET)
ADMITTED = HostAdmitted(2, (1,), PoolConfig(threads=1, fork=False), stays=False)
LOST: Final = "the head has ended, or closed the link"

ScriptedT = TypeVar("ScriptedT", bound="Scripted")


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
    """Begins a generation; what comes then, a subclass says. Keeps what it hears of ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.pids: list[int] = []
        self.ended: list[WorkerEnded] = []

    def begin(self) -> None:
        self._handler.hear(ADMITTED)
        self._handler.hear(BeginGeneration(1, (1,), 2, PATIENCE_SECONDS))

    def post(self, message: Any) -> None:
        match message:
            case OfWorker(1, generation, Hello(pid)) if generation == len(self.pids) + 1:
                self.pids.append(pid)
                self.goes_on()
            case WorkerEnded():
                self.ended.append(message)
                self._handler.hear(HostShutdown())

    def heartbeat_now(self) -> None:
        pass

    def goes_on(self) -> None:
        """Called when the worker of a generation has come."""
        raise NotImplementedError


def links_made(kind: type[ScriptedT], monkeypatch: pytest.MonkeyPatch) -> list[ScriptedT]:
    """Have hosts make links of this ``kind``; they are in the list then."""
    made: list[ScriptedT] = []

    def make(*args: Any) -> ScriptedT:
        made.append(kind(*args))
        return made[-1]

    monkeypatch.setattr(host_supervisor, "HostLink", make)
    return made


class SlowHost(Scripted):
    """Tells a host to replace a worker that was killed and that it has not seen end yet."""

    def goes_on(self) -> None:
        if len(self.pids) == 1:
            self._handler.hear(SignalWorker(1, signal.SIGKILL))
            self._handler.hear(BeginGeneration(2, (1,), 2, PATIENCE_SECONDS))
        else:
            threading.Thread(target=self._dismiss).start()

    def _dismiss(self) -> None:
        until(lambda: not psutil.pid_exists(self.pids[0]))
        self._handler.hear(HostShutdown())


class ShortOfFiles(Scripted):
    """No file may be opened any more when the worker is to go on in a second generation."""

    def goes_on(self) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with Path("/dev/null").open() as next_one:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_one.fileno(), most))
        self._handler.hear(BeginGeneration(2, (), 2, PATIENCE_SECONDS))


class TakesNothingIn(Scripted):
    """The worker stands still when it is told what to be."""

    def goes_on(self) -> None:
        os.kill(self.pids[0], signal.SIGSTOP)
        with MessageQueue(1, 1) as queue:
            handles = Handles(queue.export_handle())
        grid = RankGrid.of_job(tp=2, pp=1, dp=1, pcp=1, axes=None)
        start = Start(
            *(1, 1, False, 1, grid, 1, "cpu", SECRET, handles, False),
            *("tests.server.workers:Worker", b"x" * (4 << 20), None, 0.5, ""),
        )
        self._handler.hear(ToWorker(1, start))


class AsksForStack(Scripted):
    """Asks what the worker does, and is content with any answer."""

    stack = ""

    def goes_on(self) -> None:
        self._handler.hear(SignalWorker(1, STACK_SIGNAL))

    def post(self, message: Any) -> None:
        super().post(message)
        if isinstance(message, WorkerStack):
            self.stack = message.text
            self._handler.hear(HostShutdown())


def test_a_host_that_can_start_no_thread_shows_what_a_worker_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = links_made(AsksForStack, monkeypatch)
    with refusing_threads("pool-stack"):
        serve_host(HERE, PATIENCE_SECONDS)
    (link,) = made
    assert "File" in link.stack


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (ShortOfFiles, r"not started: this process may have \d+ files open"),
        (TakesNothingIn, "it received nothing: control channel send: timed out after 0.5 s"),
    ],
)
def test_a_host_that_cannot_begin_a_generation_says_why_and_can_begin_another(
    trouble: type[Scripted], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where none of its workers is missing: the head waits for all."""
    made = links_made(trouble, monkeypatch)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        serve_host(HERE, PATIENCE_SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (link,) = made
    (told,) = link.ended
    assert (told.rank, told.since) == (1, 1)
    assert re.match(why, told.how)
    assert not any(map(psutil.pid_exists, link.pids))


def test_the_end_of_a_worker_is_not_taken_for_its_replacements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = links_made(SlowHost, monkeypatch)
    serve_host(HERE, PATIENCE_SECONDS)
    (link,) = made
    assert len(link.pids) == 2
    assert link.ended == []
    assert not any(map(psutil.pid_exists, link.pids))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> type[BriefLink]:
    class Link(BriefLink):
        pass

    monkeypatch.setattr(host_supervisor, "HostLink", Link)
    return Link


def test_a_refusal_is_told_although_the_link_ended_behind_it(link: type[BriefLink]) -> None:
    link.says = (HostRefused("--tp is 4 there"),)
    with pytest.raises(HostError, match=r"refused this host: --tp is 4 there$"):
        serve_host(HERE, PATIENCE_SECONDS)


def test_a_dismissal_counts_although_the_link_ended_behind_it(link: type[BriefLink]) -> None:
    link.says = (ADMITTED, HostShutdown())
    serve_host(HERE, PATIENCE_SECONDS)


@pytest.mark.parametrize("says", [(), (ADMITTED,)], ids=["unheard", "admitted"])
def test_the_end_of_a_link_that_said_no_more_is_an_error(
    link: type[BriefLink], says: tuple[Any, ...]
) -> None:
    link.says = says
    with pytest.raises(HostError, match=f"{LOST}$"):
        serve_host(HERE, PATIENCE_SECONDS)


def test_a_host_that_comes_again_knows_the_port_that_the_head_has_told(
    link: type[BriefLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head at a free port, which it tells once, in torchrun's store."""
    store = coordinator.host_store()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    ports: list[int] = []
    visits = iter([(replace(ADMITTED, stays=True),), (ADMITTED, HostShutdown())])

    class Again(link):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            ports.append(args[2])
            self.says = next(visits)

    monkeypatch.setattr(host_supervisor, "HostLink", Again)
    unknown = dataclasses.replace(HERE, master_port=0)
    head = dataclasses.replace(unknown, node_rank=0)
    publish_port(head, 4321, Deadline.after(PATIENCE_SECONDS))
    serve_host(unknown, PATIENCE_SECONDS)
    assert ports == [4321, 4321]


def test_a_head_that_never_says_where_it_listens_is_an_error_of_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = coordinator.host_store()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with pytest.raises(HostError, match="the head has not published its port"):
        serve_host(dataclasses.replace(HERE, master_port=0), 0.2)


def test_a_host_that_waits_for_the_port_hears_it_where_another_host_has_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = coordinator.host_store()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    head, patient, hasty = (
        dataclasses.replace(HERE, nnodes=3, node_rank=rank, master_port=0) for rank in range(3)
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
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_PORT", str(store.port))
        threading.Timer(0.5, store.stop).start()
        began = time.monotonic()
        with pytest.raises(HostError, match=rf"the store at \S+:{store.port} does not answer"):
            serve_host(dataclasses.replace(HERE, master_port=0), 2.0)
        assert time.monotonic() - began < 2.0 + STALL_SECONDS


def test_a_way_to_the_head_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while this host's interface is down."""
    outcomes = [OSError(errno.ENETUNREACH, "no way"), OSError(errno.ENETDOWN, "down"), "10.0.0.2"]

    def looked_up(*_: object) -> str:
        found = outcomes.pop(0)
        if isinstance(found, OSError):
            raise found
        return str(found)

    monkeypatch.setattr(discovery, "own_address", looked_up)
    monkeypatch.setattr(discovery, "_RETRY_SECONDS", 0.0)
    way = partial(discovery.address_on_route, 1, "10.0.0.1", 5)
    assert way(Deadline.after(PATIENCE_SECONDS)) == "10.0.0.2"
    outcomes[:] = [OSError(errno.ENETUNREACH, "no way")]
    with pytest.raises(HostError, match=r"no way to the head at 10.0.0.1 in 0 s: .*no way"):
        way(Deadline.after(0.0))
    outcomes[:] = [OSError(errno.EACCES, "forbidden")]
    with pytest.raises(PermissionError):
        way(Deadline.after(PATIENCE_SECONDS))


def test_a_name_of_the_head_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while no name server can be reached, or none knows a head that was started just now."""
    look_up = socket.getaddrinfo
    trouble = [socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_NODATA]

    def looked_up(name: str, *how: Any, **more: Any) -> Any:
        assert name == "head.example"
        if trouble:
            raise socket.gaierror(trouble.pop(0), "no such name")
        return look_up("127.0.0.1", *how, **more)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(discovery, "_RETRY_SECONDS", 0.0)
    address = partial(discovery.address_of_head, 1, "head.example")
    assert str(address(Deadline.after(PATIENCE_SECONDS))) == "127.0.0.1"
    trouble[:] = [socket.EAI_NONAME]
    with pytest.raises(
        HostError, match=r"no way to the head at head.example in 0 s: .*no such name"
    ):
        address(Deadline.after(0.0))
    trouble[:] = [socket.EAI_FAIL]
    with pytest.raises(OSError, match=r"cannot resolve 'head\.example': no such name"):
        address(Deadline.after(PATIENCE_SECONDS))
