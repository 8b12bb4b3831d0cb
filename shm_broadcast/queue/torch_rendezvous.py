"""A torch process group as an `ObjectGroup` that exchanges only the values of a rendezvous.

torch's own object collectives unpickle bytes from sockets without authentication: any process that
reaches the port can run code here. This module sends handles, flags and errors as msgpack, decodes
them as one fixed type, refuses all other bytes, and unpickles nothing.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.errors import ForeignMemoryError, MessageDecodeError, SharedMemoryError
from shm_broadcast.queue.handle import QueueHandle
from shm_broadcast.segment import SegmentHandle

_ERRORS: Final[dict[str, type[Exception]]] = {
    each.__name__: each
    for each in (TypeError, ValueError, OSError, SharedMemoryError, ForeignMemoryError)
}


class TorchObjectGroup:
    """A torch process group as an `ObjectGroup`; ranks are ranks in the group.

    It exchanges None, a bool, a `SegmentHandle`, a `QueueHandle`, or an error that was raised while
    one of these was made; other types raise TypeError, other bytes MessageDecodeError. The tensors
    are on the CPU if the backend supports it, else on the current CUDA device.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        on_cpu = torch.device("cpu") in group._device_types
        self._device = torch.device("cpu" if on_cpu else "cuda")

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return, on every rank, the object of rank ``src``. Collective: yes, every rank."""
        own = self._tensor(encode(obj)) if self.rank == src else None
        size = torch.tensor([0 if own is None else own.numel()], device=self._device)
        dist.broadcast(size, group=self._group, group_src=src)
        if own is None:
            own = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.broadcast(own, group=self._group, group_src=src)
        return obj if self.rank == src else decode(_bytes(own))

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return all ranks' objects, in rank order. Collective: yes, every rank."""
        own = self._tensor(encode(obj))
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in self._ranks()]
        dist.all_gather(sizes, torch.tensor([own.numel()], device=self._device), self._group)
        # all_gather requires equal shapes: pad to the longest.
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: own.numel()] = own
        data = [torch.empty_like(padded) for _ in self._ranks()]
        dist.all_gather(data, padded, self._group)
        return [decode(_bytes(each[: int(size)])) for each, size in zip(data, sizes, strict=True)]

    def _ranks(self) -> range:
        return range(self.world_size)

    def _tensor(self, data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)


class _Value(msgspec.Struct, frozen=True, array_like=True):
    """The message on the wire: one field is set; none is if the object is None."""

    flag: bool | None = None
    segment: SegmentHandle | None = None
    queue: QueueHandle | None = None
    error: tuple[str, str] | None = None


_DECODER = msgspec.msgpack.Decoder(_Value)


def encode(obj: Any) -> bytes:
    """Return ``obj`` as msgpack; raise TypeError for other types than `TorchObjectGroup`'s."""
    if obj is None:
        value = _Value()
    elif isinstance(obj, bool):
        value = _Value(flag=obj)
    elif isinstance(obj, SegmentHandle):
        value = _Value(segment=obj)
    elif isinstance(obj, QueueHandle):
        value = _Value(queue=obj)
    elif isinstance(obj, Exception):
        names = [kind.__name__ for kind in type(obj).__mro__ if kind.__name__ in _ERRORS]
        value = _Value(error=(names[0] if names else "OSError", str(obj)))
    else:
        raise TypeError(f"a rendezvous does not move a {type(obj).__name__}")
    return msgspec.msgpack.encode(value)


def decode(data: bytes) -> Any:
    """Return the object of `encode`; raise MessageDecodeError for any other bytes."""
    try:
        value = _DECODER.decode(data)
    except UNDECODABLE as error:
        raise MessageDecodeError(f"not what a rendezvous moves: {error}") from error
    if value.error is not None:
        kind, text = value.error
        return _ERRORS.get(kind, OSError)(text)
    return next(
        (each for each in (value.flag, value.segment, value.queue) if each is not None), None
    )


def _bytes(x: torch.Tensor) -> bytes:
    return bytes(x.cpu().numpy())
