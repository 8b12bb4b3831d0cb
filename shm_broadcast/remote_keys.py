"""Keys for readers on other hosts: derived from the launcher's secret, never sent anywhere.

Whoever holds the secret can derive every key of a queue, so it is the trust domain: hand it to
child processes through a pipe or a 0600 file, and not through the rendezvous store, which anyone
who reaches its port can read.

Each queue has a nonce of its own (public, in its handle), and so keys of its own. Readers are
told apart by their keys: what one sends is attributed to the rank whose key its connection
proved, whatever its frames say.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

if TYPE_CHECKING:
    from collections.abc import Iterable

MIN_SECRET_BYTES: Final = 16
NONCE_BYTES: Final = 32
ZAP_DOMAIN: Final = "remote queue"
_PROTOCOL: Final = b"group-coordinator remote queue 1: "


@dataclass(frozen=True)
class CurveKey:
    """A Curve25519 key pair, each half as 40 characters of z85."""

    public: bytes
    secret: bytes = field(repr=False)


def writer_key(secret: bytes, nonce: bytes) -> CurveKey:
    """The key pair of the queue's writer. Every reader needs its public half."""
    return _derive(secret, nonce, b"writer")


def reader_key(secret: bytes, nonce: bytes, rank: int) -> CurveKey:
    """The key pair of the queue's reader ``rank``."""
    return _derive(secret, nonce, b"reader %d" % rank)


def _derive(secret: bytes, nonce: bytes, role: bytes) -> CurveKey:
    """HKDF-SHA256 (RFC 5869) with one block of output, which is a Curve25519 secret key."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"secret must have {MIN_SECRET_BYTES} or more bytes; got {len(secret)}")
    extracted = hmac.digest(nonce, secret, hashlib.sha256)
    encoded = z85.encode(hmac.digest(extracted, _PROTOCOL + role + b"\x01", hashlib.sha256))
    return CurveKey(zmq.curve_public(encoded), encoded)


class AllowList(ThreadAuthenticator):
    """Admits the readers of one queue to the sockets of ``context``, and nobody else.

    A message's ``User-Id`` is the rank of the reader whose key its connection proved.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: bytes,
        nonce: bytes,
        ranks: Iterable[int],
    ) -> None:
        super().__init__(context)
        self._ranks = {reader_key(secret, nonce, rank).public: rank for rank in ranks}
        self.configure_curve_callback(ZAP_DOMAIN, credentials_provider=self)

    def callback(self, _domain: str, public_key: bytes) -> bool:
        """Whether the reader with ``public_key`` (z85) is admitted; called by the base class."""
        return public_key in self._ranks

    def curve_user_id(self, client_public_key: bytes) -> str:
        """The rank of the reader with this public key (32 bytes); called by the base class."""
        return str(self._ranks[z85.encode(client_public_key)])
