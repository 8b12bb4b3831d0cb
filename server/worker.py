"""Run one worker process: make the user's worker, then answer calls and streams in order.

After a failed call a worker takes no other call until the driver tells it to go on. The other ranks
may still be in the failed call, waiting for this rank: they would match its group operations of the
next call with theirs of the failed one.

When the pool breaks, a worker that survives leaves its groups and queues, and waits until the
driver tells it to join new ones: the next generation.
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
from contextlib import ExitStack, closing, contextmanager, suppress
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
from coordinator.key_values import StoreRequest, StoreResponse
from coordinator.rendezvous import connect_secret_store
from coordinator.store_client import ProxyStore
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
    VOID,
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


@contextmanager
def open_rendezvous_store(seat: int, timeout: float | None) -> Iterator[Store]:
    """The store that all workers of the pool share, until the end of the block.

    Args:
        seat: the inherited descriptor; closed at the end.
        timeout: seconds to wait for each answer; None: for ever.
    """
    connection = socket.socket(fileno=seat)
    connection.set_inheritable(False)
    channel = Channel(connection, StoreResponse)

    def ask(question: StoreRequest, deadline: Deadline) -> StoreResponse:
        channel.send(question, deadline)
        while True:
            answer: StoreResponse = channel.receive(deadline)
            # Another number: the answer to a question whose asker was interrupted while waiting.
            if answer.number == question.number:
                return answer

    with closing(channel), closing(ProxyStore(ask, timeout)) as store:
        yield store


if TYPE_CHECKING:
    Running: TypeAlias = Generator[Any, None, Any]


class RunningStreams:
    """Runs generators an item at a time, as `control.protocol.Call.stream` says.

    Args:
        worker: the user's worker.
    """

    def __init__(self, worker: object) -> None:
        self._worker = worker
        self._running: dict[int, Running] = {}

    def step(self, call: Call, wanted: bool) -> tuple[Any, ...] | None:
        """Run a call that belongs to a stream.

        Args:
            call: the call.
            wanted: whether the driver wants this rank's item.

        Returns:
            ``(item,)``, where the item is ``None`` if it is not wanted; ``()`` at the end;
            ``None`` if the call closes the stream.

        Raises:
            StreamLostError: the stream began before the pool was restarted.
            TypeError: the method returned something else than a generator.
            What the generator raises.
        """
        if call.stream < 0:
            self._running.pop(-call.stream, _ended()).close()
            return None
        if call.begins:
            # If the method raises, the stream has ended on this rank; the driver closes it.
            self._running[call.stream] = _ended()
            self._running[call.stream] = self._begin(call)
        elif call.stream not in self._running:
            raise StreamLostError(call.method)
        for item in self._running[call.stream]:
            return (item if wanted else None,)
        return ()

    def _begin(self, call: Call) -> Running:
        made = getattr(self._worker, call.method)(*call.args, **call.kwargs)
        if not isinstance(made, Generator):
            raise TypeError(f"{call.method} is not a generator: it returned {type(made).__name__}")
        return made


def _ended() -> Running:
    yield from ()


_ENDS = (GroupAbortedError, GroupClosedError, PeerLostError, ChannelClosedError)
"""Errors after which a worker ends without a report: the driver knows why, or has ended."""

_ENDS_WITHIN = 0.5
"""Seconds after which a worker that was told to end says why it has not."""

_LOOK_SECONDS = 0.005
"""How often to check for the driver's `Resume`, which comes over a socket and so wakes no wait."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The first argument of a worker's ``__init__``.

    Attributes:
        groups: the groups that this rank is in.
        device: this rank's device; a CUDA device is the current one already.
        report_progress: call it with ``(done, total, what)`` to tell the driver's ``on_progress``
            how far a long piece of work, such as reading weights, has come.
        generation: 1 in a new pool, and higher each time that the pool was restarted.
        cancelled: whether nobody waits for the present call any more: its future, task or stream
            was cancelled or closed, or it is late. Costs 0.1 us. Ranks hear of it at different
            moments: where they meet in group operations, let one of them ask and tell the others.
    """

    groups: coordinator.ParallelGroups
    device: torch.device
    report_progress: Callable[[int, int, str], None]
    generation: int = 1
    cancelled: Callable[[], bool] = lambda: False


def main(control: int, seat: int, stacks: int) -> None:
    """Run the worker that the driver describes, until the driver has no more calls for it.

    Args:
        control: the descriptor of the control channel.
        seat: the descriptor for `open_rendezvous_store`.
        stacks: the descriptor to which this process writes its stacks.
    """
    writes_stacks_to(stacks)
    try:
        connection = socket.socket(fileno=control)
        connection.set_inheritable(False)
        try:
            in_order = _run(Channel(connection, receives=Start | Resume), seat)
        finally:
            # It stays open until this process ends, or becomes another program: the driver hears it
            # close, and takes a process that goes on then for no worker any more.
            connection.detach()
    except _ENDS as error:
        why = f"{type(error).__name__}: {error}"  # shown if the driver takes this end for the cause
        os.write(stacks, why.encode(errors="backslashreplace"))
        in_order = False
    except BaseException:  # noqa: BLE001 - the interpreter would wait for threads of the user's
        why = traceback.format_exc()
        sys.stderr.write(why)
        os.write(stacks, why.encode(errors="backslashreplace"))  # the driver's error has it, then
        in_order = False
    if in_order:
        late = threading.Timer(_ENDS_WITHIN, _tell_what_runs_on)
        late.daemon = True
        late.start()
    sys.stdout.flush()
    sys.stderr.flush()
    if not in_order:
        # Groups whose members are gone, or still starting, cannot be taken down in order.
        os._exit(1)


def _tell_what_runs_on() -> None:
    """Before it ends a process Python waits for its threads, and `multiprocessing`'s processes,
    that are no daemons, and so does the driver.
    """
    threads = [each for each in threading.enumerate() if each is not threading.main_thread()]
    runs_on = {
        "threads": [each.name for each in threads if not each.daemon],
        "processes": [each.name for each in multiprocessing.active_children() if not each.daemon],
    }
    for kind, names in runs_on.items():
        if names:
            sys.stderr.write(f"this worker has no more calls, and ends with its {kind}: {names}\n")


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that the user's worker has forked, and that is none of the pool's.

    Args:
        error: what it has left the user's code with; None: it has returned.
    """
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


def _run(channel: Channel, seat: int) -> bool:
    """Take part in one generation after another; False if the start failed.

    Raises:
        What is in `_ENDS`: the pool has broken, and this worker does not survive that.
    """
    start: Start = channel.receive()
    whose = start.name and f"{start.name}, "
    label_output(f"[{whose}rank {start.rank}] ")
    with open_rendezvous_store(seat, start.timeout) as store:
        return _serve_generations(channel, store, start)


def _serve_generations(channel: Channel, store: Store, start: Start) -> bool:
    """As `_run`, from the first start message on."""
    worker: Any = None
    while True:
        serving = _Serving(channel, start)
        if not hasattr(worker, "restore"):
            worker = None  # a new one will be made, and needs its memory
        process = os.getpid()
        try:
            worker = serving.join(store, worker)
        except BaseException as error:  # noqa: BLE001 - all that ends the start goes to the caller
            if os.getpid() != process:
                _end_child(error)
            channel.send(describe(error, rank=start.rank))
            return False
        channel.send(serving.ready())
        try:
            serving.serve()
        except _ENDS as error:
            lost_driver = isinstance(error, PeerLostError) and error.rank == DRIVER_RANK
            if not start.survives or lost_driver:  # its end has the reason, unlike `Detached`
                raise
        else:
            serving.close()
            return True
        serving.close()
        forget_groups()
        channel.send(Detached())
        gc.collect()  # cycles hold some of what was closed, descriptors and memory with it
        start = _next_start(channel)


def _next_start(channel: Channel) -> Start:
    while not isinstance(message := channel.receive(), Start):
        pass  # a `Resume` of the generation that is over
    return message


class _Serving:
    """One generation: the queues that bring calls and take replies, the groups, the streams.

    Args:
        channel: the control channel.
        start: what the driver says of the generation.
    """

    def __init__(self, channel: Channel, start: Start) -> None:
        self._channel = channel
        self._start = start
        self._rank = start.rank
        self._pid = os.getpid()
        self._last = start.first_call - 1
        self._resumed = 0
        self._closing = ExitStack()

    def join(self, store: Store, worker: Any) -> Any:
        """Join the queues and the groups; make the user's worker, or let it go on.

        Args:
            store: the store where the ranks meet.
            worker: the one of the generation before, to restore; ``None``: make a new one.

        Returns:
            The worker.
        """
        start = self._start
        deadline = Deadline.after(start.timeout)
        if start.spans is not None:
            record(start.spans, rank=start.rank)
        if start.cores:
            bind_process(start.cores)
        self._join_memory()
        if start.store is not None:
            store = connect_secret_store(
                start.store, start.rank, start.secret, deadline, self._closing
            )
        self._open_queues()
        device = torch.device(start.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        serve_calls(start.rank, start.secret)
        groups = self._join_groups(store, device, deadline)
        self._show_place()
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
        """Attach the memory that all workers of this host share."""
        handles = self._start.handles
        if handles.board is None or handles.cancelled is None:
            raise ValueError("this worker's host has not filled in what it shares with the worker")
        self._cancelled = self._closing.enter_context(CancellationFlags.attach(handles.cancelled))
        self._board = self._closing.enter_context(Board.attach(handles.board, self._rank))

    def _open_queues(self) -> None:
        """Attach the driver's queues; where the driver is on another host, connect to it."""
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
            node_of=(0,) * start.grid.size if start.store is None else None,
            secret=start.secret,
            backend="gloo" if device.type == "cpu" else None,
            timeout=None if start.timeout is None else deadline.remaining(),
        )
        self._closing.callback(groups.close)
        return groups

    def _show_place(self) -> None:
        """Have lists of processes show this worker's rank, and its place in the grid."""
        start = self._start
        sizes, place = start.grid.sizes, start.grid.coordinates(start.rank)
        at = "".join(f" {axis}{place[axis]}" for axis, size in sizes.items() if size > 1)
        of = start.name and f" of {start.name}"
        retitle(f"group-coordinator worker {start.rank}{at}{of}")

    @contextmanager
    def _shown(self, step: str) -> Iterator[None]:
        """Stamp a step of the start on the board: it may take minutes."""
        entry = self._board.record_begin(step)
        yield
        self._board.record_end(entry)

    def _report_progress(self, done: int, total: int, what: str) -> None:
        if not (isinstance(done, int) and isinstance(total, int) and isinstance(what, str)):
            raise TypeError(
                f"report_progress takes two ints and a text; got {done!r}, {total!r}, {what!r}"
            )
        with suppress(ChannelClosedError):  # a thread of the user's goes on behind the last call
            self._channel.send(WorkProgress(done, total, what))

    def _next_call(self) -> Call:
        if self._start.handles.replies is not None:
            return Call(*self._calls.dequeue())
        self._board.idle()  # no queue of another host is on the board
        with self._board.published_wait("dequeue") as show:
            show([self._board.ranks.index(DRIVER_RANK)])
            return Call(*self._calls.dequeue())

    def serve(self) -> None:
        """Answer calls until the driver closes the queue.

        Raises:
            What is in `_ENDS`: the generation has broken.
        """
        while True:
            try:
                call = self._next_call()
            except MessageDecodeError as error:
                # Its number is in the message that cannot be decoded; behind a gap comes a `VOID`.
                self._last += 1
                self._fail(error)
            except GroupClosedError:
                return
            else:
                self._last = call.number
                if call.method == VOID:
                    self._replies.enqueue(astuple(Reply(call.number)))
                else:
                    self._answer(call)

    def ready(self) -> Ready:
        """What to tell the driver when `join` has returned."""
        made = self._start.handles.replies is None
        return Ready(self._replies.export_handle() if made else None)

    def close(self) -> None:
        """Leave the groups and the queues."""
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
                _end_child(None)
        except BaseException as error:  # noqa: BLE001 - all that a method raises goes to the caller
            if os.getpid() != self._pid:
                _end_child(error)
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
        except BaseException as error:  # noqa: BLE001 - the value's own code fails to pickle it
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
        """Report a failed call to the driver, then wait until it says to go on."""
        begun = take_operation_counts() if begun is None else begun
        self._channel.send(describe(error, self._last, begun, self._rank))
        driver = self._board.n_members - 1
        self._board.wait(
            self._may_go_on, NEVER, "failed call", lambda: (driver,), poll=_LOOK_SECONDS
        )

    def _may_go_on(self) -> bool:
        told: Resume | None = self._channel.take()
        if told is not None:
            self._resumed = told.number
        return self._resumed == self._last
