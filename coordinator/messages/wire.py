"""Encode the messages of a group: plain data or pickle, seals, frames.

Plain data: None, bools, ints, floats, text, bytes, dtypes, `torch.Size`, and lists, tuples and
dicts of them, each of exactly its type. Instances of subclasses are not plain, nor is text with a
lone surrogate, nor text or bytes longer than `LONGEST`. It is msgpack; an array is a tag and its
contents:

    ["list", [...]]   ["tuple", [...]]   ["dict", [[key, value], ...]]
    ["size", [...]]   ["dtype", "torch.float32"]   ["int", "-1f..."]   (beyond 64 bits)

    ┌────────┬──────────────┬─────────┐
    │ number │ HMAC-SHA256  │ payload │      8 bytes, little-endian; 32 bytes
    └────────┴──────────────┴─────────┘

The HMAC of a sealed message covers kind, tag, sender, receiver, number and payload. Its key derives
from a secret of the members (the launcher's, or random bytes in the memory of their host) and
random bytes of each member: a later group rejects messages of an earlier one. Messages from one
member to another are numbered, and only the next is accepted: none is repeated, omitted or
reordered. A seal does not encrypt.

A receiver does not have the length in advance. Each message begins with a frame of fixed size:

    0        7      8      12     16                      2048
    ┌────────┬──────┬──────┬──────┬────────────────────────┐ ┌─────────────────────┐
    │ length │ kind │ call │ tag  │ 2032 bytes, padded     │ │ the rest, if any    │
    └────────┴──────┴──────┴──────┴────────────────────────┘ └─────────────────────┘
      little-endian; the kinds of this version of the format begin at 33

A receiver of another kind, or in another call (`device_comm.call_number`), gets an error instead of
the message. A sender that cannot encode its value sends an error frame, so that no receiver waits.
A message with a tag, other than 0, waits for the receive with its tag: see `messages.incoming`.

    transport                                  values            seal
    shared memory of one host                  pickled           none: only members can write
    sockets, where members share a key         pickled           yes
    other sockets                              plain data only   none

Torch's sockets do not authenticate, not even on loopback. Data from a socket without a seal is
never unpickled, whatever the message contains: this is decided when the group is built. Members
trust each other.
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
from device_comm.call_number import numbering
from shm_broadcast import MessageDecodeError, MessageRefusedError, MessageSealError
from shm_broadcast.codec import pickled
from shm_broadcast.net.derived_key import derive_key

if TYPE_CHECKING:
    from coordinator.rendezvous import Rendezvous


WHAT_IS_PLAIN = (
    "None, bools, numbers, text, bytes, dtypes, sizes, and lists, tuples and dicts of them"
)

LONGEST = (1 << 30) - 1
"""The most characters of a text, and bytes: msgpack takes 4 GiB, and a character up to 4 bytes."""

_OTHER_SCALARS = frozenset({type(None), bool, float})
_INTEGERS = range(-(1 << 63), 1 << 64)
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""torch's dtypes by name."""


def is_scalar(value: Any) -> bool:
    """Return whether msgpack has the type of ``value`` and the value is within its limits."""
    kind = type(value)
    if kind is str:
        return len(value) <= LONGEST and (value.isascii() or not _has_surrogate(value))
    if kind is int:
        return value in _INTEGERS
    return kind in _OTHER_SCALARS or (kind is bytes and len(value) <= LONGEST)


def is_key(key: Any) -> bool:
    """Return whether ``key`` is a scalar or a tuple of keys, and equal to itself."""
    if type(key) is tuple:
        return all(is_key(each) for each in key)
    return is_scalar(key) and key == key  # false for NaN


def encode_plain(value: Any) -> bytes:
    """Encode a plain value; raise TypeError if it is not plain, or nested too deeply."""
    try:
        return _encoder.encode(_to_wire(value))
    except RecursionError:
        raise TypeError("a value that is nested too deeply, or contains itself") from None


def decode_plain(data: bytes | memoryview) -> Any:
    """Decode a plain value, or raise MessageDecodeError."""
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
            raise ValueError("a size beyond 63 bits, which torch accepts but cannot print")
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
"""The receiver of messages to all members."""

NONCE_BYTES: Final = 16
"""Random bytes that each member adds to the key."""

_CODE_BYTES: Final = 32
_NUMBER = struct.Struct("<Q")
_ABOUT = struct.Struct("<BIIIQ")
_HEAD: Final = _NUMBER.size + _CODE_BYTES
_CONTEXT: Final = b"group-coordinator messages 2: "


class Seal:
    """One member's seals on its messages, and its checks of received ones."""

    def __init__(self, secret: bytes, group: str, nonces: Sequence[bytes], rank: int) -> None:
        """Derive the group's key; the first message is next.

        ``secret``, 16 bytes or more, is known to the members only; ``nonces`` are random bytes of
        each member.
        """
        self._key = derive_key(secret, b"".join(nonces), _CONTEXT + group.encode())
        self._rank = rank
        self._sent: Counter[int] = Counter()
        self._due: Counter[tuple[int, int]] = Counter()

    def close(self, kind: int, payload: bytes, dst: int, tag: int = 0) -> bytes:
        """Seal ``payload`` as the next message to ``dst``."""
        number = self._sent[dst]
        self._sent[dst] += 1
        code = self._code(_ABOUT.pack(kind, tag, self._rank, dst, number), payload)
        return _NUMBER.pack(number) + code + payload

    def open(self, kind: int, sealed: memoryview, src: int, dst: int, tag: int = 0) -> memoryview:
        """Return the payload or raise MessageSealError; call once per message, in their order."""
        due = self._due[src, dst]
        self._due[src, dst] += 1
        if len(sealed) < _HEAD:
            raise MessageSealError(src, "it has no seal: was this rank alone given a secret?")
        (number,) = _NUMBER.unpack_from(sealed)
        code, payload = bytes(sealed[_NUMBER.size : _HEAD]), sealed[_HEAD:]
        about = _ABOUT.pack(kind, tag, src, dst, number)
        if not hmac.compare_digest(code, self._code(about, payload)):
            raise MessageSealError(
                src, "its seal does not fit: it was changed, or another process sent it"
            )
        if number != due:
            raise MessageSealError(src, f"it is message {number} where message {due} is due")
        return payload

    def _code(self, about: bytes, payload: bytes | memoryview) -> bytes:
        digest = hmac.new(self._key, about, hashlib.sha256)
        digest.update(payload)
        return digest.digest()


FRAME: Final = 2048
_FRAME_HEAD: Final = struct.Struct("<QII")
_LENGTH_BITS: Final = 56


class Kind(IntEnum):
    """The kind of a message: the operation that both ends call."""

    OBJECT = 33
    TENSOR_DICT = 34
    BROADCAST_OBJECT = 35
    BROADCAST_TENSOR_DICT = 36
    GATHERED_OBJECT = 37
    REFUSED = 38
    TREE = 39

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


class Message:
    """A framed message: bytes to send, or a buffer to receive into.

    Attributes:
        kind: its kind; of a received message, after `read`, the sender's number for it.
        call: the number of the pool's call that it is part of; 0: none.
        tag: its tag; 0: none.
        first: the frame, (2048,) uint8.
    """

    __slots__ = ("_data", "_length", "call", "first", "kind", "tag")

    def __init__(
        self, kind: int = 0, payload: bytes | None = None, call: int = 0, tag: int = 0
    ) -> None:
        """Frame ``payload``; None: allocate a message to receive."""
        self.kind = kind
        self.call = call
        self.tag = tag
        self._length = 0 if payload is None else len(payload)
        self._data = bytearray(max(FRAME, _FRAME_HEAD.size + self._length))
        if payload is not None:
            _FRAME_HEAD.pack_into(self._data, 0, kind << _LENGTH_BITS | self._length, call, tag)
            self._data[_FRAME_HEAD.size : _FRAME_HEAD.size + self._length] = payload
        self.first = torch.frombuffer(self._data, dtype=torch.uint8, count=FRAME)

    @property
    def has_arrived(self) -> bool:
        """Whether the frame of a received message has arrived."""
        return any(self._data[: _FRAME_HEAD.size])  # no kind is 0

    def read(self) -> None:
        """Read kind, call, tag and length from the received frame."""
        word, self.call, self.tag = _FRAME_HEAD.unpack_from(self._data)
        self.kind, self._length = word >> _LENGTH_BITS, word & (1 << _LENGTH_BITS) - 1

    def rest(self) -> Tensor | None:
        """Return the bytes beyond the frame, (n,) uint8; None: there are none.

        Raises MessageDecodeError if the message does not fit into memory.
        """
        total = _FRAME_HEAD.size + self._length
        if total <= FRAME:
            return None
        if len(self._data) < total:
            # The frame's tensor exports the old buffer, so that cannot be resized.
            try:
                self._data = self._data + bytearray(total - FRAME)
            except MemoryError as error:
                raise MessageDecodeError(
                    f"a message of {total} bytes exceeds the memory"
                ) from error
        return torch.frombuffer(self._data, dtype=torch.uint8, count=total - FRAME, offset=FRAME)

    def frames(self) -> list[Tensor]:
        """Return the tensors to send, in order."""
        rest = self.rest()
        return [self.first] if rest is None else [self.first, rest]

    @property
    def payload(self) -> memoryview:
        """The contents, once everything has arrived. Shares the message's memory."""
        return memoryview(self._data)[_FRAME_HEAD.size : _FRAME_HEAD.size + self._length]


_REFUSAL_BYTES = 900
_TOKEN_BYTES = 16


class MessageCodec:
    """One member's encoding and decoding of messages.

    Attributes:
        numbers: whether messages are sealed and numbered. A message that has taken its number must
            be sent, or the receiver rejects all later ones.
        pickles: whether values are pickled; otherwise they must be plain.
        token: bytes that are the same on all members and differ between groups; b"" for a group of
            one.
        in_calls: whether all members serve the calls of one pool, or none does.
        call: returns the number of the call that the next message is part of; 0: none.
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
        """Store how to encode and decode; the arguments are those of the attributes.

        Without a ``seal``, ``pickles`` must be False unless only members can write. ``called`` has
        the members' global ranks, for errors.
        """
        self._seal = seal
        self._called = called
        self.numbers = seal is not None
        self.pickles = pickles
        self.token = token
        self.in_calls = in_calls
        self.call = numbering(in_calls)

    def dump(self, value: Any) -> bytes:
        """Encode a value; exceptions of its own pickling code are raised unchanged.

        Raises TypeError, with the reason and the remedy, if it cannot be encoded.
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
        """Decode a value, or raise MessageDecodeError."""
        if not self.pickles:
            return decode_plain(data)
        try:
            return pickle.loads(data)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise MessageDecodeError(f"cannot restore an object: {why}") from error

    def message(self, kind: Kind, payload: bytes, dst: int, tag: int = 0) -> Message:
        """Return the next message to ``dst``, a rank or `EVERYONE`."""
        return Message(kind, self.close(kind, payload, dst, tag), self.call(), tag)

    def error_frame(self, error: Exception, dst: int, tag: int = 0) -> Message:
        """Return an error as the next message to ``dst``. It fits into one frame."""
        return self.message(Kind.REFUSED, why_refused(error).encode(), dst, tag)

    def refused(self, src: int, why: str) -> MessageRefusedError:
        """Return the error for a message that rank ``src`` of the group cannot send."""
        return MessageRefusedError(self.global_rank(src), why)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of that rank of the group."""
        return self._called[rank] if self._called else rank

    def close(self, kind: Kind, payload: bytes, dst: int, tag: int = 0) -> bytes:
        """Return ``payload``, sealed if messages are."""
        return payload if self._seal is None else self._seal.close(kind, payload, dst, tag)

    def open(self, kind: int, data: memoryview, src: int, dst: int, tag: int = 0) -> memoryview:
        """Return the payload of a received message; call once per message, in their order.

        Raises:
            MessageSealError: it is not the next message.
            MessageRefusedError: it is an error frame of the sender.
        """
        try:
            payload = data if self._seal is None else self._seal.open(kind, data, src, dst, tag)
        except MessageSealError as error:
            raise MessageSealError(self.global_rank(src), error.detail) from None
        if kind == Kind.REFUSED:
            raise self.refused(src, bytes(payload).decode(errors="replace"))
        return payload


def negotiate_codec(
    exchange: Rendezvous, secret: bytes | None, *, only_members_write: bool
) -> MessageCodec:
    """Return the message codec of a new group. Collective: yes, every member.

    ``secret`` is known to the members only. ``only_members_write``: only they can write to the
    transport.

    Raises:
        GroupTimeoutError: some members did not arrive in time.
        SecretError: only some members have a secret. `config_handshake` has compared that before,
            but in a store that any process may write: a forged entry there must not cause plain
            messages here.
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
            f"{exchange.name}: ranks {without} have no secret, the others have one: give the "
            "launcher's secret to all ranks, or to none"
        )
    if secret is None:
        return MessageCodec(pickles=False, called=exchange.called, token=token, in_calls=in_calls)
    seal = Seal(secret, exchange.name, nonces, exchange.rank)
    return MessageCodec(seal, called=exchange.called, token=token, in_calls=in_calls)


def why_refused(error: Exception) -> str:
    """Return the text of an error frame: the reason, cut to fit into one frame."""
    plain = isinstance(error, (TypeError, ValueError))
    why = str(error) if plain else f"{type(error).__name__}: {error}"
    return why.encode(errors="replace")[:_REFUSAL_BYTES].decode(errors="ignore")


_NOT_PLAIN = (
    "would have to be pickled, and this group's sockets do not authenticate senders: "
    "give all ranks one secret (a 0600 file that GROUP_COORDINATOR_SECRET_FILE names, or "
    f"secret=), or send only {WHAT_IS_PLAIN}"
)
