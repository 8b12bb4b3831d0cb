"""Send and receive objects, tensors and dicts of tensors between members.

Guarantees
    - What one member sends to another arrives in the order sent; receives from one peer
      take effect in the order they were asked for, even if their handles were dropped.
    - A handle owns everything that its message needs, and may be dropped. A message that was begun
      proceeds while the caller is busy, or waits for something else.
    - Blocking sends do not wait for their receives, so members that send to each other
      first both go on. They wait once `OUTSTANDING_BYTES` to that peer are under way, besides
      what shared memory takes. `coordinator.messages.transport` says when a handle is done.
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

The header of a dict goes over the CPU communicator, and small tensors with it; the others over that
of their device, those on the CPU first, in the header's order. `coordinator.messages.tensor_dict`
says what is in a header and how tensors are cut, `coordinator.messages.messenger` what is
guaranteed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from coordinator.messages.incoming import TensorDictReceiver
from coordinator.messages.tensor_dict import WHOLE, Header, Slicing, pack, to_payload
from coordinator.messages.transport import MessageTransport
from coordinator.messages.wire import EVERYONE, Kind, MessageCodec, why_refused
from device_comm import AllPending, Work
from device_comm.call_number import naming_call
from device_comm.shm.signature import sign
from device_comm.verbs.checks import Shape, Timeout, check_tensor
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    DivergenceError,
    GroupTimeoutError,
    MessageRefusedError,
    MessageSealError,
)

if TYPE_CHECKING:
    from coordinator.messages.transport import Packed
    from device_comm import Communicator
    from shm_broadcast import MessageQueue


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
            self._outgoing.abort_if_partial(error, 2)  # a number and two collectives
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
            self._outgoing.abort_if_partial(error, len(self._others) + 1)
            raise
        if refused is not None:
            self.refused(refused)

        def everyone() -> list[Any]:
            return [
                works[rank].wait() if rank in works else self.wire.load(own)
                for rank in range(self.cpu.world_size)
            ]

        return Work([], AllPending([*works.values(), sent]), everyone, self._allowed(timeout))


class Messenger(ObjectMessenger):
    """One member's messages, tensors included. The communicators stay the group's."""

    def __init__(self, cpu: Communicator, device: Communicator, wire: MessageCodec) -> None:
        """Send and receive over these; they are one where the group's device is the CPU."""
        super().__init__(cpu, device, wire)
        self._n_cut: WeakKeyDictionary[Communicator, Counter[Any]] = WeakKeyDictionary()

    # --- tensors -------------------------------------------------------------------------

    def send_tensor(self, x: Tensor, dst: int, timeout: Timeout) -> None:
        """Send a tensor of the group's device, which may be changed after that."""
        check_tensor("x", x, self.routes.device.device)
        self._outgoing.send(None, (x.detach(),), dst, self._deadline(timeout))

    def isend_tensor(self, x: Tensor, dst: int, timeout: Timeout) -> Work[None]:
        """Begin to send a tensor of the group's device, which must not change until done."""
        check_tensor("x", x, self.routes.device.device)
        return self._sending(self._outgoing.begin(None, (x.detach(),), dst), None, timeout)

    def recv_tensor(
        self,
        size: Shape | None,
        dtype: torch.dtype | None,
        src: int,
        out: Tensor | None,
        timeout: Timeout,
    ) -> Tensor:
        """Receive a tensor of the group's device, behind what was asked for before."""
        deadline = self._deadline(timeout)
        with self._receiving[src] as mine:
            self._require_alone(mine, src)
            self._await_turn(src, deadline)
            tensor = self.routes.device.recv(size, dtype, src, out=out, timeout=deadline)
            self.cpu.begun.count_received(src)
            return tensor

    def irecv_tensor(
        self,
        size: Shape | None,
        dtype: torch.dtype | None,
        src: int,
        out: Tensor | None,
        timeout: Timeout,
    ) -> Work[Tensor]:
        """Begin to receive a tensor of the group's device, behind what was asked for before."""
        asked: list[Work[Tensor]] = []

        def ask() -> list[Work[Tensor]]:
            asked.append(self.routes.device.irecv(size, dtype, src, out=out, timeout=timeout))
            return asked

        with self._receiving[src] as mine:
            self._require_alone(mine, src)
            self.cpu.begun.count_received(src)
            if src not in self._turns:
                return ask()[0]
            turn = self._in_turn(src, ask)
        work: Work[Any] = Work(None, turn, lambda: asked[0].wait(), self._allowed(timeout))
        return work

    # --- dicts of tensors ----------------------------------------------------------------

    def incoming_dict(
        self, src: int, peers: Messenger | None, sorted_by: str = ""
    ) -> TensorDictReceiver:
        """The next message of ``src``, a dict. Those of different values at the key ``sorted_by``
        may be sent to the peers in different orders.
        """
        kind, dst = Kind.TENSOR_DICT, self.cpu.rank
        if peers is None:
            return TensorDictReceiver(self.wire, kind, src, dst, self.routes)
        count = partial(self._count_cut, src, peers.cpu, sorted_by)
        return TensorDictReceiver(self.wire, kind, src, dst, self.routes, peers.routes, count)

    def _count_cut(self, src: int, peers: Communicator, sorted_by: str, header: Header) -> int:
        counts, sort = self._n_cut.setdefault(peers, Counter()), header.scalars.get(sorted_by)
        counts[src, sort] += 1
        return counts[src, sort]

    def broadcast_dict(
        self,
        values: Mapping[Any, Any] | None,
        src: int,
        timeout: Timeout,
        *,
        async_op: bool = False,
    ) -> Any:
        """The dict of ``src``, on all members. Collective: yes, every member."""
        kind = Kind.BROADCAST_TENSOR_DICT
        if self._has_others(src):
            if self.cpu.rank == src:
                own = dict(values) if isinstance(values, Mapping) else {}  # refused, then
                make = partial(self._pack_source, values)
                return self._broadcast(kind, make, own, timeout, async_op)
            dst = self.cpu.rank if async_op else EVERYONE
            incoming = TensorDictReceiver(self.wire, kind, src, dst, self.routes)
            return self._receive_broadcast(incoming, src, timeout, async_op)
        return self.broadcast_object(self._a_dict(values, src), src, timeout, async_op=async_op)

    def payload(self, values: Mapping[Any, Any], slicing: Slicing) -> Packed:
        """What a dict is sent as to one member: the payload of its message, and what follows it.

        Raises:
            What `pack` raises.
        """
        return to_payload(*self.pack(values, slicing))

    def slicing(self, overrides: Mapping[Any, bool] | None) -> Slicing:
        """How to cut tensors that all members of this group hold."""
        return Slicing(self.cpu.world_size, self.cpu.rank, overrides or {})

    def pack(
        self, values: Mapping[Any, Any] | None, slicing: Slicing
    ) -> tuple[Header, list[Tensor]]:
        """What a dict is sent as.

        Raises:
            ValueError: a tensor is elsewhere, or has to be cut and cannot be.
            TypeError: a key or a value cannot be written, or a tensor is not dense.
        """
        values = self._a_dict(values, self.cpu.rank)
        for key, value in values.items():
            if isinstance(value, Tensor) and value.device not in (
                self.cpu.device,
                self.routes.device.device,
            ):
                raise ValueError(
                    f"{key!r} is on {value.device}; this group moves tensors on "
                    f"{self.cpu.device} and {self.routes.device.device}"
                )
        return pack(values, slicing, self.wire)

    def _pack_source(self, values: Mapping[Any, Any] | None) -> tuple[bytes, list[Tensor]]:
        payload, apart = to_payload(*self.pack(values, WHOLE))
        # A root's tensor is written to, and elements of an expanded one share their memory.
        dense = [part.contiguous() for part in apart]
        return payload, sorted(dense, key=lambda part: part.device.type != "cpu")

    def _a_dict(self, values: Mapping[Any, Any] | None, src: int) -> Mapping[Any, Any]:
        if isinstance(values, Mapping):
            return values
        wanted = f"rank {self.wire.global_rank(src)} is the source: it needs a dict"
        if values is None:
            raise ValueError(wanted)
        raise TypeError(f"{wanted}, not {type(values).__name__}")
