"""Receive one message: its next tensors, its place in the order of receives, its result.

A receiver does no communication. The transport calls `following` for tensors, fills them with the
sender's data, and calls it again until it returns none: in a blocking call on the caller's thread,
else on its own.

Tensors on the device are received by the device's communicator, on the caller's thread, in the
order of the calls. So a receive posts its device tensors only after the receive before it has
posted all of its own.
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


T = TypeVar("T")


class Communicators(NamedTuple):
    """A group's communicators, for the CPU and the device; the same object if that is the CPU."""

    cpu: Communicator
    device: Communicator

    def of(self, device_type: str) -> Communicator:
        """Return the communicator for tensors of this device type."""
        return self.cpu if device_type == "cpu" else self.device


class Receiver(Generic[T]):
    """The receiver of one message.

    ``on_device`` has the tensors on the group's device that follow, once `following` returns none.
    """

    def __init__(self, wire: MessageCodec, kind: Kind, src: int, dst: int) -> None:
        """Receive the next message of rank ``src`` to ``dst``, a rank or `wire.EVERYONE`."""
        self.on_device: Sequence[Tensor] = ()
        self._wire = wire
        self._src = src
        self._dst = dst
        self._message = Message(kind, call=wire.call())
        self._next: Callable[[], Sequence[Tensor]] = self._frame
        self._error: MessageRefusedError | None = None

    def following(self) -> Sequence[Tensor]:
        """Return the next tensors on the CPU to receive into; none once all have arrived.

        `result` raises errors that concern this message only. An error here aborts the group,
        because the start of the next message is unknown.

        Raises:
            DivergenceError: the sender sent another kind or call.
            MessageSealError: the data is not the sender's next message.
            MessageDecodeError: the header is invalid, or a tensor does not fit into memory.
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
                f"a message of rank {self._wire.global_rank(self._src)} cannot be received: {why}"
            ) from error

    def refused(self, why: str) -> MessageRefusedError:
        """Return the error for a message that the sender cannot send."""
        return self._wire.refused(self._src, why)

    @property
    def has_begun(self) -> bool:
        """Whether a part of the message has arrived."""
        return self._message.has_arrived

    def result(self, timeout: Timeout) -> T:
        """Return the value of the message; ``timeout`` is for peers that hold other slices.

        Raises:
            GroupTimeoutError: the peers did not take part in time.
            MessageRefusedError: the sender cannot send it.
            MessageDecodeError: it cannot be restored here.
        """
        if self._error is not None:
            raise self._error
        return self._restore(timeout)

    def leave(self, error: BaseException) -> None:
        """Abort the group of peers that complete the message, if ``error`` breaks their order."""

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
        """Decode the payload; return the CPU tensors that follow it."""
        raise NotImplementedError

    def _restore(self, timeout: Timeout) -> T:
        raise NotImplementedError


class ObjectReceiver(Receiver[Any]):
    """The receiver of an object."""

    def _read(self, payload: memoryview) -> Sequence[Tensor]:
        self._payload = payload
        return ()

    def _restore(self, timeout: Timeout) -> Any:  # noqa: ARG002 - it is whole
        return self._wire.load(self._payload)


class TensorDictReceiver(Receiver[dict[Any, Any]]):
    """The receiver of a tensor dict."""

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
        """Receive as `Receiver` does; ``peers`` receive the other slices.

        ``count`` returns a sliced dict's sequence number among those of ``src`` for the peers.
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
        """Return the dict's header, once everything has arrived; else raise as `result`."""
        if self._header is None:
            raise self._error or RuntimeError("the header has not arrived yet")
        return self._header

    def leave(self, error: BaseException) -> None:
        """Abort the peers' group if ``error``, say of a signal handler, comes before the gather.

        Otherwise the peers would gather their slices with those of another message.
        """
        interrupted = self.has_begun and not isinstance(error, CoordinatorError)
        if interrupted and self._may_be_cut and self._peers is not None:
            self._peers.cpu.abort(error)

    def _read(self, payload: memoryview) -> Sequence[Tensor]:
        return self._make_room(*from_payload(payload))

    def _make_room(self, header: Header, tensors: dict[Any, Tensor]) -> Sequence[Tensor]:
        """Allocate the header's missing tensors; return those on the CPU."""
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
                self._may_be_cut = False  # as on the peers: no member gathers
                raise ValueError(
                    f"{key!r} arrived as slice {meta.slice} of {meta.slices}: receive it with an "
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
    own_number = torch.tensor([number], device="cpu")
    for rank, other in enumerate(peers.all_gather(own_number, timeout=timeout).tolist()):
        if other != number:
            error = DivergenceError(rank, _of_slices(number), _of_slices(other))
            peers.abort(error)
            raise error


def _of_slices(number: int) -> str:
    return f"the wait for sliced dict {number}"


def _nothing() -> Sequence[Tensor]:
    return ()
