"""Read and write texts in shared memory; its words are `Words`, a type of the C extension."""

from __future__ import annotations

from typing import Protocol

from shm_broadcast._native import Words


class SharedBytes(Protocol):
    """A segment, or a copy of one that is only read."""

    @property
    def words(self) -> Words:
        """Its atomic words."""

    @property
    def memory(self) -> memoryview:
        """Its bytes."""


def read_text(segment: SharedBytes, offset: int, size: int) -> str:
    """The text in the ``size`` bytes at ``offset``."""
    return text_of(bytes(segment.memory[offset : offset + size]))


def text_of(field: bytes) -> str:
    """The text in a field."""
    return field.split(b"\0", 1)[0].decode(errors="replace")


def write_text(segment: SharedBytes, offset: int, text: str, size: int) -> None:
    """Put ``text`` there; a character that the limit would cut in two is dropped whole."""
    kept = text.encode(errors="replace")[:size].decode(errors="ignore").encode()
    segment.words.write(offset, kept.ljust(size, b"\0"))
