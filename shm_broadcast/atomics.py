"""Read and write texts in shared memory; its words are `Words`, a type of the C extension."""

from __future__ import annotations

from typing import Protocol

from shm_broadcast._native import Words


class SharedBytes(Protocol):
    """A segment, or a read-only copy of one."""

    @property
    def words(self) -> Words:
        """Its atomic words."""

    @property
    def memory(self) -> memoryview:
        """Return its bytes."""


def read_text(segment: SharedBytes, offset: int, size: int) -> str:
    """Return the text in the ``size`` bytes at ``offset``."""
    return text_of(bytes(segment.memory[offset : offset + size]))


def text_of(field: bytes) -> str:
    """Return the text of a NUL-padded field."""
    return field.split(b"\0", 1)[0].decode(errors="replace")


def write_text(segment: SharedBytes, offset: int, text: str, size: int) -> None:
    """Write ``text`` to a field of ``size`` bytes; the limit cuts whole characters."""
    kept = text.encode(errors="replace")[:size].decode(errors="ignore").encode()
    segment.words.write(offset, kept.ljust(size, b"\0"))
