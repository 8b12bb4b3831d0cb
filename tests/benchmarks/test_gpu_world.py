"""How worlds of ranks on GPUs begin and end, with devices that are none."""

from __future__ import annotations

import multiprocessing
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_first, gpu_world
from benchmarks.gpu_environment import LOADING
from device_comm import LoopbackBackend
from device_comm.cuda.ipc.ipc_backend import IpcBackend


@pytest.fixture
def kernel_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has ranks as threads be alone on devices that are none; how long their kernels wait."""
    waits: list[float] = []

    def create(*_: object, timeout: float, **__: object) -> LoopbackBackend:
        waits.append(timeout)
        return LoopbackBackend("cpu")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_world, "_own_stream", lambda _: nullcontext(NoStream()))
    monkeypatch.setattr(gpu_world, "CupyDriver", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(IpcBackend, "create", create)
    return waits


class NoStream:
    def synchronize(self) -> None: ...


def wait_in_vain(rank: gpu_world.Rank, never: threading.Event) -> None:
    never.wait()


def test_ranks_that_hang_show_where(
    kernel_waits: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    with pytest.raises(RuntimeError, match="rank 1 ---\nnot done in time"):
        gpu_world.run_world("streams", 2, wait_in_vain, never, seconds=2.0)
    never.set()
    assert capfd.readouterr().err.count("in wait_in_vain") == 2
    assert kernel_waits == [gpu_world.KERNEL_WAIT] * 2


def test_first_looks_do_not_wait_long(
    kernel_waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_first, "smallest", lambda rank: {"rank": rank.rank})
    assert gpu_first.ranks("streams") == {"rank": 0}
    assert kernel_waits == [10.0, 10.0]


def test_ranks_as_processes_load_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels hold up only their own process, and all of torch's take long to load."""
    loading: list[str] = []

    def process(args: tuple[Any, ...], **_: object) -> SimpleNamespace:
        def start() -> None:
            loading.append(os.environ[LOADING])
            args[4].send((True, "done"))

        return SimpleNamespace(start=start, join=lambda _: None, is_alive=lambda: False)

    monkeypatch.setenv(LOADING, "EAGER")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    assert gpu_world.run_world("processes", 2, print) == ["done", "done"]
    assert loading == ["LAZY", "LAZY"]
    assert os.environ[LOADING] == "EAGER"
