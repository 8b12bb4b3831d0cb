"""Looking at torch's events, without any device."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from device_comm.cuda.device import streams
from device_comm.cuda.errors import DeviceError

GLOBAL, RELAXED = 0, 2
"""Of CUstreamCaptureMode."""


@pytest.mark.parametrize("fails", [False, True])
def test_an_event_is_queried_in_a_mode_that_ends_no_capture(
    monkeypatch: pytest.MonkeyPatch, fails: bool
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
    stream: Any = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0))
    mark = streams.CudaMark(stream)
    if fails:
        with pytest.raises(DeviceError, match="cudaEventQuery: an illegal memory access"):
            mark.passed()
    else:
        assert mark.passed()
    assert modes == [RELAXED]
    assert thread.value == GLOBAL
