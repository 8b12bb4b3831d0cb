"""The other hosts of a pool, and their workers, as the driver's objects.

A worker's host watches it and forwards its messages, which arrive here in the link's thread.
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


_END_SECONDS = 4.0
"""Longest wait for the report that a killed worker has ended."""


class RemoteChannel:
    """A control channel to another host; ``send`` sends a message of the driver."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._arrived: deque[FromWorker] = deque()
        self._ended = False
        self._news = WakeFd()

    def fileno(self) -> int:
        """Return a descriptor that is readable after an arrival since the last empty `take`."""
        return self._news.fileno()

    def send(self, message: Start | Resume, deadline: Deadline = NEVER) -> None:  # noqa: ARG002
        """Queue a message; does not wait. Lost if the worker, or the link to it, is."""
        self._send(message)

    def take(self) -> FromWorker | None:
        """Return the next message, if any; after the last one raise `ChannelClosedError`."""
        if not self._arrived and not self._ended:
            self._news.clear()  # before the check: a later message notifies again
        if self._arrived:
            return self._arrived.popleft()
        if self._ended:
            raise ChannelClosedError("the worker has ended")
        return None

    def put(self, message: FromWorker) -> None:
        """Append a message of the worker; from the link's thread."""
        self._arrived.append(message)
        self._news.notify()

    def end(self) -> None:
        """Mark the last message."""
        self._ended = True
        self._news.notify()

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        self._news.close()


class RemoteWorker:
    """One worker's process on another host; see `WorkerHandle`.

    ``pidfd`` is also readable when its host is lost; ``since`` is the generation of its start;
    ``post`` sends a message to its host.
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
        return self._over.is_set()  # without a lock, which a signal handler could leave held

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGKILL or `STACK_SIGNAL` to the worker, unless it has ended."""
        if not self.ended():
            self._post(SignalWorker(self.rank, number))

    def kill_if_detached(self) -> None:
        """Do nothing: its host does it."""

    def wait(self) -> str:
        """Wait for an ended or killed process; return its end, as ``"exit status 1"``."""
        if not self.ended(_END_SECONDS):
            return "its host did not report how"
        return self._how

    def close(self) -> None:
        """Close all descriptors, after `wait`; idempotent, from any thread."""
        with self._closing:
            self.channel.close()
            self.stack_file.close()
            self._gone.close()

    def show_stack(self, text: str) -> None:
        """Store the worker's stack; from the link's thread."""
        with self._closing:
            if self.stack_file.fd >= 0:
                os.write(self.stack_file.fd, text.encode())

    def end(self, how: str, stack: str = "") -> None:
        """Record the end of the process, or the loss of its host; from the link's thread."""
        if self.ended():
            return
        self._how = how
        if stack:
            self.show_stack(stack)
        self._over.set()
        self.channel.end()
        self._gone.notify()


_LINE_SECONDS = 10.0
"""The interval of log lines on missing hosts."""
_log = logging.getLogger(__name__)


class RemoteHosts:
    """All other hosts of a pool; they reach the head at ``address``. Thread-safe; close it."""

    def __init__(self, hosts: Hosts, plan: PoolPlan, deadline: Deadline) -> None:
        """Listen for them. After an error, the provisioner is closed.

        Raises:
            HostError, ValueError, OSError: the head's address is not an address of this host, means
                all interfaces, was not resolved in time, or its port is in use.
            GroupTimeoutError, TransportError: torchrun's store does not reply, or has closed.
        """
        self._plan = plan
        self._hosts = hosts
        self._facts = facts_here(hosts.compared)
        self._nodes = range(1, hosts.nnodes)
        self._changed = threading.Condition()
        self._present: dict[int, HostHello] = {}
        self._refusal: HostError | None = None
        self._workers: dict[int, RemoteWorker] = {}
        self._n_queries = 0
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
            self._endpoint = _endpoint_text(hosts.master_addr, self.address, self._link.port)
            text = "%d hosts, from %s; this one is the head, and listens at %s"
            _log.info(text, hosts.nnodes, hosts.told_by, self._endpoint)
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
        """Wait until all hosts are connected; log the missing ones every ten seconds.

        ``tick`` and ``show`` are as for `ReadyBarrier`.

        Raises:
            HostError: one was refused, or did not connect in time.
        """
        began = logged = time.monotonic()
        self._provision()
        while absent := self._absent():
            if deadline.expired:
                late = f"{_nodes(absent)} did not connect in {deadline.timeout:g} s"
                late += f"; the head listens at {self._endpoint}"
                raise HostError(absent[0], late, absent=True)
            show([rank for node in absent for rank in self._plan.ranks_of(node)])
            self._check_provisioner(absent)
            if (now := time.monotonic()) - logged >= _LINE_SECONDS:
                logged = now
                text = "waiting for %s, for %.0f s now; this host, the head, listens at %s"
                _log.warning(text, _nodes(absent), now - began, self._endpoint)
            pause = min(deadline.remaining(), tick(), 1.0)
            with self._changed:
                if self._refusal is None and self._absent() == absent:
                    self._changed.wait(pause)
                if self._refusal is not None:
                    refusal, self._refusal = self._refusal, None
                    raise refusal

    def begin(self, generation: int, board: Board) -> None:
        """Exchange the state of ``board`` with the other hosts' boards until `leave`."""
        with self._changed:
            names = self._names()
            named = {name: self._plan.ranks_of(node) for node, name in names.items()}
            self._boards = RemoteBoards(board.ranks, named, swap=self._link.heartbeat_now)
            self._heartbeats = dict.fromkeys(names, b"")
            self._generation, self._board = generation, board
            board.set_remote_members(self._boards)

    def leave(self, generation: int) -> None:
        """End the exchange: the board of ``generation`` is about to be closed. Idempotent."""
        with self._changed:
            if self._generation == generation:
                self._board = None

    def launch(
        self, missing: Iterable[int], generation: int, deadline: Deadline
    ) -> Iterator[RemoteWorker]:
        """Have all hosts start a generation; yield their new workers, for the caller to close."""
        missing_ranks = set(missing)
        seconds = None if deadline.timeout is None else deadline.remaining()
        for node in self._nodes:
            ranks = [rank for rank in self._plan.ranks_of(node) if rank in missing_ranks]
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
                        self._workers[rank].end("its host is lost")

    def mark(self, generation: int, number: int) -> None:
        """Set the cancellation flag of a call on the other hosts."""
        for node in self._nodes:
            self._link.post(node, MarkCall(generation, number))

    def query_state(self) -> None:
        """Request the states of all hosts' processes; `seen` returns them."""
        with self._changed:
            self._n_queries += 1
            self._seen = []
            self._asked = set() if self._board is None else {*self._present}
            for node in self._asked:
                self._link.post(node, QueryState(self._n_queries))

    def seen(self, deadline: Deadline) -> list[HostSnapshot]:
        """Return the states after the latest `query_state` that arrive by the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: not self._asked, deadline.remaining())
            return list(self._seen)

    def close(self) -> None:
        """Dismiss the hosts, which end their workers. Idempotent."""
        for node in self._nodes:
            self._link.post(node, HostShutdown())
        self._link.close()
        if self._hosts.provisioner is not None:
            self._hosts.provisioner.close()

    # --- events of the link, in its thread -------------------------------------------------

    def admit(self, hello: HostHello) -> HostAdmitted | HostRefused:
        """Admit a host, unless its facts or number differ."""
        node, reason = hello.node, differing_fact(self._facts, hello.facts)
        if not reason and node not in self._nodes:
            reason = f"node must be in 1..{self._hosts.nnodes - 1}; got {node}"
        if reason:
            self._refuse(node, f"{hello.who}, node {node}: {reason}")
            return HostRefused(reason)
        with self._changed:
            self._present[node] = hello
            self._changed.notify_all()
        _log.info("%s is connected, as node %d", hello.who, node)
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
            if self._absent():  # otherwise the pool is complete, and goes on
                self._refusal = HostError(node, reason)
                self._changed.notify_all()

    def on_message(self, node: int, message: FromHost) -> None:
        """Handle a message of a host."""
        match message:
            case HeartbeatMessage(generation, heartbeat):
                self._handle_heartbeat(node, generation, heartbeat)
            case OfWorker(rank, since, content) if worker := self._worker(node, rank, since):
                worker.channel.put(content)
            case WorkerStack(rank, since, text) if worker := self._worker(node, rank, since):
                worker.show_stack(text)
            case WorkerEnded(rank, since, how, stack) if worker := self._worker(node, rank, since):
                worker.end(f"{how} on host {self._names()[node]}", stack)
            case HostState(number, key, boards):
                self._handle_state(node, number, key, boards)

    def _worker(self, node: int, rank: int, since: int) -> RemoteWorker | None:
        """Return the worker of a message, unless it was replaced."""
        worker = self._workers.get(rank)
        is_current = worker is not None and worker.since == since
        return worker if is_current and rank in self._plan.ranks_of(node) else None

    def on_lost(self, node: int, why: str) -> None:
        """Handle the loss of a host and its workers."""
        _log.error("%s", why)
        with self._changed:
            self._present.pop(node, None)
            self._asked.discard(node)
            self._changed.notify_all()
        for rank in self._plan.ranks_of(node):
            if rank in self._workers:
                self._workers[rank].end(why)

    def heartbeat_message(self) -> HeartbeatMessage:
        """Return the state of this host's board."""
        with self._changed:
            if self._board is None:
                return HeartbeatMessage(0, b"")
            local = self._plan.ranks_of(0)
            return HeartbeatMessage(
                self._generation, encode_heartbeat(self._board, local, time.monotonic_ns())
            )

    def _handle_heartbeat(self, node: int, generation: int, heartbeat: bytes) -> None:
        with self._changed:
            board = self._board
            if board is None or generation != self._generation or node not in self._heartbeats:
                return
            self._heartbeats[node] = heartbeat
            self._boards.pass_on(self._heartbeats.values(), board)

    def _handle_state(
        self, node: int, number: int, key: str, boards: Iterable[BoardSnapshot]
    ) -> None:
        with self._changed:
            if number != self._n_queries or node not in self._asked:
                return
            others = {each.key: each for each in boards}
            pool_board = others.pop(key, None)
            if self._board is not None and pool_board is not None:
                shared, name = self._board.handle().segment.nonce.hex(), self._names()[node]
                self._seen.append(HostSnapshot(name, shared, pool_board, tuple(others.values())))
            self._asked.discard(node)
            self._changed.notify_all()

    def _provision(self) -> None:
        provisioner = self._hosts.provisioner
        if provisioner is None:
            return
        for node in self._absent():
            arguments = replace(self._hosts, node_rank=node, provisioner=None)
            provisioner.start(arguments, self.address, self._link.port)

    def _check_provisioner(self, absent: Iterable[int]) -> None:
        provisioner = self._hosts.provisioner
        if provisioner is None:
            return
        for node in absent:
            problem = provisioner.problem(node)
            if problem:
                raise HostError(node, f"node {node} did not connect: {problem}")

    def _absent(self) -> list[int]:
        return [node for node in self._nodes if node not in self._present]

    def _names(self) -> dict[int, str]:
        """Return each other host's name, unique by its node number if necessary."""
        taken = [socket.gethostname(), *(hello.name for hello in self._present.values())]
        return {
            node: hello.name if taken.count(hello.name) == 1 else f"{hello.name} (node {node})"
            for node, hello in sorted(self._present.items())
        }


def _nodes(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _endpoint_text(name: str, address: str, port: int) -> str:
    """Return the head's endpoint, with a warning if it is a loopback address."""
    text = endpoint(address, port)
    if not ipaddress.ip_address(address).is_loopback:
        return text
    leads = "" if name == address else f", to which {name!r} leads on this host"
    return f"{text}, a loopback address{leads}: other hosts cannot reach it"
