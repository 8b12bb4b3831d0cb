"""Start the processes of a pool's workers, wait until they are ready, replace and end them."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, NamedTuple

from shm_broadcast import Deadline, Failure, GroupTimeoutError, QueueHandle

from ..control.attentive_clock import PauseAwareClock
from ..control.channel import RendezvousServer
from ..control.protocol import Failed, FromWorker, Ready, WorkProgress, rebuild
from ..errors import WorkerStartError
from ..inspection.diagnosis import Diagnosis, WaitNode, own_diagnoses, wait_graph
from ..inspection.snapshot import (
    HostSnapshot,
    Scan,
    merge_hosts,
    of_process,
    programs,
    scan,
)
from ..launchers.local import LocalWorker, WorkerHandle, end, launch, worker_stacks
from .supervisor import REASON_SECONDS, Supervisor, WorkerEvents

if TYPE_CHECKING:
    from ..hosts.remote_hosts import RemoteHosts
    from ..launchers.fork_servers import Tick
    from .links import SharedResources
    from .pool_plan import PoolPlan


_STOPPED: Final = "its process is stopped, by a signal or a debugger"


class HangReport(NamedTuple):
    """What was seen of workers that are late.

    Attributes:
        stacks: theirs, by rank.
        why: who holds up others, in words; ``""``: nobody does.
        held_up_by: the workers of the pool that do.
    """

    stacks: Mapping[int, str]
    why: str
    blocked_by: tuple[int, ...]


class _Process(NamedTuple):
    """A process of a program; ``host`` is ``""`` on this one."""

    host: str
    pid: int

    @classmethod
    def of(cls, party: WaitNode) -> _Process:
        return cls(party.status.host, party.status.pid)

    @property
    def is_own(self) -> bool:
        return self == ("", os.getpid())


def blocked_by(
    workers: Mapping[int, WorkerHandle], elsewhere: Sequence[HostSnapshot] = ()
) -> tuple[str, tuple[int, ...]]:
    """Which of these workers, by rank, hold up others of them: in words, and their ranks.

    In words also who else does, in a group that workers share with processes that are none of
    theirs; and who is stopped, whoever waits for it.

    Args:
        workers: those of a pool.
        elsewhere: what other hosts of it see.
    """
    ranks = _ranks(workers, elsewhere)
    culprits = [each for verdict in diagnoses(elsewhere) for each in verdict.culprits]
    own = {
        ranks[_Process.of(each)]: each
        for each in culprits
        if _Process.of(each) in ranks
        and (each.is_stopped or any(not _Process.of(peer).is_own for peer in each.waited_by))
    }
    who = {rank: each.status.who for rank, each in own.items()}
    told = [
        f"{who[rank]} holds up others: {each.reason()}"
        for rank, each in own.items()
        if not each.waits_for
    ]
    knot = [who[rank] for rank, each in own.items() if each.waits_for]
    told += [f"{' and '.join(knot)} wait for each other"] if knot else []
    told += [
        f"{each.who} holds up others: {each.reason()}"
        for each in culprits
        if each.status.pid and _Process.of(each) not in ranks and _holds_up_one_of(ranks, each)
    ]
    return "; ".join(told), tuple(own)


def stuck_in_start(
    workers: Mapping[int, WorkerHandle],
    starting: AbstractSet[int],
    elsewhere: Sequence[HostSnapshot] = (),
) -> dict[int, str]:
    """Why workers cannot finish their start, by rank: a process is stopped, or waits in a group for
    a rank that has started.

    Args:
        workers: those of a pool.
        starting: the ranks that have not started yet.
        elsewhere: as for `blocked_by`.
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
        parties = wait_graph(merge_hosts(program, elsewhere).boards)
        rank_of = {name: ranks.get(_Process.of(each), -1) for name, each in parties.items()}
        own = {rank: parties[name] for name, rank in rank_of.items() if rank in starting}
        stuck.update({rank: _STOPPED for rank, each in own.items() if each.is_stopped})
        waits = {
            rank: {rank_of[name]: wait.operation for name, wait in each.waits_for.items()}
            for rank, each in own.items()
            if each.waits_for and rank not in stuck
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
        and (each.pid == worker.pid or (each.parent == worker.pid and not worker.connected))
        for each in seen.processes.values()
    )


def _ranks(
    workers: Mapping[int, WorkerHandle], elsewhere: Sequence[HostSnapshot]
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


def diagnoses(elsewhere: Sequence[HostSnapshot]) -> list[Diagnosis]:
    """As `own_diagnoses`; none if /proc cannot be read, say for want of descriptors: what they are
    wanted for is needed all the same.
    """
    try:
        return own_diagnoses(elsewhere)
    except OSError:
        return []


def _holds_up_one_of(processes: Container[_Process], culprit: WaitNode) -> bool:
    """Whether one of these waits for it, also because of others, but not because of this process,
    which all workers wait for that have no call.
    """
    reached = [] if _Process.of(culprit).is_own else [culprit]
    for late in reached:
        for each in late.waited_by:
            if _Process.of(each) in processes:
                return True
            if each not in reached and not _Process.of(each).is_own:
                reached.append(each)
    return False


_LOOK_SECONDS: Final = 1.0
"""How often to look at most whether a worker cannot finish its start: a look takes 10 ms."""
_log = logging.getLogger(__name__)


class ReadyBarrier(WorkerEvents):
    """The supervisor's watcher while workers start: collects what they report.

    Attributes:
        replies: the queues that workers on other hosts have made for their replies, by rank.

    Args:
        ranks: all workers of the pool.
        plan: the pool's; what its ``on_progress`` raises ends the start.
        show: called with the ranks that are not ready yet, again and again.
        look: looks what workers do that are late.
        stuck: says why some of the ranks that it is given cannot finish their start.
        may_say_why: whether a worker may still tell the real cause; it is waited for up to
            `REASON_SECONDS` then.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        plan: PoolPlan,
        show: Callable[[Iterable[int]], None],
        look: Callable[[Iterable[int]], HangReport],
        stuck: Callable[[AbstractSet[int]], Mapping[int, str]],
        may_say_why: Callable[[], bool],
    ) -> None:
        self._on_progress = plan.on_progress
        self._show = show
        self._look = look
        self._stuck = stuck
        self._stuck_after = math.inf if plan.stuck_after is None else plan.stuck_after
        self._clock = PauseAwareClock(self._stuck_after / 4)
        self._look_seconds = min(_LOOK_SECONDS, self._stuck_after / 4)
        self._look_at = time.monotonic() + self._look_seconds
        self._stuck_since: dict[tuple[int, str], float] = {}
        self._patience = plan.config.stack_seconds  # for the real cause, behind hearsay
        self.replies: dict[int, QueueHandle] = {}
        self._absent = set(ranks)
        self._failure: WorkerStartError | None = None
        self._may_say_why = may_say_why
        self._hearsay: WorkerStartError | None = None
        self._heard_at = 0.0
        self._have_told: set[int] = set()

    def wait(self, supervisor: Supervisor, deadline: Deadline, tick: Callable[[], float]) -> None:
        """Wait until every worker is ready.

        Args:
            supervisor: watches the workers.
            deadline: when to give up.
            tick: called again and again; returns the seconds until its next call.

        Raises:
            WorkerStartError: a worker has failed, or was not ready in time.
            What ``tick`` raises.
        """
        while self._absent:
            self._show(sorted(self._absent))
            pause = min(deadline.remaining(), self._hearsay_remaining(), tick())
            supervisor.step(self, min(pause, max(self._look_at - time.monotonic(), 0.0)))
            if self._failure is not None:
                raise self._failure
            if self._hearsay is not None and not self._hearsay_remaining():
                raise self._hearsay
            if self._look_at <= time.monotonic():
                self._look_for_stuck()
            if deadline.expired and self._absent:
                raise self._late(deadline)

    def _look_for_stuck(self) -> None:
        """Name workers that cannot finish their start, once each.

        Raises:
            WorkerStartError: one could not for as long as a call may take.
        """
        stuck, now = self._stuck(self._absent), self._clock.read()
        for rank, why in sorted(stuck.items() - self._stuck_since.keys()):
            _log.warning("the worker of rank %d does not start: %s", rank, why)
        self._stuck_since = {each: self._stuck_since.get(each, now) for each in stuck.items()}
        for (rank, why), since in self._stuck_since.items():
            if now - since >= self._stuck_after:
                stacks = self._look([rank]).stacks
                reason = f"stuck for {self._stuck_after:g} s: {why}"
                raise WorkerStartError(rank, reason, stacks.get(rank, ""))
        self._look_at = time.monotonic() + self._look_seconds

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Note a worker's message; called by the supervisor."""
        match message:
            case Ready(replies):
                self._absent.discard(rank)
                if replies is not None:
                    self.replies[rank] = replies
            case WorkProgress(done, total, what):
                self._on_progress(rank, done, total, what)
            case Failed():
                self._failed(rank, message)

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Note that a worker's process has ended, unless it has reported hearsay before."""
        if rank not in self._have_told:
            self._failure = self._failure or WorkerStartError(rank, how, stack)

    def _failed(self, rank: int, failed: Failed) -> None:
        self._have_told.add(rank)
        cause = rebuild(failed, rank, "__init__")
        error = WorkerStartError(rank, f"{failed.kind}: {failed.message}", failed.traceback)
        error.__cause__ = cause.__cause__
        if not failed.consequence:
            self._failure = self._failure or error
        elif self._hearsay is None:
            self._hearsay = error
            self._heard_at = time.monotonic()

    def _hearsay_remaining(self) -> float:
        if self._hearsay is None:
            return float("inf")
        since = time.monotonic() - self._heard_at
        if since >= self._patience and self._may_say_why():
            return max(REASON_SECONDS - since, 0.0)
        return max(self._patience - since, 0.0)

    def _late(self, deadline: Deadline) -> WorkerStartError:
        seen = self._look(self._absent)
        rank = min({*seen.blocked_by} & self._absent or self._absent)
        late = ", ".join(map(str, sorted(self._absent)))
        more = f"; {seen.why}" if seen.why else ""
        reason = f"not ready after {deadline.timeout:g} s (late: {late}{more})"
        return WorkerStartError(rank, reason, seen.stacks.get(rank, ""))


class WorkerProcesses:
    """The workers of one pool. One thread at a time may use it.

    Attributes:
        using: held while any thread uses `workers` or their files, and while they are removed.
        workers: the workers whose processes run, or have ended and were not replaced yet, by rank.
        supervisor: watches them.
        hosts: the other hosts; ``None`` if there are none.
    """

    def __init__(self, plan: PoolPlan) -> None:
        """Nobody is started yet; other hosts may come.

        Raises:
            OSError: this host cannot be reached by others at the address that they were told.
            HostError, GroupTimeoutError, TransportError: as for `RemoteHosts`.
        """
        self._plan = plan
        deadline = Deadline.after(plan.start_timeout)
        self.using = threading.RLock()  # a signal handler may end what it interrupts
        self.workers: dict[int, WorkerHandle] = {}
        self.hosts: RemoteHosts | None = None
        with ExitStack() as undo:
            if plan.hosts is not None:
                from ..hosts.remote_hosts import RemoteHosts  # noqa: PLC0415 - loads ZeroMQ

                self.hosts = RemoteHosts(plan.hosts, plan, deadline)
                undo.callback(self.hosts.close)
            self._meeting = RendezvousServer()
            undo.callback(self._meeting.close)
            self.supervisor = Supervisor()
            undo.callback(self.supervisor.close)
            self._closing = undo.pop_all()

    def meet(self, tick: Tick, show: Callable[[Iterable[int]], None]) -> None:
        """Wait until all hosts of the pool are there.

        Args:
            tick, show: as for `assemble`.

        Raises:
            HostError: one was refused, or has not come in time.
            What ``tick`` raises.
        """
        if self.hosts is not None:
            self.hosts.meet(Deadline.after(self._plan.start_timeout), tick, show)

    def assemble(
        self,
        links: SharedResources,
        first_call: int,
        tick: Tick,
        show: Callable[[Iterable[int]], None],
    ) -> None:
        """Start the workers that are missing, and wait until all take part in a new generation.

        Args:
            links: what they share.
            first_call: the number of its first call.
            tick: called again and again; returns the seconds until its next call.
            show: called with the ranks that are waited for.

        Raises:
            WorkerStartError: a worker failed, or was not ready in time.
            OSError: a process cannot be started.
            What ``tick`` raises.
        """
        tick()  # nobody may be started any more
        plan = self._plan
        deadline = Deadline.after(plan.start_timeout)
        show(range(plan.n_workers))
        missing = [rank for rank in range(plan.n_workers) if rank not in self.workers]
        if self.hosts is not None:
            for distant in self.hosts.launch(missing, links.generation, deadline):
                self._employ(distant)
        here = [rank for rank in missing if rank in plan.ranks_of(0)]
        with self._meeting.open_round(here) as seats:
            preload = plan.config.preload if plan.config.fork else None
            for local in launch(seats, plan.threads, deadline, preload=preload, tick=tick):
                self._employ(local)
        for worker in self.workers.values():
            try:
                worker.start(links.start_of(worker.rank, first_call), deadline)
            except GroupTimeoutError as error:
                raise WorkerStartError(worker.rank, f"it took nothing in: {error}") from error
        roll_call = ReadyBarrier(
            self.workers,
            plan,
            show,
            self.look,
            self._stuck_in_start,
            lambda: self.may_say_why(links.board.aborted),
        )
        roll_call.wait(self.supervisor, deadline, tick)
        links.join(roll_call.replies, deadline)

    def look(self, ranks: Iterable[int]) -> HangReport:
        """Look what some of the workers do that run, and who holds up others of all."""
        seconds = self._plan.config.stack_seconds
        deadline = Deadline.after(seconds)
        if self.hosts is not None:
            self.hosts.query_state()  # they look while the stacks come
        shown = {rank: self.workers[rank] for rank in ranks if rank in self.workers}
        greeted = {rank: worker for rank, worker in shown.items() if worker.connected}
        stacks = worker_stacks(greeted, seconds)
        return HangReport(stacks, *blocked_by(self.workers, self._seen_elsewhere(deadline)))

    def diagnoses(self) -> list[Diagnosis]:
        """Who waits for whom among all processes that take part, on all hosts."""
        if self.hosts is not None:
            self.hosts.query_state()
        elsewhere = self._seen_elsewhere(Deadline.after(self._plan.config.stack_seconds))
        return diagnoses(elsewhere)

    def _stuck_in_start(self, starting: AbstractSet[int]) -> dict[int, str]:
        if self.hosts is not None:
            self.hosts.query_state()
        elsewhere = self._seen_elsewhere(Deadline.after(self._plan.config.stack_seconds))
        return stuck_in_start(self.workers, starting, elsewhere)

    def _seen_elsewhere(self, deadline: Deadline) -> list[HostSnapshot]:
        return [] if self.hosts is None else self.hosts.seen(deadline)

    def may_say_why(self, failure: Failure | None) -> bool:
        """Whether more may be heard of why the groups were aborted, or a queue has ended.

        From whoever reported ``failure``, or failed, until it has left or its end was passed on,
        and from workers that have ended unheard. Any thread may call.
        """
        first = () if failure is None else (failure.rank, failure.culprit)
        return any(
            self.supervisor.hears(each)
            and (each.ended() or (each.rank in first and not each.detached))
            for each in tuple(self.workers.values())
        )

    def stop_survivors(self, pause: float, tick: Tick, *, keep: bool) -> None:
        """After the board was aborted: keep the workers that leave, and kill the others.

        Args:
            pause: how many seconds to take at least.
            keep: whether to keep any.
            tick: as for `assemble`.
        """
        over = time.monotonic() + pause
        deadline = Deadline.after(self._plan.config.leave_seconds if keep else 0.0)
        workers, nobody = self.workers.values(), WorkerEvents()
        while not (deadline.expired or all(each.detached or each.ended() for each in workers)):
            self.supervisor.step(nobody, min(deadline.remaining(), tick()))
        self._remove([worker for worker in workers if not (keep and worker.detached)])
        while (seconds := over - time.monotonic()) > 0:
            self.supervisor.step(nobody, min(seconds, tick()))
        self._remove([worker for worker in workers if worker.ended()])

    def close(self, seconds: float) -> None:
        """End all workers, after giving them ``seconds`` to end by themselves; nobody watches them
        any more. Idempotent, also within a call of itself, as of a signal handler's.
        """
        end(list(self.workers.values()), seconds, self._plan.config.kill_seconds)
        for worker in self.workers.values():
            worker.close()
        self._closing.close()

    def _employ(self, worker: WorkerHandle) -> None:
        self.workers[worker.rank] = worker
        self.supervisor.watch(worker)

    def _remove(self, workers: Iterable[WorkerHandle]) -> None:
        removed = list(workers)
        end(removed, 0.0, 0.0)
        with self.using:
            for worker in removed:
                self.supervisor.forget(worker)
                del self.workers[worker.rank]
                worker.close()
