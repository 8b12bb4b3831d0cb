"""Receive one message: which tensors are next, whose turn it is, and the result.

A message's tensors on the device are received by the device's communicator, on the caller's thread,
in the caller's order. So a receive begins once the one before has asked for all its tensors; this
is checked when one of them is waited for, or inspected.

Nothing here communicates. The receiver asks `following` for tensors, fills them with the sender's
data, in that order, and asks again until there are none. A blocking call does so itself; in the
background the transport does, on a separate thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from coordinator.messages.tensor_dict import Header, TensorMeta, from_payload, unpack
from coordinator.messages.wire import Kind, Message, MessageCodec
from device_comm import AllPending, Work
from device_comm.verbs.checks import Timeout
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    DivergenceError,
    MessageDecodeError,
    MessageRefusedError,
)

if TYPE_CHECKING:
    from device_comm import Communicator


class OrderedReceive:
    """One receive; a `device_comm.Pending`."""

    def __init__(
        self,
        before: OrderedReceive | None,
        begin: Callable[[], Work[None]] | None,
        ask: Callable[[], Sequence[Work[Any]]],
    ) -> None:
        """Receive behind ``before``.

        Args:
            before: the receive from the same peer that was begun before this one.
            begin: begins to receive what is on the CPU, if anything is.
            ask: asks for what is on the device, once that is there.
        """
        self._begin = begin
        self._ask = ask
        self._on_cpu: Work[None] | None = None
        self._on_device: AllPending | None = None
        # Those that have not asked for all their tensors, in their order.
        self._line: deque[OrderedReceive] = deque() if before is None else before._line
        self._line.append(self)
        self.has_asked()

    def has_asked(self, deadline: Deadline | None = None) -> bool:
        """Whether it has asked for all its tensors; goes on, and waits if there is a deadline."""
        while self._on_device is None:
            if not self._line[0]._asks(deadline):
                return False
            self._line.popleft()
        return True

    def ready(self) -> bool:
        """Whether everything is there. Never blocks."""
        return self.has_asked() and self._on_device is not None and self._on_device.ready()

    def wait(self, deadline: Deadline) -> None:
        """Return once everything is there.

        Raises:
            GroupTimeoutError: not yet; it is still under way.
        """
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


T = TypeVar("T")


class Communicators(NamedTuple):
    """The communicators of one member's group.

    Attributes:
        cpu: moves tensors on the CPU.
        device: moves those of the group's device; the same if that is the CPU.
    """

    cpu: Communicator
    device: Communicator

    def of(self, device_type: str) -> Communicator:
        """The communicator that moves tensors of such a device."""
        return self.cpu if device_type == "cpu" else self.device


class Receiver(Generic[T]):
    """One message that is received.

    Attributes:
        on_device: tensors of the group's device, which follow by its communicator, once
            `following` gives no more.
    """

    def __init__(self, wire: MessageCodec, kind: Kind, src: int, dst: int) -> None:
        """The next message of rank ``src`` to ``dst``, a rank or `wire.EVERYONE`.

        Args:
            wire: how it is written.
            kind: what it is.
            src: its sender.
            dst: whom it is for.
        """
        self.on_device: Sequence[Tensor] = ()
        self._wire = wire
        self._src = src
        self._dst = dst
        self._message = Message(kind, call=wire.call())
        self._next: Callable[[], Sequence[Tensor]] = self._frame
        self._error: MessageRefusedError | None = None

    def following(self) -> Sequence[Tensor]:
        """The tensors on the CPU that come next; none once all are there.

        What only concerns this message is raised by `result`. An error here ends the group: where
        the next message begins is not known any more.

        Raises:
            DivergenceError: the sender has sent something else.
            MessageSealError: what has come is not the sender's next message.
            MessageDecodeError: what has come says nothing of the rest, or there is no room for it.
        """
        try:
            return self._next()
        except MessageRefusedError as error:  # nothing follows it
            self._next, self._error = _nothing, error
            return ()
        except CoordinatorError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise MessageDecodeError(
                f"what rank {self._wire.global_rank(self._src)} sends cannot be taken in: {why}"
            ) from error

    def refused(self, why: str) -> MessageRefusedError:
        """The error where the sender says that it cannot send it."""
        return self._wire.refused(self._src, why)

    @property
    def has_begun(self) -> bool:
        """Whether some of it has come."""
        return self._message.has_arrived

    def result(self, timeout: Timeout) -> T:
        """What was sent.

        Args:
            timeout: of what it takes of other peers to make it whole.

        Raises:
            GroupTimeoutError: they did not come.
            MessageRefusedError: its sender could not send it.
            MessageDecodeError: it cannot be restored here.
        """
        if self._error is not None:
            raise self._error
        return self._restore(timeout)

    def leave(self, error: BaseException) -> None:
        """Tell those that help to make it whole that ``error`` keeps this member from it."""

    def _frame(self) -> Sequence[Tensor]:
        self._next = self._rest
        return (self._message.first,)

    def _rest(self) -> Sequence[Tensor]:
        self._message.check(self._src)
        self._next = self._open
        rest = self._message.rest()
        return self._open() if rest is None else (rest,)

    def _open(self) -> Sequence[Tensor]:
        self._next, message = _nothing, self._message
        sent = self._wire.open(message.kind, message.payload, self._src, self._dst)
        return self._read(sent)

    def _read(self, payload: memoryview) -> Sequence[Tensor]:
        """Take in the payload; returns the tensors to receive behind it."""
        raise NotImplementedError

    def _restore(self, timeout: Timeout) -> T:
        """What was sent, from all that has come."""
        raise NotImplementedError


class ObjectReceiver(Receiver[Any]):
    """An object that is received."""

    def _read(self, payload: memoryview) -> Sequence[Tensor]:
        self._payload = payload
        return ()

    def _restore(self, timeout: Timeout) -> Any:  # noqa: ARG002 - it is whole
        return self._wire.load(self._payload)


class TensorDictReceiver(Receiver[dict[Any, Any]]):
    """A tensor dict that is received."""

    def __init__(
        self,
        wire: MessageCodec,
        kind: Kind,
        src: int,
        dst: int,
        routes: Communicators,
        peers: Communicators | None = None,
        count: Callable[[Header], int] | None = None,
    ) -> None:
        """The next message of rank ``src`` to ``dst``.

        Args:
            wire: as for the others.
            kind: likewise.
            src: likewise.
            dst: likewise.
            routes: of this group.
            peers: of the group that receives the other slices.
            count: called when a dict comes in slices: the how manieth that is of ``src`` for these
                peers, which is alike on all of them.
        """
        super().__init__(wire, kind, src, dst)
        self._routes = routes
        self._peers = peers
        self._header: Header | None = None
        self._tensors: dict[Any, Tensor] = {}
        self._may_be_cut = peers is not None
        self._count = count
        self._number = 0

    def header(self) -> Header:
        """The dict's header, once everything is there.

        Raises:
            What `result` raises.
        """
        if self._header is None:
            raise self._error or RuntimeError("a header is read once it is there, not before")
        return self._header

    def leave(self, error: BaseException) -> None:
        """End the peers' group if ``error``, maybe a signal handler's, comes before all slices are
        gathered: they would gather theirs with those of another message.
        """
        interrupted = self.has_begun and not isinstance(error, CoordinatorError)
        if interrupted and self._may_be_cut and self._peers is not None:
            self._peers.cpu.abort(error)

    def _read(self, payload: memoryview) -> Sequence[Tensor]:
        return self._make_room(*from_payload(payload))

    def _make_room(self, header: Header, tensors: dict[Any, Tensor]) -> Sequence[Tensor]:
        """Room for all tensors of the header but those that have come; the rooms on the CPU."""
        self._next = _nothing
        self._header, self._tensors = header, tensors
        self._may_be_cut = any(meta.slices for meta in header.tensors.values())
        if self._may_be_cut and self._count is not None:
            self._number = self._count(header)
        following: dict[bool, list[Tensor]] = {True: [], False: []}
        for key, meta in header.tensors.items():
            if key not in tensors:
                tensors[key] = room = self._room(key, meta)
                if room.numel():
                    following[meta.device == "cpu"].append(room)
        self.on_device = following[False]
        return following[True]

    def _room(self, key: Any, meta: TensorMeta) -> Tensor:
        comm = self._routes.of(meta.device)
        if comm.device.type != meta.device:
            raise ValueError(f"{key!r} comes from a {meta.device}; this group is on {comm.device}")
        return comm.empty((meta.numel_sent,), meta.torch_dtype)

    def _restore(self, timeout: Timeout) -> dict[Any, Any]:
        header, peers = self.header(), self._peers
        for key, meta in header.tensors.items():
            if meta.slices and (
                peers is None or (peers.cpu.world_size, peers.cpu.rank) != (meta.slices, meta.slice)
            ):
                self._may_be_cut = False  # as at the peers: nobody gathers
                raise ValueError(
                    f"{key!r} came as slice {meta.slice} of {meta.slices}: receive it with an "
                    "all_gather_group of that size, at that rank"
                )
        whole = {}
        tensors = self._gathered(header, timeout)
        for key, meta in header.tensors.items():
            tensor = tensors[key].view(meta.shape)
            may_require = meta.requires_grad and torch.is_grad_enabled()
            whole[key] = tensor.requires_grad_() if may_require else tensor
        return unpack(header, whole, self._wire)

    def _gathered(self, header: Header, timeout: Timeout) -> dict[Any, Tensor]:
        """The flat tensors, of those that came in slices all of them."""
        if not self._may_be_cut:
            return self._tensors
        whole, peers = dict(self._tensors), self._peers
        try:
            if peers is not None:
                _require_the_same(self._number, peers.cpu, timeout)
            for key, meta in header.tensors.items():
                if meta.slices and peers is not None:
                    comm = peers.of(meta.device)
                    whole[key] = comm.all_gather(whole[key], dim=0, timeout=timeout)
        except BaseException as error:
            self.leave(error)
            raise
        self._tensors, self._may_be_cut = whole, False
        return whole


def _require_the_same(number: int, peers: Communicator, timeout: Timeout) -> None:
    """Require that all peers gather slices of the dict of that number."""
    ours = torch.tensor([number], device="cpu")
    for rank, other in enumerate(peers.all_gather(ours, timeout=timeout).tolist()):
        if other != number:
            error = DivergenceError(rank, _of_slices(number), _of_slices(other))
            peers.abort(error)
            raise error


def _of_slices(number: int) -> str:
    return f"the wait for dict {number} of those that came in slices"


def _nothing() -> Sequence[Tensor]:
    return ()
