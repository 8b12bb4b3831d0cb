"""Run one worker process: make the user's worker, then answer calls and streams in order.

After a failed call a worker takes no call until the driver sends `Resume`. Other ranks may still
wait for this rank in the failed call, and would match its next group operations with those of the
failed call.

When the pool breaks, a surviving worker closes its groups and queues, and joins new ones when the
driver starts the next generation.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from msgspec.structs import astuple, replace
from torch.distributed import Store

import coordinator
from coordinator.call_counts import (
    GroupOperationCounts,
    forget_groups,
    serve_calls,
    take_operation_counts,
)
from coordinator.stores import open_sealed_store
from device_comm.call_number import set_call_number
from shm_broadcast import (
    DRIVER_RANK,
    NEVER,
    Board,
    Deadline,
    GroupAbortedError,
    GroupClosedError,
    MessageDecodeError,
    MessageQueue,
    PeerLostError,
)
from shm_broadcast.cpu import bind_process
from shm_broadcast.state.stacks import writes_stacks_to

from .control.channel import Channel, ChannelClosedError
from .control.output import label_output
from .control.pool_memory import CancellationFlags
from .control.protocol import (
    Call,
    Detached,
    Ready,
    Reply,
    Resume,
    Start,
    WorkProgress,
    describe,
    unsendable,
)
from .control.reference import import_guard, worker_class
from .errors import StreamLostError
from .launchers.boot import retitle
from .spans import of_call, record

if TYPE_CHECKING:
    Running: TypeAlias = Generator[Any, None, Any]


class RunningStreams:
    """Runs generators an item at a time; see `control.protocol.Call.stream`."""

    def __init__(self, worker: object) -> None:
        self._worker = worker
        self._running: dict[int, Running] = {}

    def step(self, call: Call, wanted: bool) -> tuple[Any, ...] | None:
        """Run a call that belongs to a stream.

        Args:
            call: the call.
            wanted: whether the driver needs this rank's item.

        Returns:
            ``(item,)``, with ``None`` for an item that is not wanted; ``()`` at the end; ``None``
                if the call closes the stream.

        Raises:
            StreamLostError: the stream began before a restart of the pool.
            TypeError: the method returned no generator.
            BaseException: any error of the generator.
        """
        if call.stream < 0:
            self._running.pop(-call.stream, _ended()).close()
            return None
        if call.begins:
            # If the method raises, this rank's stream has ended; the driver closes it.
            self._running[call.stream] = _ended()
            self._running[call.stream] = self._begin(call)
        elif call.stream not in self._running:
            raise StreamLostError(call.method)
        for item in self._running[call.stream]:
            return (item if wanted else None,)
        return ()

    def _begin(self, call: Call) -> Running:
        generator = getattr(self._worker, call.method)(*call.args, **call.kwargs)
        if not isinstance(generator, Generator):
            raise TypeError(
                f"{call.method} is not a generator: it returned {type(generator).__name__}"
            )
        return generator


def _ended() -> Running:
    yield from ()


_ENDS = (GroupAbortedError, GroupClosedError, PeerLostError, ChannelClosedError)
"""Errors that end a worker without a report: the driver has the reason, or has exited."""

_EXIT_SECONDS = 0.5
"""Seconds for a worker to exit before it reports its remaining threads and processes."""

_POLL_SECONDS = 0.005
"""Seconds between two polls for `Resume`, whose socket wakes no board wait."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """First argument of a worker's ``__init__``.

    Attributes:
        groups: this rank's groups.
        device: this rank's device; a CUDA device is already the current one.
        report_progress: call with ``(done, total, what)`` to report long work, such as reading
            weights, to the driver's ``on_progress``.
        generation: 1 in a new pool; increases with each restart.
        cancelled: returns whether the running call has no caller any more: its future, task or
            stream was cancelled or closed, or it is late. Costs 0.1 us. Ranks see a cancellation at
            different times: before group operations, let one rank read it and send it to the
            others.
    """

    groups: coordinator.ParallelGroups
    device: torch.device
    report_progress: Callable[[int, int, str], None]
    generation: int = 1
    cancelled: Callable[[], bool] = lambda: False


def main(control: int, stacks: int) -> None:
    """Run the worker that the driver describes, until the driver closes the queue of calls.

    Args:
        control, stacks: descriptors of the control channel, and of the file to which this process
            writes its stacks.
    """
    writes_stacks_to(stacks)
    try:
        connection = socket.socket(fileno=control)
        connection.set_inheritable(False)
        try:
            in_order = _run(Channel(connection, receives=Start | Resume))
        finally:
            # Open until exit or exec: when it closes, the driver kills a process that remains.
            connection.detach()
    except _ENDS as error:
        why = f"{type(error).__name__}: {error}"  # shown if this exit is the root cause
        os.write(stacks, why.encode(errors="backslashreplace"))
        in_order = False
    except BaseException:  # noqa: BLE001 - the interpreter would join the user's threads
        why = traceback.format_exc()
        sys.stderr.write(why)
        os.write(stacks, why.encode(errors="backslashreplace"))  # for the driver's error
        in_order = False
    if in_order:
        timer = threading.Timer(_EXIT_SECONDS, _report_leftovers)
        timer.daemon = True
        timer.start()
    sys.stdout.flush()
    sys.stderr.flush()
    if not in_order:
        # Groups with lost or starting members cannot be closed in order.
        os._exit(1)


def _report_leftovers() -> None:
    """Log non-daemon threads and child processes: they keep this worker alive."""
    threads = [each for each in threading.enumerate() if each is not threading.main_thread()]
    leftovers = {
        "threads": [each.name for each in threads if not each.daemon],
        "processes": [each.name for each in multiprocessing.active_children() if not each.daemon],
    }
    for kind, names in leftovers.items():
        if names:
            sys.stderr.write(f"this worker has no more calls, but waits for its {kind}: {names}\n")


def _exit_forked_child(error: BaseException | None) -> NoReturn:
    """Exit from a process that the user's worker forked; ``error``: raised by the user's code."""
    status: object = 0
    if isinstance(error, SystemExit):
        status = error.code or 0
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
    elif error is not None:
        status = 1
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF if isinstance(status, int) else 1)


def _run(channel: Channel) -> bool:
    """Run generations until the end; return whether all started."""
    start: Start = channel.receive()
    prefix = start.name and f"{start.name}, "
    label_output(f"[{prefix}rank {start.rank}] ")
    return _serve_generations(channel, start)


def _serve_generations(channel: Channel, start: Start) -> bool:
    worker: Any = None
    while True:
        serving = _Serving(channel, start)
        if not hasattr(worker, "restore"):
            worker = None  # free its memory before a new one is made
        process = os.getpid()
        try:
            worker = serving.join(worker)
        except BaseException as error:  # noqa: BLE001 - the caller gets every error of the start
            if os.getpid() != process:
                _exit_forked_child(error)
            channel.send(describe(error, rank=start.rank))
            return False
        channel.send(serving.ready())
        try:
            serving.serve()
        except _ENDS as error:
            lost_driver = isinstance(error, PeerLostError) and error.rank == DRIVER_RANK
            if not start.survives or lost_driver:  # its exit reports the reason, unlike `Detached`
                raise
        else:
            serving.close()
            return True
        serving.close()
        forget_groups()
        channel.send(Detached())
        gc.collect()  # cycles hold closed objects with descriptors and memory
        start = _next_start(channel)


def _next_start(channel: Channel) -> Start:
    while not isinstance(message := channel.receive(), Start):
        pass  # `Resume` of the previous generation
    return message


class _Serving:
    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self._start = start
        self._rank = start.rank
        self._pid = os.getpid()
        self._last = start.first_call - 1
        self._resumed = 0
        self._closing = ExitStack()

    def join(self, worker: Any) -> Any:
        """Join queues and groups; make the user's worker, or restore ``worker``; return it."""
        start = self._start
        deadline = Deadline.after(start.timeout)
        record()
        if start.cores:
            bind_process(start.cores)
        self._join_memory()
        store = open_sealed_store(start.store, start.secret, deadline)
        self._closing.callback(store.close)
        self._open_queues()
        device = torch.device(start.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        serve_calls(start.rank, start.secret)
        groups = self._join_groups(store, device, deadline)
        self._set_title()
        context = WorkerContext(
            groups,
            device,
            self._report_progress,
            start.generation,
            lambda: self._last in self._cancelled,
        )
        if worker is None:
            with self._shown(f"import of {start.worker.partition(':')[0]}"), import_guard():
                build = worker_class(start.worker, start.main)
                arguments = pickle.loads(start.worker_kwargs)
            with self._shown(f"{build.__name__}.__init__"):
                worker = build(context, **arguments)
        else:
            with self._shown(f"{type(worker).__name__}.restore"):
                worker.restore(context)
        self._worker = worker
        self._streams = RunningStreams(worker)
        return worker

    def _join_memory(self) -> None:
        handles = self._start.handles
        if handles.board is None or handles.cancelled is None:
            raise ValueError("this worker's host has not filled in what it shares with the worker")
        self._cancelled = self._closing.enter_context(CancellationFlags.attach(handles.cancelled))
        self._board = self._closing.enter_context(Board.attach(handles.board, self._rank))

    def _open_queues(self) -> None:
        start, open_ = self._start, self._closing.enter_context
        handles, watch = start.handles, self._board.check
        if handles.replies is not None:
            self._calls = open_(MessageQueue.attach(handles.calls, self._board))
            self._replies = open_(
                MessageQueue.attach(handles.replies, self._board, zero_copy=start.zero_copy)
            )
            return
        self._calls = open_(
            MessageQueue.create_from_handle(
                handles.calls, start.rank, secret=start.secret, watch=watch
            )
        )
        self._replies = open_(
            MessageQueue(
                *(1, 0),
                connect_ip=start.address,
                remote_reader_ranks=[DRIVER_RANK],
                writer_rank=start.rank,
                secret=start.secret,
                watch=watch,
            )
        )

    def _join_groups(
        self, store: Store, device: torch.device, deadline: Deadline
    ) -> coordinator.ParallelGroups:
        start, sizes = self._start, self._start.grid.sizes
        groups = coordinator.init(
            tp=sizes["tp"],
            pp=sizes["pp"],
            dp=sizes["dp"],
            pcp=sizes["pcp"],
            dcp=start.dcp,
            axes=start.grid.own_axes,
            rank=start.rank,
            local_rank=start.rank if device.index is None else device.index,
            store=store,
            board=self._board,
            node_of=(0,) * start.grid.size if start.on_one_host else None,
            secret=start.secret,
            backend="gloo" if device.type == "cpu" else None,
            timeout=None if start.timeout is None else deadline.remaining(),
        )
        self._closing.callback(groups.close)
        return groups

    def _set_title(self) -> None:
        start = self._start
        sizes, coordinates = start.grid.sizes, start.grid.coordinates(start.rank)
        position = "".join(
            f" {axis}{coordinates[axis]}" for axis, size in sizes.items() if size > 1
        )
        pool = start.name and f" of {start.name}"
        retitle(f"group-coordinator worker {start.rank}{position}{pool}")

    @contextmanager
    def _shown(self, step: str) -> Iterator[None]:
        """Stamp a step of the start on the board; a step may take minutes."""
        entry = self._board.record_begin(step)
        yield
        self._board.record_end(entry)

    def _report_progress(self, done: int, total: int, what: str) -> None:
        if not (isinstance(done, int) and isinstance(total, int) and isinstance(what, str)):
            raise TypeError(
                f"report_progress takes two ints and a text; got {done!r}, {total!r}, {what!r}"
            )
        with suppress(ChannelClosedError):  # a thread of the user may outlive the last call
            self._channel.send(WorkProgress(done, total, what))

    def _next_call(self) -> Call:
        if self._start.handles.replies is not None:
            return Call(*self._calls.dequeue())
        self._board.idle()  # the board lacks queues of other hosts
        with self._board.published_wait("dequeue") as show:
            show([self._board.ranks.index(DRIVER_RANK)])
            return Call(*self._calls.dequeue())

    def serve(self) -> None:
        """Answer calls until the driver closes the queue; raise one of `_ENDS` on failure."""
        while True:
            try:
                call = self._next_call()
            except MessageDecodeError as error:
                # The number is in the undecodable message.
                self._last += 1
                self._fail(error)
            except GroupClosedError:
                return
            else:
                self._last = call.number
                self._answer(call)

    def ready(self) -> Ready:
        is_remote = self._start.handles.replies is None
        return Ready(self._replies.export_handle() if is_remote else None)

    def close(self) -> None:
        self._closing.close()

    def _answer(self, call: Call) -> None:
        entry = self._board.record_begin(call.method, number=call.number & 0xFFFFFFFF)
        wanted = call.reply_rank in (-1, self._rank)
        value: Any
        try:
            set_call_number(call.number)
            try:
                value = self._value_of(call, wanted)
            finally:
                set_call_number(0)
            if os.getpid() != self._pid:
                _exit_forked_child(None)
        except BaseException as error:  # noqa: BLE001 - the caller gets every error of a method
            if os.getpid() != self._pid:
                _exit_forked_child(error)
            self._board.record_end(entry, error)
            self._fail(error)
            return
        self._board.record_end(entry)
        begun = take_operation_counts()
        try:
            reply = Reply(call.number, begun, value if wanted or call.stream else None)
            self._replies.enqueue(astuple(reply))
        except _ENDS:
            raise
        except TypeError as error:
            what = "item" if call.stream else "result"
            self._fail(unsendable(value[0] if call.stream else value, error, what), begun)
        except BaseException as error:  # noqa: BLE001 - pickling runs the value's code
            self._fail(error, begun)

    def _value_of(self, call: Call, wanted: bool) -> Any:
        if call.trace is not None:
            with of_call(call.method, call.trace, self._rank, self._start.generation):
                return self._value_of(replace(call, trace=None), wanted)
        if call.stream:
            return self._streams.step(call, wanted)
        return getattr(self._worker, call.method)(*call.args, **call.kwargs)

    def _fail(
        self, error: BaseException, begun: tuple[GroupOperationCounts, ...] | None = None
    ) -> None:
        begun = take_operation_counts() if begun is None else begun
        self._channel.send(describe(error, self._last, begun, self._rank))
        driver = self._board.n_members - 1
        self._board.wait(
            self._is_resumed, NEVER, "failed call", lambda: (driver,), poll=_POLL_SECONDS
        )

    def _is_resumed(self) -> bool:
        resume: Resume | None = self._channel.take()
        if resume is not None:
            self._resumed = resume.number
        return self._resumed == self._last
