"""Set up a CUDA IPC group, test it, and read the errors that kernels record.

A rank's kernels and its host process share a control block (see `device_comm.cuda.ipc.abi`). A
kernel whose wait times out writes an error record there. The host reads it after the launch of
every operation, without synchronising with the device, and raises it. A thread waits on the group's
board: after an abort or the death of a peer it sets the control block's abort word, and all waiting
kernels end within microseconds. It makes no CUDA call, which might block.

A device may report peer access although the connection loses writes or returns stale data, hence
the test:

    1. Each rank allocates its region; the ranks exchange the regions' handles.
    2. Each rank maps the other ranks' regions, and loads all kernels.
    3. All ranks run real collectives of every algorithm within a deadline, and compare results.

If a step fails on any rank, all release everything and raise the same `IpcUnavailableError`; the
group then uses another backend.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from device_comm.cuda.agree import unanimous
from device_comm.cuda.driver import DeviceError, Driver, HostBlock, pass_within
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import (
    KERNELS,
    Algorithm,
    ErrorCode,
    ErrorRecord,
    Limits,
    Phase,
    warm_up,
)
from device_comm.cuda.ipc.mappings import Mappings, Shared, UnmapFlags
from device_comm.cuda.ipc.planner import Planner
from device_comm.operation import ReduceOp
from device_comm.torch_waiting import ErrorTranslator
from device_comm.watchdog import SLOW_TICK, WATCHDOG, Issued, Subject
from shm_broadcast._native import Words
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import (
    CoordinatorError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    TransportError,
)
from shm_broadcast.process import ProcessId
from shm_broadcast.segment import SegmentHandle

if TYPE_CHECKING:
    from device_comm.backend import Identity
    from device_comm.cuda.agree import AllGatherBytes


_PHASES = {
    Phase.START: "to begin a collective",
    Phase.END: "to finish a collective",
    Phase.PACKET: "for its packets",
    Phase.PUT: "to receive",
    Phase.TAKE: "to send",
}

_CAUSE_SECONDS = 0.5
"""Seconds until the board has the reason why a rank's kernels were stopped."""


class KernelWatchdog(Subject):
    """One rank's control block; stops the rank's kernels if a peer is lost or the group aborted."""

    def __init__(self, control: memoryview, identity: Identity) -> None:
        """Watch the group; ``control`` is `abi.CONTROL_BYTES` that kernels access."""
        super().__init__()
        self.tick = SLOW_TICK
        self._control = control
        self._words = Words(control)
        self._watch = identity.watch
        self._errors = ErrorTranslator(identity.watch)
        self._members = identity.members
        self._kernels = Issued(identity.operation("kernels"), NEVER, identity.peers)
        WATCHDOG.add(self)

    @property
    def failed(self) -> bool:
        """Return True if a kernel has recorded an error; costs one load."""
        return self._words.load32(abi.CONTROL_RECORD) != 0

    def check(self, operation: str, timeout: float | None) -> None:
        """Raise the error that a kernel has recorded, if any.

        A `GroupTimeoutError` names the late rank. A `TransportError` means that the kernels were
        stopped, for no reason on the board. ``operation`` and ``timeout``, the kernels' time limit
        in seconds, are for the error.
        """
        # The kernel stores the code last, with release, and `failed` loads it with acquire.
        if self.failed:
            raise self._explain(ErrorRecord.read(self._control), operation, timeout)

    def abort(self) -> None:
        """Stop all waiting kernels of this rank, and later ones when they wait."""
        struct.pack_into("<I", self._control, abi.CONTROL_ABORT, 1)

    def close(self, timeout: float = 1.0) -> None:
        """End the watch; keep a copy of the control block, which may be freed afterwards."""
        super().close(timeout)
        self._control = memoryview(bytearray(self._control))
        self._words = Words(self._control)

    def _explain(
        self, record: ErrorRecord, operation: str, timeout: float | None
    ) -> CoordinatorError:
        if record.code is ErrorCode.ABORTED or record.culprit == record.reporter:
            # A rank's host process has stopped its kernels, and publishes the reason.
            cause = self._cause(operation, self._members, _CAUSE_SECONDS)
            if isinstance(cause, GroupTimeoutError):
                return TransportError(operation, "the kernels were stopped", record.reporter)
            return cause
        cause = self._cause(operation, [self._members[record.culprit]], 0)
        if not isinstance(cause, GroupTimeoutError):
            return cause
        detail = f"rank {record.reporter} waited for rank {record.culprit} "
        detail += f"{_PHASES[record.phase]}, number {record.epoch}"
        late = cause.waiting_for or (MemberStatus(record.culprit, 0, "busy"),)
        return GroupTimeoutError(operation, timeout, late, detail)

    def _cause(self, operation: str, members: Sequence[int], seconds: float) -> CoordinatorError:
        """Return the board's error about ``members``, or `GroupTimeoutError`."""
        try:
            self._watch.wait(bool, Deadline.after(seconds), operation, lambda: members, spin=0)
        except CoordinatorError as cause:
            return cause
        return GroupTimeoutError(operation, seconds)

    def update(self) -> bool:
        """Stop the kernels if the group has failed."""
        error, kernels = self._kernels.failure(self._errors), self._kernels
        if isinstance(error, PeerLostError) and error.peer.state == "closed":
            kernels.peers = [  # a close is no failure; watch the other peers
                peer for peer in kernels.peers if self._watch.member_status(peer).state != "closed"
            ]
            error = None
        if error is not None:
            self.abort()
        return error is None


_NUMBERS = 512
_MARGIN = 5.0
"""Seconds for which the host waits longer than the kernels."""


class MemoryProbe:
    """One rank's part in the test, with its memory and stream.

    Both are allocated before any kernel runs: on a shared device, an allocation or a write may wait
    for a peer's kernel, which waits for this rank.
    """

    def __init__(self, driver: Driver, layout: abi.RegionLayout, rank: int) -> None:
        numbers = np.arange(1, 1 + min(_NUMBERS, layout.packet_bytes // 4), dtype=np.float32)
        n = layout.world_size
        self._driver = driver
        self._gives = [numbers * (each + 1) for each in range(n)]
        self._sum = numbers * (n * (n + 1) // 2)
        self._size = numbers.nbytes
        self._source = driver.allocate(self._size * (1 + len(Algorithm) + n))
        driver.write(self._source, self._gives[rank].tobytes())
        self._stream = driver.make_stream()

    def close(self) -> None:
        """Release memory and stream; idempotent."""
        if self._source:
            self._driver.free_stream(self._stream)
            self._driver.free(self._source)
            self._source = 0

    def run(
        self, group: abi.Group, limits: Limits, health: KernelWatchdog, seconds: float
    ) -> bytes:
        """Test ``group``; return ``b""``, for `unanimous`. Collective: yes, every member.

        All regions are mapped and all kernels loaded. A kernel waits ``seconds`` for a peer. Raises
        a `CoordinatorError` if the test fails.
        """
        driver, source, size, n = self._driver, self._source, self._size, len(self._gives)
        planner = Planner(group.with_timeout(int(seconds * 1e9)), limits)
        reduced = [source + size * (1 + index) for index in range(len(Algorithm))]
        launches = planner.all_gather(reduced[-1] + size, source, [size] * n)
        for output, algorithm in zip(reduced, Algorithm, strict=True):
            launches += planner.all_reduce(
                output, source, size, torch.float32, ReduceOp.SUM, algorithm=algorithm
            )
        for launch in launches:
            driver.prepare(*launch)(self._stream)
        if not pass_within(seconds + _MARGIN, [driver.mark(self._stream)]):
            health.abort()
            raise DeviceError("probe", f"the device did not finish in {seconds + _MARGIN} s")
        results = np.frombuffer(driver.read(reduced[0], size * (len(Algorithm) + n)), np.float32)
        self.close()
        health.check("probe", seconds)
        if not np.array_equal(
            results, np.concatenate([*[self._sum] * len(Algorithm), *self._gives])
        ):
            raise DeviceError("probe", "ranks read wrong data from each other's memory")
        return b""


ENDPOINT_LINGER = 2.0
"""Seconds to wait for peers to unmap this rank's region; else only the process's end frees it."""

ENDPOINT_PROBE_SECONDS = 10.0
"""Seconds for which the first collectives wait for a peer."""


class _RegionExport(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message to the others: its region, and from rank 0 the segment of `UnmapFlags`.

    ``terms`` describes layout and limits, and must be the same on all ranks.
    """

    region: Shared
    unmap_flags: SegmentHandle | None
    terms: str


_DECODER = msgspec.msgpack.Decoder(_RegionExport)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rank's end of a group on its device.

    Attributes:
        group: the kernels' view of the group, with the communicator's timeout.
        health: reads the kernels' error record, and stops kernels.
        closing: releases everything. Close it after the last kernel of this rank. It waits up to
            `ENDPOINT_LINGER` for peers that still map the region.
    """

    driver: Driver
    group: abi.Group
    limits: Limits
    mappings: Mappings
    health: KernelWatchdog
    swap: AllGatherBytes
    closing: ExitStack


def connect_peers(
    identity: Identity,
    driver: Driver,
    swap: AllGatherBytes,
    *,
    layout: abi.RegionLayout | None,
    limits: Limits | None,
    probe_seconds: float,
) -> Endpoint:
    """Set up a group. Collective: yes, every member.

    Arguments and errors are as for `IpcBackend.create`.
    """
    rank, world_size = identity.rank, identity.world_size
    with ExitStack() as undo:
        layout = layout or abi.RegionLayout(world_size)
        exported = _ExportedRegion(driver, rank, undo)
        control: HostBlock

        def offer() -> bytes:
            nonlocal control
            control = driver.host_allocate(abi.CONTROL_BYTES)
            undo.callback(driver.host_free, control)
            return exported.export(layout.size, f"{layout} {limits}")

        payloads = unanimous(swap, offer)
        offers = [_DECODER.decode(each) for each in payloads]
        if limits is None:
            devices = [offer.region.device for offer in offers]
            largest = max(devices.count(device) for device in devices)
            limits = Limits.for_ranks(world_size, ranks_on_device=largest)
        health = KernelWatchdog(control.view, identity)
        undo.callback(health.close)
        chosen = limits
        probe: MemoryProbe

        def take() -> bytes:
            nonlocal probe
            exported.map_peers(offers)
            driver.load(KERNELS)
            probe = MemoryProbe(driver, layout, rank)
            undo.callback(probe.close)
            stream = driver.current_stream()
            for launch in warm_up(chosen):
                driver.prepare(*launch)(stream)
            return b""

        unanimous(swap, take)
        nanoseconds = 0 if identity.timeout is None else int(identity.timeout * 1e9)
        group = abi.Group(exported.regions, control.pointer, rank, layout, nanoseconds)
        unanimous(swap, lambda: probe.run(group, chosen, health, probe_seconds))
        return Endpoint(driver, group, limits, exported.mappings, health, swap, undo.pop_all())


class _ExportedRegion:
    """This rank's region, and its mappings of the other ranks' regions."""

    def __init__(self, driver: Driver, rank: int, undo: ExitStack) -> None:
        self.mappings = Mappings(driver)
        self.regions: tuple[int, ...] = ()
        self._driver = driver
        self._rank = rank
        self._undo = undo
        self._unmap_flags: UnmapFlags | None = None
        self._peers: list[tuple[int, ProcessId]] = []

    def export(self, size: int, terms: str) -> bytes:
        """Allocate the region; return the encoded `_RegionExport`."""
        region = self._driver.allocate(size)
        self._undo.callback(self._free, region)
        handle = None
        if self._rank == 0:
            self._unmap_flags = UnmapFlags.create(0)
            handle = self._unmap_flags.handle()
        return msgspec.msgpack.encode(_RegionExport(self.mappings.export(region), handle, terms))

    def map_peers(self, offers: Sequence[_RegionExport]) -> None:
        for offer in offers:
            if offer.terms != offers[0].terms:
                raise ValueError(f"ranks differ: {offers[0].terms}, but {offer.terms}")
        self._undo.callback(self._set_unmapped)
        self._peers = [
            (rank, ProcessId(offer.region.pid, offer.region.start_time))
            for rank, offer in enumerate(offers)
            if rank != self._rank
        ]
        if offers[0].unmap_flags is not None and self._unmap_flags is None:
            self._unmap_flags = UnmapFlags.attach(offers[0].unmap_flags, self._rank)
        own = offers[self._rank].region.pointer
        self.regions = tuple(
            own if rank == self._rank else self.mappings.address(offer.region)
            for rank, offer in enumerate(offers)
        )

    def _set_unmapped(self) -> None:
        self.mappings.close()
        if self._unmap_flags is not None:
            self._unmap_flags.set_unmapped()

    def _free(self, region: int) -> None:
        unmapped = not self._peers
        if self._unmap_flags is not None:
            unmapped = unmapped or self._unmap_flags.wait(
                self._peers, Deadline.after(ENDPOINT_LINGER)
            )
            self._unmap_flags.close()
        if unmapped:
            self._driver.free(region)
