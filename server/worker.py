"""The worker's side of a pool: makes the user's worker, then answers calls in order.

After a failed call a worker takes no other call until the driver tells it to go on. The other ranks
may still be in the failed call and wait for this rank: its group operations of the next call would
be matched with theirs of the failed one.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import astuple

import coordinator
from coordinator.begun_in_call import take_begun
from device_comm.call_number import in_call
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

from .control.cancelled_calls import CancelledCalls
from .control.channel import Channel, ChannelClosedError
from .control.meeting import take_seat
from .control.output import label_output
from .control.protocol import Call, Ready, Reply, Resume, Start, WorkProgress
from .control.reference import load
from .control.worker_failure import describe
from .running_streams import RunningStreams

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.begun_in_call import BegunInGroup

_ENDS = (GroupAbortedError, GroupClosedError, PeerLostError, ChannelClosedError)
"""Errors at which a worker ends without a report: the driver knows why, or is gone."""

_LOOK_SECONDS = 0.005
"""How often to look for the driver's word to go on; it comes over a socket, which rings nothing."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The first argument of a worker's ``__init__``.

    Attributes:
        groups: the groups that this rank is in.
        device: this rank's device; a CUDA device is the current one already.
        report_progress: call it with ``(done, total, what)`` to tell the driver's ``on_progress``
            how far a long piece of work, such as reading weights, has come.
        cancelled: whether nobody waits for the present call any more: its future, task or stream
            was cancelled or closed, or it is late. Costs 0.1 us. Ranks hear of it at different
            moments: where they meet in group operations, let one of them ask and tell the others.
    """

    groups: coordinator.ParallelGroups
    device: torch.device
    report_progress: Callable[[int, int, str], None]
    cancelled: Callable[[], bool] = lambda: False


def main(control: int, seat: int) -> None:
    """Run the worker that the driver describes, until the driver has no more calls for it.

    Args:
        control: the descriptor of the control channel.
        seat: the descriptor for `meeting.take_seat`.
    """
    channel = Channel(socket.socket(fileno=control), receives=Start | Resume)
    try:
        in_order = _run(channel, seat)
    except _ENDS:
        in_order = False
    sys.stdout.flush()
    sys.stderr.flush()
    if not in_order:
        # Groups whose members are gone, or still starting, cannot be taken down in order.
        os._exit(1)


def _run(channel: Channel, seat: int) -> bool:
    """Start, then answer calls until the driver closes the queue; False if the start failed."""
    start: Start = channel.receive()
    label_output(f"[rank {start.rank}] ")
    try:
        serving = _Serving(channel, seat, start)
    except BaseException as error:  # noqa: BLE001 - all that ends the start goes to the caller
        channel.send(describe(error))
        return False
    channel.send(Ready())
    serving.serve()
    return True


class _Serving:
    """The user's worker, with the queues that bring its calls and take its replies."""

    def __init__(self, channel: Channel, seat: int, start: Start) -> None:
        self._channel = channel
        self._rank = start.rank
        board, calls, replies, cancelled = pickle.loads(start.handles)
        self._board = Board.attach(board, start.rank)
        self._calls = MessageQueue.attach(calls, self._board)
        self._replies = MessageQueue.attach(replies, self._board)
        self._cancelled = CancelledCalls.attach(cancelled)
        self._last = self._resumed = 0
        device = torch.device(start.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        deadline = Deadline.after(start.timeout)
        n_workers = start.tp * start.pp * start.dp
        self._groups = coordinator.init(
            tp=start.tp,
            pp=start.pp,
            dp=start.dp,
            rank=start.rank,
            world_size=n_workers,
            local_rank=start.rank if device.index is None else device.index,
            store=take_seat(seat, start.timeout),
            board=self._board,
            node_of=(0,) * n_workers,
            secret=start.secret,
            backend="gloo" if device.type == "cpu" else None,
            timeout=None if start.timeout is None else deadline.remaining(),
        )
        context = WorkerContext(
            self._groups,
            device,
            lambda done, total, what: channel.send(WorkProgress(done, total, what)),
            lambda: self._last in self._cancelled,
        )
        build = load(start.worker, start.main)
        self._worker = build(context, **pickle.loads(start.worker_kwargs))
        self._streams = RunningStreams(self._worker)

    def serve(self) -> None:
        """Answer calls until the driver closes the queue, then close groups and queues."""
        while True:
            try:
                call = Call(*self._calls.dequeue())
            except MessageDecodeError as error:
                # Its number is in the message that cannot be decoded; numbers have no gaps.
                self._last += 1
                self._fail(error)
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
        self._board.stamp(call.method)
        wanted = call.reply_rank in (-1, self._rank)
        value: Any
        try:
            with in_call(call.number):
                if call.stream:
                    value = self._streams.step(call, wanted)
                else:
                    value = getattr(self._worker, call.method)(*call.args, **call.kwargs)
        except BaseException as error:  # noqa: BLE001 - all that a method raises goes to the caller
            self._fail(error)
            return
        begun = take_begun()
        try:
            reply = Reply(call.number, begun, value if wanted or call.stream else None)
            self._replies.enqueue(astuple(reply))
        except _ENDS:
            raise
        except Exception as error:  # noqa: BLE001 - the value's own code fails to pickle it
            self._fail(error, begun)

    def _fail(self, error: BaseException, begun: tuple[BegunInGroup, ...] | None = None) -> None:
        """Report a failed call to the driver, then wait until it says to go on."""
        begun = take_begun() if begun is None else begun
        self._channel.send(describe(error, self._last, begun))
        driver = self._board.n_members - 1
        self._board.wait(
            self._may_go_on, NEVER, "failed call", lambda: (driver,), poll=_LOOK_SECONDS
        )

    def _may_go_on(self) -> bool:
        told: Resume | None = self._channel.take()
        if told is not None:
            self._resumed = told.number
        return self._resumed == self._last
