"""Says which workers others wait for: what errors about late ones name beside them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from shm_broadcast.onlooker.own import own_verdicts

from ..launchers.local import LocalWorker

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from shm_broadcast.onlooker.blame import Verdict
    from shm_broadcast.onlooker.other_hosts import HostSeen
    from shm_broadcast.onlooker.parties import Party

    from ..launchers.worker_handle import WorkerHandle


class Sight(NamedTuple):
    """What was seen of workers that are late.

    Attributes:
        stacks: theirs, by rank.
        why: who holds up others, in words; ``""``: nobody does.
        held_up_by: the workers of the pool that do.
    """

    stacks: Mapping[int, str]
    why: str
    held_up_by: tuple[int, ...]


class _Process(NamedTuple):
    """A process of a program; ``host`` is ``""`` on this one."""

    host: str
    pid: int

    @classmethod
    def of(cls, party: Party) -> _Process:
        return cls(party.status.host, party.status.pid)

    @property
    def is_own(self) -> bool:
        return self == ("", os.getpid())


def held_up_by(
    workers: Mapping[int, WorkerHandle], elsewhere: Sequence[HostSeen] = ()
) -> tuple[str, tuple[int, ...]]:
    """Which of these workers, by rank, hold up others of them: in words, and their ranks.

    In words also who else does, in a group that workers share with processes that are none of
    theirs; and who is stopped, whoever waits for it.

    Args:
        workers: those of a pool.
        elsewhere: what other hosts of it see.
    """
    here = {
        _Process("", worker.pid): rank
        for rank, worker in workers.items()
        if isinstance(worker, LocalWorker)
    }
    there = {
        _Process(seen.host, member.status.pid): member.status.rank
        for seen in elsewhere
        for member in seen.there.members
        if member.status.pid and member.status.rank in workers
    }
    ranks = {**here, **there}
    culprits = [each for verdict in verdicts(elsewhere) for each in verdict.culprits]
    own = {
        ranks[_Process.of(each)]: each
        for each in culprits
        if _Process.of(each) in ranks
        and (each.is_stopped or any(not _Process.of(peer).is_own for peer in each.awaited_by))
    }
    who = {rank: each.status.who for rank, each in own.items()}
    told = [
        f"{who[rank]} holds up others: {each.holds_up()}"
        for rank, each in own.items()
        if not each.waits_on
    ]
    knot = [who[rank] for rank, each in own.items() if each.waits_on]
    told += [f"{' and '.join(knot)} wait for each other"] if knot else []
    told += [
        f"{each.who} holds up others: {each.holds_up()}"
        for each in culprits
        if each.status.pid and _Process.of(each) not in ranks and _holds_up_one_of(ranks, each)
    ]
    return "; ".join(told), tuple(own)


def verdicts(elsewhere: Sequence[HostSeen]) -> list[Verdict]:
    """As `own_verdicts`; none if /proc cannot be read, say for want of descriptors: what they are
    wanted for is needed all the same.
    """
    try:
        return own_verdicts(elsewhere)
    except OSError:
        return []


def _holds_up_one_of(processes: Container[_Process], culprit: Party) -> bool:
    """Whether one of these waits for it, also because of others, but not because of this process,
    which all workers wait for that have no call.
    """
    reached = [] if _Process.of(culprit).is_own else [culprit]
    for late in reached:
        for each in late.awaited_by:
            if _Process.of(each) in processes:
                return True
            if each not in reached and not _Process.of(each).is_own:
                reached.append(each)
    return False
