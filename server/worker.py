"""A worker's side of the pool: build the user's worker, then answer calls in their order.

After a failed call a worker takes no other one until the driver says so: the other ranks may still
be in that call, waiting for this rank, and the next call's group operations would be taken for the
failed one's.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from msgspec.structs import astuple

import coordinator
from server.channel import Channel, ChannelClosedError
from server.failures import describe
from server.messages import Call, Progress, Ready, Reply, Resume, Start
from server.reference import load
from shm_broadcast import (
    NEVER,
    Board,
    Deadline,
    GroupAbortedError,
    GroupClosedError,
    MessageDecodeError,
    MessageQueue,
    PeerLostError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_ENDS = (GroupAbortedError, GroupClosedError, PeerLostError, ChannelClosedError)
"""What ends a worker quietly: the driver knows why, or is gone."""

_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a worker's ``__init__`` is given first.

    Attributes:
        groups: the groups that this rank is in.
        device: where this rank computes; for CUDA it is the current device already.
        report_progress: ``(done, total, what)``: tells the driver's ``on_progress`` how far a
            long piece of work, such as reading weights, has come.
    """

    groups: coordinator.ParallelGroups
    device: torch.device
    report_progress: Callable[[int, int, str], None]


def main(control: int) -> None:
    """Be the worker that the driver describes over the control channel ``control``.

    Ends the process when the driver has no more calls for it.
    """
    channel = Channel(socket.socket(fileno=control), receives=Start | Resume)
    try:
        in_order = _run(channel)
    except _ENDS:
        in_order = False
    sys.stdout.flush()
    sys.stderr.flush()
    if not in_order:
        # Groups whose members are gone, or still starting, cannot be taken down in order.
        os._exit(1)


def _run(channel: Channel) -> bool:
    """Start, and answer calls to the end; whether it came to an end in good order."""
    start: Start = channel.receive()
    try:
        serving = _Serving(channel, start)
    except BaseException as error:  # noqa: BLE001 - all that ends the start goes to the caller
        channel.send(describe(error, 0, 0))
        return False
    channel.send(Ready())
    serving.serve()
    return True


class _Serving:
    """A worker that takes calls."""

    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self._rank = start.rank
        board, calls, replies = pickle.loads(start.handles)
        self._board = Board.attach(board, start.rank)
        self._calls = MessageQueue.attach(calls, self._board)
        self._replies = MessageQueue.attach(replies, self._board)
        self._last = self._resumed = 0
        device = torch.device(start.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        deadline = Deadline.after(start.timeout)
        store = coordinator.connect_store(start.store_host, start.store_port, deadline)
        self._groups = coordinator.init(
            tp=start.tp,
            pp=start.pp,
            dp=start.dp,
            rank=start.rank,
            world_size=start.tp * start.pp * start.dp,
            local_rank=start.rank if device.index is None else device.index,
            store=store,
            board=self._board,
            backend="gloo" if device.type == "cpu" else None,
            timeout=None if start.timeout is None else deadline.remaining(),
        )
        context = WorkerContext(
            self._groups,
            device,
            lambda done, total, what: channel.send(Progress(done, total, what)),
        )
        build = load(start.worker, start.main)
        self._worker = build(context, **pickle.loads(start.worker_kwargs))

    def serve(self) -> None:
        """Answer calls until the driver shuts the queue, then leave the groups."""
        while True:
            try:
                call = Call(*self._calls.dequeue())
            except MessageDecodeError as error:
                self._last += 1
                self._fail(error, 0)
            except GroupClosedError:
                break
            else:
                self._last = call.number
                self._answer(call)
        self._groups.close()
        self._replies.shutdown()
        self._calls.shutdown()
        self._board.close()

    def _answer(self, call: Call) -> None:
        board = self._board
        began = board.stamp(call.method)
        try:
            value = getattr(self._worker, call.method)(*call.args, **call.kwargs)
        except BaseException as error:  # noqa: BLE001 - all that a method raises goes to the caller
            self._fail(error, board.stamp(call.method) - began - 1)
            return
        operations = board.stamp(call.method) - began - 1
        wanted = call.reply_rank in (-1, self._rank)
        try:
            reply = Reply(call.number, operations, value if wanted else None)
            self._replies.enqueue(astuple(reply))
        except _ENDS:
            raise
        except Exception as error:  # noqa: BLE001 - the value's own code fails to pickle it
            self._fail(error, operations)

    def _fail(self, error: BaseException, operations: int) -> None:
        """Tell the driver, then wait until it says to go on."""
        self._channel.send(describe(error, self._last, operations))
        driver = self._board.n_members - 1
        self._board.wait(
            self._may_go_on, NEVER, "failed call", lambda: (driver,), poll=_LOOK_SECONDS
        )

    def _may_go_on(self) -> bool:
        told: Resume | None = self._channel.take()
        if told is not None:
            self._resumed = told.number
        return self._resumed == self._last
