"""What ranks have begun, for tests that decide without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.begun import Begun
from tests.calls import in_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.begun_in_call import BegunInGroup


def begun(
    ranks: tuple[int, ...],
    name: str = "tp",
    number: int = 0,
    sent: Mapping[int, int] | None = None,
    received: Mapping[int, int] | None = None,
    **verbs: int,
) -> tuple[BegunInGroup, ...]:
    """What a member of one group reports: how many of each verb, and messages by rank in it."""
    counts = Begun(len(ranks))
    with in_call(1):
        for verb, count in verbs.items():
            for _ in range(count):
                counts.count(verb)
        for peer, count in (sent or {}).items():
            for _ in range(count):
                counts.count_sent(peer)
        for peer, count in (received or {}).items():
            for _ in range(count):
                counts.count_received(peer)
    counted = counts.take()
    return ((name, ranks, number, counted),) if counted else ()
