"""Read and write words and texts of shared memory: the C extension's type, or a slower one in
Python.

`make_words` gives the extension's ``Words`` where it was built, else `PythonWords`. The latter is
correct on x86-64 for words with a single writer: CPython copies an aligned word in one move, and
x86 keeps stores in order and loads in order. It sleeps by polling. Its ``add32`` and
compare-and-swaps are not atomic between processes, and nothing depends on that: a lost wake-up
costs one wait slice, and of two members that abort at the same moment either may be named first.
"""

from __future__ import annotations

import os
import struct
import time
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shm_broadcast.extension import extension_of
from shm_broadcast.layout import (
    ENTRY_BYTES,
    ENTRY_END,
    ENTRY_FORMAT,
    ENTRY_NUMBER,
    ENTRY_OUTCOME,
    ENTRY_SEQUENCE,
    ENTRY_STRIDE,
    EVENTCOUNT_WAITERS,
    HISTORY_ENTRIES,
    MEMBER_OPERATION,
    MEMBER_PROGRESS,
    MEMBER_SEQUENCE,
    MEMBER_STATE,
    NO_PEER,
    OPERATION_BYTES,
    OUTCOME_DONE,
    TOTAL_BYTES,
    TOTAL_ENDED,
    TOTAL_FAILED,
    TOTAL_GROUPS,
    TOTAL_NAME_STRIDE,
    TOTAL_NS,
    TOTAL_STRIDE,
    TOTAL_VERBS,
    TOTALS,
    TOTALS_ROWS,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shm_broadcast._native import Words


class SharedBytes(Protocol):
    """A segment, or a copy of one that is only read."""

    @property
    def words(self) -> WordsLike:
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


native: ModuleType | None = extension_of("shm_broadcast")

POLL_SECONDS = 0.0005

_ENTRY = struct.Struct(ENTRY_FORMAT)


class PythonWords:
    """The extension's ``Words`` in Python; the module's docstring has its limits."""

    def __init__(self, buffer: Buffer, /) -> None:
        self._bytes = memoryview(buffer).cast("B")
        whole = len(self._bytes) & ~7
        self._words64 = self._bytes[:whole].cast("Q")
        self._words32 = self._bytes[:whole].cast("I")

    def load32(self, offset: int, /) -> int:
        """Load a 32-bit word."""
        return self._words32[_index(offset, 4)]

    def load64(self, offset: int, /) -> int:
        """Load a 64-bit word."""
        return self._words64[_index(offset, 8)]

    def store32(self, offset: int, value: int, /) -> None:
        """Store a 32-bit word."""
        self._words32[_index(offset, 4)] = value

    def store64(self, offset: int, value: int, /) -> None:
        """Store a 64-bit word."""
        self._words64[_index(offset, 8)] = value

    def add32(self, offset: int, value: int, /) -> int:
        """Add to a 32-bit word; returns the value before."""
        before = self.load32(offset)
        self.store32(offset, (before + value) & 0xFFFFFFFF)
        return before

    def compare_and_swap32(self, offset: int, expected: int, desired: int, /) -> bool:
        """Store ``desired`` if the word holds ``expected``; whether it did."""
        if self.load32(offset) != expected:
            return False
        self.store32(offset, desired)
        return True

    def compare_and_swap64(self, offset: int, expected: int, desired: int, /) -> bool:
        """Store ``desired`` if the word holds ``expected``; whether it did."""
        if self.load64(offset) != expected:
            return False
        self.store64(offset, desired)
        return True

    def ring(self, eventcount: int, /) -> None:
        """Change the doorbell; sleepers poll it."""
        if self.load32(eventcount + EVENTCOUNT_WAITERS):
            self.add32(eventcount, 1)

    def sleep_on(self, eventcount: int, seen: int, seconds: float, /) -> None:
        """Sleep one poll interval unless the doorbell has changed already."""
        if self.load32(eventcount) == seen:
            time.sleep(min(seconds, POLL_SECONDS))

    def spin64(self, offset: int, seen: int, spin_ns: int, /) -> bool:
        """Look again and again, yielding the core, until the word changes or the window ends."""
        until = time.monotonic_ns() + spin_ns
        while self.load64(offset) == seen:
            if time.monotonic_ns() >= until:
                return False
            os.sched_yield()
        return True

    def write(self, offset: int, buffer: Buffer, /) -> None:
        """Copy all of ``buffer`` to ``offset``."""
        source = memoryview(buffer).cast("B")
        self._bytes[offset : offset + len(source)] = source

    def read_into(self, offset: int, buffer: Buffer, /) -> None:
        """Fill all of ``buffer`` from ``offset``."""
        target = memoryview(buffer).cast("B")
        target[:] = self._bytes[offset : offset + len(target)]

    def stamp(
        self,
        slot: int,
        state: int,
        operation: str,
        history: int = 0,
        group: str = "",
        verb: int = 0,
        size: int = 0,
        number: int = 0,
        peer: int = NO_PEER,
        dtype: int = 0,
        /,
    ) -> int:
        """Note in a member slot and a history that an operation begins; returns its number."""
        name = operation.encode()[:OPERATION_BYTES].ljust(OPERATION_BYTES, b"\0")
        self.write(slot + MEMBER_OPERATION, name)
        sequence = self.load64(slot + MEMBER_SEQUENCE) + 1
        if history:
            now = time.monotonic_ns()
            about = (now, 0, sequence, size, number, peer, verb, dtype, 0, group.encode())
            self.write(_entry(history, sequence), _ENTRY.pack(*about))
        self.store64(slot + MEMBER_SEQUENCE, sequence)
        self.progress(slot, state)
        return sequence

    def leave(self, history: int, sequence: int, outcome: int, size: int, number: int, /) -> None:
        """Note in a history how an operation ended."""
        if not history or not sequence:
            return
        entry = _entry(history, sequence)
        if self.load64(entry + ENTRY_SEQUENCE) != sequence or self.load64(entry + ENTRY_END):
            return
        if size:
            self.store64(entry + ENTRY_BYTES, size)
        if number:
            self.store32(entry + ENTRY_NUMBER, number)
        self._bytes[entry + ENTRY_OUTCOME] = outcome
        self.store64(entry + ENTRY_END, time.monotonic_ns())
        self._count(history, entry)

    def _count(self, history: int, entry: int) -> None:
        """Add an operation that has ended to its group's and verb's totals."""
        begin, end, _, size, _, _, verb, _, outcome, name = _ENTRY.unpack_from(self._bytes, entry)
        if not 0 < verb < TOTAL_VERBS:
            return
        group = 0
        while name[0] and (group := group + 1) < TOTAL_GROUPS - 1:
            at = history + TOTALS + group * TOTAL_NAME_STRIDE
            if not self._bytes[at]:
                self.write(at, name)
            if self._bytes[at : at + len(name)] == name:
                break
        total = history + TOTALS_ROWS + (group * TOTAL_VERBS + verb) * TOTAL_STRIDE
        for field, more in (
            (TOTAL_FAILED, int(outcome != OUTCOME_DONE)),
            (TOTAL_NS, end - begin),
            (TOTAL_BYTES, size),
            (TOTAL_ENDED, 1),
        ):
            self.store64(total + field, self.load64(total + field) + more)

    def progress(self, slot: int, state: int, /) -> None:
        """Note the current time and the state in a member slot."""
        self.store64(slot + MEMBER_PROGRESS, time.monotonic_ns())
        self.store32(slot + MEMBER_STATE, state)

    def fence(self) -> None:
        """Do nothing: Python has no fence. A missed wake-up costs one poll interval here."""


def _entry(history: int, sequence: int) -> int:
    return history + (sequence - 1) % HISTORY_ENTRIES * ENTRY_STRIDE


def _index(offset: int, width: int) -> int:
    if offset < 0 or offset % width:
        raise ValueError(f"offset {offset} is not aligned to {width}")
    return offset // width


WordsLike: TypeAlias = "PythonWords | Words"
"""What both offer, as ``native/words.c`` says; offsets are bytes, aligned to the word's width."""


def make_words(buffer: Buffer) -> WordsLike:
    """The words of ``buffer``: the extension's type where it was built, else `PythonWords`."""
    words: WordsLike = PythonWords(buffer) if native is None else native.Words(buffer)
    return words
