"""What travels with the tensors of a dict, and how a dict becomes messages: pure functions.

A dict is sent as a header and the bytes of its tensors, in the dict's order:

    header   keys, plain values, other values pickled, and for each tensor a `TensorMeta`
    tensors  contiguous; empty ones do not travel at all

The sender may cut a tensor that its tensor-parallel peers hold as well: peer k of n sends
the k-th n-th of the elements, and the receivers gather the whole among themselves. Whether
a tensor is cut is decided by the sender alone and stands in its header; a receiver never
decides, so the two cannot disagree.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from shm_broadcast import MessageDecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCALARS = frozenset({type(None), bool, int, float, str})
_INTEGERS = range(-(1 << 63), 1 << 64)
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

Scalar = None | bool | int | float | str


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
            MessageDecodeError: this torch has no such dtype.
        """
        try:
            return _DTYPES[self.dtype]
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
        scalars: values of a plain type, by key.
        objects: the other values by key, pickled; empty if there are none.
    """

    keys: list[str]
    tensors: dict[str, TensorMeta]
    scalars: dict[str, Scalar] = {}
    objects: bytes = b""


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
    overrides: Mapping[str, bool] = field(default_factory=dict)

    def cuts(self, key: str, numel: int) -> bool:
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


def pack(values: Mapping[str, Any], slicing: Slicing = WHOLE) -> tuple[Header, list[Tensor]]:
    """The header of a dict, and what travels of its tensors.

    Args:
        values: tensors of any dtype, shape and layout in memory, and anything picklable.
        slicing: how tensors may be cut.

    Returns:
        The header, and the parts of the tensors that are not empty: contiguous, of one
        dimension, in the dict's order. They share memory with the tensors where these are
        contiguous.

    Raises:
        TypeError: a key is not a string, a value cannot be pickled, a tensor is not dense.
        ValueError: a tensor has to be cut and cannot be.
    """
    tensors: dict[str, TensorMeta] = {}
    scalars: dict[str, Scalar] = {}
    objects: dict[str, Any] = {}
    parts: list[Tensor] = []
    for key, value in values.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of a tensor dict are strings; got {key!r}")
        if isinstance(value, Tensor):
            tensors[key] = meta = _describe(key, value, slicing)
            if meta.numel:
                parts.append(_part(value, meta))
        elif _is_scalar(value):
            scalars[key] = value
        else:
            objects[key] = value
    pickled = _pickle(objects) if objects else b""
    return Header(list(values), tensors, scalars, pickled), parts


def encode(header: Header) -> bytes:
    """The header's bytes."""
    return _encoder.encode(header)


def decode(data: bytes | memoryview) -> Header:
    """The header that was encoded.

    Raises:
        MessageDecodeError: the bytes are no header.
    """
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise MessageDecodeError(f"not the header of a tensor dict: {error}") from error


def unpack(header: Header, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The dict, in the sender's order, of ``header`` and the whole tensors by key.

    Raises:
        MessageDecodeError: the pickled values cannot be restored here.
    """
    objects = _unpickle(header.objects) if header.objects else {}
    sources: tuple[Mapping[str, Any], ...] = (tensors, header.scalars, objects)
    return {key: next(each[key] for each in sources if key in each) for key in header.keys}


def _describe(key: str, value: Tensor, slicing: Slicing) -> TensorMeta:
    if value.layout is not torch.strided or value.is_quantized:
        raise TypeError(f"{key!r} is not a dense tensor: {value.layout}, {value.dtype}")
    cut = slicing.cuts(key, value.numel())
    return TensorMeta(
        str(value.dtype),
        tuple(value.shape),
        value.device.type,
        value.requires_grad,
        slicing.slices if cut else 0,
        slicing.slice if cut else 0,
    )


def _part(value: Tensor, meta: TensorMeta) -> Tensor:
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(meta.slices, -1)[meta.slice] if meta.slices else flat


def _is_scalar(value: Any) -> bool:
    return type(value) in _SCALARS and (type(value) is not int or value in _INTEGERS)


def _pickle(objects: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(objects, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"cannot pickle one of {list(objects)}: {error}") from error


def _unpickle(data: bytes) -> dict[str, Any]:
    try:
        return pickle.loads(data)  # type: ignore[no-any-return]
    except Exception as error:
        raise MessageDecodeError(f"cannot restore the values of a tensor dict: {error}") from error


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)
