"""Convert a dict with tensors to a header and payloads, and back: pure functions.

A dict travels as a header and the bytes of its tensors, in the dict's order:

    header    keys, scalars, and for each tensor a `TensorMeta`
    small     small tensors on the CPU, concatenated, in the header's message
    objects   all other values together, of any size, last in the header's message
    others    contiguous tensors, each separately; empty ones are not sent

The sender may slice a tensor that its tensor-parallel peers hold as well: peer k of n sends the
k-th n-th of the elements, and the receivers gather the whole. Only the sender decides, and the
header lists the slices, so the two sides cannot disagree.
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
"""The most bytes of small tensors. A frame then has half a kilobyte for their header."""

_LENGTH: Final = struct.Struct("<Q")
_CARRIED: Final = {
    name: dtype
    for name, dtype in DTYPES.items()
    if not name.removeprefix("torch.").startswith(("qint", "quint"))
}
"""The dtypes that can be sent. Of quantised tensors, torch may allocate less than ``nbytes``."""
_PICKLING = MessageCodec()


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """The description with which a receiver allocates and restores a tensor.

    Attributes:
        dtype: as ``str(tensor.dtype)``.
        shape: the whole tensor's shape.
        device: the sender's device type; the tensor is received on the same type.
        requires_grad: the sender's ``requires_grad``.
        slices: the number of equal slices; 0: the tensor is sent whole.
        slice: the index of the slice that is sent.
    """

    dtype: str
    shape: tuple[int, ...]
    device: str
    requires_grad: bool = False
    slices: int = 0
    slice: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype; raises MessageDecodeError if it is unknown here, or quantised."""
        try:
            return _CARRIED[self.dtype]
        except KeyError:
            raise MessageDecodeError(f"unknown dtype {self.dtype!r}") from None

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return torch.Size(self.shape).numel()

    @property
    def numel_sent(self) -> int:
        """The number of elements that are sent."""
        return self.numel // self.slices if self.slices else self.numel


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A dict without its tensors' bytes.

    Attributes:
        keys: all keys, in the dict's order.
        tensors: by key.
        scalars: values of a type that msgpack has, by key.
        objects: a dict of the other values, encoded by `MessageCodec.dump`; empty if there are
            none. They travel behind the header, because msgpack is limited to 4 GiB.
        small: the indices of the small tensors, counted without empty ones.
    """

    keys: list[Any]
    tensors: dict[Any, TensorMeta]
    scalars: dict[Any, Any] = {}
    objects: bytes = b""
    small: list[int] = []


@dataclass(frozen=True, slots=True)
class Slicing:
    """How a sender slices its tensors.

    Attributes:
        slices: the number of peers with the same tensors.
        slice: this sender's rank among them.
        overrides: by key: whether to slice that tensor. Others are sliced if divisible.
    """

    slices: int = 1
    slice: int = 0
    overrides: Mapping[Any, bool] = field(default_factory=dict)

    def cuts(self, key: Any, numel: int) -> bool:
        """Return whether to slice a tensor; raise ValueError if it must be and cannot."""
        divides = numel % self.slices == 0
        wanted = self.overrides.get(key, divides)
        if wanted and not divides:
            raise ValueError(f"{key!r} has {numel} elements, not divisible by {self.slices} ranks")
        return wanted and self.slices > 1 and numel > 0


WHOLE = Slicing()
"""No tensor is sliced."""


def pack(
    values: Mapping[Any, Any], slicing: Slicing = WHOLE, wire: MessageCodec = _PICKLING
) -> tuple[Header, list[Tensor]]:
    """Return a dict's header and the parts of its tensors to send.

    Args:
        values: tensors of any dtype, shape and strides, and values that ``wire`` can encode. Keys
            are text, bytes, numbers, bools, None, or tuples of these.
        slicing: how to slice tensors.
        wire: encodes the other values.

    Returns:
        The header, and the non-empty parts: one-dimensional, contiguous, in the dict's order. They
        share memory with contiguous tensors.

    Raises:
        TypeError: a key has another type, a value cannot be encoded, or a tensor is not dense.
        ValueError: a tensor must be sliced and is not divisible.
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
    """Encode a header."""
    return _encoder.encode(header)


def decode(data: bytes | memoryview) -> Header:
    """Decode a header, or raise MessageDecodeError."""
    try:
        header = _decoder.decode(data)
        keys = [_as_key(key) if type(key) is list else key for key in header.keys]
    except UNDECODABLE as error:
        raise MessageDecodeError(f"not the header of a tensor dict: {error}") from error
    return msgspec.structs.replace(header, keys=keys)


def to_payload(header: Header, parts: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Return the message payload of `pack`'s result, and the tensors to send separately."""
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
    """Return a payload's header and small tensors, by key, or raise MessageDecodeError."""
    try:
        (length,) = _LENGTH.unpack_from(payload)
        header = decode(payload[_LENGTH.size : _LENGTH.size + length])
        offset = _LENGTH.size + length
        sent_keys = [key for key, meta in header.tensors.items() if 0 not in meta.shape]
        tensors = {}
        for number in header.small:
            meta = header.tensors[sent_keys[number]]
            room = torch.empty(meta.numel_sent, dtype=meta.torch_dtype, device="cpu")
            # As bytes: elements in the payload may be unaligned for their type.
            raw = bytes(payload[offset : offset + room.nbytes])
            if len(raw) < room.nbytes:
                raise ValueError(f"{sent_keys[number]!r} is incomplete")
            ctypes.memmove(room.data_ptr(), raw, room.nbytes)
            tensors[sent_keys[number]] = room
            offset += room.nbytes
    except (struct.error, ValueError, IndexError, RuntimeError) as error:
        raise MessageDecodeError(f"not a tensor dict: {error}") from error
    if offset < len(payload):
        header = msgspec.structs.replace(header, objects=bytes(payload[offset:]))
    return header, tensors


def unpack(
    header: Header, tensors: Mapping[Any, Tensor], wire: MessageCodec = _PICKLING
) -> dict[Any, Any]:
    """Return the dict, in the sender's order, from ``header`` and the whole tensors by key.

    Raises MessageDecodeError if the other values cannot be restored here.
    """
    values = {**header.scalars, **tensors}
    if header.objects:
        values |= _load(header.objects, wire)
    try:
        return {key: values[key] for key in header.keys}
    except (KeyError, TypeError) as error:
        raise MessageDecodeError(f"the value of a key is missing: {error}") from None


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
    values = wire.load(data)
    if type(values) is not dict:
        raise MessageDecodeError(f"the values of a tensor dict are a {type(values).__name__}")
    return values


def _as_key(key: Any) -> Any:
    # msgpack has no tuples, and no key is a list.
    return tuple(_as_key(each) for each in key) if isinstance(key, list) else key


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
_KEYS = "text (that UTF-8 can write), bytes, numbers (integers of 64 bits), bools, None"
