"""Compares what the ranks did in a call: the group operations that each of them began.

In a correct call all members of a group begin the same collectives in the same order, and every
message is both sent and received. If not, an operation is left half done, and the next call's
operations would be matched with it: one request's data would end up in another's answer; or the
data of an operation are wrong, or end a process, where the transport does not compare what the
ranks call. Pure functions here; `device_comm.begun` fingerprints the operations in each rank, and
the board has the tallies of a rank whose process has ended.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from device_comm.begun import BEGUN_KEPT, SIGNATURE_WORDS, VERBS, did_of, has_messages
from shm_broadcast.errors import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from coordinator.begun_in_call import BegunInGroup
    from device_comm.begun import Did
    from shm_broadcast.board.history import PastOperation
    from shm_broadcast.board.tallies import Tally

_U32: Final = (1 << 32) - 1
_AHEAD: Final = 1 << 31


class Difference(NamedTuple):
    """Two ranks of a group that began different operations in a call.

    Attributes:
        group: the group's name.
        ranks: the two global ranks; most ranks did as the first, if there are more.
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


def fatal_divergence(
    rank: int,
    operation: str,
    tallies: Mapping[int, Sequence[Tally]],
    past: Callable[[int], Sequence[PastOperation]],
) -> Difference | None:
    """The difference in the collective in which a rank's process ended; ``None`` if there is none.

    Gloo aborts a process that receives more bytes than it expects, whichever rank is wrong.

    Args:
        rank: the rank whose process ended.
        operation: its last operation, as `MemberStatus.operation`.
        tallies: by rank, those that the board has.
        past: the last operations of a rank, as far as the board has them. Only asked about ranks
            that have begun that collective.
    """
    group, _, verb = operation.rpartition(" ")
    for lost in tallies[rank]:
        if verb in VERBS and lost.last.startswith(bytes([VERBS.index(verb)])):
            begun = {
                each: tally
                for each, its in sorted(tallies.items())
                for tally in its
                if tally.group == lost.group and (tally.count - lost.count) & _U32 < _AHEAD
            }
            last = {each: tally for each, tally in begun.items() if tally.count == lost.count}
            found = _compare_last(last) or _compare_past(rank, verb, begun, past)
            if found is not None:
                return Difference(group, *found)
    return None


def _compare_last(last: Mapping[int, Tally]) -> tuple[tuple[int, int], tuple[str, str]] | None:
    ranks = _unlike_ranks({rank: tally.digest for rank, tally in last.items()})
    if ranks is None:
        return None
    ours, theirs = (_began(last[rank].last) for rank in ranks)
    return ranks, (ours, theirs if ours != theirs else f"{theirs}, after others")


def _compare_past(
    rank: int, verb: str, begun: Iterable[int], past: Callable[[int], Sequence[PastOperation]]
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    """Compare the last collective of ``rank`` with what the ranks have begun that are further."""
    number = next(
        ((each.group, each.number) for each in reversed(past(rank)) if each.verb == verb), None
    )
    known = {}
    for each in begun:
        alike = [
            one for one in past(each) if (one.group, one.number) == number and one.verb in VERBS
        ]
        if len(alike) == 1:  # more: another group has the same name
            known[each] = alike[0]
    if rank not in known:
        return None
    ranks = _unlike_ranks(
        {each: (one.verb, one.dtype, one.size, one.peer) for each, one in known.items()}
    )
    if ranks is None:
        return None
    from device_comm.wrappers.chain import first_difference  # noqa: PLC0415 - loads torch
    from device_comm.wrappers.late import past_text  # noqa: PLC0415 - loads torch

    ours, theirs = (known[each] for each in ranks)
    if first_difference([ours], [theirs], ours.group, 0) is None:
        return None
    return ranks, (f"began {past_text(ours)}", f"began {past_text(theirs)}")


def _compare(
    ranks: tuple[int, ...], known: Mapping[int, bytes]
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    # The bytes first: nearly always they are equal, and no point-to-point message was sent.
    one = next(iter(known.values()))
    if all(begun == one for begun in known.values()) and not has_messages(one):
        return None
    did = {rank: did_of(begun, len(ranks)) for rank, begun in known.items()}
    unlike = _unlike_ranks({rank: (each.collectives, each.checksum) for rank, each in did.items()})
    if unlike is not None:
        return unlike, _unlike(did[unlike[0]], did[unlike[1]])
    for sender in did:
        for receiver in did:
            out = did[sender].sent[ranks.index(receiver)]
            taken = did[receiver].received[ranks.index(sender)]
            if out != taken:
                return (sender, receiver), (
                    f"sent {_messages(out)} to rank {receiver}",
                    f"received {_messages(taken)} from it",
                )
    return None


def _unlike_ranks(marks: Mapping[int, Hashable]) -> tuple[int, int] | None:
    """The first rank that has the most frequent mark, and the first that has another one."""
    most = Counter(marks.values()).most_common(1)[0][0]
    first = next(rank for rank, mark in marks.items() if mark == most)
    return next(((first, rank) for rank, mark in marks.items() if mark != most), None)


def _unlike(ours: Did, theirs: Did) -> tuple[str, str]:
    """For two ranks, what the first collective was that is known to differ."""
    for number in sorted(ours.last.keys() | theirs.last.keys()):
        here, there = (_collective(each, number) for each in (ours, theirs))
        if here and there and ours.last.get(number) != theirs.last.get(number):
            return here, f"{there}, of other sizes" if here == there else there
    did = f"began {ours.collectives} collectives", f"began {theirs.collectives} others"
    return did[0], f"{did[1]}: they differ before the last {BEGUN_KEPT}"


def _collective(did: Did, number: int) -> str:
    """What a rank's collective of that number was; ``""``: it is not kept."""
    if number > did.collectives:
        count = counted(did.collectives, "collective") if did.collectives else "no collective"
        return f"began {count}"
    if number not in did.last:
        return ""
    return f"{_began(did.last[number])} (collective {number})"


def _began(signature: bytes) -> str:
    from device_comm.shm.signature import signature_text, with_chunk  # noqa: PLC0415 - loads torch

    whole = signature.ljust(SIGNATURE_WORDS * 8, b"\0")
    return f"began {signature_text(with_chunk(whole, 0))}"


def _messages(count: int) -> str:
    return counted(count, "message") if count else "no messages"
