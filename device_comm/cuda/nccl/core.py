"""Own an NCCL communicator: create, share between threads, issue operations, watch, abort.

A blocking communicator is what operations need: a non-blocking one hands each call to a thread of
its own, which costs tens of microseconds. But a blocking one cannot be given up while it is made,
and a rank that never comes would be waited for without end. So a non-blocking one is made first;
the blocking one is split from it, in the background as well; then the first one is freed.

In NCCL a send ends only when it is received, and a communicator's operations run in the order in
which they are issued: two ranks that both send first would deadlock. Issued together, as a group,
sends and receives progress side by side. So messages that the caller does not wait for are held
back until one of them is waited for, any other operation is issued, or `HOLD_SECONDS` have passed.

A `StreamWatchdog` ends calls and operations that do not end by themselves, by aborting the
communicator.
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
from device_comm.cuda.watchdog import Issued, StreamWatchdog
from device_comm.operation import Operation
from device_comm.torch_waiting import ErrorTranslator, HelperThreads
from device_comm.watch import Watch
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError

if TYPE_CHECKING:
    from device_comm.work import Pending


class NcclMemory:
    """Memory on the current device; freed by `free`, or when nobody has it any more.

    Attributes:
        address: where it is, on the device.
        size: bytes.
    """

    def __init__(self, library: NcclLibrary, size: int) -> None:
        """Allocate it.

        Raises:
            NcclUnavailableError: this NCCL has no windows.
            NcclError: there is not so much memory.
        """
        library.check_windows()
        self.address = library.mem_alloc(size)
        self.size = size
        self._freeing = weakref.finalize(self, library.mem_free, self.address)
        self._freeing.atexit = False  # the device has gone by then

    def free(self) -> None:
        """Free it; idempotent. No communicator has a window of it any more."""
        self._freeing()

    def keep(self) -> None:
        """Leave it to the process: the device may still use it, so it must never be freed."""
        self._freeing.detach()


_STUCK = 1.0
"""Seconds after which `NcclHandle.abort` no longer waits for a call to return."""


class NcclHandle:
    """A blocking communicator. It is freed exactly once, and never used afterwards.

    Attributes:
        windows: its windows, with their memory.
        ended: set once NCCL has freed it.
    """

    def __init__(self, library: NcclLibrary, comm: int) -> None:
        """Own ``comm``."""
        self._library = library
        self._comm: int | None = comm
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.windows: list[tuple[int, NcclMemory]] = []

    def issue(self, enqueue: Callable[[NcclLibrary, int], None]) -> None:
        """Run ``enqueue(library, comm)``, in which NCCL may wait for peers until `abort`.

        Raises:
            NcclError: NCCL refused, or the communicator was aborted meanwhile.
            GroupClosedError: the communicator was finished or aborted before.
        """
        with self._lock:
            if self._comm is None:
                raise GroupClosedError("this communicator of NCCL has been ended")
            enqueue(self._library, self._comm)

    def register(self, memory: NcclMemory, nccl: NcclLibrary, comm: int) -> None:
        """Make a window of ``memory``, in `issue`.

        Collective: yes, every member.
        """
        self.windows.append((nccl.window_register(comm, memory.address, memory.size), memory))

    def check(self) -> None:
        """Look for errors of what NCCL does in the background; not while a call is under way.

        Raises:
            NcclError: something has failed there, such as a connection.
        """
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

        If another thread is stuck in a call and holds the lock, this goes on after `_STUCK`: the
        abort is what makes that call return.
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

        Takes as long as the peers need for their part. If there are windows, the device must have
        done all operations.
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
        """Give up the windows' memory, after the end. ``free``: the device does not use it."""
        while self.windows:
            _, memory = self.windows.pop()
            if free:
                memory.free()
            else:
                memory.keep()


if TYPE_CHECKING:
    Settle = Callable[[Callable[[], bool]], None]
    """Waits until a condition holds; raises if it has to be given up."""


class NcclForming:
    """A communicator that is being made: call `finish`, or `abort` if that raises."""

    def __init__(self, library: NcclLibrary, world_size: int, unique_id: bytes, rank: int) -> None:
        """Begin, on the current CUDA device.

        Raises:
            NcclError: NCCL refuses.
        """
        self._library = library
        self._rank = rank
        self._first = library.begin_init(world_size, unique_id, rank)
        self._begun = [self._first]

    def finish(self, settle: Settle) -> NcclHandle:
        """Make the communicator. Collective: yes, every member.

        Raises:
            NcclError: NCCL refuses.
            CoordinatorError: what ``settle`` raises.
        """
        settle(self._is_settled)
        made = self._library.begin_split(self._first, self._rank)
        settle(self._is_settled)
        self._begun.append(made())
        self._library.finalize(self._first)
        settle(self._is_settled)
        self._library.destroy(self._begun.pop(0))
        return NcclHandle(self._library, self._begun.pop())

    def abort(self) -> None:
        """Give up what was begun."""
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
    """Messages that are issued together.

    Attributes:
        stream: the stream to issue them on.
        messages: sends and receives, none of them empty, in the order of the calls.
        mark: the point in the stream after them; None before they are issued.
        error: why they could not be issued; None if they could, or were not issued yet.
    """

    stream: Stream
    messages: list[Operation] = field(default_factory=list)
    mark: StreamEvent | None = None
    error: CoordinatorError | None = None

    def enqueue(self, nccl: NcclLibrary, comm: int, stream: int) -> None:
        """Issue them to NCCL as a group."""
        try:
            nccl.group_start()
            for each in self.messages:
                sends = each.verb == "send"
                move, cargo = (nccl.send, each.source) if sends else (nccl.recv, each.output)
                move(cargo.data_ptr(), cargo.nbytes, BYTE, each.peer, comm, stream)
        finally:
            nccl.group_end()


NCCL_POLL_SECONDS: Final = 0.001
"""Seconds between two looks at NCCL's or the device's progress."""


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
        """Whether the device is done."""
        return self._mark.query()

    def wait(self, deadline: Deadline) -> None:
        """Block until the device is done; raise at the deadline, on an abort or a lost peer."""
        self._errors.wait(
            self._mark.query, deadline, self._operation, self._peers, poll=NCCL_POLL_SECONDS
        )
        # The mark is also passed when an abort has ended the operation.
        self._errors.watch.check(self._operation)


class BatchPending:
    """A message of a batch that may not have been issued yet."""

    def __init__(self, batch: MessageBatch, release: Callable[[MessageBatch], None]) -> None:
        self._batch = batch
        self._release = release

    def ready(self) -> bool:
        """Whether the device is done, or the message could not be issued."""
        mark = self._issued()
        return mark is None or mark.query()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Have the current stream wait for the message."""
        mark = self._issued()
        if mark is None:
            raise self._batch.error or GroupClosedError("the message was never issued")
        mark.stream_wait()

    def _issued(self) -> StreamEvent | None:
        if self._batch.mark is None and self._batch.error is None:
            self._release(self._batch)
        return self._batch.mark


if TYPE_CHECKING:
    Enqueue = Callable[[NcclLibrary, int, int], None]
    """Issues operations, given (library, communicator, stream)."""

_FINISH = 5.0
"""How long `close` waits for issued operations to end."""

_CAUSE = 2.0
"""How long to look for the cause of an error in the background."""

_USAGE = frozenset({NcclResult.INVALID_ARGUMENT, NcclResult.INVALID_USAGE})
"""Results that are this rank's own fault, so that no peer is to blame."""


class NcclCore(Backend):
    """An NCCL communicator without the verbs, which `device_comm.cuda.nccl.nccl_backend` adds.

    Attributes:
        streams: the device's streams.
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
        """Use `create`."""
        super().__init__(
            identity, Capabilities("nccl", stream_ordered=True, detects_loss=detects_loss)
        )
        self._library = library
        self._handle = handle
        self.streams = streams
        self._errors = ErrorTranslator(self.watch)
        self._guard = StreamWatchdog(
            f"{self.name}-nccl", self._errors, self.peers, self._look, self._fail_later
        )
        self._helpers = HelperThreads(f"{self.name}-nccl-helper")
        self._order = threading.RLock()
        self._held: MessageBatch | None = None
        self._failure: CoordinatorError | None = None
        self._last: Stream | None = None
        self._token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        self._closing.callback(self._helpers.close)
        self._closing.callback(self._give_back)

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
            rank: this process's rank in the group.
            world_size: the number of ranks.
            share: broadcasts bytes from rank 0: rank 0 passes them, the others None, and it returns
                them on all ranks. Called once.
            device: this rank's device; ``"cuda"`` is the current one.
            name: the group's name for errors and status, the same on all ranks.
            timeout: default seconds that a call may take; None: for ever.
            watch: the group's board; None: deadlines only, peers are not seen.
            members: each rank's member number on the board; None: the rank itself.
            set_up: seconds for the set-up; None: ``timeout``.
            library: the NCCL library; None: the one that torch has loaded.
            streams: the device's streams; None: torch's.

        Raises:
            NcclUnavailableError: torch has no NCCL.
            NcclError: NCCL refuses: two ranks share a device, or cannot reach each other.
            GroupTimeoutError: some ranks did not come in time; says what each was last doing.
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
            GroupTimeoutError: some are still under way at the deadline.
            CoordinatorError: an operation failed.
        """
        self._release()
        mark = self.streams.current().mark()
        operation = self.identity.operation("flush")
        NcclHostPending(mark, operation, self.peers, self._errors).wait(deadline)
        self._raise_failure()

    def check(self) -> None:
        """As `Backend.check`; the guard notices what has failed."""
        super().check()
        self._raise_failure()

    def discard(self) -> None:
        """Abort the NCCL communicator, which is never used again."""
        self._guard.close(0.0)
        # In a thread: ncclCommAbort may take long, and the caller has an error to raise.
        self._helpers.start(self._handle.abort, lambda: None)

    def _give_back(self) -> None:
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
            self._helpers.start(self._handle.finish, finished.set)
            finished.wait(_FINISH)

    def allocate(self, size: int) -> NcclMemory:
        """Memory for `register`. Collective: no.

        Raises:
            NcclUnavailableError: this NCCL has no windows.
            NcclError: there is not so much memory.
        """
        with self.streams.device():
            return NcclMemory(self._library, size)

    def register(self, memory: NcclMemory, deadline: Deadline) -> None:
        """Make a window of the memory of all ranks, until this backend is closed.

        Args:
            memory: this rank's, as large on all ranks; freed by this backend from then on.
            deadline: a rank that has not come by then ends the group.

        Collective: yes, every member.

        Raises:
            NcclUnavailableError: NCCL refuses, or makes no window of these devices' memory.
            CoordinatorError: another rank failed, or did not come.
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
        """Wait up to `_FINISH` for what is on the last stream and the current one."""
        streams = (self._last, self.streams.current())
        return pass_within(_FINISH, [each.mark() for each in streams if each is not None])

    def graph_capture(self) -> AbstractContextManager[None]:
        """As `Backend.graph_capture`; messages that are held back stay out of the graph."""
        self._release()
        return super().graph_capture()

    # --- issuing -------------------------------------------------------------------------

    def _issue(self, operation: Operation, enqueue: Enqueue) -> None:
        """Issue one collective on the current stream, and have it watched."""
        with self._order:
            self._release()
            stream, captured = self.streams.current(), self.streams.capturing()
            if not captured:
                self._last = stream
            self._put(enqueue, stream, operation.name, operation.deadline, self.peers, captured)

    def _message(self, message: Operation) -> Pending | None:
        """Add a message to those that are held back; issue them all if the caller waits for it."""
        captured = self.streams.capturing()
        with self._order:
            batch = self._batch_on(self.streams.current())
            batch.messages.append(message)
            if captured or not message.background:
                self._release(captured)
                return None
            if len(batch.messages) == 1:
                self._helpers.start(lambda: self._release_later(batch), lambda: None)
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
        """Issue the messages that are held back, if there are any."""
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
            if self._failure is not None:  # the call returned because the guard has ended it
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

    # --- what starting returns ------------------------------------------------------------

    def after(self, operation: Operation) -> Pending | None:
        """The `Pending` of an operation on the current stream; None if the caller needs none."""
        if not operation.background or self.streams.capturing():
            return None
        return StreamEventPending(self.streams.current().mark())

    def _arrival(self, operation: Operation) -> Pending | None:
        """A `Pending` that blocks the host until the device has done the operation."""
        if self.streams.capturing():
            return None
        mark = self.streams.current().mark()
        return NcclHostPending(mark, operation.name, self.peers, self._errors)

    # --- failing -------------------------------------------------------------------------

    def _look(self) -> None:
        """Raise if something has failed in the background; called by the guard."""
        try:
            self._handle.check()
        except NcclError as error:
            soon = Deadline.after(_CAUSE)
            raise _translate(error, self._errors, self.name, self.peers, soon) from error

    def _fail_later(self, error: CoordinatorError) -> None:
        """Abort the group because of an issued operation, and keep the error for the next call.

        Called by the watching threads.
        """
        self._failure = error
        self.fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.watch.check(self.name)
            raise self._failure


def _formed(
    library: NcclLibrary, identity: Identity, unique_id: bytes, deadline: Deadline
) -> NcclHandle:
    """A communicator on the current device. Collective: yes, every member."""
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
    """The error to raise instead of ``error``: the cause, if another rank has failed."""
    if error.result in _USAGE:
        return NcclError(f"{operation}: {error.function}", error.result, error.detail)
    return boundary.translate(error, operation, peers, deadline)
