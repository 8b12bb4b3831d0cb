"""Under the verbs of NCCL: setting up, issuing, watching over what was issued, ending.

A communicator never blocks inside NCCL: its set-up has a deadline, and a `StreamGuard` ends
operations that do not end by themselves. NCCL then hands each eager call to a thread of its own,
which costs some microseconds that captured calls do not pay.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Self

import torch

from device_comm.base import Capabilities, DeviceCommunicator
from device_comm.cuda.nccl_handle import NcclHandle
from device_comm.cuda.nccl_library import NcclError, NcclLibrary, Result
from device_comm.cuda.nccl_messages import HOLD_SECONDS, Batch, Message
from device_comm.cuda.nccl_pending import POLL, Arrival, Passage, Underway
from device_comm.cuda.stream_guard import Issued, StreamGuard
from device_comm.cuda.streams import CudaStreams
from device_comm.helper_threads import HelperThreads
from device_comm.torch_pending import Boundary
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.base import Call
    from device_comm.cuda.streams import Mark, Stream, Streams
    from device_comm.watch import Watch
    from device_comm.work import Pending

    Share = Callable[[bytes | None], bytes]
    Enqueue = Callable[[NcclLibrary, int, int], bool]
    """Issues something on (library, communicator, stream)."""

_FINISH = 5.0
"""Seconds that what was issued has to arrive when the communicator is closed."""

_USAGE = frozenset({Result.INVALID_ARGUMENT, Result.INVALID_USAGE})
"""Errors that are about this rank's own call."""


class NcclCore(DeviceCommunicator):
    """A communicator of NCCL, without verbs. Use `create`."""

    def __init__(
        self,
        handle: NcclHandle,
        library: NcclLibrary,
        streams: Streams,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        name: str,
        timeout: float | None,
        watch: Watch | None,
        members: Sequence[int] | None,
    ) -> None:
        """Use `create`."""
        sees_peers = watch is not None
        super().__init__(
            rank=rank,
            world_size=world_size,
            device=device,
            capabilities=Capabilities("nccl", stream_ordered=True, detects_loss=sees_peers),
            name=name,
            timeout=timeout,
            watch=watch,
            members=members,
        )
        self.library = library
        self._handle = handle
        self._streams = streams
        self._boundary = Boundary(self.watch, sees_peers)
        self._guard = StreamGuard(f"{name}-nccl", self._boundary, self.peers, self._fail_later)
        self._helpers = HelperThreads(f"{name}-nccl-helper")
        self._order = threading.RLock()
        self._held: Batch | None = None
        self._failure: CoordinatorError | None = None
        self._token = torch.zeros(1, dtype=torch.uint8, device=device)

    @classmethod
    def create(
        cls,
        rank: int,
        world_size: int,
        share: Share,
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
        """Make the ranks of a group known to each other. Collective: yes, every member.

        Args:
            rank: this process's rank in the group.
            world_size: how many ranks the group has.
            share: hands bytes from rank 0 to all: rank 0 calls it with them, the others with
                None, and it returns them to all. Called once.
            device: this rank's; ``"cuda"`` is the current one.
            name: for errors and status, the same on all ranks.
            timeout: seconds that a call allows unless it says otherwise; None: for ever.
            watch: the group's board; None: deadlines only, peers are not seen.
            members: the board's member number of each rank; None: the rank itself.
            set_up: seconds for this; None: as for a call.
            library: None: the one that torch has loaded.
            streams: None: torch's.

        Raises:
            NcclUnavailableError: torch has no NCCL.
            NcclError: NCCL refuses: two ranks share a device, or there is no way between them.
            GroupTimeoutError: some ranks did not come; shows what each was last doing.
        """
        library = library or NcclLibrary.of_torch()
        device = torch.device(device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        streams = streams or CudaStreams(device)
        unique_id = share(library.unique_id() if rank == 0 else None)
        with streams.device():
            handle = NcclHandle(library, library.begin_init(world_size, unique_id, rank))
        comm = cls(
            handle,
            library,
            streams,
            rank=rank,
            world_size=world_size,
            device=device,
            name=name,
            timeout=timeout,
            watch=watch,
            members=members,
        )
        operation = f"{name} nccl set-up"
        comm.watch.stamp(operation)
        try:
            comm._settle(
                operation, Deadline.after(timeout if set_up is None else set_up), comm.peers
            )
        except CoordinatorError:
            handle.abort()
            raise
        finally:
            comm.watch.idle()
        return comm

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Return once the device has done all that was issued here. Collective: no.

        Raises:
            GroupTimeoutError: it has not; it is still at it.
            CoordinatorError: something of it failed.
        """
        self._release()
        mark = self._streams.current().mark()
        Arrival(mark, f"{self.name} flush", self.peers, self._boundary).wait(
            Deadline.after(self.timeout if timeout is None else timeout)
        )
        self._raise_failure()

    def _discard(self) -> None:
        self._guard.close(0.0)
        # NCCL may take its time, and the caller has an error to raise.
        self._helpers.start(self._handle.abort, lambda: None)

    def _close(self) -> None:
        over = self._failure is not None or self.watch.aborted is not None
        if not over:
            self._release()
        self._guard.close()
        if over:
            self._handle.abort()
        else:
            self._handle.finish(Deadline.after(_FINISH))

    # --- issuing -------------------------------------------------------------------------

    def _issue(self, call: Call, enqueue: Enqueue) -> None:
        """Put one operation of all ranks on the current stream, and have it watched over."""
        with self._order:
            self._release()
            stream, captured = self._streams.current(), self._streams.capturing()
            self._put(enqueue, stream, call.operation, call.deadline, self.peers, captured)

    def _send_message(self, message: Message) -> Pending | None:
        """Issue a message with those that are held back; or hold it back, too."""
        captured = self._streams.capturing()
        with self._order:
            batch = self._batch_on(self._streams.current())
            batch.messages.append(message)
            if captured or not message.call.background:
                self._release(captured)
                return None
            if len(batch.messages) == 1:
                self._helpers.start(lambda: self._release_later(batch), lambda: None)
        return Underway(batch, self._release_batch)

    def _batch_on(self, stream: Stream) -> Batch:
        held = self._held
        if held is not None and held.stream.address != stream.address:
            self._release()
            held = None
        if held is None:
            held = self._held = Batch(stream)
        return held

    def _release(self, captured: bool = False) -> None:
        """Issue the messages that are held back."""
        with self._order:
            batch, self._held = self._held, None
            if batch is None:
                return
            last = batch.messages[-1].call
            peers = sorted({self.members[each.peer] for each in batch.messages})
            try:
                batch.mark = self._put(
                    batch.enqueue, batch.stream, last.operation, last.deadline, peers, captured
                )
            except CoordinatorError as error:
                batch.error = error
                raise
            finally:
                batch.messages.clear()

    def _release_batch(self, batch: Batch) -> None:
        with self._order:
            if self._held is batch:
                self._release()

    def _release_later(self, batch: Batch) -> None:
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
    ) -> Mark | None:
        self._raise_failure()
        try:
            busy = self._handle.issue(lambda nccl, comm: enqueue(nccl, comm, stream.address))
        except NcclError as error:
            raise self._translate(error, operation, peers, deadline) from error
        except GroupClosedError:
            self._raise_failure()
            raise
        if busy:
            self._settle(operation, deadline, peers)
        if captured:
            self._guard.follow_replays()
            return None
        mark = stream.mark()
        self._guard.follow(Issued(mark, operation, deadline, peers))
        return mark

    def _settle(self, operation: str, deadline: Deadline, peers: Sequence[int]) -> None:
        """Wait until NCCL is done in the background; the device may still be at work."""
        try:
            self._boundary.wait(
                lambda: not self._handle.busy(), deadline, operation, peers, poll=POLL
            )
        except NcclError as error:
            raise self._translate(error, operation, peers, deadline) from error
        except GroupClosedError:
            self._raise_failure()
            raise

    # --- what primitives return ----------------------------------------------------------

    def _after(self, call: Call) -> Pending | None:
        """The end of a primitive whose work is on the current stream."""
        if not call.background or self._streams.capturing():
            return None
        return Passage(self._streams.current().mark())

    def _arrival(self, call: Call) -> Pending | None:
        """The end of a primitive for which the host waits."""
        if self._streams.capturing():
            return None
        mark = self._streams.current().mark()
        return Arrival(mark, call.operation, self.peers, self._boundary)

    # --- failing -------------------------------------------------------------------------

    def _translate(
        self, error: NcclError, operation: str, peers: Sequence[int], deadline: Deadline
    ) -> CoordinatorError:
        """What to raise in the place of ``error``: its cause, if it is another rank's."""
        if error.result in _USAGE:
            return NcclError(f"{operation}: {error.function}", error.result, error.detail)
        return self._boundary.translate(error, operation, peers, deadline)

    def _fail_later(self, error: CoordinatorError) -> None:
        """Something that was issued will not end by itself; in a thread that watches."""
        self._failure = error
        self._fail(error)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self.watch.check(self.name)
            raise self._failure
