"""What ranks have begun, for tests that decide without processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.call_number import OperationCounts
from device_comm.shm.signature import sign
from tests.calls import in_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.call_counts import GroupOperationCounts


def begun(
    ranks: tuple[int, ...],
    name: str = "tp",
    number: int = 0,
    sent: Mapping[int, int] | None = None,
    received: Mapping[int, int] | None = None,
    signatures: tuple[bytes, ...] = (),
    **verbs: int,
) -> tuple[GroupOperationCounts, ...]:
    """What a member of one group reports: the collectives ``signatures``, how many of each verb
    behind them, and messages by rank in it.
    """
    did = OperationCounts(len(ranks))
    with in_call(1):
        for signature in signatures:
            did.add(signature)
        for verb, count in verbs.items():
            for _ in range(count):
                did.add(sign(verb))
        for peer, count in (sent or {}).items():
            for _ in range(count):
                did.count_sent(peer)
        for peer, count in (received or {}).items():
            for _ in range(count):
                did.count_received(peer)
    taken = did.take()
    return ((name, ranks, bytes([number]), *taken),) if any(taken) else ()
