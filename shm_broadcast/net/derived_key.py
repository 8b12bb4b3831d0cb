"""Keys that are derived from the launcher's secret, each for one purpose."""

from __future__ import annotations

from typing import Final

MIN_SECRET_BYTES: Final = 16


def derive_key(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    """Return a 32-byte key by HKDF-SHA256 (RFC 5869); it does not reveal ``secret``.

    ``salt`` and ``purpose`` may be public; either makes keys differ. Raises ValueError if the
    secret has fewer than 16 bytes.
    """
    import hmac  # noqa: PLC0415 - loads OpenSSL

    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"secret must have {MIN_SECRET_BYTES} or more bytes; got {len(secret)}")
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")
