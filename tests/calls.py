"""Being in a pool's call, for tests that need no pool."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from device_comm.call_number import call_number, set_call_number

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def in_call(number: int) -> Iterator[None]:
    """Inside, this thread is in call ``number``; after that, in the one before."""
    before = call_number()
    set_call_number(number)
    try:
        yield
    finally:
        set_call_number(before)
