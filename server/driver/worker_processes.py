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
from shm_broadcast.deadline import PauseAwareClock

from ..calls.call_table import REPORT_SECONDS
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
from .supervisor import Supervisor, WorkerEvents

if TYPE_CHECKING:
    from ..hosts.remote_hosts import RemoteHosts
    from ..launchers.fork_servers import Tick
    from .links import SharedResources
    from .pool_plan import PoolPlan


_STOPPED: Final = "its process is stopped, by a signal or a debugger"


class HangReport(NamedTuple):
    """Late workers' stacks, by rank, and the processes that block others: text and ranks."""

    stacks: Mapping[int, str]
    why: str
    blocked_by: tuple[int, ...]


class _Process(NamedTuple):
    """A process of a program; ``host`` is ``""`` for this one."""

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
    """Return text on the processes that block ``workers``, and the workers' ranks among them.

    The text includes processes outside the pool that share a group with the workers. A stopped
    worker counts even if only the driver waits for it. ``elsewhere``: states of other hosts.
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
    reasons = [
        f"{who[rank]} holds up others: {each.reason()}"
        for rank, each in own.items()
        if not each.waits_for
    ]
    cycle = [who[rank] for rank, each in own.items() if each.waits_for]
    reasons += [f"{' and '.join(cycle)} wait for each other"] if cycle else []
    reasons += [
        f"{each.who} holds up others: {each.reason()}"
        for each in culprits
        if each.status.pid and _Process.of(each) not in ranks and _blocks_one_of(ranks, each)
    ]
    return "; ".join(reasons), tuple(own)


def stuck_in_start(
    workers: Mapping[int, WorkerHandle],
    starting: AbstractSet[int],
    elsewhere: Sequence[HostSnapshot] = (),
) -> dict[int, str]:
    """Return reasons why workers cannot finish their start, by rank.

    The process of a rank of ``starting`` is stopped, or waits in a group for a started rank.
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
        # A worker that waits for a running one may not be stuck, even if it waits for others too.
        started = workers.keys() - starting
        while free := [r for r in waits if not waits[r].keys() <= {*started, *stuck, *waits}]:
            for rank in free:
                del waits[rank]
        for rank, late in waits.items():
            for peer in sorted(late.keys() & started)[:1]:
                stuck[rank] = f"it waits in {late[peer]} for rank {peer}, which has started"
    return stuck


def _is_stopped(worker: LocalWorker, seen: Scan) -> bool:
    """Return whether a worker's process is stopped; before its `Hello` only its reaper is known."""
    return any(
        each.condition == "stopped"
        and (each.pid == worker.pid or (each.parent == worker.pid and not worker.connected))
        for each in seen.processes.values()
    )


def _ranks(
    workers: Mapping[int, WorkerHandle], elsewhere: Sequence[HostSnapshot]
) -> dict[_Process, int]:
    local = {
        _Process("", worker.pid): rank
        for rank, worker in workers.items()
        if isinstance(worker, LocalWorker)
    }
    remote = {
        _Process(seen.host, member.status.pid): member.status.rank
        for seen in elsewhere
        for member in seen.there.members
        if member.status.pid and member.status.rank in workers
    }
    return {**local, **remote}


def diagnoses(elsewhere: Sequence[HostSnapshot]) -> list[Diagnosis]:
    """Return `own_diagnoses`; none if /proc cannot be read, as without free descriptors."""
    try:
        return own_diagnoses(elsewhere)
    except OSError:
        return []


def _blocks_one_of(processes: Container[_Process], culprit: WaitNode) -> bool:
    """Return whether ``culprit`` blocks one of these, directly or not.

    Waits for this process do not count: every worker without a call waits for it.
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
"""Least seconds between searches for workers that cannot finish their start; one takes 10 ms."""
_log = logging.getLogger(__name__)


class ReadyBarrier(WorkerEvents):
    """Waits until all workers are ready; handles the supervisor's events during a start.

    Args:
        plan: an exception of its ``on_progress`` ends the start.
        show: called repeatedly with the ranks that are not ready yet.
        look: returns the states of late workers.
        stuck: returns the reasons why some of the given ranks cannot finish their start.
        may_report: returns whether a worker may still report the root cause, for which a
            secondary failure waits up to `REPORT_SECONDS`.
    """

    def __init__(
        self,
        ranks: Iterable[int],
        plan: PoolPlan,
        show: Callable[[Iterable[int]], None],
        look: Callable[[Iterable[int]], HangReport],
        stuck: Callable[[AbstractSet[int]], Mapping[int, str]],
        may_report: Callable[[], bool],
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
        self._reason_seconds = plan.config.stack_seconds  # for the root cause
        self.replies: dict[int, QueueHandle] = {}
        self._absent = set(ranks)
        self._failure: WorkerStartError | None = None
        self._may_report = may_report
        self._secondary: WorkerStartError | None = None
        self._secondary_at = 0.0
        self._reported: set[int] = set()

    def wait(self, supervisor: Supervisor, deadline: Deadline, tick: Callable[[], float]) -> None:
        """Wait until every worker is ready, or raise WorkerStartError.

        ``tick`` is called repeatedly; it returns the seconds until its next call, and may raise.
        """
        while self._absent:
            self._show(sorted(self._absent))
            pause = min(deadline.remaining(), self._secondary_remaining(), tick())
            supervisor.step(self, min(pause, max(self._look_at - time.monotonic(), 0.0)))
            failure = self._failure or (None if self._secondary_remaining() else self._secondary)
            if failure is not None:
                self._failure = self._secondary = None
                try:
                    raise failure
                finally:
                    del failure  # its traceback holds this frame, a reference cycle
            if self._look_at <= time.monotonic():
                self._look_for_stuck()
            if deadline.expired and self._absent:
                raise self._late(deadline)

    def _look_for_stuck(self) -> None:
        """Log each worker that cannot finish its start, once; raise if it is stuck too long."""
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
        """Record a worker's message; called by the supervisor."""
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
        """Record the end of a worker's process, unless it has reported a failure before."""
        if rank not in self._reported:
            self._failure = self._failure or WorkerStartError(rank, how, stack)

    def _failed(self, rank: int, failed: Failed) -> None:
        self._reported.add(rank)
        cause = rebuild(failed, rank, "__init__")
        error = WorkerStartError(rank, f"{failed.kind}: {failed.message}", failed.traceback)
        error.__cause__ = cause.__cause__
        if not failed.consequence:
            self._failure = self._failure or error
        elif self._secondary is None:
            self._secondary = error
            self._secondary_at = time.monotonic()

    def _secondary_remaining(self) -> float:
        if self._secondary is None:
            return float("inf")
        since = time.monotonic() - self._secondary_at
        if since >= self._reason_seconds and self._may_report():
            return max(REPORT_SECONDS - since, 0.0)
        return max(self._reason_seconds - since, 0.0)

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
        workers: the workers that run, or have ended and were not replaced yet, by rank.
    """

    def __init__(self, plan: PoolPlan) -> None:
        """Prepare the start of workers, and accept other hosts; raise as `RemoteHosts`."""
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
            self.supervisor = Supervisor()
            undo.callback(self.supervisor.close)
            self._closing = undo.pop_all()

    def meet(self, tick: Tick, show: Callable[[Iterable[int]], None]) -> None:
        """Wait until all hosts are connected; raise HostError if one is late or refused."""
        if self.hosts is not None:
            self.hosts.meet(Deadline.after(self._plan.start_timeout), tick, show)

    def assemble(
        self,
        links: SharedResources,
        first_call: int,
        tick: Tick,
        show: Callable[[Iterable[int]], None],
    ) -> None:
        """Start the missing workers, and wait until all have joined a new generation.

        ``first_call`` is the number of its first call; ``tick`` and ``show`` are as for
        `ReadyBarrier`.

        Raises:
            WorkerStartError: a worker failed, or was not ready in time.
            OSError: a process cannot be started.
        """
        tick()  # raises if the pool was shut down
        plan = self._plan
        deadline = Deadline.after(plan.start_timeout)
        show(range(plan.n_workers))
        missing = [rank for rank in range(plan.n_workers) if rank not in self.workers]
        if self.hosts is not None:
            for remote in self.hosts.launch(missing, links.generation, deadline):
                self._add(remote)
        missing_here = [rank for rank in missing if rank in plan.ranks_of(0)]
        preload = plan.config.preload if plan.config.fork else None
        for local in launch(missing_here, plan.threads, deadline, preload=preload, tick=tick):
            self._add(local)
        for worker in self.workers.values():
            try:
                worker.start(links.start_of(worker.rank, first_call), deadline)
            except GroupTimeoutError as error:
                raise WorkerStartError(worker.rank, f"it received nothing: {error}") from error
        barrier = ReadyBarrier(
            self.workers,
            plan,
            show,
            self.look,
            self._stuck_in_start,
            lambda: self.may_report(links.board.aborted),
        )
        barrier.wait(self.supervisor, deadline, tick)
        links.join(barrier.replies, deadline)

    def look(self, ranks: Iterable[int]) -> HangReport:
        """Return the states of ``ranks``, and the workers of the pool that block others."""
        seconds = self._plan.config.stack_seconds
        deadline = Deadline.after(seconds)
        if self.hosts is not None:
            self.hosts.query_state()  # they reply while this host reads stacks
        shown = {rank: self.workers[rank] for rank in ranks if rank in self.workers}
        connected = {rank: worker for rank, worker in shown.items() if worker.connected}
        stacks = worker_stacks(connected, seconds)
        return HangReport(stacks, *blocked_by(self.workers, self._seen_elsewhere(deadline)))

    def diagnoses(self) -> list[Diagnosis]:
        """Return the diagnoses of all processes in the pool's groups, on all hosts."""
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

    def may_report(self, failure: Failure | None) -> bool:
        """Return whether a worker may still report why the groups were aborted.

        That is the reporter or culprit of ``failure``, until it has detached or its end was
        handled, and any ended worker whose end was not handled. Any thread may call.
        """
        named = () if failure is None else (failure.rank, failure.culprit)
        return any(
            self.supervisor.is_watched(each)
            and (each.ended() or (each.rank in named and not each.detached))
            for each in tuple(self.workers.values())
        )

    def stop_survivors(self, pause: float, tick: Tick, *, keep: bool) -> None:
        """Keep (if ``keep``) the workers that detach after an abort, and kill the others.

        Takes ``pause`` seconds at least.
        """
        earliest = time.monotonic() + pause
        deadline = Deadline.after(self._plan.config.leave_seconds if keep else 0.0)
        workers, ignored = self.workers.values(), WorkerEvents()
        while not (deadline.expired or all(each.detached or each.ended() for each in workers)):
            self.supervisor.step(ignored, min(deadline.remaining(), tick()))
        self._remove([worker for worker in workers if not (keep and worker.detached)])
        while (seconds := earliest - time.monotonic()) > 0:
            self.supervisor.step(ignored, min(seconds, tick()))
        self._remove([worker for worker in workers if worker.ended()])

    def close(self, seconds: float) -> None:
        """End all workers, after ``seconds`` in which they may exit; idempotent.

        The supervisor thread has ended. A signal handler may call it during a call.
        """
        end(list(self.workers.values()), seconds, self._plan.config.kill_seconds)
        for worker in self.workers.values():
            worker.close()
        self._closing.close()

    def _add(self, worker: WorkerHandle) -> None:
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
