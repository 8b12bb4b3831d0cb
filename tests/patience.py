"""Waiting in tests for what has to come, on machines that stall any process for seconds."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from shm_broadcast import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

STALL_SECONDS = 4.0
"""What a test adds to a bound that is no promise: the machine may keep all processes waiting."""

NAMED_WITHIN = 1.0
"""Seconds in which, as promised, a dead peer is named or an abort arrives."""

ATTEMPTS = 5

PATIENCE_SECONDS = 60.0
"""How long anything that has to come is waited for."""


def until(true: Callable[[], object], otherwise: str = "it did not come about") -> None:
    """Return once ``true()``, which must become so within `PATIENCE_SECONDS`."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < end, otherwise
        time.sleep(0.002)


async def auntil(true: Callable[[], object]) -> None:
    """As `until`; the event loop goes on meanwhile."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not true():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.005)


def quickest(attempt: Callable[[], float], promised: float) -> float:
    """The seconds of ``attempt``, repeated while it takes longer: the machine may stall."""
    for _ in range(ATTEMPTS - 1):
        seconds = attempt()
        if seconds < promised:
            return seconds
    return attempt()


def failure_of(call: Callable[[], object]) -> tuple[Any, float]:
    """The error that ``call`` raises, and when, on the clock that all processes share."""
    try:
        call()
    except CoordinatorError as error:
        return error, time.monotonic()
    raise AssertionError("nothing was raised")


def all_here(store: Store, n: int, place: str = "here") -> None:
    """Return once ``n`` ranks have called this, over a store and not the group under test.

    A barrier of the group would not do: a rank that fails after it may find others still in it.
    """
    if store.add(f"{place}/count", 1) == n:
        store.set(f"{place}/all", "")
    store.wait([f"{place}/all"])
