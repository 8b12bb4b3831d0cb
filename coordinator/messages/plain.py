"""Plain data as bytes and back: safe to read from anybody, because decoding it runs no code.

None, bools, ints, floats, text, bytes, dtypes, `torch.Size`, and lists, tuples and dicts of them,
each exactly of its type: an instance of a subclass is not plain, nor is text with a lone surrogate,
which UTF-8 cannot write, nor text or bytes of more than `LONGEST`. On the wire it is msgpack, in
which an array is a tag and what it is about:

    ["list", [...]]   ["tuple", [...]]   ["dict", [[key, value], ...]]
    ["size", [...]]   ["dtype", "torch.float32"]   ["int", "-1f..."]   (beyond 64 bits)
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from shm_broadcast import MessageDecodeError

WHAT_IS_PLAIN = (
    "None, bools, numbers, text, bytes, dtypes, sizes, and lists, tuples and dicts of them"
)

LONGEST = (1 << 30) - 1
"""Characters of a text, and bytes, at most: msgpack takes 4 GiB, and a character up to four."""

_OTHER_SCALARS = frozenset({type(None), bool, float})
_INTEGERS = range(-(1 << 63), 1 << 64)
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""torch's dtypes by name."""


def is_scalar(value: Any) -> bool:
    """Whether msgpack has the type of ``value`` itself, and room for it."""
    kind = type(value)
    if kind is str:
        return len(value) <= LONGEST and (value.isascii() or not _has_surrogate(value))
    if kind is int:
        return value in _INTEGERS
    return kind in _OTHER_SCALARS or (kind is bytes and len(value) <= LONGEST)


def is_key(key: Any) -> bool:
    """Whether ``key`` is a scalar, or a tuple of keys, that a dict finds again."""
    if type(key) is tuple:
        return all(is_key(each) for each in key)
    return is_scalar(key) and key == key  # NaN is not


def encode_plain(value: Any) -> bytes:
    """The bytes of a plain value.

    Raises:
        TypeError: it is not plain, or nested too deeply.
    """
    try:
        return _encoder.encode(_to_wire(value))
    except RecursionError:
        raise TypeError("a value that is nested too deeply, or contains itself") from None


def decode_plain(data: bytes | memoryview) -> Any:
    """The plain value of these bytes.

    Raises:
        MessageDecodeError: they are none.
    """
    try:
        return _from_wire(_decoder.decode(data))
    except (msgspec.MsgspecError, RecursionError, ValueError, TypeError, KeyError) as error:
        raise MessageDecodeError(f"not plain data: {type(error).__name__}: {error}") from error


def _to_wire(value: Any) -> Any:
    if is_scalar(value):
        return value
    kind = type(value)
    if kind in (list, tuple):
        return [kind.__name__, [_to_wire(each) for each in value]]
    if kind is dict:
        return ["dict", [[_to_wire(key), _to_wire(each)] for key, each in value.items()]]
    if kind is torch.Size:
        return ["size", list(value)]
    if kind is torch.dtype:
        return ["dtype", str(value)]
    if kind is int:
        return ["int", format(value, "x")]
    if kind in (str, bytes):
        raise TypeError(
            f"text or bytes of {len(value)}, where {LONGEST} is the limit,"
            if len(value) > LONGEST
            else "a text with a lone surrogate, which UTF-8 cannot write,"
        )
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def _from_wire(value: Any) -> Any:
    if type(value) is dict:
        raise TypeError("a map")
    if type(value) is not list:
        return value
    tag, body = value
    if tag == "list":
        return [_from_wire(each) for each in body]
    if tag == "tuple":
        return tuple(_from_wire(each) for each in body)
    if tag == "dict":
        return {_from_wire(key): _from_wire(each) for key, each in body}
    if tag == "size":
        if any(each >= 1 << 63 for each in body):
            raise ValueError("a size beyond 63 bits, which torch takes but cannot show")
        return torch.Size(body)
    if tag == "dtype":
        return DTYPES[body]
    if tag == "int":
        return int(body, 16)
    raise ValueError(f"an array that begins with {tag!r}")


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()
