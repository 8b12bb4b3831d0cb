"""The driver's shared memory with its workers for one generation: the board and the queues.

Each generation has its own board, queues and groups, so no message or hanging process of an earlier
generation can reach it. Workers are members 0 to n-1 of the board, by rank; the driver is the last
member.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from shm_broadcast import DRIVER_RANK, Deadline, MessageQueue, QueueHandle
from shm_broadcast.eventcount import WakeFd
from shm_broadcast.state.flight_recorder import VerbTotal, added_up

from ..control.pool_memory import CancellationFlags, create_pool_board
from ..control.protocol import Handles, Start

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ..hosts.remote_hosts import RemoteHosts
    from .pool_plan import PoolPlan


class ReplyNotifier:
    """A thread that calls ``wake`` when queues from other hosts may have messages.

    Close it before the queues.
    """

    def __init__(self, queues: Iterable[MessageQueue], wake: Callable[[], None]) -> None:
        self._wake = wake
        self._end = WakeFd()
        self._poll = select.epoll()
        self._poll.register(self._end.fileno(), select.EPOLLIN)
        for queue in queues:
            # Edge-triggered: the descriptor stays readable until the queue is polled.
            self._poll.register(queue.fileno(), select.EPOLLIN | select.EPOLLET)
        self._thread = threading.Thread(target=self._watch, name="pool-reply-bell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._end.notify()
        self._thread.join()
        self._poll.close()
        self._end.close()

    def _watch(self) -> None:
        while all(fd != self._end.fileno() for fd, _ in self._poll.poll()):
            self._wake()


class SharedResources:
    """The driver's ends of one generation's memory. Close it when the workers have ended.

    Attributes:
        driver: the driver's member number.
        replies: the queue from each worker, by rank; of workers on other hosts after `join`.
        cancelled: the flags of calls without a caller.
        totals_before: the sums of each rank's operations in earlier generations.
    """

    def __init__(self, plan: PoolPlan, generation: int) -> None:
        """Make the board, or raise `SharedMemoryError`; `open` follows."""
        self._plan = plan
        self.generation = generation
        self._secret = secrets.token_bytes()
        self.driver = plan.n_workers
        self.totals_before: dict[int, tuple[VerbTotal, ...]] = {}
        self._store = ""
        self._hosted: TCPStore | None = None
        self.board = create_pool_board(plan.n_workers, generation, plan.config.name)
        self._undo = ExitStack()
        self._undo.callback(self.board.close)

    def open(self, hosts: RemoteHosts | None) -> None:
        """Make the queues; with other hosts, which have connected, also listen for their workers.

        After a SharedMemoryError or OSError, `close` releases everything.
        """
        plan, generation, undo = self._plan, self.generation, self._undo
        local = plan.ranks_of(0)
        self.calls = undo.enter_context(
            MessageQueue.on_board(
                self.board,
                self.driver,
                local,
                plan.config.call_capacity,
                connect_ip=None if hosts is None else hosts.address,
                remote_reader_ranks=range(len(local), plan.n_workers),
                secret=self._secret,
            )
        )
        self.replies = {
            rank: undo.enter_context(
                MessageQueue.on_board(self.board, rank, [self.driver], plan.config.reply_capacity)
            )
            for rank in local
        }
        echo = None
        if hosts is None:
            # One for each generation: a worker killed amid a write may spoil it.
            fd = os.memfd_create("rendezvous", os.MFD_CLOEXEC)
            undo.callback(os.close, fd)
            self._store = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            from coordinator import host_store  # noqa: PLC0415 - loads torch

            self._hosted = host_store(hosts.address)
            self._store = f"{hosts.address}:{self._hosted.port}"
            echo = partial(hosts.mark, generation)
            hosts.begin(generation, self.board)
            undo.callback(hosts.leave, generation)
        self.cancelled = undo.enter_context(CancellationFlags.create(plan.in_flight, echo))

    def start_of(self, rank: int, first_call: int) -> Start:
        """Return the start message for the worker of ``rank``."""
        plan = self._plan
        handles = Handles(self.calls.export_handle())
        if rank in plan.ranks_of(0):
            handles = Handles(
                handles.calls,
                self.replies[rank].export_handle(),
                self.board.handle(),
                self.cancelled.handle(),
            )
        return Start(
            generation=self.generation,
            first_call=first_call,
            survives=plan.restart == "worker",
            rank=rank,
            grid=plan.grid,
            dcp=plan.dcp,
            device=plan.devices[rank],
            secret=self._secret,
            handles=handles,
            zero_copy=plan.config.zero_copy,
            name=plan.config.name,
            worker=plan.worker,
            worker_kwargs=plan.worker_kwargs,
            main=plan.main,
            timeout=plan.start_timeout,
            store=self._store,
            cores=plan.cores_of(rank),
        )

    def join(self, replies: Mapping[int, QueueHandle], deadline: Deadline) -> None:
        """Join the queues of workers on other hosts, and wait until they read the calls' queue."""
        for rank, handle in replies.items():
            queue = MessageQueue.create_from_handle(handle, DRIVER_RANK, secret=self._secret)
            self.replies[rank] = self._undo.enter_context(queue)
        if replies:
            remote = [self.replies[rank] for rank in replies]
            notifier = ReplyNotifier(remote, partial(self.board.notify, self.driver))
            self._undo.callback(notifier.close)
            self.calls.wait_until_ready(deadline)

    def totals(self) -> dict[int, tuple[VerbTotal, ...]]:
        """Return the sums of each rank's operations on this host, earlier generations included.

        Any thread may call, also after `close`. Takes no lock: a signal handler may end the pool.
        """
        return {
            rank: added_up((*self.totals_before.get(rank, ()), *self.board.totals(rank)))
            for rank in range(self._plan.n_workers)
        }

    def close(self) -> None:
        """Close everything; idempotent."""
        self._undo.close()
        self._hosted = None
