"""Bytes by address: what plans and transfers are made of."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shm_broadcast.segment import Segment

copy_bytes = ctypes.memmove
"""``copy_bytes(to, from, size)``; other threads run meanwhile."""


def address_of(segment: Segment) -> int:
    """Where a segment is mapped; it stays there as long as ``segment.memory`` is referenced."""
    return ctypes.addressof(ctypes.c_char.from_buffer(segment.memory))
