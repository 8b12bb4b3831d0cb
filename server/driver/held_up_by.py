"""Says which workers others wait for: what errors about late ones name beside them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shm_broadcast.onlooker.own import own_verdicts
from shm_broadcast.onlooker.processes import condition_of

from ..hosts.distant_worker import DistantWorker
from ..launchers.local import LocalWorker

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from shm_broadcast.onlooker.parties import Party

    from ..launchers.worker_handle import WorkerHandle


def held_up_by(workers: Mapping[int, WorkerHandle]) -> tuple[str, tuple[int, ...]]:
    """Which of these workers, by rank, hold up others of them: in words, and their ranks.

    In words also who else does, in a group that workers share with processes that are none of
    theirs. Of workers on other hosts, what their hosts said when their stacks were asked for last.
    """
    here = {rank: worker for rank, worker in workers.items() if isinstance(worker, LocalWorker)}
    ranks = {worker.pid: rank for rank, worker in here.items()}
    try:
        culprits = [each for verdict in own_verdicts() for each in verdict.culprits]
    except OSError:  # out of descriptors, say: the error is needed all the same
        return "", ()
    own = {
        ranks[each.status.pid]: each
        for each in culprits
        if each.status.pid in ranks
        and any(peer.status.pid != os.getpid() for peer in each.awaited_by)
    }
    who = {rank: f"rank {rank} (pid {each.status.pid})" for rank, each in own.items()}
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
        if each.status.pid not in {0, *ranks} and _holds_up_one_of(ranks, each)
    ]
    elsewhere = {
        rank: worker.holds_up
        for rank, worker in workers.items()
        if isinstance(worker, DistantWorker) and worker.holds_up
    }
    return "; ".join([*told, *dict.fromkeys(elsewhere.values())]), (*own, *elsewhere)


def holds_up(rank: int, workers: Mapping[int, LocalWorker]) -> str:
    """What a host says of one of its workers, which others may wait for on whatever host.

    Args:
        rank: the worker's.
        workers: all of this host.

    Returns:
        ``""`` if nothing is wrong with it that can be seen here.
    """
    why, culprits = held_up_by(workers)
    if rank in culprits:
        return why
    pid = workers[rank].pid
    stopped = condition_of(pid) == "stopped"
    return f"rank {rank} (pid {pid}) is stopped, by a signal or a debugger" if stopped else ""


def _holds_up_one_of(pids: Container[int], culprit: Party) -> bool:
    """Whether one of these processes waits for it, also because of others, but not because of this
    process, which all workers wait for that have no call.
    """
    reached = [] if culprit.status.pid == os.getpid() else [culprit]
    for late in reached:
        for each in late.awaited_by:
            if each.status.pid in pids:
                return True
            if each not in reached and each.status.pid != os.getpid():
                reached.append(each)
    return False
