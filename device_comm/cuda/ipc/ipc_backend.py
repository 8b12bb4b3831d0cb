"""Collectives and messages of ranks on one host whose devices can access each other's memory.

Every rank shares a region of its device memory with the others. Kernels of this project move data
through these regions; in graphs they read large inputs directly. Ranks may be processes or threads,
with a device each or several on one device. Reductions run in rank order, so results are bitwise
equal on all ranks.

Device memory per rank, with n ranks, by default: ``16 MiB + 4 n MiB``, and 4 MiB more once
graphs are captured.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from device_comm.backend import Backend, Capabilities, Identity
from device_comm.cuda.device.streams import pass_within
from device_comm.cuda.ipc.completion import StreamCompletion
from device_comm.cuda.ipc.endpoint import ENDPOINT_PROBE_SECONDS, meet_peers
from device_comm.cuda.ipc.order import SideStreams, StreamOrder
from device_comm.cuda.ipc.prepared import PreparedLaunches
from device_comm.cuda.ipc.recipes import recipe
from device_comm.cuda.ipc.registry import Registry
from device_comm.cuda.launches.abi import ALIGN
from device_comm.cuda.launches.launch import NUMBERS, Algorithm, kernels_reduce
from device_comm.cuda.launches.planner import Planner
from device_comm.operation import REDUCTIONS
from device_comm.torch_group.pending import Boundary
from device_comm.torch_group.reduce_here import reduce_here
from device_comm.watch import LoneWatch
from device_comm.work import Followed
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from device_comm.choice import Explanation
    from device_comm.cuda.agree import Swap
    from device_comm.cuda.device.driver import Driver, PreparedLaunch
    from device_comm.cuda.device.streams import StreamMark
    from device_comm.cuda.ipc.endpoint import Endpoint
    from device_comm.cuda.launches.abi import RegionLayout
    from device_comm.cuda.launches.launch import Limits
    from device_comm.operation import Operation
    from device_comm.watch import Watch
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline

_FINISH = 5.0
"""How long `close` waits for the device to finish this rank's operations."""


class IpcBackend(Backend):
    """One rank's end of a group. One thread at a time. Make it with `create`.

    - Calls return when the work is queued on torch's current stream; `barrier` and `flush` when the
      device has done it. A call on another stream than the last one is ordered after it, except in
      a capture: there a call on a second stream raises ValueError.
    - A kernel waits for a peer as long as the call's timeout. An error is raised by the next call,
      by `barrier` or by `flush`; results until then are undefined.
    - `isend` and `irecv` run on side streams, so the current stream does not wait for the peer. In
      a capture they run on the captured stream, and on channels of their own: a message that one
      rank captures the other has to capture, too.
    - Calls may be captured in CUDA graphs: see `graph_capture`.

    Attributes:
        reasons: why captured collectives had to be staged, if some were; for `explain`.
    """

    def __init__(self, identity: Identity, endpoint: Endpoint) -> None:
        """Use `create`."""
        driver, group = endpoint.driver, endpoint.group
        super().__init__(
            identity,
            Capabilities(
                "ipc",
                stream_ordered=True,
                detects_loss=not isinstance(identity.watch, LoneWatch),
                sends_ahead=True,
                normed=frozenset(NUMBERS),
            ),
        )
        self._driver = driver
        self._endpoint = endpoint
        self._health = endpoint.health
        self._boundary = Boundary(self.watch)
        self._order = StreamOrder(driver, self.name)
        self._messages = SideStreams(driver)
        self._planner = Planner(group, endpoint.limits)
        self._prepared = PreparedLaunches(driver, self._planner, self.world_size)
        self._registry = Registry(driver, endpoint.mappings, group.rank, endpoint.swap)
        self._closing.callback(self._give_back)

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
        probe_seconds: float = ENDPOINT_PROBE_SECONDS,
    ) -> Self:
        """Set up a group of ranks on one host, and test it. Collective: yes, every member.

        Args:
            driver: the driver of this rank's device: a `CupyDriver`. The caller closes it.
            rank: this process's rank in the group.
            world_size: the number of ranks, from 2 to 8.
            swap: gives this rank's bytes to all ranks and returns all ranks' bytes, by rank. Called
                several times, here and in `graph_capture`; has its own deadline.
            name: the group's name for errors and status, the same on all ranks.
            timeout: default seconds that a call may take; None: for ever.
            watch: the group's board; None: deadlines only, peers are not seen.
            members: each rank's member number on the board; None: the rank itself.
            layout: the sizes of the shared regions, the same on all ranks; None: the default.
            limits: the sizes of launches, the same on all ranks; None: the default.
            probe_seconds: how long the collectives of the test wait for a peer.

        Raises:
            IpcUnavailableError: a rank cannot use another one's memory; all ranks raise this, with
                the first such rank and the reason. Everything is released.
            ValueError: the sizes are out of range.
            CoordinatorError: ``swap`` failed.
        """
        identity = Identity.of(
            rank,
            world_size,
            driver.device,
            name=name,
            timeout=timeout,
            watch=watch,
            members=members,
        )
        endpoint = meet_peers(
            identity, driver, swap, layout=layout, limits=limits, probe_seconds=probe_seconds
        )
        return cls(identity, endpoint)

    @property
    def packet_bytes(self) -> int:
        """The largest all-reduce, in bytes, that the packet algorithm can do."""
        return self._endpoint.group.layout.packet_bytes

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why captured collectives had to be staged, if some were."""
        return tuple(self._registry.reasons)

    def explain(self) -> Explanation:
        """As `Backend.explain`, and why captured collectives had to be staged. Collective: no."""
        refused = tuple(("ipc without staging in graphs", reason) for reason in self.reasons)
        return replace(super().explain(), refused=refused)

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """A context in which CUDA graphs with collectives of this group may be captured.

        Large captured collectives read their inputs directly, without a copy into the region, the
        first 32,768 of a context: at its end all ranks swap the inputs' addresses. From then on,
        until `close`, graphs may be replayed, on all ranks in the same order, and on the stream
        that the group's other calls are on. Contexts may nest: then all of this is done at the end
        of the outermost, and no graph may be replayed before.

        Collective: yes, every member.

        Raises:
            DivergenceError: ranks have captured different collectives, or a message without its
                other end; do not replay them.
            IpcUnavailableError: a rank cannot map the captured memory; do not replay the graphs.
        """
        self._registry.begin()
        try:
            yield
        except BaseException:
            self._registry.finish(failed=True)
            raise
        try:
            self._registry.finish()
        except DivergenceError as error:
            self.identity.name_globally(error)
            raise

    def flush(self, deadline: Deadline) -> None:
        """Wait until the device has finished all operations of this backend.

        Raises:
            GroupTimeoutError: some are still under way at the deadline.
            CoordinatorError: an operation failed.
        """
        operation = self.identity.operation("flush")
        for mark in (*self._messages.marks(), *self._order.marks()):
            self._wait_for(mark, operation, deadline.timeout).wait(deadline)

    def check(self) -> None:
        """As `Backend.check`; kernels record here what they fail of, also those of graphs."""
        super().check()
        if self._health.failed:
            self._health.check(self.identity.operation("check"), self.timeout)

    def goes_ahead(self, peer: int, size: int) -> bool:  # noqa: ARG002 - never
        """As every backend's. What was sent before may still fill the channel."""
        return False

    def norms(self, x: Tensor, weight: Tensor, algorithm: Algorithm | None = None) -> bool:
        """As `Backend.norms`: for sums that go in packets, with rows of whole cells.

        Args:
            x: the rows to sum.
            weight: the norm's weight.
            algorithm: that of the sum; None: chosen by its size.
        """
        algorithm = algorithm or self._planner.algorithm(x.nbytes)
        fits = 0 < x.nbytes <= self.packet_bytes and weight.nbytes % ALIGN == 0
        return fits and algorithm is Algorithm.PACKETS and x.dtype in self.capabilities.normed

    def discard(self) -> None:
        """Stop all waiting kernels of this rank."""
        self._health.abort()

    def start(self, operation: Operation, algorithm: Algorithm | None = None) -> Pending | None:
        """Launch the kernels of an operation. Reductions without a kernel are computed by torch.

        Args:
            operation: as for `Backend.start`.
            algorithm: the algorithm of an all-reduce; None: chosen by its size.
        """
        if algorithm is None:
            algorithm = self._planner.algorithm(operation.source.nbytes)
        pending: Pending | None = None
        if operation.verb in ("send", "recv"):
            pending = self._transfer(operation, algorithm)
        elif operation.verb in REDUCTIONS and not kernels_reduce(
            operation.op, operation.source.dtype
        ):
            moving, reduce = reduce_here(operation, self.rank, self.world_size)
            self._issue(moving, algorithm)
            reduce()
        else:
            self._issue(operation, algorithm)
            if operation.verb == "barrier":
                pending = self._arrival(operation)
        self._check(operation)
        return pending

    # --- issuing -------------------------------------------------------------------------

    def _issue(self, operation: Operation, algorithm: Algorithm) -> None:
        """Launch on the current stream."""
        place = self._order.place()
        for launch in self._launches(operation, algorithm, captured=place.captured):
            launch(place.stream)

    def _transfer(self, operation: Operation, algorithm: Algorithm) -> Pending | None:
        """Launch a message beside the current stream."""
        place = self._order.look()
        launches = self._launches(operation, algorithm, captured=place.captured)
        if place.captured:
            message = operation.source if operation.verb == "send" else operation.output
            self._registry.note_message(operation.verb, operation.peer, message.nbytes)
            for launch in launches:
                launch(place.stream)
            return None
        way = (operation.verb, operation.peer)
        passage = self._messages.run(way, launches, place.stream, operation)
        transfer = Followed(passage, lambda: self._check(operation))
        if operation.background:
            return transfer
        transfer.wait(operation.deadline)
        return None

    def _arrival(self, operation: Operation) -> Pending | None:
        """A `Pending` for all work launched so far, which blocks the host; None in a capture."""
        place = self._order.look()
        if place.captured:
            return None
        mark = self._driver.mark(place.stream)
        return self._wait_for(mark, operation.name, operation.deadline.timeout)

    def _wait_for(self, mark: StreamMark, operation: str, timeout: float | None) -> Pending:
        def check() -> None:
            self._health.check(operation, timeout)

        return StreamCompletion(mark, operation, self.peers, self._boundary, check)

    def _launches(
        self, operation: Operation, algorithm: Algorithm, *, captured: bool
    ) -> Sequence[PreparedLaunch]:
        """The launches of an operation; its kernels have its time limit."""
        usual = operation.timeout == self.timeout
        if usual and not captured:
            return self._prepared.launches(operation, algorithm)
        launches, direct = recipe(operation, self.world_size, algorithm, captured=captured)
        table = 0
        if captured and direct is not None:
            what = f"{operation.verb} of {direct.nbytes} bytes of {direct.dtype}"
            table = self._registry.reserve(what, direct.data_ptr())
        planner = self._planner
        if not usual:
            group = self._endpoint.group.with_timeout(_nanoseconds(operation.deadline))
            planner = Planner(group, self._endpoint.limits)
        return [self._driver.prepare(*each) for each in launches(planner, table)]

    def _check(self, operation: Operation) -> None:
        if self._health.failed:
            self._health.check(operation.name, operation.deadline.timeout)

    def _give_back(self) -> None:
        marks = [*self._messages.marks(), *self._order.marks()]
        if not pass_within(_FINISH, marks):
            self._health.abort()
            if not pass_within(_FINISH, marks):
                return  # the device still uses the memory: never free it
        self._messages.close()
        self._registry.close()
        self._endpoint.closing.close()


def _nanoseconds(deadline: Deadline) -> int:
    """The remaining time for a kernel, to which 0 means for ever."""
    return 0 if deadline.timeout is None else max(int(deadline.remaining() * 1e9), 1)
