"""What /status and the page show of the workers and of failures, as plain data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shm_broadcast.onlooker.processes import condition_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.rank_grid import RankGrid
    from shm_broadcast import MemberStatus

LONGEST_TEXT = 4000
"""Characters of a text that are shown: messages of workers have no limit of their own."""


def workers(grid: RankGrid, statuses: Sequence[MemberStatus]) -> list[dict[str, Any]]:
    """Each worker: its status, its place on each axis, and whether its process is stopped."""
    return [
        {
            **asdict(status),
            "place": grid.coordinates(status.rank),
            "stopped": _is_stopped(status),
        }
        for status in statuses
    ]


def past_failure(failure: tuple[float, BaseException] | None) -> dict[str, object] | None:
    """When something failed last, in seconds since the epoch, and why."""
    return None if failure is None else {"at": failure[0], "text": clipped(failure[1])}


def clipped(text: object) -> str:
    """A text, cut where it is longer than `LONGEST_TEXT`."""
    whole = str(text)
    left = len(whole) - LONGEST_TEXT
    return whole if left <= 0 else f"{whole[:LONGEST_TEXT]} ... and {left} characters more"


def _is_stopped(status: MemberStatus) -> bool:
    here = not status.host and status.state in ("idle", "busy")
    return here and condition_of(status.pid) == "stopped"
