"""The failures on a board: each member can report one; the first to claim the abort word aborts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shm_broadcast import layout
from shm_broadcast.board.fixed_text import read_text, write_text
from shm_broadcast.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shm_broadcast.board.fixed_text import SharedBytes
    from shm_broadcast.segment import Segment


def first_failure(segment: SharedBytes, ranks: Sequence[int]) -> Failure | None:
    """The failure that aborted the group, if one did.

    Args:
        segment: the board's.
        ranks: what its members are called.
    """
    first = segment.words.load32(layout.BOARD_ABORT)
    if first == 0:
        return None
    slot = layout.failure_slot(first - 1, len(ranks))
    return Failure(
        rank=ranks[first - 1],
        culprit=ranks[segment.words.load32(slot + layout.FAILURE_CULPRIT)],
        kind=read_text(segment, slot + layout.FAILURE_KIND, layout.FAILURE_KIND_BYTES),
        message=read_text(segment, slot + layout.FAILURE_MESSAGE, layout.FAILURE_MESSAGE_BYTES),
    )


def report_failure(
    segment: Segment, n_members: int, member: int, kind: str, text: str, culprit: int
) -> None:
    """Write down ``member``'s failure, unless it has one, and claim the abort word with it."""
    words, slot = segment.words, layout.failure_slot(member, n_members)
    if words.compare_and_swap32(slot + layout.FAILURE_CLAIMED, 0, 1):
        words.store32(slot + layout.FAILURE_CULPRIT, culprit)
        write_text(segment, slot + layout.FAILURE_KIND, kind, layout.FAILURE_KIND_BYTES)
        write_text(segment, slot + layout.FAILURE_MESSAGE, text, layout.FAILURE_MESSAGE_BYTES)
    # Also where it has one: a signal handler may have raised before that could abort anything.
    words.compare_and_swap32(layout.BOARD_ABORT, 0, member + 1)


def forget_failure(segment: Segment, n_members: int, member: int) -> None:
    """Let ``member``'s successor report a failure, unless that of ``member`` aborted the group."""
    if segment.words.load32(layout.BOARD_ABORT) != member + 1:
        slot = layout.failure_slot(member, n_members)
        segment.words.store32(slot + layout.FAILURE_CLAIMED, 0)


def kind_and_message(error: BaseException | str) -> tuple[str, str]:
    """The kind of an error, and its text."""
    if isinstance(error, str):
        return "Abort", error
    try:
        return type(error).__name__, str(error)
    except Exception as another:  # noqa: BLE001 - the group is aborted whatever its text says
        return type(error).__name__, f"no text: its __str__ raised {type(another).__name__}"
