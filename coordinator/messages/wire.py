"""How a group's messages are encoded for each transport, and how far they are trusted.

    way                                        values            seal
    shared memory of one host                  pickled           none: it reaches members only
    sockets, where members share a key         pickled           yes
    other sockets                              plain data only   none

Torch's sockets authenticate nobody, not even on loopback. Nothing that came over one without a seal
is ever unpickled, whatever the message says: this is decided when the group is built.
"""

from __future__ import annotations

import os
import pickle
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from coordinator.begun_in_call import caller_of
from coordinator.messages.framing import Kind, Message
from coordinator.messages.plain import WHAT_IS_PLAIN, decode_plain, encode_plain
from coordinator.messages.seal import NONCE_BYTES, Seal
from coordinator.stores.secret import SecretError
from device_comm.call_number import numbering
from shm_broadcast import MessageDecodeError, MessageRefusedError, MessageSealError
from shm_broadcast.codec import pickled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.setup.exchange import Exchange

_REFUSAL_BYTES = 900
_TOKEN_BYTES = 16


class Wire:
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
        """The next message to ``dst``, a rank or `seal.EVERYONE`."""
        return Message(kind, self.close(kind, payload, dst), self.call())

    def refusal(self, error: Exception, dst: int) -> Message:
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


def agree_on_wire(exchange: Exchange, secret: bytes | None, *, only_members_write: bool) -> Wire:
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
        return Wire(called=exchange.called, token=token, in_calls=in_calls)
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
        return Wire(pickles=False, called=exchange.called, token=token, in_calls=in_calls)
    seal = Seal(secret, exchange.name, nonces, exchange.rank)
    return Wire(seal, called=exchange.called, token=token, in_calls=in_calls)


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
