"""The processes of a pool's workers: starts them, replaces those that have ended, ends them."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shm_broadcast import Deadline, GroupTimeoutError

from ..control.meeting import WorkerMeeting
from ..errors import WorkerStartError
from ..launchers.local import end, launch, worker_stacks
from .held_up_by import Sight, held_up_by, stuck_in_start, verdicts
from .roll_call import RollCall
from .supervisor import Supervisor, Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

    from shm_broadcast import Failure
    from shm_broadcast.onlooker.blame import Verdict
    from shm_broadcast.onlooker.other_hosts import HostSeen

    from ..hosts.distant_hosts import DistantHosts
    from ..launchers.fork_servers import Tick
    from ..launchers.worker_handle import WorkerHandle
    from .links import Links
    from .pool_plan import PoolPlan


class Staff:
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
            HostError, GroupTimeoutError, TransportError: as for `DistantHosts`.
        """
        self._plan = plan
        deadline = Deadline.after(plan.start_timeout)
        self.using = threading.RLock()  # a signal handler may end what it interrupts
        self.workers: dict[int, WorkerHandle] = {}
        self.hosts: DistantHosts | None = None
        with ExitStack() as undo:
            if plan.hosts is not None:
                from ..hosts.distant_hosts import DistantHosts  # noqa: PLC0415 - loads ZeroMQ

                self.hosts = DistantHosts(plan.hosts, plan, deadline)
                undo.callback(self.hosts.close)
            self._meeting = WorkerMeeting()
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
        self, links: Links, first_call: int, tick: Tick, show: Callable[[Iterable[int]], None]
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
        with self._meeting.convene(here) as seats:
            preload = plan.config.preload if plan.config.fork else None
            for local in launch(seats, plan.threads, deadline, preload=preload, tick=tick):
                self._employ(local)
        for worker in self.workers.values():
            try:
                worker.start(links.start_of(worker.rank, first_call), deadline)
            except GroupTimeoutError as error:
                raise WorkerStartError(worker.rank, f"it took nothing in: {error}") from error
        roll_call = RollCall(
            self.workers,
            plan,
            show,
            self.look,
            self._stuck_in_start,
            lambda: self.may_say_why(links.board.aborted),
        )
        roll_call.wait(self.supervisor, deadline, tick)
        links.join(roll_call.replies, deadline)

    def look(self, ranks: Iterable[int]) -> Sight:
        """Look what some of the workers do that run, and who holds up others of all."""
        seconds = self._plan.config.stack_seconds
        deadline = Deadline.after(seconds)
        if self.hosts is not None:
            self.hosts.look_around()  # they look while the stacks come
        shown = {rank: self.workers[rank] for rank in ranks if rank in self.workers}
        greeted = {rank: worker for rank, worker in shown.items() if worker.greeted}
        stacks = worker_stacks(greeted, seconds)
        return Sight(stacks, *held_up_by(self.workers, self._seen_elsewhere(deadline)))

    def verdicts(self) -> list[Verdict]:
        """Who waits for whom among all processes that take part, on all hosts."""
        if self.hosts is not None:
            self.hosts.look_around()
        elsewhere = self._seen_elsewhere(Deadline.after(self._plan.config.stack_seconds))
        return verdicts(elsewhere)

    def _stuck_in_start(self, starting: AbstractSet[int]) -> dict[int, str]:
        if self.hosts is not None:
            self.hosts.look_around()
        elsewhere = self._seen_elsewhere(Deadline.after(self._plan.config.stack_seconds))
        return stuck_in_start(self.workers, starting, elsewhere)

    def _seen_elsewhere(self, deadline: Deadline) -> list[HostSeen]:
        return [] if self.hosts is None else self.hosts.seen(deadline)

    def may_say_why(self, failure: Failure | None) -> bool:
        """Whether more may be heard of why the groups were aborted, or a queue has ended.

        From whoever reported ``failure``, or failed, until it has left or its end was passed on,
        and from workers that have ended unheard. Any thread may call.
        """
        first = () if failure is None else (failure.rank, failure.culprit)
        return any(
            self.supervisor.hears(each) and (each.ended() or (each.rank in first and not each.away))
            for each in tuple(self.workers.values())
        )

    def dismiss(self, pause: float, tick: Tick, *, keep: bool) -> None:
        """After the board was aborted: keep the workers that leave, and kill the others.

        Args:
            pause: how many seconds to take at least.
            keep: whether to keep any.
            tick: as for `assemble`.
        """
        over = time.monotonic() + pause
        deadline = Deadline.after(self._plan.config.leave_seconds if keep else 0.0)
        workers, nobody = self.workers.values(), Watcher()
        while not (deadline.expired or all(each.away or each.ended() for each in workers)):
            self.supervisor.step(nobody, min(deadline.remaining(), tick()))
        self._remove([worker for worker in workers if not (keep and worker.away)])
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
