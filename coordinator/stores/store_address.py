"""Where a store between hosts is; apart from the store, which loads ZeroMQ."""

from __future__ import annotations

import msgspec


class StoreAddress(msgspec.Struct, frozen=True):
    """Names a store to its members. Holds no secret.

    Attributes:
        address: where it listens, ``tcp://host:port``.
        nonce: random bytes from which, with the secret, the connections' keys are derived.
    """

    address: str
    nonce: bytes
