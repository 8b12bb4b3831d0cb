"""Sets a CUDA IPC group up: ranks map each other's regions and prove that they can use them.

    1. Each rank allocates its region; the ranks swap the regions' handles.
    2. Each rank maps the other ranks' regions, and loads all kernels.
    3. All ranks run real collectives with known results, within a deadline.

After each step all ranks learn whether it has worked everywhere. If not, all of them release
everything and raise the same `IpcUnavailableError`: the whole group uses another backend then.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from device_comm.cuda.agree import agree
from device_comm.cuda.ipc.health import Health
from device_comm.cuda.ipc.mappings import Departures, Mappings, Shared
from device_comm.cuda.ipc.probe import MemoryProbe
from device_comm.cuda.launches import abi
from device_comm.cuda.launches.launch import KERNELS, Limits, warm_up
from shm_broadcast.deadline import Deadline
from shm_broadcast.machine.liveness import ProcessId
from shm_broadcast.segment import SegmentHandle  # noqa: TC001 - msgspec looks at it

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.backend import Identity
    from device_comm.cuda.agree import Swap
    from device_comm.cuda.device.driver import Driver, HostBlock

ENDPOINT_LINGER = 2.0
"""How long to wait for peers to unmap this rank's region. If they do not, it is not freed before
the process ends."""

ENDPOINT_PROBE_SECONDS = 10.0
"""How long the first collectives wait for a peer, in seconds."""


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: its region, and rank 0 also the segment of `Departures`.

    ``terms`` describes layout and limits, and must be the same on all ranks.
    """

    region: Shared
    departures: SegmentHandle | None
    terms: str


_DECODER = msgspec.msgpack.Decoder(_Offer)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One rank's end of a group on its device.

    Attributes:
        driver: the device's driver.
        group: what kernels need to know of the group, with the communicator's timeout.
        limits: the sizes of launches.
        mappings: the memory that is shared with, and mapped from, the peers.
        health: reads the kernels' error record, and stops kernels.
        swap: swaps bytes among the ranks.
        closing: releases everything. Close it when no kernel of this rank runs any more. It waits
            up to `ENDPOINT_LINGER` for peers that still map the region.
    """

    driver: Driver
    group: abi.Group
    limits: Limits
    mappings: Mappings
    health: Health
    swap: Swap
    closing: ExitStack


def meet_peers(
    identity: Identity,
    driver: Driver,
    swap: Swap,
    *,
    layout: abi.RegionLayout | None,
    limits: Limits | None,
    probe_seconds: float,
) -> Endpoint:
    """Set a group up. Collective: yes, every member.

    Args:
        identity: this rank and its group.
        driver, swap, and all others: as for `IpcBackend.create`.

    Raises:
        IpcUnavailableError: a step failed on a rank; all ranks raise it.
        CoordinatorError: ``swap`` failed.
    """
    rank, world_size = identity.rank, identity.world_size
    with ExitStack() as undo:
        layout = layout or abi.RegionLayout(world_size)
        loan = _RegionLoan(driver, rank, undo)
        control: HostBlock

        def offer() -> bytes:
            nonlocal control
            control = driver.host_allocate(abi.CONTROL_BYTES)
            undo.callback(driver.host_free, control)
            return loan.offer(layout.size, f"{layout} {limits}")

        payloads = agree(swap, offer)
        offers = [_DECODER.decode(each) for each in payloads]
        if limits is None:
            devices = [offer.region.device for offer in offers]
            crowd = max(devices.count(device) for device in devices)
            limits = Limits.for_ranks(world_size, ranks_on_device=crowd)
        health = Health(control.view, identity)
        undo.callback(health.close)
        chosen = limits
        probe: MemoryProbe

        def take() -> bytes:
            nonlocal probe
            loan.take(offers)
            driver.load(KERNELS)
            probe = MemoryProbe(driver, layout, rank)
            undo.callback(probe.close)
            stream = driver.current_stream()
            for launch in warm_up(chosen):
                driver.prepare(*launch)(stream)
            return b""

        agree(swap, take)
        nanoseconds = 0 if identity.timeout is None else int(identity.timeout * 1e9)
        group = abi.Group(loan.regions, control.pointer, rank, layout, nanoseconds)
        agree(swap, lambda: probe.run(group, chosen, health, probe_seconds))
        return Endpoint(driver, group, limits, loan.mappings, health, swap, undo.pop_all())


class _RegionLoan:
    """This rank's region, and its mappings of the other ranks' regions."""

    def __init__(self, driver: Driver, rank: int, undo: ExitStack) -> None:
        self.mappings = Mappings(driver)
        self.regions: tuple[int, ...] = ()
        self._driver = driver
        self._rank = rank
        self._undo = undo
        self._departures: Departures | None = None
        self._peers: list[tuple[int, ProcessId]] = []

    def offer(self, size: int, terms: str) -> bytes:
        """Allocate the region; returns the encoded `_Offer`."""
        region = self._driver.allocate(size)
        self._undo.callback(self._free, region)
        handle = None
        if self._rank == 0:
            self._departures = Departures.create(0)
            handle = self._departures.handle()
        return msgspec.msgpack.encode(_Offer(self.mappings.share(region), handle, terms))

    def take(self, offers: Sequence[_Offer]) -> None:
        """Map the other ranks' regions."""
        for offer in offers:
            if offer.terms != offers[0].terms:
                raise ValueError(f"ranks differ: {offers[0].terms}, but {offer.terms}")
        self._undo.callback(self._depart)
        self._peers = [
            (rank, ProcessId(offer.region.pid, offer.region.start_time))
            for rank, offer in enumerate(offers)
            if rank != self._rank
        ]
        if offers[0].departures is not None and self._departures is None:
            self._departures = Departures.attach(offers[0].departures, self._rank)
        own = offers[self._rank].region.pointer
        self.regions = tuple(
            own if rank == self._rank else self.mappings.address(offer.region)
            for rank, offer in enumerate(offers)
        )

    def _depart(self) -> None:
        self.mappings.close()
        if self._departures is not None:
            self._departures.depart()

    def _free(self, region: int) -> None:
        alone = not self._peers
        if self._departures is not None:
            alone = alone or self._departures.wait(self._peers, Deadline.after(ENDPOINT_LINGER))
            self._departures.close()
        if alone:
            self._driver.free(region)
