"""Run collectives and messages between ranks whose devices access each other's memory.

Collectives of a group must run one after the other, in the same order on every rank. A call on
another stream than the last one is made to wait for that one, by an event. During a capture that is
not possible: all operations of a communicator in one capture must be on one stream, and calls on
others are refused. Replays of graphs are not seen here: replay them on the stream of the other
calls, or order the streams yourself.

A message may wait long for the other rank. So background messages run on side streams, one for each
peer and direction, and collectives do not wait for them.

Every rank shares a region of its device memory with the others. Kernels of this project move data
through these regions; in graphs they read large inputs directly. Ranks may be processes or threads,
with a device each or several on one device. Reductions run in rank order, so results are bitwise
equal on all ranks.

Device memory per rank, with n ranks, by default: ``16 MiB + 4 n MiB``, and 4 MiB more once
graphs are captured.

Which algorithm is fastest for a size depends on the machine: on how long a synchronisation of the
ranks takes, and on how fast they read each other's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from torch import Tensor

from device_comm.backend import Backend, Capabilities, Explanation, Identity
from device_comm.cuda.driver import (
    Driver,
    PreparedLaunch,
    StreamEvent,
    StreamEventPending,
    pass_within,
)
from device_comm.cuda.ipc.abi import ALIGN, NUMBERS, Algorithm, Limits, RegionLayout, kernels_reduce
from device_comm.cuda.ipc.mappings import GraphBufferRegistry
from device_comm.cuda.ipc.planner import Planner, PreparedLaunches, launch_plan
from device_comm.cuda.ipc.setup import ENDPOINT_PROBE_SECONDS, Endpoint, connect_peers
from device_comm.operation import REDUCTIONS, Operation, ReduceOp
from device_comm.selection import Candidate
from device_comm.torch_backend import reduce_here
from device_comm.torch_waiting import ErrorTranslator
from device_comm.watch import LoneWatch, Watch
from device_comm.work import Pending, PendingThen
from device_comm.wrappers import Wrapper
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import DivergenceError, GroupTimeoutError

if TYPE_CHECKING:
    from device_comm.cuda.agree import AllGatherBytes


_POLL_SECONDS = 0.0005
"""Seconds between two looks at the device's progress."""

_GIVES_UP = 0.5
"""How long the host waits, after its own deadline, for a kernel to record its time-out.

The kernel knows which rank it has waited for; the host does not.
"""


class StreamCompletion:
    """A `Pending` whose `wait` blocks the host until the device has done the work."""

    def __init__(
        self,
        mark: StreamEvent,
        operation: str,
        peers: Sequence[int],
        boundary: ErrorTranslator,
        check: Callable[[], None],
    ) -> None:
        """Wait for work on a stream.

        Args:
            mark: the point in the stream right after the work.
            operation: the operation's name, for errors.
            peers: the member numbers of the ranks that it needs.
            boundary: waits while watching the group.
            check: raises the error that a kernel has recorded, if there is one.
        """
        self._mark = mark
        self._operation = operation
        self._peers = peers
        self._errors = boundary
        self._check = check

    def ready(self) -> bool:
        """Whether the device has done it."""
        return self._mark.query()

    def wait(self, deadline: Deadline) -> None:
        """Wait until the device has done the work."""
        try:
            self._look(deadline)
        except GroupTimeoutError:  # the kernel's own error is better: it names the late rank
            with suppress(GroupTimeoutError):
                self._look(Deadline.after(_GIVES_UP))
            self._check()
            raise
        self._check()

    def _look(self, deadline: Deadline) -> None:
        self._errors.wait(
            self._mark.query, deadline, self._operation, self._peers, poll=_POLL_SECONDS
        )


class StreamPlace(NamedTuple):
    """The stream of an operation.

    Attributes:
        stream: the caller's stream.
        captured: whether it is being captured into a graph.
    """

    stream: int
    captured: bool


class StreamOrder:
    """Orders the operations of one communicator across streams."""

    def __init__(self, driver: Driver, name: str) -> None:
        """Begin with no stream used; ``name`` is for errors."""
        self._driver = driver
        self._name = name
        self._eager: int | None = None
        self._capture: int | None = None

    def place(self) -> StreamPlace:
        """The current stream, after having it wait for the last one used.

        Raises:
            ValueError: another stream is being captured; this call could not be ordered with it.
        """
        stream = self._driver.current_stream()
        if self._driver.is_capturing(stream):
            self._refuse_beside(self._capture, stream)
            self._capture = stream
            return StreamPlace(stream, True)
        if self._eager is not None and self._eager != stream:
            self._refuse_beside(self._eager, stream)
            self._driver.order(self._eager, stream)
        self._eager = stream
        return StreamPlace(stream, False)

    def look(self) -> StreamPlace:
        """The current stream, for an operation that need not wait for the others."""
        stream = self._driver.current_stream()
        return StreamPlace(stream, self._driver.is_capturing(stream))

    def marks(self) -> list[StreamEvent]:
        """The ends of all work on the last stream used and on the current one, replays included."""
        streams = {self._driver.current_stream()}
        if self._eager is not None:
            streams.add(self._eager)
        return [self._driver.mark(each) for each in streams if not self._driver.is_capturing(each)]

    def _refuse_beside(self, other: int | None, stream: int) -> None:
        if other is not None and other != stream and self._driver.is_capturing(other):
            raise ValueError(
                f"{self._name}: a capture is under way on stream {other:#x}; its operations "
                f"cannot be ordered with one on stream {stream:#x}: use the capture's own"
            )


class SideStreams:
    """The side streams of messages; keeps what the messages use alive until they are done."""

    def __init__(self, driver: Driver) -> None:
        """Make no stream yet."""
        self._driver = driver
        self._streams: dict[tuple[str, int], int] = {}
        self._under_way: deque[tuple[StreamEvent, object]] = deque()

    def run(
        self, way: tuple[str, int], launches: Sequence[PreparedLaunch], stream: int, keep: object
    ) -> StreamEventPending:
        """Launch on a side stream, after all work that is on ``stream`` now.

        Args:
            way: (direction, peer); launches with the same way run in order, on the same stream.
            launches: what to launch.
            stream: the caller's stream.
            keep: an object to keep alive until the kernels are done.
        """
        driver = self._driver
        self._forget()
        side = self._streams.get(way)
        if side is None:
            side = self._streams[way] = driver.make_stream()
        driver.order(stream, side)
        for launch in launches:
            launch(side)
        mark = driver.mark(side)
        self._under_way.append((mark, keep))
        return StreamEventPending(mark)

    def marks(self) -> list[StreamEvent]:
        """The ends of all unfinished messages."""
        return [mark for mark, _ in self._under_way]

    def close(self) -> None:
        """Destroy the streams; all messages must be done."""
        self._under_way.clear()
        while self._streams:
            self._driver.free_stream(self._streams.popitem()[1])

    def _forget(self) -> None:
        """Drop finished messages; those of different ways may end in any order."""
        still = [entry for entry in self._under_way if not entry[0].query()]
        self._under_way = deque(still)


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
                eager_sends=True,
                normed=frozenset(NUMBERS),
            ),
        )
        self._driver = driver
        self._endpoint = endpoint
        self._health = endpoint.health
        self._errors = ErrorTranslator(self.watch)
        self._order = StreamOrder(driver, self.name)
        self._messages = SideStreams(driver)
        self._planner = Planner(group, endpoint.limits)
        self._prepared = PreparedLaunches(driver, self._planner, self.world_size)
        self._registry = GraphBufferRegistry(driver, endpoint.mappings, group.rank, endpoint.swap)
        self._closing.callback(self._give_back)

    @classmethod
    def create(
        cls,
        driver: Driver,
        rank: int,
        world_size: int,
        swap: AllGatherBytes,
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
        endpoint = connect_peers(
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
        return replace(super().explain(), unavailable=refused)

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

    def sends_eagerly(self, peer: int, size: int) -> bool:  # noqa: ARG002 - never
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
        transfer = PendingThen(passage, lambda: self._check(operation))
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

    def _wait_for(self, mark: StreamEvent, operation: str, timeout: float | None) -> Pending:
        def check() -> None:
            self._health.check(operation, timeout)

        return StreamCompletion(mark, operation, self.peers, self._errors, check)

    def _launches(
        self, operation: Operation, algorithm: Algorithm, *, captured: bool
    ) -> Sequence[PreparedLaunch]:
        """The launches of an operation; its kernels have its time limit."""
        usual = operation.timeout == self.timeout
        if usual and not captured:
            return self._prepared.launches(operation, algorithm)
        launches, direct = launch_plan(operation, self.world_size, algorithm, captured=captured)
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


_REDUCTIONS: Final = frozenset(
    (op, dtype) for op in ReduceOp for dtype in NUMBERS if kernels_reduce(op, dtype)
)


def ipc_algorithms(ipc: IpcBackend) -> list[Candidate]:
    """A candidate for each algorithm of ``ipc``; they do not close ``ipc``."""
    limits = {Algorithm.PACKETS: ipc.packet_bytes}
    return [
        Candidate(f"ipc {each.value}", IpcAlgorithm(ipc, each), up_to=limits.get(each))
        for each in Algorithm
    ]


class IpcAlgorithm(Wrapper):
    """The all-reduce of an `IpcBackend` by one fixed algorithm."""

    def __init__(self, ipc: IpcBackend, algorithm: Algorithm) -> None:
        """Use ``ipc``, which its maker closes. Collective: no."""
        normed = ipc.capabilities.normed if algorithm is Algorithm.PACKETS else frozenset()
        has = replace(
            ipc.capabilities,
            verbs=frozenset({"all_reduce"}),
            reductions=_REDUCTIONS,
            normed=normed,
        )
        super().__init__(ipc, capabilities=has, closes=False)
        self._ipc = ipc
        self._algorithm = algorithm

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """As `IpcBackend.norms`, by the algorithm."""
        return self._ipc.norms(x, weight, self._algorithm)

    def start(self, operation: Operation) -> Pending | None:
        """Reduce by the algorithm."""
        op, dtype = operation.op, operation.source.dtype
        if not self.capabilities.reduces(op, dtype):
            raise NotImplementedError(f"{operation.name}: no kernel for {op.name} of {dtype}")
        return self._ipc.start(operation, self._algorithm)
