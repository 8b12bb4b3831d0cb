"""Tests whether ranks can use each other's memory, by collectives with known results.

A device may report peer access although the connection loses writes or returns stale data. So the
kernels run once, in all their ways of moving data, with a deadline, and the results are compared.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from device_comm.cuda.errors import DeviceError
from device_comm.cuda.launches.launch import Protocol
from device_comm.cuda.launches.planner import Planner
from device_comm.reduce_op import ReduceOp
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from device_comm.cuda.device.driver import Driver
    from device_comm.cuda.ipc.health import Health
    from device_comm.cuda.launches import abi
    from device_comm.cuda.launches.launch import Limits

_NUMBERS = 512
_MARGIN = 5.0
"""Seconds that the host waits longer than the kernels do."""

_NAP = 0.0005


def probe(
    driver: Driver, group: abi.Group, limits: Limits, health: Health, seconds: float
) -> bytes:
    """Test ``group``; returns ``b""``, for `agree`. Collective: yes, every member.

    Args:
        driver: the device's driver.
        group: the group; all regions are mapped and all kernels loaded.
        limits: the sizes of launches.
        health: this rank's.
        seconds: how long a kernel waits for a peer.

    Raises:
        CoordinatorError: the test failed; says why.
    """
    n = group.layout.world_size
    planner = Planner(group.with_timeout(int(seconds * 1e9)), limits)
    numbers = np.arange(1, 1 + min(_NUMBERS, group.layout.packet_bytes // 4), dtype=np.float32)
    gives = [numbers * (rank + 1) for rank in range(n)]
    total = numbers * (n * (n + 1) // 2)
    size = numbers.nbytes
    source = driver.allocate(size * (1 + len(Protocol) + n))
    reduced = [source + size * (1 + index) for index in range(len(Protocol))]
    launches = planner.all_gather(reduced[-1] + size, source, [size] * n)
    for output, protocol in zip(reduced, Protocol, strict=True):
        launches += planner.all_reduce(
            output, source, size, torch.float32, ReduceOp.SUM, protocol=protocol
        )
    driver.write(source, gives[group.rank].tobytes())
    stream = driver.make_stream()
    for launch in launches:
        driver.prepare(*launch)(stream)
    _wait(driver, stream, health, seconds + _MARGIN)
    results = np.frombuffer(driver.read(reduced[0], size * (len(Protocol) + n)), np.float32)
    driver.free_stream(stream)
    driver.free(source)
    health.check("probe", seconds)
    if not np.array_equal(results, np.concatenate([*[total] * len(Protocol), *gives])):
        raise DeviceError("probe", "what ranks wrote into each other's memory is not there")
    return b""


def _wait(driver: Driver, stream: int, health: Health, seconds: float) -> None:
    mark = driver.mark(stream)
    deadline = Deadline.after(seconds)
    while not mark.passed():
        if deadline.expired:
            health.abort()
            raise DeviceError("probe", f"the device was not done in {deadline.timeout} s")
        time.sleep(_NAP)
