"""Objects from one member of a group to another, or to all, over its CPU communicator.

Guarantees
    - What one member sends to another arrives in the order sent; receives from one peer
      take effect in the order they were asked for, also those whose handles were dropped.
    - A handle owns all that its message needs, and may be dropped.
    - Blocking sends do not wait for their receives, so members that send to each other
      first both go on. They wait once `OUTSTANDING_BYTES` to that peer are under way, besides
      what shared memory takes.
    - A receive that meets a message of another kind ends the group with `DivergenceError`.

A collective over objects is two collectives over tensors, of which the second depends on what
the first brought. In the background it therefore is messages instead, from each source to each
member, in order with the others between these two.

Assumes: the members trust each other, for objects are pickled; one thread at a time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from coordinator.boxes import Inbox, Outbox, Together, carry_out, in_background, waiting
from coordinator.messages import Kind, Message, broadcast_bytes
from device_comm import Joined, Work
from device_comm.checks import check_rank
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    DivergenceError,
    GroupTimeoutError,
    MessageDecodeError,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from coordinator.boxes import Ask, Receipt, Steps
    from device_comm import DeviceCommunicator

T = TypeVar("T")

Deliver = Callable[["DeviceCommunicator", Tensor, bool], None]
"""Sends a tensor over a communicator; the third argument says that nobody else will change it."""

OUTSTANDING_BYTES = 64 << 20
"""What may be under way to one peer before a blocking send waits; one message always may."""


def dump(obj: Any) -> bytes:
    """Pickle an object.

    Raises:
        TypeError: it cannot be pickled.
    """
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"cannot send a {type(obj).__name__}: {error}") from error


def load(data: bytes | memoryview) -> Any:
    """Restore a pickled object.

    Raises:
        MessageDecodeError: it cannot be restored here.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        raise MessageDecodeError(f"cannot restore an object: {error}") from error


class ObjectMail:
    """One member's messages to and from the others. The communicator stays the group's."""

    def __init__(self, cpu: DeviceCommunicator) -> None:
        """Send and receive over ``cpu``, which moves tensors on the CPU."""
        self.cpu = cpu
        self._inboxes: dict[int, Inbox] = {}
        self._outboxes: dict[int, Outbox] = {}

    def isend_object(self, obj: Any, dst: int, timeout: float | None) -> Work[None]:
        """Begin to send an object. Collective: no."""
        return self._isend_payload(Kind.OBJECT, dump(obj), dst, timeout)

    def send_object(self, obj: Any, dst: int, timeout: float | None) -> None:
        """Send an object. Collective: no."""
        payload = dump(obj)
        with self._ahead(dst, timeout) as deliver:
            for frame in Message(Kind.OBJECT, payload).frames():
                deliver(self.cpu, frame, True)

    def recv_object(self, src: int, timeout: float | None) -> Any:
        """The next message of ``src``, an object. Collective: no."""
        return self.receive(src, lambda ask: self._object_steps(Kind.OBJECT, src, ask), timeout)

    def irecv_object(self, src: int, timeout: float | None) -> Work[Any]:
        """Begin to receive the next message of ``src``, an object. Collective: no."""
        return self._receiving(src, self._object_steps(Kind.OBJECT, src), timeout)

    def broadcast_object(self, obj: Any, src: int, timeout: float | None) -> Any:
        """The object of ``src``, on all members. Collective: yes, every member."""
        deadline = self.deadline(timeout)
        if self.cpu.rank == src:
            broadcast_bytes(self.cpu, Kind.BROADCAST_OBJECT, dump(obj), src, deadline)
            return obj
        return load(broadcast_bytes(self.cpu, Kind.BROADCAST_OBJECT, None, src, deadline))

    def ibroadcast_object(self, obj: Any, src: int, timeout: float | None) -> Work[Any]:
        """As `broadcast_object`, in the background. Collective: yes, every member."""
        check_rank("src", src, self.cpu.world_size)
        if self.cpu.rank != src:
            return self._receiving(src, self._object_steps(Kind.BROADCAST_OBJECT, src), timeout)
        sends = self._isend_to_all(Kind.BROADCAST_OBJECT, dump(obj), timeout)
        return Work(obj, Together(sends), timeout=self._allowed(timeout))

    def all_gather_object(self, obj: Any, timeout: float | None) -> list[Any]:
        """Every member's object, by rank. Collective: yes, every member."""
        deadline = self.deadline(timeout)
        payload = torch.frombuffer(bytearray(dump(obj)), dtype=torch.uint8)
        lengths = self.cpu.all_gather(torch.tensor([payload.numel()]), timeout=deadline).tolist()
        everyone = self.cpu.all_gatherv(payload, sizes=lengths, timeout=deadline)
        return [load(memoryview(each.numpy())) for each in everyone.split(lengths)]

    def iall_gather_object(self, obj: Any, timeout: float | None) -> Work[list[Any]]:
        """As `all_gather_object`, in the background. Collective: yes, every member."""
        payload = dump(obj)
        sends = self._isend_to_all(Kind.GATHERED_OBJECT, payload, timeout)
        receipts = {
            src: self.begin(src, self._object_steps(Kind.GATHERED_OBJECT, src))
            for src in self.others
        }

        def everyone() -> list[Any]:
            return [
                receipts[rank].finish() if rank in receipts else load(payload)
                for rank in range(self.cpu.world_size)
            ]

        pending = Joined([*receipts.values(), Together(sends)])
        return Work([], pending, everyone, self._allowed(timeout))

    @property
    def others(self) -> list[int]:
        """All ranks but this one's."""
        return [rank for rank in range(self.cpu.world_size) if rank != self.cpu.rank]

    def receive(self, src: int, steps: Callable[[Ask], Steps[T]], timeout: float | None) -> T:
        """Receive from ``src``, behind what was asked for before, and wait for it.

        Raises:
            GroupTimeoutError: it did not come in time; the group has been aborted.
        """
        if self.is_behind(src):
            work: Work[T] = self._receiving(src, steps(in_background), timeout)
            return self.finish(work)
        deadline = self.deadline(timeout)
        return carry_out(steps(waiting(deadline)), deadline)

    def finish(self, work: Work[T]) -> T:
        """The end of a blocking receive; what cannot be taken back ends the group.

        Raises:
            GroupTimeoutError: it did not come in time; the group has been aborted.
        """
        try:
            return work.wait()
        except GroupTimeoutError as error:
            self.cpu.abort(error)
            raise

    def settle(self, src: int, timeout: float | None) -> None:
        """Wait until the receives from ``src`` have asked for all their parts."""
        if src in self._inboxes:
            self._inboxes[src].settle(self.deadline(timeout))

    def begin(self, src: int, steps: Steps[T]) -> Receipt[T]:
        """Begin a receive from ``src``, behind those that were begun before. Never blocks."""
        return self._inboxes.setdefault(src, Inbox()).begin(steps)

    def settle_receipt(self, src: int, receipt: Receipt[Any], deadline: Deadline) -> None:
        """Wait until a receive has asked for all its parts."""
        self._inboxes[src].settle(deadline, receipt)

    def is_behind(self, src: int) -> bool:
        """Whether a receive from ``src`` that begins now has to wait for others' turns."""
        return src in self._inboxes and self._inboxes[src].is_busy()

    def flush(self, linger: float) -> None:
        """Let messages that are under way arrive; give up after ``linger`` seconds."""
        deadline = Deadline.after(linger)
        with suppress(CoordinatorError):
            for outbox in self._outboxes.values():
                outbox.flush(deadline)
            self.cpu.flush(deadline)

    def deadline(self, timeout: float | None) -> Deadline:
        """The end of a call that begins now; None: as long as the communicator allows."""
        return Deadline.after(self.cpu.timeout if timeout is None else timeout)

    def _isend_payload(
        self, kind: Kind, payload: bytes, dst: int, timeout: float | None
    ) -> Work[None]:
        works = [self.cpu.isend(frame, dst) for frame in Message(kind, payload).frames()]
        return self._sending(dst, works, len(payload), timeout)

    def _isend_to_all(self, kind: Kind, payload: bytes, timeout: float | None) -> list[Work[None]]:
        return [self._isend_payload(kind, payload, dst, timeout) for dst in self.others]

    def frame_steps(self, kind: Kind, src: int, ask: Ask) -> Generator[Work[Any], Any, Message]:
        """The first step of receiving a message of a kind: its frame."""
        message = Message(kind)
        yield ask(self.cpu, message.first, src)
        try:
            message.check(src)
        except DivergenceError as error:
            self.cpu.abort(error)
            raise
        return message

    def _object_steps(self, kind: Kind, src: int, ask: Ask = in_background) -> Steps[Any]:
        message = yield from self.frame_steps(kind, src, ask)
        rest = message.rest()
        works = [] if rest is None else [ask(self.cpu, rest, src)]
        return works, lambda: load(message.payload)

    @contextmanager
    def _ahead(self, dst: int, timeout: float | None) -> Iterator[Deliver]:
        """For blocking sends to ``dst``: go ahead of the receiver, but not too far."""
        deadline = self.deadline(timeout)
        outbox = self._outboxes.setdefault(dst, Outbox())

        def deliver(comm: DeviceCommunicator, x: Tensor, is_own: bool) -> None:
            if comm.goes_ahead(dst, x.nbytes):
                comm.send(x, dst, timeout=deadline)
            else:
                outbox.add([comm.isend(x if is_own else x.clone(), dst)], x.nbytes)

        yield deliver
        outbox.shrink(OUTSTANDING_BYTES, deadline)

    def _sending(
        self, dst: int, works: Sequence[Work[None]], size: int, timeout: float | None
    ) -> Work[None]:
        self._outboxes.setdefault(dst, Outbox()).add(works, size)
        return Work(None, Together(works), timeout=self._allowed(timeout))

    def _receiving(self, src: int, steps: Steps[Any], timeout: float | None) -> Work[Any]:
        receipt = self.begin(src, steps)
        return Work(None, receipt, receipt.finish, self._allowed(timeout))

    def _allowed(self, timeout: float | None) -> float | None:
        return self.cpu.timeout if timeout is None else timeout
