"""Keys for readers on other hosts, derived from the launcher's secret and never sent.

Every process with the secret can derive every key of a queue: its holders trust each other. Pass it
to child processes through a pipe or a file with mode 0600, not through the rendezvous store, which
any process that reaches its port can read.

Each queue has keys of its own, by a random public nonce in its handle. Each reader has a key: a
frame counts as sent by the rank whose key its connection proved, regardless of its contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from shm_broadcast.net.derived_key import derive_key

HANDSHAKE_NONCE_BYTES: Final = 32
ZAP_DOMAIN: Final = "remote queue"
_PROTOCOL: Final = b"group-coordinator remote queue 1: "


@dataclass(frozen=True)
class CurveKey:
    """A Curve25519 key pair, each half as 40 characters of z85."""

    public: bytes
    secret: bytes = field(repr=False)


def writer_key(secret: bytes, nonce: bytes) -> CurveKey:
    """Return the key pair of the queue's writer. Every reader needs its public half."""
    return _derive(secret, nonce, b"writer")


def reader_key(secret: bytes, nonce: bytes, rank: int) -> CurveKey:
    """Return the key pair of the queue's reader ``rank``."""
    return _derive(secret, nonce, b"reader %d" % rank)


def _derive(secret: bytes, nonce: bytes, role: bytes) -> CurveKey:
    # Any 32 bytes are a valid Curve25519 secret key, so a derived one needs no search.
    encoded = z85.encode(derive_key(secret, nonce, _PROTOCOL + role))
    return CurveKey(zmq.curve_public(encoded), encoded)


class AllowList(ThreadAuthenticator):
    """Admits only the readers of one queue to the sockets of ``context``.

    The ``User-Id`` of a message's frames is the rank of the reader whose key its connection proved.
    It answers zmq's authentication requests (ZAP) in a thread of its own.
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
        """Return whether the reader with ``public_key`` (z85) is admitted."""
        return public_key in self._ranks

    def curve_user_id(self, client_public_key: bytes) -> str:
        """Return the rank of the reader with this public key (32 bytes)."""
        return str(self._ranks[z85.encode(client_public_key)])
