"""The number of the pool's call that a thread carries out, which all ranks must agree on.

If one rank leaves an operation out of a call, its operation of the next call would be matched with
the others' of this call, and they would use each other's data of different requests. To prevent
that, a worker sets the number of its current call. The number goes with every operation through
shared memory and with every message. A rank that finds a number other than its own raises
`DivergenceError` instead of using the data.

The number belongs to a thread; other threads have 0. A call that hands operations to another thread
must do so on every rank.

A group that has members outside of the pool, or from another pool, takes part in no calls: its
members have no number in common.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_number", "naming_call", "numbering", "set_call_number"]

_BITS = (1 << 32) - 1


class _Current(threading.local):
    number = 0


try:
    from device_comm._native import call_number, set_call_number
except ImportError:
    _current = _Current()

    def call_number() -> int:
        """The number of this thread's call, modulo 2**32; 0: it is in no call."""
        return _current.number

    def set_call_number(number: int, /) -> None:
        """Set the number of the call that this thread is in; 0: none."""
        _current.number = number & _BITS


def numbering(in_calls: bool) -> Callable[[], int]:
    """What numbers a group's operations: `call_number`, or 0 where it takes part in no calls."""
    return call_number if in_calls else int


def naming_call(what: str, number: int) -> str:
    """``what`` with the number of the call, if it is not 0, for error messages."""
    return f"{what} in call {number}" if number else what
