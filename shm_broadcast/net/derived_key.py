"""Keys that are derived from the launcher's secret, each for one purpose."""

from __future__ import annotations

from typing import Final

MIN_SECRET_BYTES: Final = 16


def derive_key(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """A 32-byte key by HKDF-SHA256 (RFC 5869), from which ``secret`` cannot be computed.

    Args:
        secret: 16 bytes or more.
        salt: makes keys for the same purpose differ; may be public.
        purpose: what the key is for; may be public.

    Raises:
        ValueError: the secret has fewer than 16 bytes.
    """
    import hmac  # noqa: PLC0415 - loads OpenSSL

    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"secret must have {MIN_SECRET_BYTES} or more bytes; got {len(secret)}")
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")
