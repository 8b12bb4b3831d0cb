"""Launches that are kept: what makes two operations the same, and how many are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import Operation, ReduceOp
from device_comm.cuda.ipc import abi, planner
from device_comm.cuda.ipc.abi import Algorithm, Limits
from device_comm.cuda.ipc.planner import Planner, PreparedLaunches
from device_comm.operation import Norm
from tests.device_comm.cuda.host_driver import HostDriver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.cuda.driver import PreparedLaunch

X, Y, Z = torch.zeros(64), torch.zeros(64), torch.zeros(64)
PACKETS = Algorithm.PACKETS


class Counting(HostDriver):
    """Notes what it was given to prepare."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prepared: list[tuple[str, bytes]] = []

    def prepare(self, kernel: str, grid: int, block: int, args: Sequence[bytes]) -> PreparedLaunch:
        self.prepared.append((kernel, args[0]))
        return super().prepare(kernel, grid, block, args)


def make(driver: HostDriver, n: int = 2) -> PreparedLaunches:
    group = abi.Group((4096,) * n, 8192, 0, abi.RegionLayout(n), 10**9)
    return PreparedLaunches(driver, Planner(group, Limits()), n)


def reduction(source: torch.Tensor = X, output: torch.Tensor = Y, **how: Any) -> Operation:
    return Operation("all_reduce", source, output, **how)


def test_what_comes_again_is_planned_once() -> None:
    driver = Counting()
    kept = make(driver)
    first = kept.launches(reduction(), PACKETS)
    assert kept.launches(reduction(), PACKETS) is first
    assert [name for name, _ in driver.prepared] == ["ipc_packets_float32"]


@pytest.mark.parametrize(
    ("other", "algorithm"),
    [
        (reduction(Y, X), PACKETS),
        (reduction(X, X), PACKETS),
        (reduction(X[:32], Y[:32]), PACKETS),
        (reduction(X.view(torch.float16), Y.view(torch.float16)), PACKETS),
        (reduction(op=ReduceOp.MAX), PACKETS),
        (reduction(), Algorithm.ONE_SHOT),
        (Operation("send", X, peer=1), PACKETS),
        (Operation("recv", output=X, peer=1), PACKETS),
        (Operation("broadcast", X, peer=0), PACKETS),
        (Operation("broadcast", output=X, peer=1), PACKETS),
    ],
    ids=lambda each: str(each),
)
def test_what_differs_is_planned_anew(other: Operation, algorithm: Algorithm) -> None:
    driver = Counting()
    kept = make(driver)
    before = kept.launches(reduction(), PACKETS)
    assert kept.launches(other, algorithm) is not before
    jobs = driver.prepared
    assert len(jobs) == 2
    assert jobs[0] != jobs[1]


@pytest.mark.parametrize(
    "other",
    [
        None,
        Norm(Y, X[:16], Z, 0.5),
        Norm(X, X[16:32], Z, 0.5),
        Norm(X, X[:32], Z, 0.5),
        Norm(X, X[:16], Y, 0.5),
        Norm(X, X[:16], Z, 0.25),
    ],
    ids=["none", "residual", "weight", "width", "kept", "epsilon"],
)
def test_a_norm_is_what_is_normed(other: Norm | None) -> None:
    driver = Counting()
    kept = make(driver)
    before = kept.launches(reduction(norm=Norm(X, X[:16], Z, 0.5)), PACKETS)
    assert kept.launches(reduction(norm=Norm(X, X[:16], Z, 0.5)), PACKETS) is before
    assert kept.launches(reduction(norm=other), PACKETS) is not before
    assert len({*driver.prepared}) == 2


def test_parts_of_other_sizes_are_planned_anew() -> None:
    driver = Counting()
    kept = make(driver)
    for sizes in ([16, 48], [48, 16], (16, 48)):
        exchange = Operation("all_to_all", X, Y, source_sizes=sizes, output_sizes=sizes)
        kept.launches(exchange, PACKETS)
    assert len(driver.prepared) == 2


def test_no_more_are_kept_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MOST", 3)
    driver = Counting()
    kept = make(driver)
    for count in (1, 2, 3, 1, 4, 1, 4):
        kept.launches(reduction(X[:count], Y[:count]), PACKETS)
    assert len(driver.prepared) == 5
