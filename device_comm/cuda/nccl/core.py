"""The base of the NCCL backend: set-up, issuing operations, watching them, and closing.

A `StreamGuard` ends calls and operations that do not end by themselves, by aborting the
communicator.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

import torch

from device_comm.backend import Backend, Capabilities, Identity
from device_comm.cuda.device.stream_guard import Issued, StreamGuard
from device_comm.cuda.device.streams import CudaStreams, Passage, pass_within
from device_comm.cuda.nccl.batch import HOLD_SECONDS, MessageBatch
from device_comm.cuda.nccl.forming import NcclForming
from device_comm.cuda.nccl.library import NcclError, NcclLibrary, NcclResult, NcclUnavailableError
from device_comm.cuda.nccl.nccl_memory import NcclMemory
from device_comm.cuda.nccl.pending import NCCL_POLL_SECONDS, NcclArrival, Underway
from device_comm.torch_group.helper_threads import HelperThreads
from device_comm.torch_group.pending import Boundary
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from device_comm.cuda.device.streams import Stream, StreamMark, Streams
    from device_comm.cuda.nccl.shared_handle import NcclHandle
    from device_comm.operation import Operation
    from device_comm.watch import Watch
    from device_comm.work import Pending

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
        self._boundary = Boundary(self.watch)
        self._guard = StreamGuard(
            f"{self.name}-nccl", self._boundary, self.peers, self._look, self._fail_later
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
        NcclArrival(mark, operation, self.peers, self._boundary).wait(deadline)
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
        return Underway(batch, self._release_batch)

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
    ) -> StreamMark | None:
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
            raise _translate(error, self._boundary, operation, peers, deadline) from error
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
        return Passage(self.streams.current().mark())

    def _arrival(self, operation: Operation) -> Pending | None:
        """A `Pending` that blocks the host until the device has done the operation."""
        if self.streams.capturing():
            return None
        mark = self.streams.current().mark()
        return NcclArrival(mark, operation.name, self.peers, self._boundary)

    # --- failing -------------------------------------------------------------------------

    def _look(self) -> None:
        """Raise if something has failed in the background; called by the guard."""
        try:
            self._handle.check()
        except NcclError as error:
            soon = Deadline.after(_CAUSE)
            raise _translate(error, self._boundary, self.name, self.peers, soon) from error

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
    boundary = Boundary(watch)

    def settle(settled: Callable[[], bool]) -> None:
        boundary.wait(settled, deadline, operation, peers, poll=NCCL_POLL_SECONDS)

    forming = NcclForming(library, identity.world_size, unique_id, identity.rank)
    entry = watch.stamp(operation)
    try:
        handle = forming.finish(settle)
    except CoordinatorError as error:
        watch.ended(entry, error)
        forming.abort()
        if isinstance(error, NcclError):
            raise _translate(error, boundary, operation, peers, deadline) from error
        raise
    finally:
        watch.idle()
    watch.ended(entry)
    return handle


def _translate(
    error: NcclError,
    boundary: Boundary,
    operation: str,
    peers: Sequence[int],
    deadline: Deadline,
) -> CoordinatorError:
    """The error to raise instead of ``error``: the cause, if another rank has failed."""
    if error.result in _USAGE:
        return NcclError(f"{operation}: {error.function}", error.result, error.detail)
    return boundary.translate(error, operation, peers, deadline)
