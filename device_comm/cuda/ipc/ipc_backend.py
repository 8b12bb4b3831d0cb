"""Run collectives and messages between ranks whose devices access each other's memory.

Every rank shares a region of its device memory with the others. Kernels move data through these
regions; in graphs they read large inputs directly. Ranks may be processes or threads, with a device
each or several on one device. Reductions run in rank order, so results are bitwise equal on all
ranks.

Collectives of a group must run one after the other, in the same order on every rank. A call on
another stream than the last one waits for it, by an event. In a capture that is impossible: all
captured operations of a communicator must be on one stream; others are refused. Replays are not
observable: run them on the stream of the other calls, or order the streams yourself. Background
messages may wait for long, so they run on side streams, one per peer and direction, and collectives
do not wait for them.

Device memory per rank, with n ranks, by default: ``16 MiB + 4 n MiB``, and 4 MiB more after a
capture.
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
from device_comm.operation import ALL_VERBS, REDUCTIONS, Operation, ReduceOp
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
"""Seconds between two polls of the device."""

_RECORD_SECONDS = 0.5
"""Seconds for which the host waits after its deadline for a kernel's error record.

The record names the late rank.
"""


class StreamCompletion:
    """A `Pending` whose `wait` blocks the host until the device is done."""

    def __init__(
        self,
        mark: StreamEvent,
        operation: str,
        peers: Sequence[int],
        boundary: ErrorTranslator,
        check: Callable[[], None],
    ) -> None:
        """Wait for the work before ``mark``.

        ``check`` raises the error that a kernel has recorded, if any.
        """
        self._mark = mark
        self._operation = operation
        self._peers = peers
        self._errors = boundary
        self._check = check

    def ready(self) -> bool:
        """Return True if the device is done."""
        return self._mark.query()

    def wait(self, deadline: Deadline) -> None:
        """Wait until the device is done."""
        try:
            self._look(deadline)
        except GroupTimeoutError:  # a kernel's error names the late rank
            with suppress(GroupTimeoutError):
                self._look(Deadline.after(_RECORD_SECONDS))
            self._check()
            raise
        self._check()

    def _look(self, deadline: Deadline) -> None:
        self._errors.wait(
            self._mark.query, deadline, self._operation, self._peers, poll=_POLL_SECONDS
        )


class StreamPlace(NamedTuple):
    """The caller's stream, and if it is being captured."""

    stream: int
    captured: bool


class StreamOrder:
    """Orders the operations of one communicator across streams."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._name = name
        self._eager: int | None = None
        self._capture: int | None = None

    def place(self) -> StreamPlace:
        """Return the current stream, after it waits for the last one used.

        Raises:
            ValueError: another stream is being captured, so they cannot be ordered.
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
        """Return the current stream, for an operation without order."""
        stream = self._driver.current_stream()
        return StreamPlace(stream, self._driver.is_capturing(stream))

    def marks(self) -> list[StreamEvent]:
        """Return events after all work on the last used and the current stream, with replays."""
        streams = {self._driver.current_stream()}
        if self._eager is not None:
            streams.add(self._eager)
        return [self._driver.mark(each) for each in streams if not self._driver.is_capturing(each)]

    def _refuse_beside(self, other: int | None, stream: int) -> None:
        if other is not None and other != stream and self._driver.is_capturing(other):
            raise ValueError(
                f"{self._name}: a capture is under way on stream {other:#x}; its operations "
                f"cannot be ordered with one on stream {stream:#x}: use the captured stream"
            )


class SideStreams:
    """The side streams of messages, which keep the messages' objects alive."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._streams: dict[tuple[str, int], int] = {}
        self._under_way: deque[tuple[StreamEvent, object]] = deque()

    def run(
        self, way: tuple[str, int], launches: Sequence[PreparedLaunch], stream: int, keep: object
    ) -> StreamEventPending:
        """Launch on a side stream, after all current work on ``stream``.

        Launches of the same ``way``, (direction, peer), run in order, on the same stream. ``keep``
        stays alive until the kernels are done.
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
        """Return events after all unfinished messages."""
        return [mark for mark, _ in self._under_way]

    def close(self) -> None:
        """Destroy the streams; all messages must be done."""
        self._under_way.clear()
        while self._streams:
            self._driver.free_stream(self._streams.popitem()[1])

    def _forget(self) -> None:
        """Drop finished messages, which may end in any order."""
        still = [entry for entry in self._under_way if not entry[0].query()]
        self._under_way = deque(still)


_FINISH = 5.0
"""Seconds for which `close` waits for this rank's operations on the device."""


class IpcBackend(Backend):
    """One rank's end of a group. One thread at a time. Make it with `create`.

    - Calls return when the work is queued on torch's current stream; `barrier` and `flush` when the
      device is done. A call on another stream than the last one is ordered after it; in a capture
      it raises ValueError.
    - A kernel waits for a peer up to the call's timeout. The next call, `barrier` or `flush` raises
      its error; results until then are undefined.
    - `isend` and `irecv` run on side streams, so the current stream does not wait for the peer. In
      a capture they run on the captured stream and separate channels, so both ranks must capture a
      message.
    """

    def __init__(self, identity: Identity, endpoint: Endpoint) -> None:
        driver, group = endpoint.driver, endpoint.group
        super().__init__(
            identity,
            Capabilities(
                "ipc",
                ALL_VERBS,
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
            world_size: from 2 to 8.
            swap: an all-gather of bytes, by rank, with its own deadline. Called several times, here
                and in `graph_capture`.
            name: for errors and status, the same on all ranks.
            rank, timeout, watch, members: as for `Identity.of`.
            layout: the shared regions, the same on all ranks; None: the default.
            limits: the sizes of launches, the same on all ranks; None: the default.
            probe_seconds: how long the test's kernels wait for a peer.

        Raises:
            IpcUnavailableError: a rank cannot use another one's memory. All ranks raise this for
                the first such rank, and everything is released.
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
        """Return the largest all-reduce of the packet algorithm, in bytes."""
        return self._endpoint.group.layout.packet_bytes

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return why captured collectives were staged, if any."""
        return tuple(self._registry.reasons)

    def explain(self) -> Explanation:
        """See `Backend.explain`; adds why captured collectives were staged."""
        refused = tuple(("ipc without staging in graphs", reason) for reason in self.reasons)
        return replace(super().explain(), unavailable=refused)

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Return a context in which CUDA graphs may capture collectives of this group.

        Large captured collectives read their inputs directly, without staging, up to the first
        32,768 of a context: at its end all ranks exchange the inputs' addresses. From then on,
        until `close`, graphs may be replayed, in the same order on all ranks, on the stream of the
        group's other calls. Contexts may nest: the exchange happens at the end of the outermost.

        Collective: yes, every member.

        Raises:
            DivergenceError: ranks captured different collectives, or a message without its other
                end; do not replay the graphs.
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
            GroupTimeoutError, CoordinatorError: some are incomplete at the deadline; one failed.
        """
        operation = self.identity.operation("flush")
        for mark in (*self._messages.marks(), *self._order.marks()):
            self._wait_for(mark, operation, deadline.timeout).wait(deadline)

    def check(self) -> None:
        """See `Backend.check`; reads errors of kernels, also in graphs."""
        super().check()
        if self._health.failed:
            self._health.check(self.identity.operation("check"), self.timeout)

    def sends_eagerly(self, peer: int, size: int) -> bool:  # noqa: ARG002 - never
        """Return False: earlier messages may still fill the channel."""
        return False

    def norms(self, x: Tensor, weight: Tensor, algorithm: Algorithm | None = None) -> bool:
        """Return True for sums in packets, with rows of whole cells; see `Backend.norms`.

        ``algorithm`` of the sum; None: by size.
        """
        algorithm = algorithm or self._planner.algorithm(x.nbytes)
        fits = 0 < x.nbytes <= self.packet_bytes and weight.nbytes % ALIGN == 0
        return fits and algorithm is Algorithm.PACKETS and x.dtype in self.capabilities.normed

    def discard(self) -> None:
        """Stop all waiting kernels of this rank."""
        self._health.abort()

    def start(self, operation: Operation, algorithm: Algorithm | None = None) -> Pending | None:
        """Launch the kernels of an operation; torch computes reductions without a kernel.

        ``algorithm`` of an all-reduce; None: by size.
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
        place = self._order.place()
        for launch in self._launches(operation, algorithm, captured=place.captured):
            launch(place.stream)

    def _transfer(self, operation: Operation, algorithm: Algorithm) -> Pending | None:
        """Launch a message on a side stream, or on the captured stream."""
        place = self._order.look()
        launches = self._launches(operation, algorithm, captured=place.captured)
        if place.captured:
            message = operation.source if operation.verb == "send" else operation.output
            self._registry.note_message(operation.verb, operation.peer, message.nbytes)
            for launch in launches:
                launch(place.stream)
            return None
        way = (operation.verb, operation.peer)
        launched = self._messages.run(way, launches, place.stream, operation)
        transfer = PendingThen(launched, lambda: self._check(operation))
        if operation.background:
            return transfer
        transfer.wait(operation.deadline)
        return None

    def _arrival(self, operation: Operation) -> Pending | None:
        """Return a `Pending` that blocks the host until all launched work is done."""
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
        """Return the launches of an operation, with its time limit."""
        has_default_limit = operation.timeout == self.timeout
        if has_default_limit and not captured:
            return self._prepared.launches(operation, algorithm)
        launches, direct = launch_plan(operation, self.world_size, algorithm, captured=captured)
        table = 0
        if captured and direct is not None:
            description = f"{operation.verb} of {direct.nbytes} bytes of {direct.dtype}"
            table = self._registry.reserve(description, direct.data_ptr())
        planner = self._planner
        if not has_default_limit:
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
                return  # never free memory that the device still uses
        self._messages.close()
        self._registry.close()
        self._endpoint.closing.close()


def _nanoseconds(deadline: Deadline) -> int:
    """Return the remaining time for a kernel; 0: unlimited."""
    return 0 if deadline.timeout is None else max(int(deadline.remaining() * 1e9), 1)


_REDUCTIONS: Final = frozenset(
    (op, dtype) for op in ReduceOp for dtype in NUMBERS if kernels_reduce(op, dtype)
)


def ipc_algorithms(ipc: IpcBackend) -> list[Candidate]:
    """Return a candidate for each algorithm of ``ipc``; they do not close it."""
    limits = {Algorithm.PACKETS: ipc.packet_bytes}
    return [
        Candidate(f"ipc {each.value}", IpcAlgorithm(ipc, each), up_to=limits.get(each))
        for each in Algorithm
    ]


class IpcAlgorithm(Wrapper):
    """The all-reduce of an `IpcBackend` by one fixed algorithm."""

    def __init__(self, ipc: IpcBackend, algorithm: Algorithm) -> None:
        """Use ``ipc``, which the caller closes."""
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
        """See `IpcBackend.norms`, for this algorithm."""
        return self._ipc.norms(x, weight, self._algorithm)

    def start(self, operation: Operation) -> Pending | None:
        """Reduce by the algorithm."""
        op, dtype = operation.op, operation.source.dtype
        if not self.capabilities.reduces(op, dtype):
            raise NotImplementedError(f"{operation.name}: no kernel for {op.name} of {dtype}")
        return self._ipc.start(operation, self._algorithm)
