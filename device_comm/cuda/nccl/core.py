"""Own an NCCL communicator: create, share between threads, issue operations, watch, abort.

Operations use a blocking communicator: a non-blocking one hands each call to a thread, which costs
tens of microseconds. But the creation of a blocking one cannot be abandoned if a rank is missing.
So a non-blocking one is created first, the blocking one is split from it in the background, and the
first is freed.

An NCCL send ends only when it is received, and operations of a communicator run in order: two ranks
that both send first would deadlock. In an NCCL group, sends and receives progress together. So
background messages are batched until one is waited for, another operation is issued, or
`HOLD_SECONDS` have passed.

A `StreamWatch` ends blocked calls and operations by aborting the communicator.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import torch

from device_comm.backend import Backend, Capabilities, Identity
from device_comm.cuda.driver import (
    CudaStreams,
    Stream,
    StreamEvent,
    StreamEventPending,
    Streams,
    pass_within,
)
from device_comm.cuda.nccl.library import (
    BYTE,
    NcclError,
    NcclLibrary,
    NcclResult,
    NcclUnavailableError,
)
from device_comm.operation import Operation, Verb
from device_comm.torch_waiting import HELPERS, ErrorTranslator
from device_comm.watch import Watch
from device_comm.watchdog import Issued, StreamWatch
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError

if TYPE_CHECKING:
    from device_comm.work import Pending

    Settle = Callable[[Callable[[], bool]], None]
    """Waits until a condition holds; raises on a failure."""

    Enqueue = Callable[["NcclLibrary", int, int], None]
    """Issues operations, given (library, communicator, stream)."""


class NcclMemory:
    """``size`` bytes at ``address`` on the current device.

    `free` frees them, or the last reference.
    """

    def __init__(self, library: NcclLibrary, size: int) -> None:
        """Allocate; raise `NcclUnavailableError` without windows, `NcclError` without memory."""
        library.check_windows()
        self.address = library.mem_alloc(size)
        self.size = size
        self._freeing = weakref.finalize(self, library.mem_free, self.address)
        self._freeing.atexit = False  # the device is released before

    def free(self) -> None:
        """Free the memory; idempotent. No communicator may have a window of it."""
        self._freeing()

    def keep(self) -> None:
        """Never free the memory: the device may still use it."""
        self._freeing.detach()


_STUCK = 1.0
"""Seconds for which `NcclHandle.abort` waits for a blocked call."""


class NcclHandle:
    """A blocking communicator. It is freed exactly once, and never used afterwards.

    ``windows`` are its windows and their memory; ``ended`` is set once NCCL has freed it.
    """

    def __init__(self, library: NcclLibrary, comm: int) -> None:
        self._library = library
        self._comm: int | None = comm
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.windows: list[tuple[int, NcclMemory]] = []

    def issue(self, enqueue: Callable[[NcclLibrary, int], None]) -> None:
        """Run ``enqueue(library, comm)``, in which NCCL may wait for peers until `abort`.

        Raises `NcclError` if NCCL refused or was aborted meanwhile, `GroupClosedError` after the
        end.
        """
        with self._lock:
            if self._comm is None:
                raise GroupClosedError("this NCCL communicator has ended")
            enqueue(self._library, self._comm)

    def register(self, memory: NcclMemory, nccl: NcclLibrary, comm: int) -> None:
        """Register ``memory`` as a window, in `issue`. Collective: yes, every member."""
        self.windows.append((nccl.window_register(comm, memory.address, memory.size), memory))

    def check(self) -> None:
        """Raise NCCL's background error, if any; do nothing during a call."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._comm is None:
                return
            result = self._library.async_result(self._comm)
            if result not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
                raise self._library.error("background work", result, self._comm)
        finally:
            self._lock.release()

    def abort(self) -> None:
        """End the communicator and its operations, also on the device; idempotent.

        If another thread is blocked in a call and holds the lock, continue after `_STUCK`: the
        abort makes that call return.
        """
        held = self._lock.acquire(timeout=_STUCK)
        try:
            comm, self._comm = self._comm, None
        finally:
            if held:
                self._lock.release()
        if comm is not None:
            self._library.abort(comm)
            self.ended.set()

    def finish(self) -> None:
        """Complete all issued operations and free the communicator; idempotent.

        Blocks until the peers have done their part. With windows, the device must be done.
        """
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is None:
            return
        try:
            for window, _ in self.windows:
                self._library.window_deregister(comm, window)
            self._library.finalize(comm)
            self._library.destroy(comm)
        except NcclError:
            self._library.abort(comm)
        self.ended.set()
        self.drop_windows(free=True)

    def drop_windows(self, *, free: bool) -> None:
        """Drop the windows' memory after the end; free it if the device does not use it."""
        while self.windows:
            _, memory = self.windows.pop()
            if free:
                memory.free()
            else:
                memory.keep()


class NcclForming:
    """A communicator in creation: call `finish`, or `abort` if that raises."""

    def __init__(self, library: NcclLibrary, world_size: int, unique_id: bytes, rank: int) -> None:
        """Begin on the current CUDA device; raise `NcclError` if NCCL refuses."""
        self._library = library
        self._rank = rank
        self._first = library.begin_init(world_size, unique_id, rank)
        self._begun = [self._first]

    def finish(self, settle: Settle) -> NcclHandle:
        """Create the communicator; raise ``settle``'s errors. Collective: yes, every member."""
        settle(self._is_settled)
        split = self._library.begin_split(self._first, self._rank)
        settle(self._is_settled)
        self._begun.append(split())
        self._library.finalize(self._first)
        settle(self._is_settled)
        self._library.destroy(self._begun.pop(0))
        return NcclHandle(self._library, self._begun.pop())

    def abort(self) -> None:
        """Abort the unfinished communicators."""
        while self._begun:
            self._library.abort(self._begun.pop())

    def _is_settled(self) -> bool:
        result = self._library.async_result(self._first)
        if result not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
            raise self._library.error("set-up", result, self._first)
        return result == NcclResult.SUCCESS


HOLD_SECONDS: Final = 0.002


@dataclass(eq=False, slots=True)
class MessageBatch:
    """Messages that are issued together, in the order of the calls; none is empty.

    ``mark`` is the event after them, None before they are issued. ``error`` is the error of issuing
    them.
    """

    stream: Stream
    messages: list[Operation] = field(default_factory=list)
    mark: StreamEvent | None = None
    error: CoordinatorError | None = None

    def enqueue(self, nccl: NcclLibrary, comm: int, stream: int) -> None:
        """Issue the messages as an NCCL group."""
        try:
            nccl.group_start()
            for each in self.messages:
                sends = each.verb == "send"
                move, tensor = (nccl.send, each.source) if sends else (nccl.recv, each.output)
                move(tensor.data_ptr(), tensor.nbytes, BYTE, each.peer, comm, stream)
        finally:
            nccl.group_end()


NCCL_POLL_SECONDS: Final = 0.001
"""Seconds between two polls of NCCL or the device."""


class NcclHostPending:
    """An operation whose `wait` blocks the host, such as a barrier."""

    def __init__(
        self, mark: StreamEvent, operation: str, peers: Sequence[int], boundary: ErrorTranslator
    ) -> None:
        self._mark = mark
        self._operation = operation
        self._peers = peers
        self._errors = boundary

    def ready(self) -> bool:
        """Return True if the device is done."""
        return self._mark.query()

    def wait(self, deadline: Deadline) -> None:
        """Block until the device is done; raise on the deadline, an abort or a lost peer."""
        self._errors.wait(
            self._mark.query, deadline, self._operation, self._peers, poll=NCCL_POLL_SECONDS
        )
        # An abort also completes the event.
        self._errors.watch.check(self._operation)


class BatchPending:
    """A message of a batch that may not have been issued yet."""

    def __init__(self, batch: MessageBatch, release: Callable[[MessageBatch], None]) -> None:
        self._batch = batch
        self._release = release

    def ready(self) -> bool:
        """Return True if the device is done, or issuing failed."""
        mark = self._issued()
        return mark is None or mark.query()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Make the current stream wait for the message."""
        mark = self._issued()
        if mark is None:
            raise self._batch.error or GroupClosedError("the message was never issued")
        mark.stream_wait()

    def _issued(self) -> StreamEvent | None:
        if self._batch.mark is None and self._batch.error is None:
            self._release(self._batch)
        return self._batch.mark


_FINISH = 5.0
"""Seconds for which `close` waits for issued operations."""

_CAUSE = 2.0
"""Seconds to wait for the cause of a background error."""

_VERBS: Final = frozenset[Verb](
    {
        "all_reduce",
        "all_gather",
        "all_gatherv",
        "reduce_scatter",
        "reduce_scatterv",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    }
)
"""The verbs of `NcclBackend`. Not `ALL_VERBS`: mypy does not find a verb that it lacks."""

_USAGE = frozenset({NcclResult.INVALID_ARGUMENT, NcclResult.INVALID_USAGE})
"""Results that this rank causes, not a peer."""


class NcclCore(Backend):
    """An NCCL communicator; `device_comm.cuda.nccl.nccl_backend` adds the verbs.

    ``streams`` are the device's streams.
    """

    def __init__(
        self,
        identity: Identity,
        library: NcclLibrary,
        handle: NcclHandle,
        streams: Streams,
        *,
        detects_loss: bool,
    ) -> None:
        super().__init__(
            identity, Capabilities("nccl", _VERBS, stream_ordered=True, detects_loss=detects_loss)
        )
        self._library = library
        self._handle = handle
        self.streams = streams
        self._errors = ErrorTranslator(self.watch)
        self._guard = StreamWatch(
            f"{self.name}-nccl", self._errors, self.peers, self._look, self._fail_later
        )
        self._order = threading.RLock()
        self._held: MessageBatch | None = None
        self._failure: Exception | None = None
        self._last: Stream | None = None
        self._token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self._closing.callback(self._release_handle)

    @classmethod
    def create(
        cls,
        rank: int,
        world_size: int,
        share: Callable[[bytes | None], bytes],
        *,
        device: torch.device | str = "cuda",
        name: str = "group",
        timeout: float | None = 60.0,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
        set_up: float | Deadline | None = None,
        library: NcclLibrary | None = None,
        streams: Streams | None = None,
    ) -> Self:
        """Set up an NCCL communicator. Collective: yes, every member.

        Args:
            rank, world_size, device, timeout, watch, members: as for `Identity.of`.
            share: broadcasts rank 0's bytes; other ranks pass None. Called once.
            name: for errors and status, the same on all ranks.
            set_up: seconds for the set-up; None: ``timeout``.
            library, streams: None: torch's.

        Raises:
            NcclUnavailableError: torch has no NCCL.
            NcclError: NCCL refuses: two ranks share a device, or cannot reach each other.
            GroupTimeoutError: some ranks are late; names them and their last operations.
        """
        library = library or NcclLibrary.of_torch()
        identity = Identity.of(
            rank, world_size, device, name=name, timeout=timeout, watch=watch, members=members
        )
        streams = streams or CudaStreams(identity.device)
        unique_id = share(library.unique_id() if rank == 0 else None)
        deadline = Deadline.after(timeout if set_up is None else set_up)
        with streams.device():
            handle = _formed(library, identity, unique_id, deadline)
        return cls(identity, library, handle, streams, detects_loss=watch is not None)

    def flush(self, deadline: Deadline) -> None:
        """Wait until the device has finished all operations of this backend.

        Raises:
            GroupTimeoutError, CoordinatorError: some are incomplete at the deadline; one failed.
        """
        self._release()
        mark = self.streams.current().mark()
        operation = self.identity.operation("flush")
        NcclHostPending(mark, operation, self.peers, self._errors).wait(deadline)
        self._raise_failure()

    def check(self) -> None:
        """See `Backend.check`; the watchdog detects failures."""
        super().check()
        self._raise_failure()

    def discard(self) -> None:
        """Abort the NCCL communicator, permanently."""
        self._guard.close(0.0)
        # In a thread: ncclCommAbort may block for long, and the caller has an error to raise.
        HELPERS.start(self._handle.abort, lambda: None)

    def _release_handle(self) -> None:
        over = self._failure is not None or self.watch.aborted is not None
        if not over:
            self._release()
            over = bool(self._handle.windows) and not self._passed()
        self._guard.close()
        if over:
            self._handle.abort()
            if self._handle.windows:
                ended = self._handle.ended.wait(_FINISH)
                self._handle.drop_windows(free=ended and self._passed())
        else:
            finished = threading.Event()
            HELPERS.start(self._handle.finish, finished.set)
            finished.wait(_FINISH)

    def allocate(self, size: int) -> NcclMemory:
        """Return memory for `register`; see `NcclMemory` for errors."""
        with self.streams.device():
            return NcclMemory(self._library, size)

    def register(self, memory: NcclMemory, deadline: Deadline) -> None:
        """Register a window of all ranks' memory, until this backend is closed.

        ``memory`` has the same size on all ranks and belongs to this backend afterwards. A rank
        that is missing at ``deadline`` ends the group. Raises `NcclUnavailableError` if NCCL
        refuses, or has no windows of these devices' memory. Collective: yes, every member.
        """
        name = self.identity.operation("nccl window")
        with self._order, self.streams.device():
            self._release()
            stream = self.streams.current()

            def enqueue(nccl: NcclLibrary, comm: int, _: int) -> None:
                try:
                    self._handle.register(memory, nccl, comm)
                except NcclError as error:
                    if self._failure is not None:
                        raise
                    raise NcclUnavailableError(str(error)) from error

            self._put(enqueue, stream, name, deadline, self.peers, captured=False)

    def _passed(self) -> bool:
        """Wait up to `_FINISH` for the last stream and the current one."""
        streams = (self._last, self.streams.current())
        return pass_within(_FINISH, [each.mark() for each in streams if each is not None])

    def graph_capture(self) -> AbstractContextManager[None]:
        """See `Backend.graph_capture`; batched messages are issued before."""
        self._release()
        return super().graph_capture()

    # --- issuing -------------------------------------------------------------------------

    def _issue(self, operation: Operation, enqueue: Enqueue) -> None:
        """Issue one collective on the current stream, and watch it."""
        with self._order:
            self._release()
            stream, captured = self.streams.current(), self.streams.capturing()
            if not captured:
                self._last = stream
            self._put(enqueue, stream, operation.name, operation.deadline, self.peers, captured)

    def _message(self, message: Operation) -> Pending | None:
        """Batch a message; issue the batch if the caller waits for it."""
        captured = self.streams.capturing()
        with self._order:
            batch = self._batch_on(self.streams.current())
            batch.messages.append(message)
            if captured or not message.background:
                self._release(captured)
                return None
            if len(batch.messages) == 1:
                HELPERS.start(lambda: self._release_later(batch), lambda: None)
        return BatchPending(batch, self._release_batch)

    def _batch_on(self, stream: Stream) -> MessageBatch:
        held = self._held
        if held is not None and held.stream.address != stream.address:
            self._release()
            held = None
        if held is None:
            held = self._held = MessageBatch(stream)
        return held

    def _release(self, captured: bool = False) -> None:
        """Issue the batch, if any."""
        with self._order:
            batch, self._held = self._held, None
            if batch is None:
                return
            last = batch.messages[-1]
            peers = sorted({self.members[each.peer] for each in batch.messages})
            try:
                batch.mark = self._put(
                    batch.enqueue, batch.stream, last.name, last.deadline, peers, captured
                )
            except CoordinatorError as error:
                batch.error = error
                raise
            finally:
                batch.messages.clear()

    def _release_batch(self, batch: MessageBatch) -> None:
        with self._order:
            if self._held is batch:
                self._release()

    def _release_later(self, batch: MessageBatch) -> None:
        time.sleep(HOLD_SECONDS)
        try:
            self._release_batch(batch)
        except CoordinatorError as error:
            self._fail_later(error)

    def _put(
        self,
        enqueue: Enqueue,
        stream: Stream,
        operation: str,
        deadline: Deadline,
        peers: Sequence[int],
        captured: bool,
    ) -> StreamEvent | None:
        self._raise_failure()
        issued = Issued(operation, deadline, peers)
        self._guard.follow(issued)
        try:
            self._handle.issue(lambda nccl, comm: enqueue(nccl, comm, stream.address))
            if not captured:
                issued.mark = stream.mark()
        except NcclError as error:
            if self._failure is not None:  # the watchdog ended the call
                raise self._failure from error
            raise _translate(error, self._errors, operation, peers, deadline) from error
        except GroupClosedError:
            self._raise_failure()
            raise
        finally:
            issued.over = issued.mark is None
        if captured:
            self._guard.follow_replays()
        return issued.mark

    # --- pending operations ---------------------------------------------------------------

    def after(self, operation: Operation) -> Pending | None:
        """Return the `Pending` of the current stream; None if the caller needs none."""
        if not operation.background or self.streams.capturing():
            return None
        return StreamEventPending(self.streams.current().mark())

    def _arrival(self, operation: Operation) -> Pending | None:
        """Return a `Pending` that blocks the host until the device is done."""
        if self.streams.capturing():
            return None
        mark = self.streams.current().mark()
        return NcclHostPending(mark, operation.name, self.peers, self._errors)

    # --- failing -------------------------------------------------------------------------

    def _look(self) -> None:
        """Raise a background error, if any; the watchdog calls it."""
        try:
            self._handle.check()
        except NcclError as error:
            soon = Deadline.after(_CAUSE)
            raise _translate(error, self._errors, self.name, self.peers, soon) from error

    def _fail_later(self, error: Exception) -> None:
        """Abort the group from a watching thread, and keep the error for the next call."""
        self._failure = error
        self.fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.watch.check(self.name)
            raise self._failure


def _formed(
    library: NcclLibrary, identity: Identity, unique_id: bytes, deadline: Deadline
) -> NcclHandle:
    """Return a communicator on the current device. Collective: yes, every member."""
    operation, watch, peers = identity.operation("nccl set-up"), identity.watch, identity.peers
    boundary = ErrorTranslator(watch)

    def settle(settled: Callable[[], bool]) -> None:
        boundary.wait(settled, deadline, operation, peers, poll=NCCL_POLL_SECONDS)

    forming = NcclForming(library, identity.world_size, unique_id, identity.rank)
    entry = watch.record_begin(operation)
    try:
        handle = forming.finish(settle)
    except CoordinatorError as error:
        watch.record_end(entry, error)
        forming.abort()
        if isinstance(error, NcclError):
            raise _translate(error, boundary, operation, peers, deadline) from error
        raise
    finally:
        watch.idle()
    watch.record_end(entry)
    return handle


def _translate(
    error: NcclError,
    boundary: ErrorTranslator,
    operation: str,
    peers: Sequence[int],
    deadline: Deadline,
) -> CoordinatorError:
    """Return the cause of ``error`` if another rank failed, else ``error``."""
    if error.result in _USAGE:
        return NcclError(f"{operation}: {error.function}", error.result, error.detail)
    return boundary.translate(error, operation, peers, deadline)
