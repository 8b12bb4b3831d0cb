"""Times the calls of one communicator: by the host's clock, or by the device's in a CUDA graph.

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from device_comm.cuda.device.streams import CudaMark, CudaStreams
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.communicator import Communicator

SECONDS: Final = 60.0
"""The time limit of each wait."""

_POLL: Final = 0.0001


class HostStopwatch:
    """Times calls in a row, as an eager model makes them, until the device has done the last."""

    def __init__(
        self,
        comm: Communicator,
        meeting: Communicator,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time calls of ``comm``, whose ranks meet by ``meeting`` before each series."""
        self._comm = comm
        self._meeting = meeting
        self._clock = clock

    def time(self, call: Callable[[], Any], calls: int, repeats: int) -> float:
        """The seconds of one call: of ``repeats`` series of ``calls``, the quickest counts.

        Collective: yes, every member.
        """
        best = math.inf
        for _ in range(repeats):
            self._settle()
            self._meeting.barrier(timeout=SECONDS)
            began = self._clock()
            for _ in range(calls):
                call()
            self._settle()
            best = min(best, self._clock() - began)
        return max(best, 1e-9) / calls

    def _settle(self) -> None:
        """Wait until the device has finished all operations."""
        comm = self._comm
        comm.flush(SECONDS)
        if comm.device.type == "cuda":
            _wait_for(CudaStreams(comm.device).current().mark().passed, comm)


class GraphStopwatch:
    """Times calls in a CUDA graph, as a decoding model makes them."""

    def __init__(self, comm: Communicator) -> None:
        """Time calls of ``comm``, which can be captured."""
        self._comm = comm

    def time(self, call: Callable[[], Any], calls: int, repeats: int) -> float:
        """As `HostStopwatch.time`."""
        device = self._comm.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with self._comm.graph_capture(), torch.cuda.stream(stream):
            # Not torch.cuda.graph, which looks for garbage each time.
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(calls):
                call()
            graph.capture_end()
        best = math.inf
        with torch.cuda.stream(stream):
            for _ in range(repeats):
                best = min(best, self._replay(graph, stream))
        torch.cuda.current_stream(device).wait_stream(stream)
        return max(best, 1e-9) / calls

    def _replay(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        graph.replay()  # the ranks are together from here on
        start.record(stream)
        graph.replay()
        end.record(stream)
        _wait_for(CudaMark(stream).passed, self._comm)
        self._comm.check()
        return float(start.elapsed_time(end)) / 1e3


def _wait_for(passed: Callable[[], bool], comm: Communicator) -> None:
    deadline = Deadline.after(SECONDS)
    comm.watch.wait(passed, deadline, f"{comm.name} measure", lambda: comm.peers, poll=_POLL)
