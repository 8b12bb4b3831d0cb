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
of their device, those on the CPU first, in the header's order. `messages.incoming` says which
receive gets which message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

from coordinator.messages.incoming import Communicators, Inbox, Incoming, Receive
from coordinator.messages.tensor_dict import WHOLE, Header, Slicing, pack, to_payload
from coordinator.messages.transport import AnotherThreadError, Sender
from coordinator.messages.wire import EVERYONE, Kind, Message, MessageCodec, why_refused
from device_comm import AllPending, Pending, Work
from device_comm.call_number import call_number, naming_call
from device_comm.shm.signature import sign
from device_comm.verbs.checks import Shape, Timeout, check_peer, check_rank, check_tensor
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    DivergenceError,
    GroupTimeoutError,
    MessageDecodeError,
    MessageRefusedError,
    MessageSealError,
)

if TYPE_CHECKING:
    from device_comm import Communicator
    from shm_broadcast import MessageQueue

    Packed: TypeAlias = tuple[bytes, Sequence[Tensor]]
    """The payload of a message, and the tensors behind it."""

    Make: TypeAlias = Callable[[], Packed]

T = TypeVar("T")

_ARRIVED = Work(None)
_PAUSE = 0.0005
"""Seconds between two attempts of a thread to receive while another one does."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """Replaces a refused object in a queue: see `Kind.REFUSED`."""

    why: str


class Messenger:
    """One member's messages to and from the others. The group owns the communicators.

    ``cpu`` moves messages, ``routes`` the tensors behind them; ``wire`` encodes and seals.
    """

    def __init__(self, cpu: Communicator, device: Communicator, wire: MessageCodec) -> None:
        """Use these communicators: the same object twice if the group's device is the CPU."""
        self.cpu = cpu
        self.wire = wire
        self.routes = Communicators(cpu, device)
        self._timeout = cpu.timeout
        self._outgoing = Sender(self.routes, numbered=wire.numbers)
        self._others = [rank for rank in range(cpu.world_size) if rank != cpu.rank]
        self._inboxes = {rank: Inbox(self.routes, wire, cpu.rank) for rank in self._others}
        self._broadcasts = Inbox(self.routes, wire, EVERYONE)

    def flush(self, linger: float) -> None:
        """Wait for messages in flight, at most ``linger`` seconds."""
        with suppress(CoordinatorError):
            self._outgoing.flush(Deadline.after(linger))

    # --- messages to one member ----------------------------------------------------------

    def send(self, kind: Kind, dst: int, make: Make, timeout: Timeout, tag: int = 0) -> None:
        """Send the result of ``make``; if it raises, send an error frame instead."""
        deadline = self._deadline(timeout)
        payload, parts = self._made(make, (dst,), tag)
        message = partial(self.wire.message, kind, payload, dst, tag)
        self._outgoing.send(message, parts, dst, deadline)

    def isend(
        self,
        kind: Kind,
        dsts: Sequence[int],
        make: Make,
        result: T,
        timeout: Timeout,
        tag: int = 0,
    ) -> Work[T]:
        """Begin to send the result of ``make``; the work returns ``result``."""
        payload, parts = self._made(make, dsts, tag)
        message = partial(self.wire.message, kind, payload, tag=tag)
        return self._sending(self._begin_to_each(message, parts, dsts), result, timeout)

    def refuse(self, error: Exception, dsts: Iterable[int], tag: int = 0) -> None:
        """Send error frames instead of a message."""
        with suppress(CoordinatorError, AnotherThreadError):
            self._begin_to_each(partial(self.wire.error_frame, error, tag=tag), (), tuple(dsts))

    def refused(self, error: Exception) -> NoReturn:
        """Raise MessageRefusedError for a TypeError, else ``error`` itself."""
        if isinstance(error, TypeError):
            raise self.wire.refused(self.cpu.rank, str(error)) from error
        raise error

    def _made(self, make: Make, dsts: Sequence[int], tag: int) -> Packed:
        for dst in dsts:
            check_peer("dst", dst, self.cpu.rank, self.cpu.world_size)
        try:
            return make()
        except Exception as error:  # noqa: BLE001 - `refused` raises it
            self.refuse(error, dsts, tag)
            self.refused(error)

    def _begin_to_each(
        self, make: Callable[[int], Message], parts: Sequence[Tensor], dsts: Sequence[int]
    ) -> list[Work[None]]:
        works: list[Work[None]] = []
        n_begun = 0
        try:
            for dst in dsts:
                works += self._outgoing.begin(partial(make, dst), parts, dst)
                n_begun += 1
        except BaseException as error:
            if n_begun or not isinstance(error, AnotherThreadError):
                self._outgoing.abort_if_partial(error, len(dsts))
            raise
        return works

    def _sending(self, works: Sequence[Work[None]], result: T, timeout: Timeout) -> Work[T]:
        return Work(result, AllPending(works) if works else None, timeout=self._allowed(timeout))

    # --- messages from one member --------------------------------------------------------

    def recv(
        self,
        kind: Kind,
        src: int,
        timeout: Timeout,
        *,
        tag: int = 0,
        peers: Communicators | None = None,
    ) -> Any:
        """Return the value of the next message of ``src`` with that tag.

        Threads may receive at once, with different tags other than 0.
        """
        deadline = Deadline.after(self._timeout if timeout is None else timeout)
        inbox = self._inbox(src)
        receive = Receive(inbox, kind, src, tag, peers)
        try:
            while not receive.has_arrived:
                with inbox.turn as acquired:
                    if acquired:
                        self._receive(inbox, receive, deadline)
                if acquired:
                    continue
                if not tag:
                    self._require_alone(acquired, src)
                if inbox.give(receive):  # the other thread has received it
                    self.finish(receive, deadline)
                elif inbox.turn.take_within(_PAUSE):
                    inbox.turn.__exit__()
            return receive.result(deadline)
        except BaseException as error:
            receive.leave(error)
            raise

    def irecv(
        self,
        kind: Kind,
        src: int,
        timeout: Timeout,
        *,
        tag: int = 0,
        peers: Communicators | None = None,
    ) -> Work[Any]:
        """Begin to receive the next message of ``src`` with that tag."""
        receive, allowed = self.post(kind, src, tag, peers), self._allowed(timeout)
        return Work(None, receive, lambda: receive.result(allowed), allowed)

    def post(
        self, kind: Kind, src: int, tag: int = 0, peers: Communicators | None = None
    ) -> Receive:
        """Begin to receive a message, behind earlier receives. Never blocks."""
        inbox = self._inbox(src)
        receive = Receive(inbox, kind, src, tag, peers)
        with inbox.turn as acquired:
            self._require_alone(acquired, src)
            inbox.post(receive)
            inbox.begin(receive)
        return receive

    def _receive(self, inbox: Inbox, receive: Receive, deadline: Deadline) -> None:
        """Receive one message, which may be unexpected."""
        if inbox.open:
            inbox.post(receive)
        unexpected = inbox.unexpected and inbox.give(receive)
        if unexpected or inbox.open or receive.incoming is not None:
            self.finish(receive, deadline)
            return
        if inbox.last is not None:
            inbox.last.has_asked(deadline)
        if call_number():
            self.cpu.begun.count_received(receive.src)
        self._fill(inbox, receive, partial(self._recv_parts, receive.src, deadline))

    def _fill(
        self, inbox: Inbox, receive: Receive, fill: Callable[[Sequence[Tensor]], None]
    ) -> None:
        """Receive one message on this thread; abort if only a part of it has arrived."""
        incoming = receive.incoming = Incoming(receive)
        try:
            inbox.open.append(receive)
            for tensors in incoming.steps(inbox, receive.src):
                fill(tensors)
            if incoming.on_device:
                fill(incoming.on_device)
            receive.has_arrived = receive.incoming is incoming
            if not receive.has_arrived:
                inbox.withdraw(receive)
            incoming.pending = _ARRIVED
        except BaseException as error:
            if isinstance(error, CoordinatorError):
                torn = isinstance(error, (DivergenceError, MessageDecodeError, MessageSealError))
            else:
                torn = incoming.frame.has_arrived
            if torn:  # the start of the next message is unknown
                self.cpu.abort(error)
            inbox.withdraw(receive)
            raise

    def _recv_parts(self, src: int, deadline: Deadline, parts: Sequence[Tensor]) -> None:
        for part in parts:
            self.routes.of(part.device.type).recv(out=part, src=src, timeout=deadline)

    def _inbox(self, src: int) -> Inbox:
        inbox = self._inboxes.get(src) if type(src) is int else None
        return inbox or self._inboxes[check_peer("src", src, self.cpu.rank, self.cpu.world_size)]

    def _require_alone(self, acquired: bool, src: int) -> None:
        if not acquired:
            raise AnotherThreadError(f"is receiving from rank {src} over {self.cpu.name}")

    def finish(self, work: Pending, timeout: Timeout = None) -> Any:
        """Wait for a blocking call's work; a GroupTimeoutError aborts the group."""
        try:
            return work.wait(timeout)  # type: ignore[arg-type]
        except GroupTimeoutError as error:
            self.cpu.abort(error)
            raise

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(self._timeout if timeout is None else timeout)

    def _allowed(self, timeout: Timeout) -> Timeout:
        return self._timeout if timeout is None else timeout

    # --- broadcasts ----------------------------------------------------------------------

    def broadcast_object(
        self, obj: Any, src: int, timeout: Timeout, *, async_op: bool = False
    ) -> Any:
        """Return the object of ``src``. Collective: yes, every member."""
        kind, make = Kind.BROADCAST_OBJECT, partial(self.dump, obj)
        return self._broadcast_from(src, kind, make, obj, timeout, async_op)

    def broadcast_dict(
        self,
        values: Mapping[Any, Any] | None,
        src: int,
        timeout: Timeout,
        *,
        async_op: bool = False,
    ) -> Any:
        """Return the dict of ``src``. Collective: yes, every member."""
        if self.cpu.world_size == 1:
            return self.broadcast_object(self._a_dict(values, src), src, timeout, async_op=async_op)
        own = dict(values) if isinstance(values, Mapping) else {}  # `pack` refuses others
        kind, make = Kind.BROADCAST_TENSOR_DICT, partial(self._pack_source, values)
        return self._broadcast_from(src, kind, make, own, timeout, async_op)

    def _broadcast_from(
        self, src: int, kind: Kind, make: Make, own: Any, timeout: Timeout, async_op: bool
    ) -> Any:
        check_rank("src", src, self.cpu.world_size)
        if self.cpu.world_size == 1:
            return self.cpu.runner.skip("broadcast", own, async_op)
        if self.cpu.rank == src:
            return self._broadcast(kind, make, own, timeout, async_op)
        if async_op:
            return self.irecv(kind, src, timeout)
        deadline = self._deadline(timeout)
        receive = Receive(self._broadcasts, kind, src)
        self._fill(self._broadcasts, receive, partial(self._broadcast_parts, src, deadline))
        return receive.result(deadline)

    def _broadcast(
        self, kind: Kind, make: Make, result: Any, timeout: Timeout, async_op: bool
    ) -> Any:
        """Broadcast the result of ``make``. Collective: yes, every member."""
        if async_op:
            return self.isend(kind, self._others, make, result, timeout)
        deadline = self._deadline(timeout)
        try:
            payload, parts = make()
        except Exception as error:  # noqa: BLE001 - `refused` raises it
            with suppress(CoordinatorError, AnotherThreadError):
                refusal = partial(self.wire.error_frame, error, EVERYONE)
                self._broadcast_message(refusal, (), deadline)
            self.refused(error)
        message = partial(self.wire.message, kind, payload, EVERYONE)
        self._broadcast_message(message, parts, deadline)
        return result

    def _broadcast_message(
        self, make: Callable[[], Message], parts: Sequence[Tensor], deadline: Deadline
    ) -> None:
        def send(frames: Sequence[Tensor]) -> None:
            self._broadcast_parts(self.cpu.rank, deadline, frames)
            self._broadcast_parts(self.cpu.rank, deadline, parts)

        self._outgoing.whole(make, len(parts), send)

    def _broadcast_parts(self, root: int, deadline: Deadline, parts: Sequence[Tensor]) -> None:
        works: list[Work[Tensor]] = []
        for part in parts:
            comm = self.routes.of(part.device.type)
            if len(parts) > 1 and comm.capabilities.overlaps:
                works.append(comm.broadcast_(part, src=root, async_op=True))
            else:
                comm.broadcast_(part, src=root, timeout=deadline)
        for work in works:
            self.finish(work, deadline)

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

    # --- objects of all members -----------------------------------------------------------

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
            works = {src: self.irecv(Kind.GATHERED_OBJECT, src, timeout) for src in self._others}
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
        inbox = self._inbox(src)
        with inbox.turn as acquired:
            self._require_alone(acquired, src)
            if inbox.last is not None:
                inbox.last.has_asked(deadline)
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

        inbox = self._inbox(src)
        with inbox.turn as acquired:
            self._require_alone(acquired, src)
            self.cpu.begun.count_received(src)
            if inbox.last is None:
                return post()[0]
            turn = inbox.in_turn(None, post)
        work: Work[Any] = Work(None, turn, lambda: works[0].wait(), self._allowed(timeout))
        return work

    # --- contents ------------------------------------------------------------------------

    def dump(self, obj: Any) -> Packed:
        """Encode an object as a payload, or raise TypeError."""
        return self.wire.dump(obj), ()

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
