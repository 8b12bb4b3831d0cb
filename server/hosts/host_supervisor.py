"""Runs on every host of a pool except the head: starts the workers there, and watches them.

The main thread owns the workers, and does what the head says. The link's thread talks to the head
even while workers are being started, which takes seconds.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from coordinator.daemon_threads import run_in_thread
from coordinator.remote_boards import decode_heartbeat, encode_heartbeat
from shm_broadcast import Board, Deadline, GroupTimeoutError, SharedMemoryError, TransportError
from shm_broadcast.state.stacks import STACK_SIGNAL

from ..control.channel import ChannelClosedError, RendezvousServer
from ..control.pool_memory import CancellationFlags, create_pool_board
from ..control.protocol import FromWorker, Ready, Start
from ..driver.binding import Bound, bound_here, worker_threads
from ..driver.limits import translated_limit_errors
from ..driver.supervisor import Supervisor, WorkerEvents
from ..errors import HostError, WorkerStartError
from ..inspection.diagnosis import own_programs
from ..launchers.local import LocalWorker, end, launch, worker_stacks
from .discovery import address_of_head, address_on_route, discover_port
from .link import (
    BeginGeneration,
    FromHead,
    HeartbeatMessage,
    HostAdmitted,
    HostHello,
    HostLink,
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
    facts_here,
)

if TYPE_CHECKING:
    from .place import Hosts

_LOOK_SECONDS = 0.05
"""How often to look whether the board was aborted."""
_LINE_SECONDS = 10.0
"""How often a line says that the head is not there."""
_ASK_SECONDS = 1.0
"""How often to look why."""
_log = logging.getLogger(__name__)


class _HeadLost(NamedTuple):
    """The last message in the inbox: why nothing more will come."""

    why: str


def serve_host(hosts: Hosts, timeout: float | None = 300.0) -> None:
    """Run this host's part of a pool whose driver is on another host, until the pool is shut down.

    The head says which workers to start; they need to find the worker's class here, too. Workers
    end with this process, however it ends. Any thread may call; the main thread, if it is to hear
    signals.

    Args:
        hosts: which host this is; not the head.
        timeout: seconds to wait for the head, each time; ``None``: for ever.

    Raises:
        HostError: the head did not answer in time, refused this host, or was lost; of a pool that
            is restarted, it was lost and has not come back in time.
        ValueError: this is the head.
        DescriptorLimitError: too few files may be open (``ulimit -n``).
        ProcessLimitError: no further thread can be started.
        OSError: the head's name cannot be looked up, for a reason that does not pass.
    """
    if hosts.is_head:
        raise ValueError("node 0 is the head: make a WorkerPool there")
    deadline = Deadline.after(timeout)
    try:
        hosts = replace(hosts, master_port=discover_port(hosts, deadline))
    except (GroupTimeoutError, TransportError) as error:
        raise HostError(hosts.node_rank, str(error)) from error
    stays, instance_id = True, uuid.uuid4().hex
    while stays:
        with translated_limit_errors(1, 0):
            supervisor = HostSupervisor(hosts, instance_id, deadline)
        with supervisor:
            stays = supervisor.run()
        deadline = Deadline.after(timeout)


class HostSupervisor(WorkerEvents):
    """One host's part of a pool, over one link to the head. Close it."""

    def __init__(self, hosts: Hosts, instance_id: str, deadline: Deadline) -> None:
        """Wait until the head has admitted this host.

        Args:
            hosts: with the port at which the head listens.
            visitor: as of `HostHello`.
            deadline: for the head's answer.

        Raises:
            HostError: it did not answer in time, or refused.
            OSError: its name cannot be looked up, for a reason that does not pass.
        """
        self._node = hosts.node_rank
        self._inbox: deque[FromHead | _HeadLost] = deque()
        self._spoken = threading.Event()
        self._boarding = threading.Lock()
        self._board: Board | None = None
        self._generation = 0
        self._told_abort = False
        self._workers: dict[int, LocalWorker] = {}
        self._since: dict[int, int] = {}
        self._supervisor = Supervisor()
        self._meeting = RendezvousServer()
        self._memory = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._supervisor.close)
            undo.callback(self._meeting.close)
            self._pool = self._join(hosts, instance_id, deadline, undo)
            self._closing = undo.pop_all()

    def run(self) -> bool:
        """Do what the head says; False when the pool was shut down, True to come again.

        Raises:
            HostError: the head is lost, and has not said that this host is to come again.
        """
        while True:
            self._supervisor.step(self, _LOOK_SECONDS if self._workers else 1.0)
            self._tell_abort()
            while self._inbox:
                match self._inbox.popleft():
                    case HostShutdown():
                        return False
                    case _HeadLost(why):
                        _log.error("%s; the workers here end", why)
                        if self._pool.stays:
                            return True
                        raise HostError(self._node, why)
                    case message:
                        self._obey(message)

    def __enter__(self) -> HostSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers here, and leave."""
        end(list(self._workers.values()), 0.0, self._pool.config.kill_seconds)
        for worker in self._workers.values():
            worker.close()
        self._leave_board()
        self._closing.close()

    # --- what the link brings, in its thread -----------------------------------------------

    def hear(self, message: FromHead) -> None:
        """Take in a message of the head."""
        match message:
            case HeartbeatMessage():
                self._take_beat(message)
            case MarkCall():
                self._mark(message)
            case _:
                self._put(message)

    def lose(self, why: str) -> None:
        """Take in that the head is gone, behind what it said before."""
        self._put(_HeadLost(why))

    def _put(self, news: FromHead | _HeadLost) -> None:
        self._inbox.append(news)
        self._spoken.set()
        self._supervisor.wake()

    def heartbeat_message(self) -> HeartbeatMessage:
        """What this host's board says."""
        with self._boarding:
            if self._board is None:
                return HeartbeatMessage(0, b"")
            heartbeat = encode_heartbeat(self._board, self._pool.ranks, time.monotonic_ns())
            return HeartbeatMessage(self._generation, heartbeat)

    def _take_beat(self, heartbeat_message: HeartbeatMessage) -> None:
        with self._boarding:
            board = self._board
            if (
                board is None
                or heartbeat_message.generation != self._generation
                or board.aborted is not None
            ):
                return
            heartbeat = decode_heartbeat(heartbeat_message.heartbeat)
            failure = None if heartbeat is None else heartbeat.failure
            if failure is not None:
                self._told_abort = True
                board.report(failure.member, failure.kind, failure.message, failure.culprit)

    def _mark(self, told: MarkCall) -> None:
        with self._boarding:
            if self._board is not None and told.generation == self._generation:
                self._cancelled.mark(told.number)

    # --- what the workers do, in the main thread -------------------------------------------

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Pass a worker's message on; called by the supervisor."""
        self._tell_abort()  # first: it says how to understand a failure
        if isinstance(message, Ready):
            self._starting.discard(rank)
            self._show(sorted(self._starting))
        self._link.post(OfWorker(rank, self._since[rank], message))
        self._link.heartbeat_now()

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Tell that a worker has ended; called by the supervisor."""
        self._tell_abort()
        self._link.post(self.heartbeat_message())  # the head compares what the worker did last
        self._link.post(WorkerEnded(rank, self._since[rank], how, stack))
        self._forget(self._workers[rank])

    def _forget(self, worker: LocalWorker) -> None:
        del self._workers[worker.rank]
        self._supervisor.forget(worker)
        worker.close()

    def _tell_abort(self) -> None:
        if self._board is not None and not self._told_abort and self._board.aborted is not None:
            self._told_abort = True
            self._link.post(self.heartbeat_message())

    # --- what the head says, in the main thread --------------------------------------------

    def _obey(self, message: FromHead) -> None:
        match message:
            case BeginGeneration():
                self._assemble(message)
            case ToWorker(rank, told) if rank in self._workers:
                if isinstance(told, Start):
                    self._start(rank, told)
                else:
                    with suppress(ChannelClosedError):  # its death is told by itself
                        self._workers[rank].channel.send(told)
            case SignalWorker(rank, number) if rank in self._workers:
                if number == STACK_SIGNAL:
                    self._show_stack(rank)
                else:
                    self._workers[rank].signal(number)
            case QueryState(number):
                run_in_thread(lambda: self._query_state(number), "pool-look")

    def _assemble(self, told: BeginGeneration) -> None:
        self._end(told.missing)
        self._leave_board()
        self._since.update(dict.fromkeys(told.missing, told.generation))
        try:
            with translated_limit_errors(len(told.missing), None):
                self._make_board(told)
                started = self._launch(told)
        except (OSError, ValueError, SharedMemoryError, WorkerStartError) as error:
            self._give_up(told.missing or self._pool.ranks, f"not started: {error}")
            return
        for worker in started:
            self._workers[worker.rank] = worker
            self._supervisor.watch(worker)

    def _make_board(self, told: BeginGeneration) -> None:
        with ExitStack() as undo:
            pool = self._pool
            board = undo.enter_context(
                create_pool_board(pool.n_workers, told.generation, pool.config.name)
            )
            self._cancelled = undo.enter_context(CancellationFlags.create(told.in_flight))
            self._show = undo.enter_context(board.published_wait("the start of the pool"))
            self._starting = {*self._pool.ranks}
            self._show(self._pool.ranks)
            with self._boarding:
                self._board, self._generation, self._told_abort = board, told.generation, False
            self._memory = undo.pop_all()

    def _launch(self, told: BeginGeneration) -> list[LocalWorker]:
        config, ranks = self._pool.config, self._pool.ranks
        threads = config.threads or worker_threads(len(ranks), self._bound)
        preload = config.preload if config.fork else None
        with self._meeting.open_round(told.missing) as seats:
            return launch(seats, threads, Deadline.after(told.seconds), preload=preload)

    def _give_up(self, ranks: Iterable[int], why: str) -> None:
        """End workers that cannot take part in a generation, and tell why of all of them."""
        self._end(ranks)
        for rank in ranks:
            self._link.post(WorkerEnded(rank, self._since[rank], why, ""))

    def _end(self, ranks: Iterable[int]) -> None:
        """End those of these workers that run; the head is not told."""
        replaced = [self._workers[rank] for rank in ranks if rank in self._workers]
        end(replaced, 0.0, 0.0)
        for worker in replaced:
            self._forget(worker)

    @cached_property
    def _bound(self) -> Bound:
        """The cores of each worker here, the same for those that replace others."""
        return bound_here(self._pool.config.bind, len(self._pool.ranks))

    def _start(self, rank: int, start: Start) -> None:
        if self._board is None:
            return
        handles = structs.replace(
            start.handles, board=self._board.handle(), cancelled=self._cancelled.handle()
        )
        cores = self._bound[self._pool.ranks.index(rank)] if self._bound else ()
        whole = structs.replace(start, handles=handles, address=self._address, cores=cores)
        try:
            self._workers[rank].start(whole, Deadline.after(start.timeout))
        except GroupTimeoutError as error:
            self._give_up((rank,), f"it received nothing: {error}")

    def _show_stack(self, rank: int) -> None:
        worker, since = self._workers[rank], self._since[rank]
        seconds = self._pool.config.stack_seconds

        def show() -> None:
            found = worker_stacks({rank: worker}, seconds)
            self._link.post(WorkerStack(rank, since, found.get(rank, "")))

        if worker.connected:
            run_in_thread(show, "pool-stack")

    def _query_state(self, number: int) -> None:
        with self._boarding:
            key = "" if self._board is None else self._board.handle().segment.nonce.hex()
        try:
            boards = tuple(board for each in own_programs() for board in each.boards)
        except OSError:  # out of descriptors, say
            boards = ()
        self._link.post(HostState(number, key, boards))

    def _leave_board(self) -> None:
        with self._boarding:
            self._board = None
        self._memory.close()

    def _join(
        self, hosts: Hosts, instance_id: str, deadline: Deadline, undo: ExitStack
    ) -> HostAdmitted:
        """Make the link, and wait until the head admits this host."""
        began = said = time.monotonic()
        port = hosts.master_port
        _log.info(
            "node %d of %d, as %s say; the head is %s, port %d",
            *(hosts.node_rank, hosts.nnodes, hosts.told_by, hosts.master_addr, port),
        )
        head = str(address_of_head(self._node, hosts.master_addr, deadline))
        self._address = address_on_route(self._node, head, port, deadline)
        hello = HostHello(
            *(socket.gethostname(), self._address, os.getpid(), self._node),
            facts_here(hosts.compared),
            instance_id,
        )
        self._link = HostLink(hosts, head, port, hello, self)
        undo.callback(self._link.close)
        self._link.begin()
        while not self._spoken.wait(deadline.remaining(_ASK_SECONDS)):
            trouble = self._link.problem()
            if deadline.expired:
                reason = f"the head has not answered in {deadline.timeout:g} s: {trouble}"
                raise HostError(self._node, reason)
            if (now := time.monotonic()) - said >= _LINE_SECONDS:
                said = now
                _log.warning("waiting for the head, for %.0f s now: %s", now - began, trouble)
        answer = self._inbox.popleft()
        if isinstance(answer, _HeadLost):
            raise HostError(self._node, answer.why)
        if isinstance(answer, HostRefused):
            raise HostError(self._node, f"the head has refused this host: {answer.reason}")
        if not isinstance(answer, HostAdmitted):
            raise HostError(self._node, f"the head has not admitted this host: {answer}")
        return answer
