"""Tests whether ranks can use each other's memory, by collectives with known results.

A device may report peer access although the connection loses writes or returns stale data. So the
kernels run once, in all their ways of moving data, with a deadline, and the results are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from device_comm.cuda.device.streams import pass_within
from device_comm.cuda.errors import DeviceError
from device_comm.cuda.launches.launch import Algorithm
from device_comm.cuda.launches.planner import Planner
from device_comm.reduce_op import ReduceOp

if TYPE_CHECKING:
    from device_comm.cuda.device.driver import Driver
    from device_comm.cuda.ipc.health import Health
    from device_comm.cuda.launches import abi
    from device_comm.cuda.launches.launch import Limits

_NUMBERS = 512
_MARGIN = 5.0
"""Seconds that the host waits longer than the kernels do."""


class MemoryProbe:
    """One rank's part in the test, with the memory and the stream that it needs.

    Both are made here, before any kernel runs: while a peer's kernel waits on a device that the
    ranks share, allocating and writing its memory may have to wait for that kernel.
    """

    def __init__(self, driver: Driver, layout: abi.RegionLayout, rank: int) -> None:
        """For ``rank`` of a group with such regions. Collective: no."""
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
        """Give it back, when the test is over or does not take place. May be called again."""
        if self._source:
            self._driver.free_stream(self._stream)
            self._driver.free(self._source)
            self._source = 0

    def run(self, group: abi.Group, limits: Limits, health: Health, seconds: float) -> bytes:
        """Test ``group``; returns ``b""``, for `agree`. Collective: yes, every member.

        Args:
            group: the group; all regions are mapped and all kernels loaded.
            limits: the sizes of launches.
            health: this rank's.
            seconds: how long a kernel waits for a peer.

        Raises:
            CoordinatorError: the test failed; says why.
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
            raise DeviceError("probe", f"the device was not done in {seconds + _MARGIN} s")
        results = np.frombuffer(driver.read(reduced[0], size * (len(Algorithm) + n)), np.float32)
        self.close()
        health.check("probe", seconds)
        if not np.array_equal(
            results, np.concatenate([*[self._sum] * len(Algorithm), *self._gives])
        ):
            raise DeviceError("probe", "what ranks wrote into each other's memory is not there")
        return b""
