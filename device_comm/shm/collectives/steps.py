"""What carries out plans: the C extension's ``Comm``, or its Python twin `python_steps`."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from device_comm.shm.collectives.slot_plan import SlotPlan


class Status(IntEnum):
    """How far a plan has come."""

    DONE = 0
    BLOCKED = 1
    DIVERGED = 2


class Steps(Protocol):
    """One rank's steps. One plan at a time, one thread at a time."""

    def begin(self, plan: SlotPlan, call: int, /) -> None:
        """Take on a plan, in the call of that number; the one before is done."""

    def advance(self, spin_ns: int, /) -> int:
        """Go on, and look ``spin_ns`` for more: a `Status`.

        It is blocked too, and `ready` at once, when it has moved a few MiB.
        """

    def ready(self) -> bool:
        """Whether `advance` would get further, after it was blocked."""

    def missing(self) -> list[int]:
        """The ranks that are waited for, after `advance` was blocked."""

    def divergent(self) -> tuple[int, bytes, bytes] | None:
        """The first rank that has arrived with another signature; this rank's, and its."""
