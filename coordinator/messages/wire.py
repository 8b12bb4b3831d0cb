"""Encode the messages of a group: plain data or pickle, frames of bytes, and seals.

None, bools, ints, floats, text, bytes, dtypes, `torch.Size`, and lists, tuples and dicts of them,
each exactly of its type: an instance of a subclass is not plain, nor is text with a lone surrogate,
which UTF-8 cannot write, nor text or bytes of more than `LONGEST`. On the wire it is msgpack, in
which an array is a tag and what it is about:

    ["list", [...]]   ["tuple", [...]]   ["dict", [[key, value], ...]]
    ["size", [...]]   ["dtype", "torch.float32"]   ["int", "-1f..."]   (beyond 64 bits)

    ┌────────┬──────────────┬─────────┐
    │ number │ HMAC-SHA256  │ payload │      8 bytes, little-endian; 32 bytes
    └────────┴──────────────┴─────────┘

The HMAC is over kind, sender, receiver, number and payload. Its key belongs to one group, and is
made of something that only the members know (the launcher's secret, or random bytes in the memory
of their host) and of random bytes of each member, so a later group does not accept messages sealed
for an earlier one. Messages from one member to another are numbered; one that is not the next is
refused, so none is repeated, left out, or put before another.

Assumes: the members trust each other. A seal hides nothing: anybody who listens can read the
payload.

The receiver does not know the length. Every message begins with a frame of one size:

    0        7      8      12                             2048
    ┌────────┬──────┬──────┬───────────────────────────────┐ ┌─────────────────────┐
    │ length │ kind │ call │ the first 2036 bytes, padded  │ │ the rest, if any    │
    └────────┴──────┴──────┴───────────────────────────────┘ └─────────────────────┘
      little-endian

so a short message, with small tensors, takes one transfer. A receiver that asks for another kind
than the next message has, or in another call (`device_comm.call_number`), gets an error instead of
the message. A sender that cannot send its value sends a notice instead, so that no receiver waits.

    way                                        values            seal
    shared memory of one host                  pickled           none: it reaches members only
    sockets, where members share a key         pickled           yes
    other sockets                              plain data only   none

Torch's sockets authenticate nobody, not even on loopback. Nothing that came over one without a seal
is ever unpickled, whatever the message says: this is decided when the group is built.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import struct
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
from torch import Tensor

from coordinator.call_counts import caller_of
from coordinator.secret import SecretError
from device_comm.call_number import naming_call, numbering
from shm_broadcast import DivergenceError, MessageDecodeError, MessageRefusedError, MessageSealError
from shm_broadcast.codec import pickled
from shm_broadcast.net.derived_key import derive_key

if TYPE_CHECKING:
    from coordinator.rendezvous import Rendezvous


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

EVERYONE: Final = 0xFFFFFFFF
"""The receiver of what goes to all members at once."""

NONCE_BYTES: Final = 16
"""Random bytes that each member adds to the key."""

_TAG_BYTES: Final = 32
_NUMBER = struct.Struct("<Q")
_ABOUT = struct.Struct("<BIIQ")
_HEAD: Final = _NUMBER.size + _TAG_BYTES
_CONTEXT: Final = b"group-coordinator messages 1: "


class Seal:
    """One member's seals on what it sends, and its checks of what it receives."""

    def __init__(self, secret: bytes, group: str, nonces: Sequence[bytes], rank: int) -> None:
        """Begin with the first message.

        Args:
            secret: what the members know and nobody else: 16 bytes or more.
            group: the group's name.
            nonces: random bytes of each member, by rank, this one's among them.
            rank: this member's.
        """
        self._key = derive_key(secret, b"".join(nonces), _CONTEXT + group.encode())
        self._rank = rank
        self._sent: Counter[int] = Counter()
        self._due: Counter[tuple[int, int]] = Counter()

    def close(self, kind: int, payload: bytes, dst: int) -> bytes:
        """``payload``, sealed as the next message to ``dst``."""
        number = self._sent[dst]
        self._sent[dst] += 1
        tag = self._tag(kind, self._rank, dst, number, payload)
        return _NUMBER.pack(number) + tag + payload

    def open(self, kind: int, sealed: memoryview, src: int, dst: int) -> memoryview:
        """The payload of a message of ``src``; call it in the order of the messages, once for each.

        Raises:
            MessageSealError: it is not the next message of ``src`` to ``dst``.
        """
        due = self._due[src, dst]
        self._due[src, dst] += 1
        if len(sealed) < _HEAD:
            raise MessageSealError(src, "it has no seal: was this rank alone given a secret?")
        (number,) = _NUMBER.unpack_from(sealed)
        tag, payload = bytes(sealed[_NUMBER.size : _HEAD]), sealed[_HEAD:]
        if not hmac.compare_digest(tag, self._tag(kind, src, dst, number, payload)):
            raise MessageSealError(src, "its seal does not fit: it was changed, or not sent by it")
        if number != due:
            raise MessageSealError(src, f"it is message {number} where message {due} is due")
        return payload

    def _tag(
        self, kind: int, src: int, dst: int, number: int, payload: bytes | memoryview
    ) -> bytes:
        digest = hmac.new(self._key, _ABOUT.pack(kind, src, dst, number), hashlib.sha256)
        digest.update(payload)
        return digest.digest()


FRAME: Final = 2048
_FRAME_HEAD: Final = struct.Struct("<QI")
_LENGTH_BITS: Final = 56


class Kind(IntEnum):
    """What a message is: what both ends have called."""

    OBJECT = 1
    TENSOR_DICT = 2
    BROADCAST_OBJECT = 3
    BROADCAST_TENSOR_DICT = 4
    GATHERED_OBJECT = 5
    REFUSED = 6

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Message:
    """Bytes to send, or room for bytes to receive, framed.

    Attributes:
        kind: what it is; of one that is received, as `check` has found it.
        first: the frame, (2048,) uint8.
    """

    __slots__ = ("_call", "_data", "_length", "first", "kind")

    def __init__(self, kind: Kind, payload: bytes | None = None, call: int = 0) -> None:
        """Frame ``payload``; None makes room for a message of that kind that is to come.

        Args:
            kind: what it is.
            payload: what it holds.
            call: the number of the call that it is part of; 0: none.
        """
        self.kind: int = kind
        self._call = call
        self._length = 0 if payload is None else len(payload)
        self._data = bytearray(max(FRAME, _FRAME_HEAD.size + self._length))
        if payload is not None:
            _FRAME_HEAD.pack_into(self._data, 0, kind << _LENGTH_BITS | self._length, self._call)
            self._data[_FRAME_HEAD.size : _FRAME_HEAD.size + self._length] = payload
        self.first = torch.frombuffer(self._data, dtype=torch.uint8)[:FRAME]

    @property
    def has_arrived(self) -> bool:
        """Of one that is received: whether its frame is there."""
        return any(self._data[: _FRAME_HEAD.size])  # the kind, at least, is not 0

    def check(self, src: int) -> None:
        """Read the frame that has come from ``src``: of this kind, or a refusal, in this call.

        Raises:
            DivergenceError: it is another.
        """
        word, call = _FRAME_HEAD.unpack_from(self._data)
        found, self._length = word >> _LENGTH_BITS, word & (1 << _LENGTH_BITS) - 1
        if found not in (self.kind, Kind.REFUSED) or call != self._call:
            names = {int(kind): str(kind) for kind in Kind}
            name = names.get(found, f"message of kind {found}")
            raise DivergenceError(
                src,
                naming_call(f"receive of {Kind(self.kind)}", self._call),
                naming_call(f"send of {name}", call),
            )
        self.kind = found

    def rest(self) -> Tensor | None:
        """What does not fit into the frame, (n,) uint8.

        Raises:
            MessageDecodeError: it is larger than this host's memory.
        """
        total = _FRAME_HEAD.size + self._length
        if total <= FRAME:
            return None
        if len(self._data) < total:
            # The frame's tensor keeps the old bytes, which cannot grow under it.
            try:
                self._data = self._data + bytearray(total - FRAME)
            except MemoryError as error:
                raise MessageDecodeError(f"a message that says it has {total} bytes") from error
        return torch.frombuffer(self._data, dtype=torch.uint8)[FRAME:total]

    def frames(self) -> list[Tensor]:
        """What is sent, one after the other."""
        rest = self.rest()
        return [self.first] if rest is None else [self.first, rest]

    @property
    def payload(self) -> memoryview:
        """The bytes, once everything is there."""
        return memoryview(self._data)[_FRAME_HEAD.size : _FRAME_HEAD.size + self._length]


_REFUSAL_BYTES = 900
_TOKEN_BYTES = 16


class MessageCodec:
    """One member's way of writing and reading messages.

    Attributes:
        numbers: whether messages are numbered, as they are sealed: what has its number has to be
            sent, or nothing that follows is taken.
        pickles: whether values are pickled; otherwise they have to be plain.
        token: the same on all members, and on those of no other group; b"" for a group of one.
        in_calls: whether all members carry out the calls of one pool, or none does.
        call: the number of the call that the next message is part of; 0: none.
    """

    def __init__(
        self,
        seal: Seal | None = None,
        *,
        pickles: bool = True,
        called: Sequence[int] = (),
        token: bytes = b"",
        in_calls: bool = True,
    ) -> None:
        """Write and read so.

        Args:
            seal: of all messages; None: they have none.
            pickles: only with a seal, or where nobody but the members can write.
            called: the members' global ranks, for errors; empty: the same as those in the group.
            token: as the attribute.
            in_calls: as the attribute.
        """
        self._seal = seal
        self._called = called
        self.numbers = seal is not None
        self.pickles = pickles
        self.token = token
        self.in_calls = in_calls
        self.call = numbering(in_calls)

    def dump(self, value: Any) -> bytes:
        """The bytes of a value.

        Raises:
            TypeError: it cannot be sent this way; says why, and the cure.
            Exception: pickling it has raised this, as it is.
        """
        if not self.pickles:
            try:
                return encode_plain(value)
            except TypeError as error:
                raise TypeError(f"{error} {_NOT_PLAIN}") from None
        try:
            return pickled(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"cannot pickle a {type(value).__name__}: {error}") from error

    def load(self, data: bytes | memoryview) -> Any:
        """The value of these bytes.

        Raises:
            MessageDecodeError: it cannot be restored here.
        """
        if not self.pickles:
            return decode_plain(data)
        try:
            return pickle.loads(data)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise MessageDecodeError(f"cannot restore an object: {why}") from error

    def message(self, kind: Kind, payload: bytes, dst: int) -> Message:
        """The next message to ``dst``, a rank or `EVERYONE`."""
        return Message(kind, self.close(kind, payload, dst), self.call())

    def error_frame(self, error: Exception, dst: int) -> Message:
        """The next message to ``dst``, which says that there is none. It fits a frame."""
        return self.message(Kind.REFUSED, why_refused(error).encode(), dst)

    def refused(self, src: int, why: str) -> MessageRefusedError:
        """The error where rank ``src`` of the group cannot send something."""
        return MessageRefusedError(self.global_rank(src), why)

    def global_rank(self, rank: int) -> int:
        """What errors call that rank of the group."""
        return self._called[rank] if self._called else rank

    def close(self, kind: Kind, payload: bytes, dst: int) -> bytes:
        """What is sent of ``payload``."""
        return payload if self._seal is None else self._seal.close(kind, payload, dst)

    def open(self, kind: int, data: memoryview, src: int, dst: int) -> memoryview:
        """The payload of what has come; call it in the order of the messages, once for each.

        Raises:
            MessageSealError: it is not the message that is due.
            MessageRefusedError: its sender says that it cannot send it.
        """
        try:
            payload = data if self._seal is None else self._seal.open(kind, data, src, dst)
        except MessageSealError as error:
            raise MessageSealError(self.global_rank(src), error.detail) from None
        if kind == Kind.REFUSED:
            raise self.refused(src, bytes(payload).decode(errors="replace"))
        return payload


def negotiate_codec(
    exchange: Rendezvous, secret: bytes | None, *, only_members_write: bool
) -> MessageCodec:
    """The wire of a new group.

    Args:
        exchange: of the members.
        secret: what only the members know; None: there is nothing.
        only_members_write: where messages travel.

    Collective: yes, every member.

    Raises:
        GroupTimeoutError: some members did not come in time.
        SecretError: some say that they have no secret. `agree` has compared that before, but in a
            store that anybody may write; whoever forged it there gets no plain messages here.
    """
    caller = caller_of(exchange.global_rank(exchange.rank))
    nonces = exchange.all_gather(
        "members", bytes([secret is not None]) + os.urandom(NONCE_BYTES) + caller
    )
    in_calls = all(nonce.endswith(caller) for nonce in nonces)
    token = blake2b(b"".join(nonces), digest_size=_TOKEN_BYTES).digest()
    if only_members_write:
        return MessageCodec(called=exchange.called, token=token, in_calls=in_calls)
    without = [
        exchange.global_rank(rank)
        for rank, nonce in enumerate(nonces)
        if not nonce.startswith(b"\1")
    ]
    if without and len(without) < len(nonces):
        raise SecretError(
            f"{exchange.name}: ranks {without} were given no secret, the others were: give the "
            "launcher's secret to all ranks, or to none"
        )
    if secret is None:
        return MessageCodec(pickles=False, called=exchange.called, token=token, in_calls=in_calls)
    seal = Seal(secret, exchange.name, nonces, exchange.rank)
    return MessageCodec(seal, called=exchange.called, token=token, in_calls=in_calls)


def why_refused(error: Exception) -> str:
    """Why a message is refused whose making has raised ``error``, as much as fits a frame."""
    plain = isinstance(error, (TypeError, ValueError))
    why = str(error) if plain else f"{type(error).__name__}: {error}"
    return why.encode(errors="replace")[:_REFUSAL_BYTES].decode(errors="ignore")


_NOT_PLAIN = (
    "would have to be pickled, and nothing proves who sends what arrives over this group's "
    "sockets: give all ranks one secret (a 0600 file that GROUP_COORDINATOR_SECRET_FILE names, or "
    f"secret=), or send only {WHAT_IS_PLAIN}"
)
