"""Encodes objects as a main part and out-of-band buffers, and decodes them.

`PickleCodec` is for peers that trust each other: processes of one user on one host, or peers that
proved the launcher's secret. `MsgpackCodec` carries messages of one type, validates them, and is
about twice as fast. Nothing that comes from a client is ever unpickled.

Contiguous memory of `OUT_OF_BAND_BYTES` and more is not copied into the main part: it travels as a
buffer of its own (pickle protocol 5, PEP 574). numpy's arrays support that; torch's tensors do not,
so there is a reducer for them here. A tensor is sent by value: of a view only the elements it
shows, in contiguous order; tensors that shared a storage no longer do; a tensor on another device
is copied to the host, and at the receiver to the device of the same name.
"""

from __future__ import annotations

import copyreg
import pickle
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import msgspec
import torch

from shm_broadcast.errors import MessageDecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

OUT_OF_BAND_BYTES: Final = 16 << 10
MAX_BUFFERS: Final = 512
"""Buffers of a message at most; further ones stay in the main part.

A table of so many sizes fits into one record of the smallest ring.
"""

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises of bytes that are no message of the type it looks for."""

PICKLE: Final = 1
MSGPACK: Final = 2


_NUMPY_KNOWS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""For each item size in bytes a dtype that numpy has too; it has no bfloat16, for one."""

_NUMPY_DIMS: Final = 64
"""The most dimensions that numpy has."""

Encoded: TypeAlias = "tuple[Sequence[Buffer], Sequence[memoryview]]"
"""The main part in pieces (contiguous, of any shape), and the out-of-band buffers (flat bytes).

All of it may still be the memory of the message itself.
"""


class Codec(Protocol):
    """How one queue's messages are encoded; every record's header has its ``code``."""

    @property
    def code(self) -> int:
        """The number that names this codec in a record's header."""

    def encode(self, message: Any) -> Encoded:
        """Encode ``message``. One thread at a time."""

    def decode(self, main: Buffer, buffers: Sequence[Buffer]) -> Any:
        """The message. It may refer to the memory of ``buffers``, never to that of ``main``.

        Raises:
            MessageDecodeError: the bytes are not a message of this codec.
        """


class PickleCodec:
    """Any picklable object; tensors of every dtype and numpy arrays out of band."""

    code = PICKLE

    def __init__(self) -> None:
        self._main = _Sink()
        self._buffers: list[memoryview] = []
        # Kept between messages: to make a pickler costs as much as to pickle a small message.
        self._pickler = pickle.Pickler(self._main, protocol=5, buffer_callback=self._keep_in_band)
        self._pickler.dispatch_table = _REDUCERS

    def encode(self, message: Any) -> Encoded:
        """Pickle ``message``.

        Raises:
            TypeError: it cannot be pickled.
        """
        try:
            self._pickler.dump(message)
            return tuple(self._main), tuple(self._buffers)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"cannot send a {type(message).__name__}: {error}") from error
        finally:
            self._pickler.clear_memo()
            self._main.clear()
            self._buffers.clear()

    def decode(self, main: Buffer, buffers: Sequence[Buffer]) -> Any:
        """Unpickle a message whose sender is trusted."""
        try:
            return pickle.loads(main, buffers=buffers)
        except Exception as error:
            raise MessageDecodeError(f"cannot unpickle: {type(error).__name__}: {error}") from error

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES or len(self._buffers) == MAX_BUFFERS:
            return True
        self._buffers.append(raw)
        return False


class MsgpackCodec:
    """One type that msgspec can validate: a Struct, a dataclass, builtin containers."""

    code = MSGPACK

    def __init__(self, message_type: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: Any) -> Encoded:
        """Encode ``message``; one that msgspec does not know raises TypeError."""
        return (self._encoder.encode(message),), ()

    def decode(self, main: Buffer, buffers: Sequence[Buffer]) -> Any:
        """Decode and validate a message."""
        if buffers:
            raise MessageDecodeError("a typed message carries no out-of-band buffers")
        try:
            return self._decoder.decode(main)
        except Exception as error:
            raise MessageDecodeError(f"cannot decode: {type(error).__name__}: {error}") from error


def codec_for(message_type: Any | None) -> Codec:
    """The codec of a queue: typed if ``message_type`` is given."""
    return PickleCodec() if message_type is None else MsgpackCodec(message_type)


class _Sink(list[bytes]):
    """What a pickler writes to: a list of pieces, so that large ones are not copied."""

    write = list.append


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not plain:
        reduced: tuple[Any, ...] = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return reduced
    device = None if tensor.is_cpu else str(tensor.device)
    return _rebuild_tensor, (
        _values(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        device,
        tensor.requires_grad,
    )


def _values(tensor: torch.Tensor) -> pickle.PickleBuffer | bytes:
    if tensor.numel() == 0:
        return b""
    values = tensor.detach() if tensor.requires_grad else tensor
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        values = values.resolve_conj().resolve_neg().cpu().contiguous()
    if values.dim() > _NUMPY_DIMS:
        values = values.view(-1)
    array = values.view(_NUMPY_KNOWS[values.itemsize]).numpy()
    return pickle.PickleBuffer(cast("Buffer", array))


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    return torch.nn.Parameter, (parameter.detach(), parameter.requires_grad)


def _rebuild_tensor(
    memory: Buffer,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: str | None,
    requires_grad: bool,
) -> torch.Tensor:
    values = memoryview(memory)
    if values.nbytes:
        writable = bytearray(memory) if values.readonly else memory
        tensor = torch.frombuffer(writable, dtype=dtype).view(shape)
    else:
        tensor = torch.empty(0, dtype=torch.uint8).view(dtype).view(shape)
    if device is not None:
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


class _Reducers(dict[type, Any]):
    """Our reducers, then copyreg's: a pickler with its own dispatch table ignores copyreg's."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]


_REDUCERS: Final = _Reducers({torch.Tensor: _reduce_tensor, torch.nn.Parameter: _reduce_parameter})
