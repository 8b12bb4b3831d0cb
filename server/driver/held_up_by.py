"""Says which workers others wait for: what errors about late ones name beside them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from shm_broadcast.onlooker.other_hosts import joined
from shm_broadcast.onlooker.own import own_verdicts
from shm_broadcast.onlooker.parties import parties_of
from shm_broadcast.onlooker.processes import scan
from shm_broadcast.onlooker.programs import of_process, programs

from ..launchers.local import LocalWorker

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from shm_broadcast.onlooker.blame import Verdict
    from shm_broadcast.onlooker.other_hosts import HostSeen
    from shm_broadcast.onlooker.parties import Party
    from shm_broadcast.onlooker.processes import Scan

    from ..launchers.worker_handle import WorkerHandle


_STOPPED: Final = "its process is stopped, by a signal or a debugger"


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
    ranks = _ranks(workers, elsewhere)
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


def stuck_in_start(
    workers: Mapping[int, WorkerHandle],
    starting: AbstractSet[int],
    elsewhere: Sequence[HostSeen] = (),
) -> dict[int, str]:
    """Why workers cannot finish their start, by rank: a process is stopped, or waits in a group for
    a rank that has started.

    Args:
        workers: those of a pool.
        starting: the ranks that have not started yet.
        elsewhere: as for `held_up_by`.
    """
    try:
        seen = scan()
    except OSError:
        return {}
    stuck = {
        rank: _STOPPED
        for rank in starting
        if isinstance(worker := workers[rank], LocalWorker) and _is_stopped(worker, seen)
    }
    ranks = _ranks(workers, elsewhere)
    for program in of_process(os.getpid(), seen, programs(seen)):
        parties = parties_of(joined(program, elsewhere).boards)
        rank_of = {name: ranks.get(_Process.of(each), -1) for name, each in parties.items()}
        own = {rank: parties[name] for name, rank in rank_of.items() if rank in starting}
        stuck.update({rank: _STOPPED for rank, each in own.items() if each.is_stopped})
        waits = {
            rank: {rank_of[name]: wait.operation for name, wait in each.waits_on.items()}
            for rank, each in own.items()
            if each.waits_on and rank not in stuck
        }
        # Who waits for one that still works may be right to do so, whomever else it waits for.
        started = workers.keys() - starting
        while free := [r for r in waits if not waits[r].keys() <= {*started, *stuck, *waits}]:
            for rank in free:
                del waits[rank]
        for rank, late in waits.items():
            for peer in sorted(late.keys() & started)[:1]:
                stuck[rank] = f"it waits in {late[peer]} for rank {peer}, which has started"
    return stuck


def _is_stopped(worker: LocalWorker, seen: Scan) -> bool:
    """Whether a worker's process is stopped; before its `Hello` its keeper is known only."""
    return any(
        each.condition == "stopped"
        and (each.pid == worker.pid or (each.parent == worker.pid and not worker.greeted))
        for each in seen.processes.values()
    )


def _ranks(
    workers: Mapping[int, WorkerHandle], elsewhere: Sequence[HostSeen]
) -> dict[_Process, int]:
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
    return {**here, **there}


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
