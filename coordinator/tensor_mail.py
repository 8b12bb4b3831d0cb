"""Dicts of tensors from one member of a group to another, or to all.

The header goes over the CPU communicator, each tensor over that of its device, in the
header's order. `coordinator.tensor_dict` says what is in a header and how tensors are cut,
`coordinator.objects` what is guaranteed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coordinator.boxes import Together, in_background, in_turn
from coordinator.messages import Kind, Message, broadcast_bytes
from coordinator.objects import ObjectMail
from coordinator.tensor_dict import WHOLE, Slicing, decode, encode, pack, unpack
from device_comm import Work
from device_comm.checks import check_rank
from shm_broadcast import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from coordinator.boxes import Ask, Steps
    from coordinator.tensor_dict import Header, TensorMeta
    from device_comm import DeviceCommunicator
    from shm_broadcast import Deadline


class TensorMail(ObjectMail):
    """One member's messages, tensors included. The communicators stay the group's."""

    def __init__(self, cpu: DeviceCommunicator, device: DeviceCommunicator) -> None:
        """Send and receive over these; they are one where the group's device is the CPU."""
        super().__init__(cpu)
        self.device = device

    def flush(self, linger: float) -> None:
        """Let messages that are under way arrive; give up after ``linger`` seconds."""
        super().flush(linger)
        if self.device is not self.cpu:
            with suppress(CoordinatorError):
                self.device.flush(linger)

    def isend_dict(
        self, values: Mapping[str, Any], dst: int, slicing: Slicing, timeout: float | None
    ) -> Work[None]:
        """Begin to send a dict, whose tensors must not change until that is done."""
        return self.isend_packed(dst, *self.pack(values, slicing), timeout)

    def send_dict(
        self, values: Mapping[str, Any], dst: int, slicing: Slicing, timeout: float | None
    ) -> None:
        """Send a dict, whose tensors may be changed after that."""
        self.send_packed(dst, *self.pack(values, slicing), timeout)

    def isend_packed(
        self,
        dst: int,
        header: Header | None,
        parts: Sequence[Tensor],
        timeout: float | None,
        kind: Kind = Kind.TENSOR_DICT,
    ) -> Work[None]:
        """Begin to send what `pack` made; a header of None is one that ``dst`` knows."""
        frames = [] if header is None else Message(kind, encode(header)).frames()
        works = [self.cpu.isend(frame, dst) for frame in frames]
        works += [self._comm(part.device.type).isend(part, dst) for part in parts]
        return self._sending(dst, works, sum(part.nbytes for part in parts), timeout)

    def send_packed(
        self, dst: int, header: Header | None, parts: Sequence[Tensor], timeout: float | None
    ) -> None:
        """Send what `pack` made; as `isend_packed`, and the parts may be changed after that."""
        frames = [] if header is None else Message(Kind.TENSOR_DICT, encode(header)).frames()
        with self._ahead(dst, timeout) as deliver:
            for frame in frames:
                deliver(self.cpu, frame, True)
            for part in parts:
                deliver(self._comm(part.device.type), part, False)

    def recv_dict(
        self, src: int, peers: TensorMail | None, timeout: float | None
    ) -> dict[str, Any]:
        """As `irecv_dict`, and wait for it."""
        return self.receive(src, lambda ask: self.dict_steps(src, peers, ask=ask), timeout)

    def irecv_dict(
        self, src: int, peers: TensorMail | None, timeout: float | None
    ) -> Work[dict[str, Any]]:
        """Begin to receive the next message of ``src``, a dict.

        Args:
            src: a rank in the group.
            peers: the mail of the group that receives the other slices.
            timeout: seconds that its `wait` allows; None: the communicator's.
        """
        return self._receiving(src, self.dict_steps(src, peers), timeout)

    def isend_tensor(self, x: Tensor, dst: int, timeout: float | None) -> Work[None]:
        """Begin to send a tensor of the group's device, which must not change until done."""
        return self._sending(dst, [self.device.isend(x, dst)], x.nbytes, timeout)

    def send_tensor(self, x: Tensor, dst: int, timeout: float | None) -> None:
        """Send a tensor of the group's device, which may be changed after that."""
        with self._ahead(dst, timeout) as deliver:
            deliver(self.device, x.detach(), False)

    def irecv_tensor(
        self,
        size: Sequence[int] | None,
        dtype: torch.dtype | None,
        src: int,
        out: Tensor | None,
        timeout: float | None,
    ) -> Work[Tensor]:
        """Begin to receive a tensor of the group's device, behind what was asked for before."""
        if not self.is_behind(src):
            return self.device.irecv(size, dtype, src, out=out, timeout=timeout)
        return self._receiving(
            src,
            in_turn(lambda: self.device.irecv(size, dtype, src, out=out, timeout=timeout)),
            timeout,
        )

    def broadcast_dict(
        self, values: Mapping[str, Any] | None, src: int, timeout: float | None
    ) -> dict[str, Any]:
        """The dict of ``src``, on all members. Collective: yes, every member."""
        deadline = self.deadline(timeout)
        if self.cpu.rank != src:
            kind = Kind.BROADCAST_TENSOR_DICT
            header = decode(broadcast_bytes(self.cpu, kind, None, src, deadline))
            tensors = self._rooms(header)
            self._broadcast_all([room for room in tensors.values() if room.numel()], src, deadline)
            return unpack(header, self._whole(header, tensors, None))
        header, parts = self._pack_source(values, src)
        broadcast_bytes(self.cpu, Kind.BROADCAST_TENSOR_DICT, encode(header), src, deadline)
        self._broadcast_all(parts, src, deadline)
        return dict(values or {})

    def ibroadcast_dict(
        self, values: Mapping[str, Any] | None, src: int, timeout: float | None
    ) -> Work[dict[str, Any]]:
        """As `broadcast_dict`, in the background. Collective: yes, every member."""
        check_rank("src", src, self.cpu.world_size)
        kind = Kind.BROADCAST_TENSOR_DICT
        if self.cpu.rank != src:
            return self._receiving(src, self.dict_steps(src, None, kind=kind), timeout)
        packed = self._pack_source(values, src)
        sends = [self.isend_packed(dst, *packed, timeout, kind) for dst in self.others]
        return Work(dict(values or {}), Together(sends), timeout=self._allowed(timeout))

    def slicing(self, overrides: Mapping[str, bool] | None) -> Slicing:
        """How to cut tensors that all members of this mail's group hold."""
        return Slicing(self.cpu.world_size, self.cpu.rank, overrides or {})

    def pack(self, values: Mapping[str, Any], slicing: Slicing) -> tuple[Header, list[Tensor]]:
        """What a dict is sent as.

        Raises:
            ValueError: a tensor is elsewhere, or has to be cut and cannot be.
            TypeError: a key is not a string, a value cannot be pickled, a tensor is not dense.
        """
        for key, value in values.items():
            if isinstance(value, Tensor) and value.device not in (
                self.cpu.device,
                self.device.device,
            ):
                raise ValueError(
                    f"{key!r} is on {value.device}; this group moves tensors on "
                    f"{self.cpu.device} and {self.device.device}"
                )
        return pack(values, slicing)

    def dict_steps(
        self,
        src: int,
        peers: TensorMail | None,
        seen: Callable[[Header], None] | None = None,
        kind: Kind = Kind.TENSOR_DICT,
        ask: Ask = in_background,
    ) -> Steps[dict[str, Any]]:
        """The steps of receiving a dict; ``seen`` is told its header as soon as that is there."""
        message = yield from self.frame_steps(kind, src, ask)
        rest = message.rest()
        if rest is not None:
            yield ask(self.cpu, rest, src)
        header = decode(message.payload)
        if seen is not None:
            seen(header)
        return self.receive_parts(header, src, peers, ask)

    def receive_parts(
        self, header: Header, src: int, peers: TensorMail | None, ask: Ask = in_background
    ) -> tuple[Sequence[Work[Any]], Callable[[], dict[str, Any]]]:
        """Begin to receive the tensors of a header: the works, and the last step."""
        tensors = self._rooms(header)
        works = [
            ask(self._comm(room.device.type), room, src)
            for room in tensors.values()
            if room.numel()
        ]
        return works, lambda: unpack(header, self._whole(header, tensors, peers))

    def _pack_source(
        self, values: Mapping[str, Any] | None, src: int
    ) -> tuple[Header, list[Tensor]]:
        if values is None:
            raise ValueError(f"rank {src} is the source: it needs a dict")
        return self.pack(values, WHOLE)

    def _broadcast_all(self, parts: Sequence[Tensor], src: int, deadline: Deadline) -> None:
        works: list[Work[Tensor]] = []
        for part in parts:
            comm = self._comm(part.device.type)
            if comm.capabilities.overlaps:
                works.append(comm.broadcast_(part, src=src, async_op=True))
            else:
                comm.broadcast_(part, src=src, timeout=deadline)
        for work in works:
            work.wait(deadline)

    def _whole(
        self, header: Header, tensors: Mapping[str, Tensor], peers: TensorMail | None
    ) -> dict[str, Tensor]:
        """The received tensors by key: gathered where they were cut, in their shapes."""
        for key, meta in header.tensors.items():
            if meta.slices and (
                peers is None or (peers.cpu.world_size, peers.cpu.rank) != (meta.slices, meta.slice)
            ):
                raise ValueError(
                    f"{key!r} came as slice {meta.slice} of {meta.slices}: receive it with an "
                    "all_gather_group of that size, at that rank"
                )
        whole = {}
        for key, tensor in tensors.items():
            meta = header.tensors[key]
            if meta.slices and peers is not None:
                tensor = peers._comm(meta.device).all_gather(tensor, dim=0)
            tensor = tensor.view(meta.shape)
            may_require = meta.requires_grad and torch.is_grad_enabled()
            whole[key] = tensor.requires_grad_() if may_require else tensor
        return whole

    def _rooms(self, header: Header) -> dict[str, Tensor]:
        """Room for what arrives of each tensor, by key."""
        return {key: self._room(key, meta) for key, meta in header.tensors.items()}

    def _room(self, key: str, meta: TensorMeta) -> Tensor:
        comm = self._comm(meta.device)
        if comm.device.type != meta.device:
            raise ValueError(f"{key!r} comes from a {meta.device}; this group is on {comm.device}")
        return comm.empty((meta.numel_sent,), meta.torch_dtype)

    def _comm(self, device_type: str) -> DeviceCommunicator:
        return self.cpu if device_type == "cpu" else self.device
