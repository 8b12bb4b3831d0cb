"""What travels with the tensors of a dict, and how a dict becomes messages: pure functions.

A dict is sent as a header and the bytes of its tensors, in the dict's order:

    header    keys, scalars, and for each tensor a `TensorMeta`
    small     tensors on the CPU, one behind the other, in the same message as the header
    objects   all other values together, of any size, the last in that message
    others    contiguous tensors, each by itself; empty ones do not travel at all

The sender may cut a tensor that its tensor-parallel peers hold as well: peer k of n sends
the k-th n-th of the elements, and the receivers gather the whole among themselves. Whether
a tensor is cut is decided by the sender alone and stands in its header; a receiver never
decides, so the two cannot disagree.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from coordinator.messages.wire import DTYPES, MessageCodec, is_key, is_scalar
from device_comm.verbs.checks import why_not_dense
from shm_broadcast import MessageDecodeError
from shm_broadcast.codec import UNDECODABLE

INLINE_BYTES: Final = 1536
"""Of the tensors that travel with their header. A frame then has half a kilobyte for that."""

_LENGTH: Final = struct.Struct("<Q")
_CARRIED: Final = {
    name: dtype
    for name, dtype in DTYPES.items()
    if not name.removeprefix("torch.").startswith(("qint", "quint"))
}
"""The dtypes of tensors. Of a quantised one torch may give out less memory than ``nbytes`` says."""
_PICKLING = MessageCodec()


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """What a receiver needs to make room for a tensor and to restore it.

    Attributes:
        dtype: as ``str(tensor.dtype)``.
        shape: the whole tensor's.
        device: the type of the device it was on: where it is received, too.
        requires_grad: whether the sender's did.
        slices: into how many equal parts it was cut; 0: it travels whole.
        slice: which of these parts travels.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    requires_grad: bool = False
    slices: int = 0
    slice: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself.

        Raises:
            MessageDecodeError: this torch has no such dtype, or it is quantised.
        """
        try:
            return _CARRIED[self.dtype]
        except KeyError:
            raise MessageDecodeError(f"unknown dtype {self.dtype!r}") from None

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()

    @property
    def numel_sent(self) -> int:
        """Elements that travel."""
        return self.numel // self.slices if self.slices else self.numel


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Everything of a dict but its tensors' bytes.

    Attributes:
        keys: all keys, in the dict's order.
        tensors: by key.
        scalars: values of a type that msgpack has, by key.
        objects: a dict of the other values, as `Wire.dump` made it; empty if there are none. They
            travel behind the header, for msgpack takes 4 GiB at most.
        small: the numbers of the tensors that are small, empty ones not counted.
    """

    keys: list[Any]
    tensors: dict[Any, TensorMeta]
    scalars: dict[Any, Any] = {}
    objects: bytes = b""
    small: list[int] = []


@dataclass(frozen=True, slots=True)
class Slicing:
    """How a sender may cut its tensors.

    Attributes:
        slices: how many peers hold the same tensors.
        slice: this sender's rank among them.
        overrides: by key: cut this one, or do not. Other keys: cut what divides.
    """

    slices: int = 1
    slice: int = 0
    overrides: Mapping[Any, bool] = field(default_factory=dict)

    def cuts(self, key: Any, numel: int) -> bool:
        """Whether the tensor at ``key`` is cut.

        Raises:
            ValueError: it has to be, but its elements cannot be divided equally.
        """
        divides = numel % self.slices == 0
        wanted = self.overrides.get(key, divides)
        if wanted and not divides:
            raise ValueError(f"{key!r} has {numel} elements, not divisible by {self.slices} ranks")
        return wanted and self.slices > 1 and numel > 0


WHOLE = Slicing()
"""No tensor is cut."""


def pack(
    values: Mapping[Any, Any], slicing: Slicing = WHOLE, wire: MessageCodec = _PICKLING
) -> tuple[Header, list[Tensor]]:
    """The header of a dict, and what travels of its tensors.

    Args:
        values: tensors of any dtype, shape and layout in memory, and what ``wire`` can write. Keys
            are text, bytes, numbers, bools, None, or tuples of these.
        slicing: how tensors may be cut.
        wire: how values are written.

    Returns:
        The header, and the parts of the tensors that are not empty: contiguous, of one
        dimension, in the dict's order. They share memory with the tensors where these are
        contiguous.

    Raises:
        TypeError: a key is of another type, a value cannot be written, a tensor is not dense.
        ValueError: a tensor has to be cut and cannot be.
    """
    tensors: dict[Any, TensorMeta] = {}
    scalars: dict[Any, Any] = {}
    objects: dict[Any, Any] = {}
    parts: list[Tensor] = []
    for key, value in values.items():
        if not is_key(key):
            raise TypeError(
                f"the keys of a tensor dict are {_KEYS}, and tuples of these; got {key!r}"
            )
        if isinstance(value, Tensor):
            tensors[key] = meta = _describe(key, value, slicing)
            if meta.numel:
                parts.append(_part(value, meta))
        elif is_scalar(value):
            scalars[key] = value
        else:
            objects[key] = value
    return Header(list(values), tensors, scalars, _dump(objects, wire)), parts


def encode(header: Header) -> bytes:
    """The header's bytes."""
    return _encoder.encode(header)


def decode(data: bytes | memoryview) -> Header:
    """The header that was encoded.

    Raises:
        MessageDecodeError: the bytes are no header.
    """
    try:
        header = _decoder.decode(data)
        keys = [_as_key(key) if type(key) is list else key for key in header.keys]
    except UNDECODABLE as error:
        raise MessageDecodeError(f"not the header of a tensor dict: {error}") from error
    return msgspec.structs.replace(header, keys=keys)


def to_payload(header: Header, parts: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """What `pack` made, as the payload of a message, and the tensors that travel by themselves."""
    small: list[int] = []
    apart: list[Tensor] = []
    payload, room = [b"", b""], INLINE_BYTES
    for number, part in enumerate(parts):
        if part.nbytes > room or part.device.type != "cpu":
            apart.append(part)
            continue
        room -= part.nbytes
        small.append(number)
        dense = part.contiguous()
        payload.append(ctypes.string_at(dense.data_ptr(), dense.nbytes))
    payload[1] = encode(msgspec.structs.replace(header, objects=b"", small=small))
    payload[0] = _LENGTH.pack(len(payload[1]))
    payload.append(header.objects)
    return b"".join(payload), apart


def from_payload(payload: memoryview) -> tuple[Header, dict[Any, Tensor]]:
    """The header in the payload of a message, and the small tensors behind it, by key.

    Raises:
        MessageDecodeError: it is no such payload.
    """
    try:
        (length,) = _LENGTH.unpack_from(payload)
        header = decode(payload[_LENGTH.size : _LENGTH.size + length])
        place = _LENGTH.size + length
        travelling = [key for key, meta in header.tensors.items() if 0 not in meta.shape]
        tensors = {}
        for number in header.small:
            meta = header.tensors[travelling[number]]
            room = torch.empty(meta.numel_sent, dtype=meta.torch_dtype, device="cpu")
            # As bytes: in the payload elements need not lie where those of their type have to.
            sent = bytes(payload[place : place + room.nbytes])
            if len(sent) < room.nbytes:
                raise ValueError(f"{travelling[number]!r} did not come whole")
            ctypes.memmove(room.data_ptr(), sent, room.nbytes)
            tensors[travelling[number]] = room
            place += room.nbytes
    except (struct.error, ValueError, IndexError, RuntimeError) as error:
        raise MessageDecodeError(f"not a tensor dict: {error}") from error
    if place < len(payload):
        header = msgspec.structs.replace(header, objects=bytes(payload[place:]))
    return header, tensors


def unpack(
    header: Header, tensors: Mapping[Any, Tensor], wire: MessageCodec = _PICKLING
) -> dict[Any, Any]:
    """The dict, in the sender's order, of ``header`` and the whole tensors by key.

    Raises:
        MessageDecodeError: the other values cannot be restored here.
    """
    values = {**header.scalars, **tensors}
    if header.objects:
        values |= _load(header.objects, wire)
    try:
        return {key: values[key] for key in header.keys}
    except (KeyError, TypeError) as error:
        raise MessageDecodeError(f"the value of a key did not come: {error}") from None


def _describe(key: Any, value: Tensor, slicing: Slicing) -> TensorMeta:
    if (why := why_not_dense(value)) is not None:
        raise TypeError(f"{key!r} is not a dense tensor: {why}")
    dtype = str(value.dtype)
    if dtype not in _CARRIED:
        raise TypeError(f"{key!r} is quantised: {dtype}")
    cut = slicing.cuts(key, value.numel())
    return TensorMeta(
        dtype,
        tuple(value.shape),
        value.device.type,
        value.requires_grad,
        slicing.slices if cut else 0,
        slicing.slice if cut else 0,
    )


def _part(value: Tensor, meta: TensorMeta) -> Tensor:
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(meta.slices, -1)[meta.slice] if meta.slices else flat


def _dump(objects: dict[Any, Any], wire: MessageCodec) -> bytes:
    if not objects:
        return b""
    try:
        return wire.dump(objects)
    except TypeError:
        for key, value in objects.items():
            _require_writable(key, value, wire)
        raise


def _require_writable(key: Any, value: Any, wire: MessageCodec) -> None:
    try:
        wire.dump(value)
    except TypeError as error:
        raise TypeError(f"the value of {key!r}: {error}") from error


def _load(data: bytes, wire: MessageCodec) -> dict[Any, Any]:
    found = wire.load(data)
    if type(found) is not dict:
        raise MessageDecodeError(f"the values of a tensor dict are a {type(found).__name__}")
    return found


def _as_key(key: Any) -> Any:
    """msgpack knows no tuples; no list is a key."""
    return tuple(_as_key(each) for each in key) if isinstance(key, list) else key


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_KEYS = "text (that UTF-8 can write), bytes, numbers (integers of 64 bits), bools, None"
