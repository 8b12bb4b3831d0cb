"""Objects from one member of a group to another, or to all, over its CPU communicator.

Guarantees
    - What one member sends to another arrives in the order sent; receives from one peer
      take effect in the order they were asked for, even if their handles were dropped.
    - A handle owns everything that its message needs, and may be dropped. A message that was begun
      proceeds while the caller is busy, or waits for something else.
    - Blocking sends do not wait for their receives, so members that send to each other
      first both go on. They wait once `OUTSTANDING_BYTES` to that peer are under way, besides
      what shared memory takes. `coordinator.messages.outgoing` says when a handle is done.
    - A receive that meets a message of another kind or call ends the group with `DivergenceError`;
      one that has no room for what comes, with `MessageDecodeError`.
    - What cannot be sent raises `MessageRefusedError` where it was to be sent and where it is to
      be received: the sender's call counts as a message. The group can be used on. At the sender
      what the value's own code raises while it is pickled stays what it is, TypeErrors excepted.

A collective over objects is two collectives over tensors, of which the second depends on what
the first brought. In the background it therefore is messages instead, from each source to each
member, in order with the others between these two.

Assumes: the members trust each other; `coordinator.messages.wire` says when objects are pickled.
One thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from coordinator.messages.framing import Kind
from coordinator.messages.seal import EVERYONE
from coordinator.messages.transport import MessageTransport
from coordinator.messages.wire import why_refused
from device_comm import Joined, Work
from device_comm.call_number import naming_call
from device_comm.shm.signature import sign
from shm_broadcast import (
    CoordinatorError,
    DivergenceError,
    GroupTimeoutError,
    MessageRefusedError,
    MessageSealError,
)

if TYPE_CHECKING:
    from device_comm.verbs.arguments import Timeout
    from shm_broadcast import Deadline, MessageQueue


@dataclass(frozen=True, slots=True)
class _Refused:
    """Goes through a queue in the place of what cannot: see `Kind.REFUSED`."""

    why: str


class ObjectMessenger(MessageTransport):
    """One member's objects to and from the others."""

    def dump(self, obj: Any) -> tuple[bytes, tuple[()]]:
        """What an object is sent as.

        Raises:
            TypeError: it cannot be sent this way.
        """
        return self.wire.dump(obj), ()

    def broadcast_object(
        self, obj: Any, src: int, timeout: Timeout, *, async_op: bool = False
    ) -> Any:
        """The object of ``src``, on all members. Collective: yes, every member."""
        kind = Kind.BROADCAST_OBJECT
        if self._has_others(src):
            if self.cpu.rank == src:
                return self._broadcast(kind, partial(self.dump, obj), obj, timeout, async_op)
            incoming = self.object_of(src, kind, None if async_op else EVERYONE)
            return self._receive_broadcast(incoming, src, timeout, async_op)
        return self.cpu.runner.skip("broadcast", obj, async_op)

    def broadcast_through(self, queue: MessageQueue, obj: Any, timeout: Timeout) -> Any:
        """The object of the queue's writer, rank 0, on all members. Collective: yes.

        Raises:
            GroupTimeoutError: it took too long; the group has been aborted.
        """
        self.cpu.begun.add(sign("broadcast"))
        ours = self.wire.call()
        deadline = self._deadline(timeout)
        try:
            theirs, found = queue.broadcast_object((ours, obj), deadline)
        except GroupTimeoutError as error:
            self.cpu.abort(error)
            raise
        except CoordinatorError:
            raise
        except Exception as error:
            if not queue.is_writer:
                raise
            try:
                queue.enqueue((ours, _Refused(why_refused(error))), deadline)
            except GroupTimeoutError as late:
                self.cpu.abort(late)
                raise
            self.refused(error)
        if theirs != ours:
            what = Kind.BROADCAST_OBJECT
            divergence = DivergenceError(
                0, naming_call(f"receive of {what}", ours), naming_call(f"send of {what}", theirs)
            )
            self.cpu.abort(divergence)
            raise divergence
        if type(found) is _Refused:
            raise self.wire.refused(0, found.why)
        return found

    def all_gather_object(self, obj: Any, timeout: Timeout) -> list[Any]:
        """Every member's object, by rank. Collective: yes, every member."""
        if self.cpu.world_size == 1:
            return [self.broadcast_object(obj, 0, timeout)]
        deadline = self._deadline(timeout)
        kind, own, refused = self._dumped(obj)
        try:
            payloads = self._gather(kind, own, deadline)
        except MessageSealError as error:
            self.cpu.abort(error)
            raise
        except BaseException as error:
            self._outgoing.ends_halfway(error, 2)  # a number and two collectives
            raise
        if refused is not None:
            self.refused(refused)
        for refusal in payloads:
            if isinstance(refusal, MessageRefusedError):
                raise refusal
        return [self.wire.load(payload) for payload in payloads]  # type: ignore[arg-type]

    def _dumped(self, obj: Any) -> tuple[Kind, bytes, Exception | None]:
        """What the others are told of an object, and why it cannot be sent, to be raised then."""
        try:
            return Kind.GATHERED_OBJECT, self.wire.dump(obj), None
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return Kind.REFUSED, why_refused(error).encode(), error

    def _gather(
        self, kind: Kind, own: bytes, deadline: Deadline
    ) -> list[bytes | memoryview | MessageRefusedError]:
        """What each member has made of its object, or why it could not."""
        sealed = self.wire.close(kind, own, EVERYONE)
        mine = torch.frombuffer(bytearray([kind]) + sealed, dtype=torch.uint8)
        length = torch.tensor([mine.numel()], device="cpu")
        lengths = self.cpu.all_gather(length, timeout=deadline).tolist()
        everyone = self.cpu.all_gatherv(mine, sizes=lengths, timeout=deadline)
        parts = [memoryview(part.numpy()) for part in everyone.split(lengths)]  # type: ignore[no-untyped-call]

        def opened(src: int) -> memoryview | MessageRefusedError:
            try:
                return self.wire.open(parts[src][0], parts[src][1:], src, EVERYONE)
            except MessageRefusedError as refusal:  # raised once all are opened, and so counted
                return refusal

        return [own if src == self.cpu.rank else opened(src) for src in range(len(parts))]

    def iall_gather_object(self, obj: Any, timeout: Timeout) -> Work[list[Any]]:
        """As `all_gather_object`, in the background. Collective: yes, every member."""
        if self.cpu.world_size == 1:
            return Work(self.all_gather_object(obj, timeout))
        kind, own, refused = self._dumped(obj)
        make = partial(self.wire.message, kind, own)
        try:
            works = {
                src: self.ireceive(self.object_of(src, Kind.GATHERED_OBJECT), src, timeout)
                for src in self._others
            }
            sent = self._sending(self._begin_to_each(make, (), self._others), None, timeout)
        except BaseException as error:
            self._outgoing.ends_halfway(error, len(self._others) + 1)
            raise
        if refused is not None:
            self.refused(refused)

        def everyone() -> list[Any]:
            return [
                works[rank].wait() if rank in works else self.wire.load(own)
                for rank in range(self.cpu.world_size)
            ]

        return Work([], Joined([*works.values(), sent]), everyone, self._allowed(timeout))
