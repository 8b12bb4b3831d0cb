"""Send and receive objects, tensors and dicts of tensors between members.

Guarantees, assuming that the members trust each other, with one thread at a time:

- Messages from one member to another arrive in the order sent. Receives from one peer match in the
  order of their calls, even if their handles were dropped.
- A handle owns everything that its message needs, and may be dropped. A message progresses while
  the caller computes, or waits for something else.
- Blocking sends return before their receives, so members may send to each other first. They block
  once `OUTSTANDING_BYTES` to that peer are in flight, besides the contents of shared memory.
- A receive that meets a message of another kind or call aborts the group with `DivergenceError`;
  one without memory for the message, with `MessageDecodeError`.
- A value that cannot be sent raises `MessageRefusedError` at sender and receiver: the sender's call
  counts as a message, and the group stays usable. At the sender, exceptions of the value's own
  pickling code are raised unchanged, except TypeErrors.

A collective over objects consists of two collectives over tensors; the second depends on the result
of the first. With ``async_op`` it consists of messages from each source to each member instead. A
dict's header and small tensors travel over the CPU communicator; then the other tensors over that
of their device, those on the CPU first, in the header's order.
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
    """Replaces a refused object in a queue: see `Kind.REFUSED`."""

    why: str


class ObjectMessenger(MessageTransport):
    """One member's objects to and from the others."""

    def dump(self, obj: Any) -> tuple[bytes, tuple[()]]:
        """Encode an object as a payload, or raise TypeError."""
        return self.wire.dump(obj), ()

    def broadcast_object(
        self, obj: Any, src: int, timeout: Timeout, *, async_op: bool = False
    ) -> Any:
        """Return the object of ``src``. Collective: yes, every member."""
        kind = Kind.BROADCAST_OBJECT
        if self._has_others(src):
            if self.cpu.rank == src:
                return self._broadcast(kind, partial(self.dump, obj), obj, timeout, async_op)
            incoming = self.object_of(src, kind, None if async_op else EVERYONE)
            return self._receive_broadcast(incoming, src, timeout, async_op)
        return self.cpu.runner.skip("broadcast", obj, async_op)

    def broadcast_through(self, queue: MessageQueue, obj: Any, timeout: Timeout) -> Any:
        """Return the object of the queue's writer, rank 0. Collective: yes, every member.

        A GroupTimeoutError aborts the group.
        """
        self.cpu.begun.add(sign("broadcast"))
        own_call = self.wire.call()
        deadline = self._deadline(timeout)
        try:
            call, value = queue.broadcast_object((own_call, obj), deadline)
        except GroupTimeoutError as error:
            self.cpu.abort(error)
            raise
        except CoordinatorError:
            raise
        except Exception as error:
            if not queue.is_writer:
                raise
            try:
                queue.enqueue((own_call, _Refused(why_refused(error))), deadline)
            except GroupTimeoutError as timeout_error:
                self.cpu.abort(timeout_error)
                raise
            self.refused(error)
        if call != own_call:
            kind = Kind.BROADCAST_OBJECT
            divergence = DivergenceError(
                0, naming_call(f"receive of {kind}", own_call), naming_call(f"send of {kind}", call)
            )
            self.cpu.abort(divergence)
            raise divergence
        if type(value) is _Refused:
            raise self.wire.refused(0, value.why)
        return value

    def all_gather_object(self, obj: Any, timeout: Timeout) -> list[Any]:
        """Return all members' objects, by rank. Collective: yes, every member."""
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
        """Return an object's kind and payload, and the error if it cannot be sent."""
        try:
            return Kind.GATHERED_OBJECT, self.wire.dump(obj), None
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return Kind.REFUSED, why_refused(error).encode(), error

    def _gather(
        self, kind: Kind, own: bytes, deadline: Deadline
    ) -> list[bytes | memoryview | MessageRefusedError]:
        sealed = self.wire.close(kind, own, EVERYONE)
        own_message = torch.frombuffer(bytearray([kind]) + sealed, dtype=torch.uint8)
        length = torch.tensor([own_message.numel()], device="cpu")
        lengths = self.cpu.all_gather(length, timeout=deadline).tolist()
        everyone = self.cpu.all_gatherv(own_message, sizes=lengths, timeout=deadline)
        parts = [memoryview(part.numpy()) for part in everyone.split(lengths)]  # type: ignore[no-untyped-call]

        def opened(src: int) -> memoryview | MessageRefusedError:
            try:
                return self.wire.open(parts[src][0], parts[src][1:], src, EVERYONE)
            except MessageRefusedError as refusal:  # raised once all are opened and counted
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
    """One member's messages, tensors included. The group owns the communicators."""

    def __init__(self, cpu: Communicator, device: Communicator, wire: MessageCodec) -> None:
        """Use these communicators: the same object twice if the group's device is the CPU."""
        super().__init__(cpu, device, wire)
        self._n_cut: WeakKeyDictionary[Communicator, Counter[Any]] = WeakKeyDictionary()

    # --- tensors -------------------------------------------------------------------------

    def send_tensor(self, x: Tensor, dst: int, timeout: Timeout) -> None:
        """Send a tensor of the group's device; the caller may change it afterwards."""
        check_tensor("x", x, self.routes.device.device)
        self._outgoing.send(None, (x.detach(),), dst, self._deadline(timeout))

    def isend_tensor(self, x: Tensor, dst: int, timeout: Timeout) -> Work[None]:
        """Begin to send a tensor of the group's device; it must not change until done."""
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
        """Receive a tensor of the group's device, behind earlier receives."""
        deadline = self._deadline(timeout)
        with self._receiving[src] as acquired:
            self._require_alone(acquired, src)
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
        """Begin to receive a tensor of the group's device, behind earlier receives."""
        works: list[Work[Tensor]] = []

        def post() -> list[Work[Tensor]]:
            works.append(self.routes.device.irecv(size, dtype, src, out=out, timeout=timeout))
            return works

        with self._receiving[src] as acquired:
            self._require_alone(acquired, src)
            self.cpu.begun.count_received(src)
            if src not in self._turns:
                return post()[0]
            turn = self._in_turn(src, post)
        work: Work[Any] = Work(None, turn, lambda: works[0].wait(), self._allowed(timeout))
        return work

    # --- dicts of tensors ----------------------------------------------------------------

    def incoming_dict(
        self, src: int, peers: Messenger | None, sorted_by: str = ""
    ) -> TensorDictReceiver:
        """Return the receiver of the next dict of ``src``.

        Dicts with different values at the key ``sorted_by`` may reach the peers in different
        orders.
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
        """Return the dict of ``src``. Collective: yes, every member."""
        kind = Kind.BROADCAST_TENSOR_DICT
        if self._has_others(src):
            if self.cpu.rank == src:
                own = dict(values) if isinstance(values, Mapping) else {}  # `pack` refuses others
                make = partial(self._pack_source, values)
                return self._broadcast(kind, make, own, timeout, async_op)
            dst = self.cpu.rank if async_op else EVERYONE
            incoming = TensorDictReceiver(self.wire, kind, src, dst, self.routes)
            return self._receive_broadcast(incoming, src, timeout, async_op)
        return self.broadcast_object(self._a_dict(values, src), src, timeout, async_op=async_op)

    def payload(self, values: Mapping[Any, Any], slicing: Slicing) -> Packed:
        """Return the payload of a dict's message, and the tensors behind it; raise as `pack`."""
        return to_payload(*self.pack(values, slicing))

    def slicing(self, overrides: Mapping[Any, bool] | None) -> Slicing:
        """Return how to slice tensors that all members of this group hold."""
        return Slicing(self.cpu.world_size, self.cpu.rank, overrides or {})

    def pack(
        self, values: Mapping[Any, Any] | None, slicing: Slicing
    ) -> tuple[Header, list[Tensor]]:
        """Return a dict's header and tensors.

        Raises:
            ValueError: a tensor is on another device, or must be sliced and is not divisible.
            TypeError: a key or a value cannot be encoded, or a tensor is not dense.
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
        # Backends write to a root's tensor; elements of an expanded one share memory.
        dense = [part.contiguous() for part in apart]
        return payload, sorted(dense, key=lambda part: part.device.type != "cpu")

    def _a_dict(self, values: Mapping[Any, Any] | None, src: int) -> Mapping[Any, Any]:
        if isinstance(values, Mapping):
            return values
        problem = f"rank {self.wire.global_rank(src)} is the source: it needs a dict"
        if values is None:
            raise ValueError(problem)
        raise TypeError(f"{problem}, not {type(values).__name__}")
