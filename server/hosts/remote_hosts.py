"""Represent the other hosts of a pool, and the workers on them, in the driver.

The worker's host watches it and passes its messages on; here they arrive by the link's thread.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from coordinator.remote_boards import RemoteBoards, encode_heartbeat
from shm_broadcast import NEVER, Board, Deadline
from shm_broadcast.eventcount import WakeFd
from shm_broadcast.state.stacks import StackFile

from ..control.channel import ChannelClosedError
from ..control.protocol import FromWorker, Resume, Start
from ..errors import HostError
from ..inspection.snapshot import BoardSnapshot, HostSnapshot
from .discovery import address_of_head, publish_port
from .link import (
    BeginGeneration,
    FromHead,
    FromHost,
    HeadLink,
    HeartbeatMessage,
    HostAdmitted,
    HostHello,
    HostRefused,
    HostShutdown,
    HostState,
    MarkCall,
    OfWorker,
    QueryState,
    SignalWorker,
    ToWorker,
    WorkerEnded,
    WorkerStack,
    differing_fact,
    endpoint,
    facts_here,
)

if TYPE_CHECKING:
    from ..driver.pool_plan import PoolPlan
    from .place import Hosts


_BURY_SECONDS = 4.0
"""How long to wait for the word that a worker has ended which was killed."""


class RemoteChannel:
    """A control channel whose other end is on another host.

    Args:
        send: sends a message of the driver.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._arrived: deque[FromWorker] = deque()
        self._ended = False
        self._news = WakeFd()

    def fileno(self) -> int:
        """A descriptor that is readable if something has come since `take` gave ``None`` last."""
        return self._news.fileno()

    def send(self, message: Start | Resume, deadline: Deadline = NEVER) -> None:  # noqa: ARG002
        """Send a message soon; does not wait. Lost if the worker, or the link to it, is gone."""
        self._send(message)

    def take(self) -> FromWorker | None:
        """The next message if one has arrived, else ``None``.

        Raises:
            ChannelClosedError: there will be none.
        """
        if not self._arrived and not self._ended:
            self._news.clear()  # before the look: what comes after it is announced anew
        if self._arrived:
            return self._arrived.popleft()
        if self._ended:
            raise ChannelClosedError("the worker has ended")
        return None

    def put(self, message: FromWorker) -> None:
        """Let a message of the worker arrive; from the link's thread."""
        self._arrived.append(message)
        self._news.notify()

    def end(self) -> None:
        """No more messages will arrive."""
        self._ended = True
        self._news.notify()

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        self._news.close()


class RemoteWorker:
    """One worker's process on another host; see `WorkerHandle`.

    Attributes:
        pidfd: a descriptor that becomes readable when the worker has ended, or its host is lost.

    Args:
        rank: its global rank.
        since: the generation in which it is started.
        post: sends a message to its host.
    """

    def __init__(self, rank: int, since: int, post: Callable[[FromHead], None]) -> None:
        self.rank = rank
        self.since = since
        self.pid = 0
        self.connected = self.detached = False
        self.channel = RemoteChannel(lambda message: post(ToWorker(rank, message)))
        self._gone = WakeFd()
        self.pidfd = self._gone.fileno()
        self.stack_file = StackFile()
        self._post = post
        self._how = ""
        self._over = threading.Event()
        self._closing = threading.RLock()  # a signal handler may close it, too

    def start(self, start: Start, deadline: Deadline) -> None:
        """Send the start message."""
        self.detached = False
        self.channel.send(start, deadline)

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait until the process has ended or is lost; False after ``timeout`` seconds."""
        if timeout > 0:
            return self._over.wait(min(timeout, threading.TIMEOUT_MAX))
        return self._over.is_set()  # takes no lock, which a signal handler could leave taken

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGKILL or `STACK_SIGNAL` to the worker, unless it has ended."""
        if not self.ended():
            self._post(SignalWorker(self.rank, number))

    def kill_if_detached(self) -> None:
        """Nothing: its host does that."""

    def wait(self) -> str:
        """Wait for a process that has ended, or was killed, and return how it ended."""
        if not self.ended(_BURY_SECONDS):
            return "its host does not say how"
        return self._how

    def close(self) -> None:
        """Close all descriptors, after `wait`; idempotent, from any thread."""
        with self._closing:
            self.channel.close()
            self.stack_file.close()
            self._gone.close()

    def show_stack(self, text: str) -> None:
        """Let the worker's stack arrive; from the link's thread."""
        with self._closing:
            if self.stack_file.fd >= 0:
                os.write(self.stack_file.fd, text.encode())

    def end(self, how: str, stack: str = "") -> None:
        """Note that the process has ended, or its host is lost; from the link's thread."""
        if self.ended():
            return
        self._how = how
        if stack:
            self.show_stack(stack)
        self._over.set()
        self.channel.end()
        self._gone.notify()


_LINE_SECONDS = 10.0
"""How often a line says who is missing."""
_log = logging.getLogger(__name__)


class RemoteHosts:
    """All hosts of a pool but this one, the head. Any thread may use it; close it.

    Attributes:
        address: this host's address, as the others reach it.
    """

    def __init__(self, hosts: Hosts, plan: PoolPlan, deadline: Deadline) -> None:
        """Listen for them. If that fails, the summoner is closed.

        Raises:
            HostError: the head's name leads to no address in time.
            OSError: the address is none of this host's, or its port is in use.
            ValueError: it means all interfaces.
            GroupTimeoutError: torchrun's store, which is to tell them the port, does not answer.
            TransportError: that store has gone.
        """
        self._plan = plan
        self._hosts = hosts
        self._facts = facts_here(hosts.compared)
        self._nodes = range(1, hosts.nnodes)
        self._changed = threading.Condition()
        self._present: dict[int, HostHello] = {}
        self._refusal: HostError | None = None
        self._workers: dict[int, RemoteWorker] = {}
        self._questions = 0
        self._asked: set[int] = set()
        self._seen: list[HostSnapshot] = []
        self._generation = 0
        self._board: Board | None = None
        self._boards = RemoteBoards((), {})
        self._heartbeats: dict[int, bytes] = {}
        with ExitStack() as undo:
            if hosts.provisioner is not None:
                undo.callback(hosts.provisioner.close)
            head = address_of_head(hosts.node_rank, hosts.master_addr, deadline)
            self._link = HeadLink(hosts, head, self)
            undo.callback(self._link.close)
            self.address = self._link.address
            self._where = _told_where(hosts.master_addr, self.address, self._link.port)
            told = "%d hosts, as %s say; this one is the head, and listens at %s"
            _log.info(told, hosts.nnodes, hosts.told_by, self._where)
            self._link.begin()
            if hosts.provisioner is None:
                publish_port(hosts, self._link.port, deadline)
            undo.pop_all()

    def meet(
        self,
        deadline: Deadline,
        tick: Callable[[], float],
        show: Callable[[Iterable[int]], None],
    ) -> None:
        """Wait until all hosts are there; a line every ten seconds says who is missing.

        Args:
            deadline: when to give up.
            tick: called again and again; returns the seconds until its next call.
            show: called with the ranks of the hosts that are not there.

        Raises:
            HostError: one was refused, or has not come in time.
            What ``tick`` raises.
        """
        began = said = time.monotonic()
        self._summon()
        while absent := self._absent():
            if deadline.expired:
                late = f"{_nodes(absent)} did not come in {deadline.timeout:g} s"
                late += f"; the head listens at {self._where}"
                raise HostError(absent[0], late, absent=True)
            show([rank for node in absent for rank in self._plan.ranks_of(node)])
            self._look_for_trouble(absent)
            if (now := time.monotonic()) - said >= _LINE_SECONDS:
                said = now
                told = "waiting for %s, for %.0f s now; this host, the head, listens at %s"
                _log.warning(told, _nodes(absent), now - began, self._where)
            pause = min(deadline.remaining(), tick(), 1.0)
            with self._changed:
                if self._refusal is None and self._absent() == absent:
                    self._changed.wait(pause)
                if self._refusal is not None:
                    refusal, self._refusal = self._refusal, None
                    raise refusal

    def begin(self, generation: int, board: Board) -> None:
        """Swap what ``board`` says with the other hosts' boards of its generation until `leave`."""
        with self._changed:
            names = self._names()
            named = {name: self._plan.ranks_of(node) for node, name in names.items()}
            self._boards = RemoteBoards(board.ranks, named, swap=self._link.heartbeat_now)
            self._heartbeats = dict.fromkeys(names, b"")
            self._generation, self._board = generation, board
            board.set_remote_members(self._boards)

    def leave(self, generation: int) -> None:
        """Swap no more: the board of ``generation`` is about to be closed. Idempotent."""
        with self._changed:
            if self._generation == generation:
                self._board = None

    def launch(
        self, missing: Iterable[int], generation: int, deadline: Deadline
    ) -> Iterator[RemoteWorker]:
        """Have all hosts begin a generation, and start those workers of theirs that are missing.

        Yields:
            Each of these workers, to be closed by the caller.
        """
        wanted = set(missing)
        seconds = None if deadline.timeout is None else deadline.remaining()
        for node in self._nodes:
            ranks = [rank for rank in self._plan.ranks_of(node) if rank in wanted]
            for rank in ranks:
                worker = RemoteWorker(rank, generation, partial(self._link.post, node))
                self._workers[rank] = worker
                yield worker
            self._link.post(
                node, BeginGeneration(generation, tuple(ranks), self._plan.in_flight, seconds)
            )
            with self._changed:
                if node not in self._present:
                    for rank in ranks:
                        self._workers[rank].end("its host is gone")

    def mark(self, generation: int, number: int) -> None:
        """Tell the other hosts that nobody waits for a call any more."""
        for node in self._nodes:
            self._link.post(node, MarkCall(generation, number))

    def query_state(self) -> None:
        """Ask all hosts what they see of their workers; `seen` has the answers."""
        with self._changed:
            self._questions += 1
            self._seen = []
            self._asked = set() if self._board is None else {*self._present}
            for node in self._asked:
                self._link.post(node, QueryState(self._questions))

    def seen(self, deadline: Deadline) -> list[HostSnapshot]:
        """What the hosts saw after the latest `query_state`: those that tell it in time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._asked, deadline.remaining())
            return list(self._seen)

    def close(self) -> None:
        """Dismiss the hosts, which end what is left of their workers. Idempotent."""
        for node in self._nodes:
            self._link.post(node, HostShutdown())
        self._link.close()
        if self._hosts.provisioner is not None:
            self._hosts.provisioner.close()

    # --- what the link tells, in its thread ------------------------------------------------

    def admit(self, hello: HostHello) -> HostAdmitted | HostRefused:
        """Let a host take part, unless something is different there."""
        node, differs = hello.node, differing_fact(self._facts, hello.facts)
        if not differs and node not in self._nodes:
            differs = f"there is no node {node} to come, of {self._hosts.nnodes}"
        if differs:
            self._refuse(node, f"{hello.who}, node {node}: {differs}")
            return HostRefused(differs)
        with self._changed:
            self._present[node] = hello
            self._changed.notify_all()
        _log.info("%s is here, as node %d", hello.who, node)
        plan = self._plan
        return HostAdmitted(
            n_workers=plan.n_workers,
            ranks=tuple(plan.ranks_of(node)),
            config=plan.config,
            stays=plan.restart != "never",
        )

    def _refuse(self, node: int, reason: str) -> None:
        _log.warning("refused %s", reason)
        with self._changed:
            if self._absent():  # otherwise all are there, whom it does not disturb
                self._refusal = HostError(node, reason)
                self._changed.notify_all()

    def on_message(self, node: int, message: FromHost) -> None:
        """Take in what a host says."""
        match message:
            case HeartbeatMessage(generation, heartbeat):
                self._take_beat(node, generation, heartbeat)
            case OfWorker(rank, since, told) if worker := self._worker(node, rank, since):
                worker.channel.put(told)
            case WorkerStack(rank, since, text) if worker := self._worker(node, rank, since):
                worker.show_stack(text)
            case WorkerEnded(rank, since, how, stack) if worker := self._worker(node, rank, since):
                worker.end(f"{how} on host {self._names()[node]}", stack)
            case HostState(number, key, boards):
                self._take_sight(node, number, key, boards)

    def _worker(self, node: int, rank: int, since: int) -> RemoteWorker | None:
        """The worker that a host speaks of, unless it was replaced meanwhile."""
        worker = self._workers.get(rank)
        speaks_of_it = worker is not None and worker.since == since
        return worker if speaks_of_it and rank in self._plan.ranks_of(node) else None

    def on_lost(self, node: int, why: str) -> None:
        """Take in that a host is gone: its workers are, too."""
        _log.error("%s", why)
        with self._changed:
            self._present.pop(node, None)
            self._asked.discard(node)
            self._changed.notify_all()
        for rank in self._plan.ranks_of(node):
            if rank in self._workers:
                self._workers[rank].end(why)

    def heartbeat_message(self) -> HeartbeatMessage:
        """What this host's board says."""
        with self._changed:
            if self._board is None:
                return HeartbeatMessage(0, b"")
            here = self._plan.ranks_of(0)
            return HeartbeatMessage(
                self._generation, encode_heartbeat(self._board, here, time.monotonic_ns())
            )

    def _take_beat(self, node: int, generation: int, heartbeat: bytes) -> None:
        with self._changed:
            board = self._board
            if board is None or generation != self._generation or node not in self._heartbeats:
                return
            self._heartbeats[node] = heartbeat
            self._boards.pass_on(self._heartbeats.values(), board)

    def _take_sight(
        self, node: int, number: int, key: str, boards: Iterable[BoardSnapshot]
    ) -> None:
        with self._changed:
            if number != self._questions or node not in self._asked:
                return
            beside = {each.key: each for each in boards}
            there = beside.pop(key, None)
            if self._board is not None and there is not None:
                shared, name = self._board.handle().segment.nonce.hex(), self._names()[node]
                self._seen.append(HostSnapshot(name, shared, there, tuple(beside.values())))
            self._asked.discard(node)
            self._changed.notify_all()

    def _summon(self) -> None:
        """Have the absent hosts' processes started, if that is not a launcher's task."""
        summoner = self._hosts.provisioner
        if summoner is None:
            return
        for node in self._absent():
            there = replace(self._hosts, node_rank=node, provisioner=None)
            summoner.start(there, self.address, self._link.port)

    def _look_for_trouble(self, absent: Iterable[int]) -> None:
        summoner = self._hosts.provisioner
        if summoner is None:
            return
        for node in absent:
            trouble = summoner.problem(node)
            if trouble:
                raise HostError(node, f"node {node} did not come: {trouble}")

    def _absent(self) -> list[int]:
        return [node for node in self._nodes if node not in self._present]

    def _names(self) -> dict[int, str]:
        """What each other host is called: its host name, if no other host has the same."""
        taken = [socket.gethostname(), *(hello.name for hello in self._present.values())]
        return {
            node: hello.name if taken.count(hello.name) == 1 else f"{hello.name} (node {node})"
            for node, hello in sorted(self._present.items())
        }


def _nodes(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _told_where(named: str, address: str, port: int) -> str:
    """Where the head listens, and, if so, why nobody comes there."""
    where = endpoint(address, port)
    if not ipaddress.ip_address(address).is_loopback:
        return where
    leads = "" if named == address else f", to which {named!r} leads on this host"
    return f"{where}, a loopback address{leads}: other hosts cannot reach it"
