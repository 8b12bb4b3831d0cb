"""Start and watch the workers on a host of a pool that is not the head.

The main thread owns the workers, and executes the head's messages. The link's thread communicates
with the head even during a start of workers, which takes seconds.
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

from ..control.channel import ChannelClosedError
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

_POLL_SECONDS = 0.05
"""The interval of checks for the board's abort."""
_LINE_SECONDS = 10.0
"""The interval of log lines while the head does not answer."""
_PROBLEM_SECONDS = 1.0
"""The interval of checks for the reason."""
_log = logging.getLogger(__name__)


class _HeadLost(NamedTuple):
    """The last message in the inbox: the reason for the end of the link."""

    why: str


def serve_host(hosts: Hosts, timeout: float | None = 300.0) -> None:
    """Run this host's part of a pool until the pool is shut down.

    The head chooses the workers to start; the worker's class must be importable on this host.
    Workers end with this process, however it ends. Any thread may call; the main thread, to handle
    signals.

    Args:
        hosts: the hosts, and this one's number; not the head.
        timeout: seconds to wait for the head, each time; ``None``: no limit.

    Raises:
        HostError: the head did not answer in time, refused this host, or was lost. If the pool is
            restarted: the head was lost, and did not answer again in time.
        ValueError: this is the head.
        DescriptorLimitError: the limit of open files is too low (``ulimit -n``).
        ProcessLimitError: no further thread can be started.
        OSError: the head's name cannot be resolved, for a permanent reason.
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
        """Wait until the head has admitted this host; raise as `serve_host`.

        ``hosts`` has the head's port; ``instance_id`` is that of `HostHello`.
        """
        self._node = hosts.node_rank
        self._inbox: deque[FromHead | _HeadLost] = deque()
        self._received = threading.Event()
        self._board_lock = threading.Lock()
        self._board: Board | None = None
        self._generation = 0
        self._abort_reported = False
        self._workers: dict[int, LocalWorker] = {}
        self._since: dict[int, int] = {}
        self._supervisor = Supervisor()
        self._memory = ExitStack()
        with ExitStack() as undo:
            undo.callback(self._supervisor.close)
            self._pool = self._join(hosts, instance_id, deadline, undo)
            self._closing = undo.pop_all()

    def run(self) -> bool:
        """Execute the head's messages; False after the pool's shutdown, True to reconnect.

        Raises `HostError` if the head is lost, and the pool is not restarted.
        """
        while True:
            self._supervisor.step(self, _POLL_SECONDS if self._workers else 1.0)
            self._report_abort()
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
                        self._execute(message)

    def __enter__(self) -> HostSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers here, and close the link."""
        end(list(self._workers.values()), 0.0, self._pool.config.kill_seconds)
        for worker in self._workers.values():
            worker.close()
        self._leave_board()
        self._closing.close()

    # --- messages of the link, in its thread -----------------------------------------------

    def hear(self, message: FromHead) -> None:
        """Handle a message of the head."""
        match message:
            case HeartbeatMessage():
                self._handle_heartbeat(message)
            case MarkCall():
                self._mark(message)
            case _:
                self._put(message)

    def lose(self, why: str) -> None:
        """Handle the loss of the head, after its earlier messages."""
        self._put(_HeadLost(why))

    def _put(self, message: FromHead | _HeadLost) -> None:
        self._inbox.append(message)
        self._received.set()
        self._supervisor.wake()

    def heartbeat_message(self) -> HeartbeatMessage:
        """Return the state of this host's board."""
        with self._board_lock:
            if self._board is None:
                return HeartbeatMessage(0, b"")
            heartbeat = encode_heartbeat(self._board, self._pool.ranks, time.monotonic_ns())
            return HeartbeatMessage(self._generation, heartbeat)

    def _handle_heartbeat(self, heartbeat_message: HeartbeatMessage) -> None:
        with self._board_lock:
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
                self._abort_reported = True
                board.report(failure.member, failure.kind, failure.message, failure.culprit)

    def _mark(self, message: MarkCall) -> None:
        with self._board_lock:
            if self._board is not None and message.generation == self._generation:
                self._cancelled.mark(message.number)

    # --- events of the workers, in the main thread -----------------------------------------

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Forward a worker's message; called by the supervisor."""
        self._report_abort()  # first: the head interprets a failure by it
        if isinstance(message, Ready):
            self._starting.discard(rank)
            self._show(sorted(self._starting))
        self._link.post(OfWorker(rank, self._since[rank], message))
        self._link.heartbeat_now()

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Report that a worker has ended; called by the supervisor."""
        self._report_abort()
        self._link.post(self.heartbeat_message())  # the head compares the last operations
        self._link.post(WorkerEnded(rank, self._since[rank], how, stack))
        self._forget(self._workers[rank])

    def _forget(self, worker: LocalWorker) -> None:
        del self._workers[worker.rank]
        self._supervisor.forget(worker)
        worker.close()

    def _report_abort(self) -> None:
        if self._board is not None and not self._abort_reported and self._board.aborted is not None:
            self._abort_reported = True
            self._link.post(self.heartbeat_message())

    # --- messages of the head, in the main thread ------------------------------------------

    def _execute(self, message: FromHead) -> None:
        match message:
            case BeginGeneration():
                self._assemble(message)
            case ToWorker(rank, content) if rank in self._workers:
                if isinstance(content, Start):
                    self._start(rank, content)
                else:
                    with suppress(ChannelClosedError):  # `on_death` reports the worker's end
                        self._workers[rank].channel.send(content)
            case SignalWorker(rank, number) if rank in self._workers:
                if number == STACK_SIGNAL:
                    self._show_stack(rank)
                else:
                    self._workers[rank].signal(number)
            case QueryState(number):
                run_in_thread(lambda: self._query_state(number), "pool-look")

    def _assemble(self, message: BeginGeneration) -> None:
        self._end(message.missing)
        self._leave_board()
        self._since.update(dict.fromkeys(message.missing, message.generation))
        try:
            with translated_limit_errors(len(message.missing), None):
                self._make_board(message)
                started = self._launch(message)
        except (OSError, ValueError, SharedMemoryError, WorkerStartError) as error:
            self._give_up(message.missing or self._pool.ranks, f"not started: {error}")
            return
        for worker in started:
            self._workers[worker.rank] = worker
            self._supervisor.watch(worker)

    def _make_board(self, message: BeginGeneration) -> None:
        with ExitStack() as undo:
            pool = self._pool
            board = undo.enter_context(
                create_pool_board(pool.n_workers, message.generation, pool.config.name)
            )
            self._cancelled = undo.enter_context(CancellationFlags.create(message.in_flight))
            self._show = undo.enter_context(board.published_wait("the start of the pool"))
            self._starting = {*self._pool.ranks}
            self._show(self._pool.ranks)
            with self._board_lock:
                self._board, self._generation = board, message.generation
                self._abort_reported = False
            self._memory = undo.pop_all()

    def _launch(self, message: BeginGeneration) -> list[LocalWorker]:
        config, ranks = self._pool.config, self._pool.ranks
        threads = config.threads or worker_threads(len(ranks), self._bound)
        preload = config.preload if config.fork else None
        return launch(message.missing, threads, Deadline.after(message.seconds), preload=preload)

    def _give_up(self, ranks: Iterable[int], why: str) -> None:
        """End workers that cannot join a generation, and report the reason for each."""
        self._end(ranks)
        for rank in ranks:
            self._link.post(WorkerEnded(rank, self._since[rank], why, ""))

    def _end(self, ranks: Iterable[int]) -> None:
        """End the running workers among ``ranks`` without a report to the head."""
        replaced = [self._workers[rank] for rank in ranks if rank in self._workers]
        end(replaced, 0.0, 0.0)
        for worker in replaced:
            self._forget(worker)

    @cached_property
    def _bound(self) -> Bound:
        """The cores of each worker here, unchanged when workers are replaced."""
        return bound_here(self._pool.config.bind, len(self._pool.ranks))

    def _start(self, rank: int, start: Start) -> None:
        if self._board is None:
            return
        handles = structs.replace(
            start.handles, board=self._board.handle(), cancelled=self._cancelled.handle()
        )
        cores = self._bound[self._pool.ranks.index(rank)] if self._bound else ()
        completed = structs.replace(start, handles=handles, address=self._address, cores=cores)
        try:
            self._workers[rank].start(completed, Deadline.after(start.timeout))
        except GroupTimeoutError as error:
            self._give_up((rank,), f"it received nothing: {error}")

    def _show_stack(self, rank: int) -> None:
        worker, since = self._workers[rank], self._since[rank]
        seconds = self._pool.config.stack_seconds

        def show() -> None:
            stacks = worker_stacks({rank: worker}, seconds)
            self._link.post(WorkerStack(rank, since, stacks.get(rank, "")))

        if worker.connected:
            run_in_thread(show, "pool-stack")

    def _query_state(self, number: int) -> None:
        with self._board_lock:
            key = "" if self._board is None else self._board.handle().segment.nonce.hex()
        try:
            boards = tuple(board for each in own_programs() for board in each.boards)
        except OSError:  # such as EMFILE
            boards = ()
        self._link.post(HostState(number, key, boards))

    def _leave_board(self) -> None:
        with self._board_lock:
            self._board = None
        self._memory.close()

    def _join(
        self, hosts: Hosts, instance_id: str, deadline: Deadline, undo: ExitStack
    ) -> HostAdmitted:
        """Make the link, and wait until the head admits this host."""
        began = logged = time.monotonic()
        port = hosts.master_port
        _log.info(
            "node %d of %d, from %s; the head is %s, port %d",
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
        while not self._received.wait(deadline.remaining(_PROBLEM_SECONDS)):
            problem = self._link.problem()
            if deadline.expired:
                reason = f"the head has not answered in {deadline.timeout:g} s: {problem}"
                raise HostError(self._node, reason)
            if (now := time.monotonic()) - logged >= _LINE_SECONDS:
                logged = now
                _log.warning("waiting for the head, for %.0f s now: %s", now - began, problem)
        answer = self._inbox.popleft()
        if isinstance(answer, _HeadLost):
            raise HostError(self._node, answer.why)
        if isinstance(answer, HostRefused):
            raise HostError(self._node, f"the head has refused this host: {answer.reason}")
        if not isinstance(answer, HostAdmitted):
            raise HostError(self._node, f"the head has not admitted this host: {answer}")
        return answer
