"""Receive messages: their tensors, their order, the receives that they match, their results.

Messages match receives by their tags, as in MPI. Those with one tag match in the order sent. A
message with a tag, other than 0, that no receive waits for is unexpected: it is kept for the next
receive with its tag. A message without a tag must match the next receive.

    receives            A ──▶ message 1    each open receive has one message on its way
                        B ──▶ message 2
    message 1 is for B  A ──▶ message 2    once its frame has arrived, they swap
                        B ──▶ message 1
    it is unexpected    A ──▶ another one, begun when A is waited for

Tensors on the device are received by the device's communicator, on the caller's thread, in the
order of the calls. So a receive posts its device tensors only after the receive before it has
posted all of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from coordinator.messages.tensor_dict import Header, TensorMeta, from_payload, unpack
from coordinator.messages.wire import Kind, Message, MessageCodec
from device_comm import AllPending, Pending, Work
from device_comm.call_number import call_number, naming_call
from device_comm.verbs.checks import Timeout
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    DivergenceError,
    MessageDecodeError,
    MessageRefusedError,
)
from shm_broadcast._native import Turn

if TYPE_CHECKING:
    from device_comm import Communicator


class OrderedReceive:
    """A receive that posts its device tensors in order; a `device_comm.Pending`."""

    def __init__(
        self,
        before: OrderedReceive | None,
        begin: Callable[[], Work[None]] | None,
        ask: Callable[[], Sequence[Work[Any]]],
    ) -> None:
        """Queue the receive behind ``before``, the previous one from the same peer.

        ``begin`` begins to receive the CPU tensors, if any; ``ask`` posts the device tensors after
        their arrival.
        """
        self._begin = begin
        self._ask = ask
        self._on_cpu: Work[None] | None = None
        self._on_device: AllPending | None = None
        # The receives from this peer that have not posted all their tensors, in order.
        self._line: deque[OrderedReceive] = deque() if before is None else before._line
        self._line.append(self)
        self.has_asked()

    def has_asked(self, deadline: Deadline | None = None) -> bool:
        """Return whether all tensors are posted; post them if possible. Waits with a deadline."""
        while self._on_device is None:
            if not self._line[0]._asks(deadline):
                return False
            self._line.popleft()
        return True

    def ready(self) -> bool:
        """Return whether everything has arrived. Never blocks."""
        return self.has_asked() and self._on_device is not None and self._on_device.ready()

    def wait(self, deadline: Deadline) -> None:
        """Wait until everything has arrived; a GroupTimeoutError leaves it in progress."""
        self.has_asked(deadline)
        if self._on_device is not None:
            self._on_device.wait(deadline)

    def _asks(self, deadline: Deadline | None) -> bool:
        if self._begin is not None:
            self._on_cpu = self._on_cpu or self._begin()
            if deadline is None and not self._on_cpu.is_completed():
                return False
            self._on_cpu.wait(deadline)
        self._on_device = AllPending(self._ask())
        return True


class Communicators(NamedTuple):
    """A group's communicators, for the CPU and the device; the same object if that is the CPU."""

    cpu: Communicator
    device: Communicator

    def of(self, device_type: str) -> Communicator:
        """Return the communicator for tensors of this device type."""
        return self.cpu if device_type == "cpu" else self.device


class Incoming:
    """A message on its way.

    Attributes:
        frame: its first part, with kind, call and tag once it has arrived.
        payload: an object's.
        header, tensors: a dict's, the tensors by key.
        on_device: a dict's tensors on the group's device, which follow those on the CPU.
        error: the sender cannot send the message.
        receive: the receive that it is for, until its contents are decoded; None: unexpected.
        pending: its arrival; None: not begun, or on a thread that waits for it.
    """

    def __init__(self, receive: Receive) -> None:
        self.frame = Message()
        self.payload: memoryview | None = None
        self.header: Header | None = None
        self.tensors: dict[Any, Tensor] = {}
        self.on_device: Sequence[Tensor] = ()
        self.error: MessageRefusedError | None = None
        self.receive: Receive | None = receive
        self.pending: Pending | None = None

    def steps(self, inbox: Inbox, src: int) -> Iterator[Sequence[Tensor]]:
        """Yield the CPU tensors to receive into, in order: the frame, the rest, a dict's tensors.

        `Receive.result` raises errors that concern this message only. An error here aborts the
        group, because the start of the next message is unknown.

        Raises:
            DivergenceError: the sender sent another kind or call.
            MessageSealError: the data is not the sender's next message.
            MessageDecodeError: the header is invalid, or a tensor does not fit into memory.
        """
        frame, wire = self.frame, inbox.wire
        try:
            yield (frame.first,)
            frame.read()
            inbox.match(self)
            if (rest := frame.rest()) is not None:
                yield (rest,)
            payload = wire.open(frame.kind, frame.payload, src, inbox.dst, frame.tag)
            if frame.kind in _DICTS:
                self.header, self.tensors = from_payload(payload)
                inbox.count(self)
                if on_cpu := allocate(self, self.header, inbox.routes):
                    yield on_cpu
            else:
                self.payload, self.receive = payload, None
        except MessageRefusedError as error:  # nothing follows it
            self.error, self.receive = error, None
        except CoordinatorError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise MessageDecodeError(
                f"a message of rank {wire.global_rank(src)} cannot be received: {why}"
            ) from error


_DICTS = frozenset({Kind.TENSOR_DICT, Kind.BROADCAST_TENSOR_DICT, Kind.TREE})


def allocate(incoming: Incoming, header: Header, routes: Communicators) -> Sequence[Tensor]:
    """Allocate the missing tensors of a dict; return those on the CPU."""
    on_cpu: list[Tensor] = []
    on_device: list[Tensor] = []
    for key, meta in header.tensors.items():
        if key not in incoming.tensors:
            incoming.tensors[key] = room = _room(key, meta, routes)
            if room.numel():
                (on_cpu if meta.device == "cpu" else on_device).append(room)
    incoming.on_device = on_device
    return on_cpu


def _room(key: Any, meta: TensorMeta, routes: Communicators) -> Tensor:
    comm = routes.of(meta.device)
    if comm.device.type != meta.device:
        raise ValueError(f"{key!r} comes from a {meta.device}; this group is on {comm.device}")
    return comm.empty((meta.numel_sent,), meta.torch_dtype)


class Receive:
    """A receive of one message; once posted, a `device_comm.Pending`.

    Attributes:
        incoming: the message on its way; another one until the frame of its own has arrived.
        has_arrived: whether everything has.
    """

    def __init__(
        self,
        inbox: Inbox,
        kind: Kind,
        src: int,
        tag: int = 0,
        peers: Communicators | None = None,
    ) -> None:
        """Receive the next message of rank ``src`` with that tag; ``peers`` receive its slices."""
        self.src = src
        self.tag = tag
        self.incoming: Incoming | None = None
        self.has_arrived = False
        self._inbox = inbox
        self._kind = kind
        self._call = inbox.wire.call()
        self._peers = peers
        self._is_cut = True  # until the header has arrived, it may be
        self._number = 0

    def check(self, frame: Message) -> None:
        """Raise DivergenceError if a message is of another kind, call or tag."""
        fits = frame.kind == self._kind or frame.kind == Kind.REFUSED
        if not fits or frame.call != self._call or frame.tag != self.tag:
            names = {int(each): str(each) for each in Kind}
            name = names.get(frame.kind, f"message of kind {frame.kind}")
            raise DivergenceError(
                self.src,
                naming_call(f"receive of {self._kind}", self._call),
                naming_call(f"send of {name}", frame.call),
            )

    def adopt(self, incoming: Incoming) -> None:
        """Take a message that was unexpected."""
        try:
            self.check(incoming.frame)
        except DivergenceError as error:
            self._inbox.routes.cpu.abort(error)
            raise
        self.incoming = incoming
        if incoming.header is not None:
            self.count(incoming.header)
        elif incoming.payload is None and incoming.error is None:
            incoming.receive = self

    def count(self, header: Header) -> None:
        """Number a sliced dict among those with this sender, tag and peers."""
        self._is_cut = False
        for meta in header.tensors.values():
            if meta.slices:
                self._is_cut = True
        if self._is_cut and self._peers is not None:
            self._number = self._inbox.number(self._peers.cpu, self.tag)

    def ready(self) -> bool:
        """Return whether `wait` would return or raise at once. Never blocks."""
        incoming = None
        try:
            while incoming is None or incoming is not self.incoming:
                incoming, pending = self._arriving()
                if not pending.ready():
                    return False
        except CoordinatorError:  # `wait` raises it
            pass
        return True

    def wait(self, deadline: Deadline) -> None:
        """Return when the message has arrived; a receive stays posted after GroupTimeoutError."""
        incoming = None
        while incoming is None or incoming is not self.incoming:
            incoming, pending = self._arriving()
            pending.wait(deadline)
        self.has_arrived = True

    def _arriving(self) -> tuple[Incoming, Pending]:
        incoming = self.incoming or self._inbox.begin(self)
        while incoming.pending is None:
            self._inbox.routes.cpu.abort("a receive was interrupted before it had begun")
            self._inbox.routes.cpu.check()
        return incoming, incoming.pending

    def result(self, timeout: Timeout) -> Any:
        """Return the value of the message; ``timeout`` is for peers that hold other slices.

        Raises:
            GroupTimeoutError: the peers did not take part in time.
            MessageRefusedError: the sender cannot send it.
            MessageDecodeError: it cannot be restored here.
        """
        incoming, wire = self.incoming, self._inbox.wire
        if incoming is None or not self.has_arrived:
            raise RuntimeError("the message has not arrived yet")
        if incoming.error is not None:
            raise incoming.error
        if incoming.header is None:
            return wire.load(incoming.payload or b"")
        if self._is_cut:
            self._gather(incoming.header, incoming.tensors, timeout)
        whole = {}
        grads = torch.is_grad_enabled()
        for key, meta in incoming.header.tensors.items():
            whole[key] = tensor = incoming.tensors[key].view(meta.shape)
            if meta.requires_grad and grads:
                tensor.requires_grad_()
        return unpack(incoming.header, whole, wire)

    def leave(self, error: BaseException) -> None:
        """Abort the peers' group if ``error``, say of a signal handler, comes before the gather.

        Otherwise the peers would gather their slices with those of another message.
        """
        begun = self.incoming is not None and self.incoming.frame.has_arrived
        if self._is_cut and self._peers and begun and not isinstance(error, CoordinatorError):
            self._peers.cpu.abort(error)

    def _gather(self, header: Header, tensors: dict[Any, Tensor], timeout: Timeout) -> None:
        """Replace the slices by the whole tensors."""
        peers = self._peers
        own = (0, 0) if peers is None else (peers.cpu.world_size, peers.cpu.rank)
        cut = {key: meta for key, meta in header.tensors.items() if meta.slices}
        for key, meta in cut.items():
            if own != (meta.slices, meta.slice):
                self._is_cut = False  # as on the peers: no member gathers
                raise ValueError(
                    f"{key!r} arrived as slice {meta.slice} of {meta.slices}: receive it with an "
                    "all_gather_group of that size, at that rank"
                )
        if peers is None:
            return
        try:
            _require_the_same(self._number, peers.cpu, timeout)
            whole = {
                key: peers.of(meta.device).all_gather(tensors[key], dim=0, timeout=timeout)
                for key, meta in cut.items()
            }
            tensors.update(whole)
            self._is_cut = False
        except BaseException as error:
            self.leave(error)
            raise


def _require_the_same(number: int, peers: Communicator, timeout: Timeout) -> None:
    own_number = torch.tensor([number], device="cpu")
    for rank, other in enumerate(peers.all_gather(own_number, timeout=timeout).tolist()):
        if other != number:
            error = DivergenceError(rank, _of_slices(number), _of_slices(other))
            peers.abort(error)
            raise error


def _of_slices(number: int) -> str:
    return f"the wait for sliced dict {number}"


class Inbox:
    """The receives from one rank, and its unexpected messages.

    Attributes:
        dst: this rank, or `wire.EVERYONE`.
        turn: held by the thread that receives from the rank.
        open: the posted receives that no frame has matched yet, in order.
        last: the last receive that posts device tensors in order; None: there is none.
        unexpected: messages that no receive waited for, in order.
        lock: frames may arrive on other threads. Re-entrant: a signal handler may receive.
    """

    def __init__(self, routes: Communicators, wire: MessageCodec, dst: int) -> None:
        self.routes = routes
        self.wire = wire
        self.dst = dst
        self.turn = Turn()
        self.open: list[Receive] = []
        self.last: OrderedReceive | None = None
        self.lock = RLock()
        self.unexpected: list[Incoming] = []
        self._n_cut: WeakKeyDictionary[Communicator, Counter[int]] = WeakKeyDictionary()

    def post(self, receive: Receive) -> None:
        """Give the receive its message, if that was unexpected; else make it an open one."""
        with self.lock:
            if not self.give(receive):
                self.open.append(receive)

    def give(self, receive: Receive) -> bool:
        """Give the receive its message, if that was unexpected; return whether it was."""
        with self.lock:
            for incoming in self.unexpected:
                if incoming.frame.tag == receive.tag and incoming.pending is not None:
                    self.unexpected.remove(incoming)
                    receive.adopt(incoming)
                    return True
            return False

    def withdraw(self, receive: Receive) -> None:
        """Let an open receive match no message."""
        with self.lock, suppress(ValueError):
            self.open.remove(receive)

    def begin(self, receive: Receive) -> Incoming:
        """Begin to receive another message for ``receive``, which has none on its way."""
        (cpu, device), src = self.routes, receive.src
        with self.lock:
            if receive.incoming is not None:
                return receive.incoming
            incoming = receive.incoming = Incoming(receive)
        begin = partial(cpu.irecv_series, partial(next, incoming.steps(self, src), ()), src)
        if call_number():
            cpu.begun.count_received(src)
        if device is cpu:
            incoming.pending = begin()
        else:
            incoming.pending = self.in_turn(
                begin, lambda: [device.irecv(out=part, src=src) for part in incoming.on_device]
            )
        return incoming

    def number(self, peers: Communicator, tag: int) -> int:
        """Return the number of a sliced dict among those with its tag for ``peers``."""
        counts = self._n_cut.setdefault(peers, Counter())
        counts[tag] += 1
        return counts[tag]

    def in_turn(
        self, begin: Callable[[], Work[None]] | None, ask: Callable[[], Sequence[Work[Any]]]
    ) -> OrderedReceive:
        """Queue a receive behind the previous one: see `OrderedReceive`."""
        self.last = OrderedReceive(self.last, begin, ask)
        return self.last

    def keep(self, incoming: Incoming) -> None:
        """Keep an unexpected message for a later receive."""
        self.unexpected.append(incoming)

    def match(self, incoming: Incoming) -> None:
        """Give a message, whose frame has arrived, to the first open receive with its tag."""
        frame = incoming.frame
        owner: Any = incoming.receive  # one of `open`
        if self.open[0] is owner and owner.tag == frame.tag:  # other threads only append
            self.open.pop(0).check(frame)
            return
        with self.lock:
            for receive in self.open:
                if receive.tag == frame.tag:
                    break
            else:
                if not frame.tag:
                    self.open[0].check(frame)
                owner.incoming = incoming.receive = None
                self.keep(incoming)
                return
            self.open.remove(receive)
            if receive.incoming is not None:
                receive.incoming.receive = owner
            owner.incoming = receive.incoming
            receive.incoming, incoming.receive = incoming, receive
        receive.check(frame)

    def count(self, incoming: Incoming) -> None:
        """Let the receive count its dict, once the header has arrived; drop it."""
        with self.lock:
            receive, incoming.receive = incoming.receive, None
            if receive is not None and incoming.header is not None:
                receive.count(incoming.header)
