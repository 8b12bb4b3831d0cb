"""The least that waking another process takes: a word in shared memory, and Linux's futex.

Nothing is carried: what a queue or a call needs more than this is its own.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any

from benchmarks.queue_systems import READERS, Spawned

_NUMBER = {"x86_64": 202, "aarch64": 98}[platform.machine()]
_WAIT, _WAKE = 0, 1
_END = 0xFFFFFFFF
_syscall = ctypes.CDLL(None, use_errno=True).syscall


class Futex(Spawned):
    """Two words for each reader: asked, and answered."""

    name = "a bare futex"
    works = ("echo", "wake")

    def start(self, n_readers: int) -> None:
        self._pairs = [READERS.RawArray(ctypes.c_uint32, 2) for _ in range(n_readers)]
        self._sent = 0
        self.start_readers(answer, [(pair,) for pair in self._pairs])

    def send(self, command: str, payload: Any) -> None:
        self._sent += 1
        self._payload = payload
        for pair in self._pairs:
            ring(pair, 0, _END if command == "stop" else self._sent)

    def replies(self) -> list[Any]:
        for pair in self._pairs:
            wait_while(pair, 1, self._sent - 1)
        return [self._payload] * len(self._pairs)


def answer(pair: Any) -> None:
    """A reader's process."""
    seen = 0
    while (asked := wait_while(pair, 0, seen)) != _END:
        seen = asked
        ring(pair, 1, seen)


def ring(words: Any, index: int, value: int) -> None:
    """Store a word, and wake who waits for it."""
    words[index] = value
    _syscall(_NUMBER, ctypes.byref(words, 4 * index), _WAKE, 1, None, None, 0)


def wait_while(words: Any, index: int, value: int) -> int:
    """Sleep until a word is no longer ``value``; what it is then."""
    while words[index] == value:
        _syscall(_NUMBER, ctypes.byref(words, 4 * index), _WAIT, value, None, None, 0)
    return int(words[index])
