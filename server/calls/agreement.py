"""Compares what the ranks did in a call: the group operations that each of them began.

In a correct call all members of a group begin the same collectives, and every message is both sent
and received. If not, an operation is left half done, and the next call's operations would be
matched with it: one request's data would end up in another's answer. Pure functions here;
`coordinator.begun_in_call` does the counting in each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from device_comm.begun import VERBS, counts_of
from shm_broadcast.errors import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from coordinator.begun_in_call import BegunInGroup


_COLLECTIVES_END = 4 * len(VERBS)


class Difference(NamedTuple):
    """Two ranks of a group that began different operations in a call.

    Attributes:
        group: the group's name.
        ranks: the two global ranks.
        did: what each of them began in the group, as text.
    """

    group: str
    ranks: tuple[int, int]
    did: tuple[str, str]


def first_divergence(reports: Mapping[int, Sequence[BegunInGroup]]) -> Difference | None:
    """The first difference between the ranks of a call; ``None`` if they have done the same.

    Args:
        reports: by rank, what `coordinator.begun_in_call.take_begun` returned there. A rank that
            is missing is not compared.
    """
    if not any(reports.values()):
        return None
    groups: dict[tuple[str, tuple[int, ...], int], dict[int, bytes]] = {}
    for rank, report in reports.items():
        for name, ranks, number, did in report:
            groups.setdefault((name, ranks, number), {})[rank] = did
    for (name, ranks, _), begun in groups.items():
        known = {rank: begun.get(rank, b"") for rank in ranks if rank in reports}
        found = _compare(ranks, known)
        if found is not None:
            return Difference(name, *found)
    return None


def _compare(
    ranks: tuple[int, ...], known: Mapping[int, bytes]
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    # The bytes first: nearly always they are equal, and no point-to-point message was sent.
    one = next(iter(known.values()))
    if all(did == one for did in known.values()) and not any(one[_COLLECTIVES_END:]):
        return None
    counts = {rank: counts_of(begun, len(ranks)) for rank, begun in known.items()}
    first = next(iter(counts))
    for rank, (collectives, _, _) in counts.items():
        if collectives != counts[first][0]:
            return (first, rank), _unlike(counts[first][0], collectives)
    for sender, (_, sent, _) in counts.items():
        for receiver, (_, _, received) in counts.items():
            out, taken = sent[ranks.index(receiver)], received[ranks.index(sender)]
            if out != taken:
                return (sender, receiver), (
                    f"sent {_messages(out)} to rank {receiver}",
                    f"received {_messages(taken)} from it",
                )
    return None


def _unlike(ours: Sequence[int], theirs: Sequence[int]) -> tuple[str, str]:
    """For two ranks, a text of the operations that they began a different number of times."""
    unlike = [code for code, verb in enumerate(VERBS) if ours[code] != theirs[code]]

    def told(counts: Sequence[int]) -> str:
        return "began " + " and ".join(f"{counts[code] or 'no'} {VERBS[code]}" for code in unlike)

    return told(ours), told(theirs)


def _messages(count: int) -> str:
    return counted(count, "message") if count else "no messages"
