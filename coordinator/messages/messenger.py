"""Tensors, and dicts of them, from one member of a group to another, or to all.

The header of a dict goes over the CPU communicator, and small tensors with it; the others over that
of their device, those on the CPU first, in the header's order. `coordinator.messages.tensor_dict`
says what is in a header and how tensors are cut, `coordinator.messages.object_messenger` what is
guaranteed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from coordinator.messages.framing import Kind
from coordinator.messages.incoming import IncomingDict
from coordinator.messages.object_messenger import ObjectMessenger
from coordinator.messages.seal import EVERYONE
from coordinator.messages.tensor_dict import WHOLE, Slicing, pack, to_payload
from device_comm import Work
from device_comm.verbs.checks import check_tensor

if TYPE_CHECKING:
    import torch

    from coordinator.messages.tensor_dict import Header
    from coordinator.messages.transport import Packed
    from coordinator.messages.wire import Wire
    from device_comm import Communicator
    from device_comm.verbs.arguments import Timeout
    from device_comm.verbs.checks import Shape


class Messenger(ObjectMessenger):
    """One member's messages, tensors included. The communicators stay the group's."""

    def __init__(self, cpu: Communicator, device: Communicator, wire: Wire) -> None:
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

    def incoming_dict(self, src: int, peers: Messenger | None, sorted_by: str = "") -> IncomingDict:
        """The next message of ``src``, a dict. Those of different values at the key ``sorted_by``
        may be sent to the peers in different orders.
        """
        kind, dst = Kind.TENSOR_DICT, self.cpu.rank
        if peers is None:
            return IncomingDict(self.wire, kind, src, dst, self.routes)
        count = partial(self._count_cut, src, peers.cpu, sorted_by)
        return IncomingDict(self.wire, kind, src, dst, self.routes, peers.routes, count)

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
            incoming = IncomingDict(self.wire, kind, src, dst, self.routes)
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
