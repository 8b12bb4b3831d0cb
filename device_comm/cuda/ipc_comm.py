"""Collectives and messages of ranks on one host whose devices see each other's memory.

Every rank lends a region of its device memory to the others; kernels of this project move data
through these regions, or, in graphs, straight from where it is. Ranks may be processes or threads,
on a device each or several on one. Reductions are in rank order: all ranks hold the same bits.

Device memory of each of n ranks, by default: ``16 MiB + 2.25 n MiB``, and 1 MiB once graphs are
captured.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from device_comm.base import Capabilities
from device_comm.cuda.arrival import POLL, Arrival, Transfer
from device_comm.cuda.endpoint import PROBE_SECONDS, meet
from device_comm.cuda.graph import Registry
from device_comm.cuda.ipc_verbs import IpcVerbs
from device_comm.cuda.order import SideStreams, StreamOrder
from device_comm.cuda.planner import Planner
from device_comm.torch_pending import Boundary
from device_comm.watch import LoneWatch
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from device_comm.base import Call
    from device_comm.choice import Explanation
    from device_comm.cuda.abi import RegionLayout
    from device_comm.cuda.agree import Swap
    from device_comm.cuda.driver import Driver, Mark
    from device_comm.cuda.endpoint import Endpoint
    from device_comm.cuda.ipc_verbs import Plan
    from device_comm.cuda.launch import Launch, Limits, Protocol
    from device_comm.cuda.order import Place
    from device_comm.watch import Watch
    from device_comm.work import Pending

_FINISH = 5.0
"""Seconds that what was issued has to end when the communicator is closed."""


class IpcComm(IpcVerbs):
    """One rank's end of a group. One thread at a time. Use `create`.

    - Calls return once the work is on torch's current stream; `barrier` and `flush` once the
      device has done it. A call on another stream than the last one is ordered behind it, except
      in a capture: there, a call on a second stream raises ValueError.
    - A kernel waits for a rank as long as its call allows. What goes wrong then, or before, is
      raised by the next call, by `barrier` or by `flush`; results until then are undefined.
    - `isend` and `irecv` need no stream's patience: they are beside it. In a capture they are not.
    - Calls may be captured in CUDA graphs: see `graph_capture`.

    Attributes:
        reasons: why captured collectives had to be staged, if some were; for `explain`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        name: str,
        timeout: float | None,
        watch: Watch,
        members: Sequence[int],
    ) -> None:
        """Use `create`."""
        driver, group = endpoint.driver, endpoint.group
        super().__init__(
            rank=group.rank,
            world_size=len(group.regions),
            device=driver.device,
            capabilities=Capabilities(
                "ipc",
                stream_ordered=True,
                detects_loss=not isinstance(watch, LoneWatch),
                sends_ahead=True,
            ),
            name=name,
            timeout=timeout,
            watch=watch,
            members=members,
        )
        self._driver = driver
        self._endpoint = endpoint
        self._health = endpoint.health
        self._boundary = Boundary(self.watch, self.capabilities.detects_loss)
        self._order = StreamOrder(driver, name)
        self._messages = SideStreams(driver)
        self._planner = Planner(group, endpoint.limits)
        self._registry = Registry(driver, endpoint.mappings, group.rank, endpoint.swap)

    @classmethod
    def create(
        cls,
        driver: Driver,
        rank: int,
        world_size: int,
        swap: Swap,
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
        layout: RegionLayout | None = None,
        limits: Limits | None = None,
        probe_seconds: float = PROBE_SECONDS,
    ) -> Self:
        """Set up a group of ranks on one host, and try it out. Collective: yes, every member.

        Args:
            driver: of this rank's device: a `CupyDriver`; it stays its maker's to close.
            rank: this process's rank in the group.
            world_size: how many ranks, from 2 to 8.
            swap: gives bytes of this rank to all and returns those of all, by rank. Called
                several times, here and in `graph_capture`, and has its own deadline.
            name: for errors and status, the same on all ranks.
            timeout: seconds that a call allows unless it says otherwise; None: for ever.
            watch: the group's board; None: deadlines only, peers are not seen.
            members: the board's member number of each rank; None: the rank itself.
            layout: sizes of the memory that ranks lend, the same on all; None: the default.
            limits: how launches are sized, the same on all; None: the default.
            probe_seconds: how long the first collectives, which try the way to the peers out,
                wait for these.

        Raises:
            IpcUnavailableError: some rank cannot use the memory of another one; all ranks raise
                this, naming the first and the reason. Nothing is left behind.
            ValueError: the sizes are out of range.
            CoordinatorError: ``swap`` has failed.
        """
        watch = LoneWatch(rank) if watch is None else watch
        members = range(world_size) if members is None else members
        endpoint = meet(
            driver,
            rank,
            world_size,
            swap,
            watch,
            members,
            name=name,
            timeout=timeout,
            layout=layout,
            limits=limits,
            probe_seconds=probe_seconds,
        )
        return cls(endpoint, name=name, timeout=timeout, watch=watch, members=members)

    @property
    def packet_bytes(self) -> int:
        """The largest all-reduce that can be done in packets."""
        return self._endpoint.group.layout.packet_bytes

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why captured collectives had to be staged, if some were."""
        return tuple(self._registry.reasons)

    def explain(self) -> Explanation:
        """Also why captured collectives had to be staged. Collective: no."""
        refused = tuple(("ipc without staging in graphs", reason) for reason in self.reasons)
        return replace(super().explain(), refused=refused)

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Capture graphs with collectives of this group in this context. Collective: yes.

        Large captured collectives read their input where it lies: at the end of the context all
        ranks tell each other where that is. Graphs may be replayed from then on, on all ranks in
        the same order, on the stream that other calls are on, and as long as this is open.

        Raises:
            DivergenceError: ranks have captured different collectives; do not replay them.
            IpcUnavailableError: some rank cannot map what was captured; likewise.
        """
        self._registry.begin()
        try:
            yield
        except BaseException:
            self._registry.finish(failed=True)
            raise
        self._registry.finish()

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Return once the device has done all that it was given here. Collective: no.

        Raises:
            GroupTimeoutError: it has not; it is still at it.
            CoordinatorError: something has failed.
        """
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        operation = f"{self.name} flush"
        for mark in (*self._messages.marks(), *self._order.marks()):
            self._wait_for(mark, operation, deadline.timeout).wait(deadline)

    def _close(self) -> None:
        marks = [*self._messages.marks(), *self._order.marks()]
        if not _pass(marks):
            self._health.abort()
            if not _pass(marks):
                return  # what the device still uses must stay
        self._messages.close()
        self._registry.close()
        self._endpoint.closing.close()

    def _discard(self) -> None:
        self._health.abort()

    # --- issuing -------------------------------------------------------------------------

    def _launch(self, primitive: Callable[[Call], Pending | None], call: Call) -> Pending | None:
        self._check(call)
        pending = primitive(call)
        self._check(call)
        return pending

    def _issue(self, call: Call, plan: Plan, direct: Tensor | None = None) -> Pending | None:
        place = self._order.place()
        table = 0
        if place.captured and direct is not None:
            what = f"{call.verb} of {direct.nbytes} bytes of {direct.dtype}"
            table = self._registry.reserve(what, direct.data_ptr())
        self._put(plan(self._planner_for(call), table), place)
        return None

    def _transfer(
        self, direction: str, peer: int, plan: Plan, keep: Tensor, call: Call
    ) -> Pending | None:
        place = self._order.look()
        launches = plan(self._planner_for(call), 0)
        if place.captured:
            self._put(launches, place)
            return None
        passage = self._messages.run((direction, peer), launches, place.stream, keep)
        transfer = Transfer(passage, lambda: self._check(call))
        if call.background:
            return transfer
        transfer.wait(call.deadline)
        return None

    def _arrival(self, call: Call) -> Pending | None:
        place = self._order.look()
        if place.captured:
            return None
        mark = self._driver.mark(place.stream)
        return self._wait_for(mark, call.operation, call.deadline.timeout)

    def _wait_for(self, mark: Mark, operation: str, timeout: float | None) -> Pending:
        def check() -> None:
            self._health.check(operation, timeout)

        return Arrival(mark, operation, self.peers, self._boundary, check)

    def _protocol(self, size: int) -> Protocol:
        return self._planner.protocol(size)

    def _put(self, launches: Sequence[Launch], place: Place) -> None:
        for kernel, grid, block, args in launches:
            self._driver.launch(kernel, grid, block, args, place.stream)

    def _planner_for(self, call: Call) -> Planner:
        """A planner of launches that wait as long as ``call`` allows."""
        deadline = call.deadline
        if deadline.timeout == self.timeout:
            return self._planner
        group = self._endpoint.group.with_timeout(_nanoseconds(deadline))
        return Planner(group, self._endpoint.limits)

    def _check(self, call: Call) -> None:
        self._health.check(call.operation, call.deadline.timeout)


def _nanoseconds(deadline: Deadline) -> int:
    """For a kernel, to which 0 means for ever."""
    return 0 if deadline.timeout is None else max(int(deadline.remaining() * 1e9), 1)


def _pass(marks: Sequence[Mark]) -> bool:
    """Whether the device gets there in time."""
    deadline = Deadline.after(_FINISH)
    while not all(mark.passed() for mark in marks):
        if deadline.expired:
            return False
        time.sleep(POLL)
    return True


__all__ = ["IpcComm"]
