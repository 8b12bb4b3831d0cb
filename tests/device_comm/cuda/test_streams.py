"""Looking at torch's events, without any device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm.cuda import driver as streams
from device_comm.cuda.driver import DeviceError
from device_comm.wrappers import CudaSideStream

if TYPE_CHECKING:
    from collections.abc import Callable

GLOBAL, RELAXED = 0, 2
"""Of CUstreamCaptureMode."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "mark",
    [
        lambda stream: streams.CudaEvent(stream).query,
        lambda stream: CudaSideStream(stream).mark(),
    ],
    ids=["mark", "side stream"],
)
def test_an_event_is_queried_in_a_mode_that_ends_no_capture(
    monkeypatch: pytest.MonkeyPatch, mark: Callable[[Any], Callable[[], bool]], fails: bool
) -> None:
    """And that of the thread is as before then, also when the device has failed."""
    thread, modes = ctypes.c_int(GLOBAL), []

    def exchange(mode: Any) -> int:
        mode._obj.value, thread.value = thread.value, mode._obj.value
        return 0

    def query() -> bool:
        modes.append(thread.value)
        if fails:
            raise RuntimeError("an illegal memory access was encountered")
        return True

    event = SimpleNamespace(record=lambda _: None, query=query)
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    device = torch.device("cuda", 0)
    passed = mark(SimpleNamespace(cuda_stream=0, device=device, record_event=lambda: event))
    if fails:
        with pytest.raises(DeviceError, match="cudaEventQuery: an illegal memory access"):
            passed()
    else:
        assert passed()
    assert modes == [RELAXED]
    assert thread.value == GLOBAL


@pytest.mark.parametrize("reached", [False, True])
def test_only_what_is_to_come_is_waited_for(monkeypatch: pytest.MonkeyPatch, reached: bool) -> None:
    """A stream that is captured cannot wait for anything else than its graph."""
    event = SimpleNamespace(record=lambda _: None, query=lambda: reached)
    waits: list[object] = []
    driver = SimpleNamespace(cuThreadExchangeStreamCaptureMode=lambda _: 0)
    monkeypatch.setattr(streams, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    current = SimpleNamespace(wait_event=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    stream: Any = SimpleNamespace(device=torch.device("cuda", 0))
    streams.CudaEvent(stream).stream_wait()
    assert waits == ([] if reached else [event])
