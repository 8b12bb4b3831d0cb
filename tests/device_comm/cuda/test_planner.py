"""What is launched for which verb and size, how launches are packed, and which ones are kept."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import Operation, ReduceOp
from device_comm.cuda.ipc import abi, ipc_backend
from device_comm.cuda.ipc import planner as planning
from device_comm.cuda.ipc.abi import (
    KERNELS,
    Algorithm,
    Limits,
    RegionLayout,
    warm_up,
)
from device_comm.cuda.ipc.planner import Planner, PreparedLaunches
from device_comm.operation import Norm
from device_comm.span import Span
from tests.device_comm.cuda.ipc_ranks import HostDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.cuda.driver import PreparedLaunch

pytestmark = pytest.mark.quick

KIB = 1 << 10
TO, FROM, TABLE = 1 << 40, 1 << 41, 1 << 42
SUM = ReduceOp.SUM
FLOAT = torch.float32


def planner(rank: int = 0, n: int = 4, limits: Limits | None = None) -> Planner:
    sizes = {"staging_bytes": 64 * KIB, "packet_bytes": 8 * KIB, "channel_bytes": 64 * KIB}
    group = abi.Group(tuple(range(1, n + 1)), 99, rank, RegionLayout(n, **sizes), 10**9)
    usual = Limits(lanes=8, packets_up_to=8 * KIB, one_shot_up_to=128 * KIB)
    return Planner(group, limits or usual)


@pytest.mark.parametrize(
    ("size", "kernel"),
    [
        (2, "ipc_packets_float16"),
        (8 * KIB, "ipc_packets_float16"),
        (8 * KIB + 2, "ipc_reduce_float16"),
        (128 * KIB, "ipc_reduce_float16"),
        (128 * KIB + 2, "ipc_all_reduce_float16"),
    ],
)
def test_the_size_chooses_the_algorithm_of_an_all_reduce(size: int, kernel: str) -> None:
    launches = planner().all_reduce(TO, FROM, size, torch.float16, SUM)
    assert {launch.kernel for launch in launches} == {kernel}


def test_packets_are_no_larger_than_their_area() -> None:
    plan = planner(limits=Limits(packets_up_to=64 * KIB))
    assert plan.algorithm(8 * KIB + 4) is Algorithm.ONE_SHOT
    said = "packets carry at most 8192 bytes, not 8196"
    with pytest.raises(ValueError, match=said):
        plan.all_reduce(TO, FROM, 8196, FLOAT, SUM, algorithm=Algorithm.PACKETS)
    row = Span(FROM, 8196)
    with pytest.raises(ValueError, match=said):
        plan.all_reduce_norm((row, row, row), (row, row), FLOAT, 0.5)


def test_one_shot_from_a_table_is_not_in_place() -> None:
    how: Any = {"algorithm": Algorithm.ONE_SHOT, "table": TABLE}
    assert len(planner().all_reduce(TO, FROM, 150 * KIB, FLOAT, SUM, **how)) == 1
    with pytest.raises(ValueError, match="cannot be in place"):
        planner().all_reduce(FROM, FROM, 150 * KIB, FLOAT, SUM, **how)


@pytest.mark.parametrize(("rows", "grid"), [(0, 1), (1, 1), (3, 3), (9, 8)])
def test_each_row_of_a_norm_has_a_block(rows: int, grid: int) -> None:
    x, y, to, kept = (Span(place, 128 * rows) for place in (1, 2, 4, 5))
    plan = planner(limits=Limits(max_blocks=8))
    (launch,) = plan.all_reduce_norm((x, y, Span(3, 128)), (to, kept), torch.float16, 0.5)
    assert (launch.kernel, launch.grid) == ("ipc_packets_norm_float16", grid)


@pytest.mark.parametrize(("size", "grid"), [(1, 1), (4 * KIB, 1), (4 * KIB + 1, 2), (1 << 30, 8)])
def test_messages_take_as_many_lanes_as_they_fill(size: int, grid: int) -> None:
    for launches in (planner(0).send(FROM, size, 3), planner(3).recv(TO, size, 0)):
        (launch,) = launches
        assert (launch.kernel, launch.grid) == ("ipc_transfer", grid)


def test_a_collective_has_more_lanes_than_a_message() -> None:
    layout = RegionLayout(4, channel_bytes=64 * KIB)
    plan = Planner(abi.Group((0,) * 4, 0, 0, layout, 0), Limits(max_blocks=20, lanes=5))
    for size, grid in ((1 << 20, 20), (layout.slot_bytes(20) + 1, 2)):
        sizes = (size,) * 4
        assert [launch.grid for launch in plan.all_to_all(TO, FROM, sizes, sizes)] == [grid]
    assert [launch.grid for launch in plan.send(FROM, 1 << 20, 1)] == [5]


def test_every_kernel_is_warmed_up() -> None:
    launches = warm_up(Limits())
    assert [launch.kernel for launch in launches] == list(KERNELS)
    assert {launch.args for launch in launches} == {(bytes(abi.JOB_BYTES),)}


# --- limits ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "largest"), [("max_blocks", 64), ("lanes", 32), ("threads", 512)])
def test_wrong_limits_are_refused(name: str, largest: int) -> None:
    Limits(**{name: largest})
    for wrong in (0, largest + 1):
        with pytest.raises(ValueError, match=f"{name} must be from"):
            Limits(**{name: wrong})


@pytest.mark.parametrize("n", range(2, abi.MAX_RANKS + 1))
def test_kernels_of_ranks_on_one_device_fit_side_by_side(n: int) -> None:
    limits = Limits.for_ranks(n, ranks_on_device=n)
    assert n * limits.max_blocks <= 64  # multiprocessors; larger devices have more than 100
    Planner(abi.Group((0,) * n, 0, 0, RegionLayout(n), 0), limits)  # does not refuse
    assert Limits.for_ranks(n).max_blocks == 36


@pytest.mark.parametrize(
    ("n", "shared", "lanes"),
    [(2, 1, 16), (4, 1, 16), (8, 1, 16), (2, 2, 16), (4, 2, 16), (4, 4, 8), (6, 3, 7), (8, 8, 2)],
)
def test_lanes_of_messages_between_all_ranks(n: int, shared: int, lanes: int) -> None:
    assert Limits.for_ranks(n, ranks_on_device=shared).lanes == lanes
    begun_until_two_meet = shared * (n - 1) * lanes
    assert begun_until_two_meet < 2 * 64  # two on each multiprocessor


# --- the layout of memory ----------------------------------------------------------------


def test_the_memory_of_a_rank_is_as_documented() -> None:
    said = re.search(r"``(\d+) MiB \+ (\d+) n MiB``", ipc_backend.__doc__ or "")
    assert said is not None
    common, each = map(int, said.groups())
    for n in (2, abi.MAX_RANKS):
        assert RegionLayout(n).size // (1 << 20) == common + each * n
    layout = RegionLayout(3, staging_bytes=4096, packet_bytes=512, channel_bytes=1024)
    assert layout.size == 28928 + 2 * 4096 + 3 * (4 * 512 + 3 * 1024)


def test_lanes_share_a_channel() -> None:
    layout = RegionLayout(2, channel_bytes=1024)
    assert [layout.slot_bytes(lanes) for lanes in (1, 2, 3, 32)] == [512, 256, 160, 16]
    with pytest.raises(ValueError, match="33 lanes do not fit into channel_bytes=1024"):
        layout.slot_bytes(33)
    assert RegionLayout(2).slot_bytes(abi.MAX_LANES) == 16 << 10


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RegionLayout(1), "must be"),
        (lambda: RegionLayout(9), "must be"),
        (lambda: RegionLayout(8, staging_bytes=112), "must be"),
        (lambda: RegionLayout(2, staging_bytes=1000), "must be"),
        (lambda: RegionLayout(2, packet_bytes=0), "must be"),
        (lambda: RegionLayout(2, channel_bytes=24), "must be"),
        (lambda: abi.Group((1, 2, 3), 0, 0, RegionLayout(2), 0), "3 regions for 2 ranks"),
        (lambda: abi.Group((1, 2), 0, 2, RegionLayout(2), 0), "rank 2 is not one of 2 ranks"),
        (
            lambda: Planner(
                abi.Group((0, 0), 0, 0, RegionLayout(2, channel_bytes=512), 0), Limits()
            ),
            "32 lanes do not fit into channel_bytes=512",
        ),
    ],
)
def test_wrong_layouts_and_groups_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


# --- launches that are kept --------------------------------------------------------------

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


@pytest.fixture
def driver() -> Counting:
    return Counting()


@pytest.fixture
def kept(driver: Counting) -> PreparedLaunches:
    group = abi.Group((4096,) * 2, 8192, 0, RegionLayout(2), 10**9)
    return PreparedLaunches(driver, Planner(group, Limits()), 2)


def reduction(source: torch.Tensor = X, output: torch.Tensor = Y, **how: Any) -> Operation:
    return Operation("all_reduce", source, output, **how)


def normed(residual: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Operation:
    return reduction(norm=Norm(residual, weight, *rest))


def usual() -> Operation:
    return normed(X, X[:16], Z, 0.5)


@pytest.mark.parametrize(
    ("make", "other", "algorithm"),
    [
        (reduction, reduction(Y, X), PACKETS),
        (reduction, reduction(X, X), PACKETS),
        (reduction, reduction(X[:32], Y[:32]), PACKETS),
        (reduction, reduction(X.view(torch.float16), Y.view(torch.float16)), PACKETS),
        (reduction, reduction(op=ReduceOp.MAX), PACKETS),
        (reduction, reduction(), Algorithm.ONE_SHOT),
        (reduction, Operation("send", X, peer=1), PACKETS),
        (reduction, Operation("recv", output=X, peer=1), PACKETS),
        (reduction, Operation("broadcast", X, peer=0), PACKETS),
        (reduction, Operation("broadcast", output=X, peer=1), PACKETS),
        (usual, reduction(), PACKETS),
        (usual, normed(Y, X[:16], Z, 0.5), PACKETS),
        (usual, normed(X, X[16:32], Z, 0.5), PACKETS),
        (usual, normed(X, X[:32], Z, 0.5), PACKETS),
        (usual, normed(X, X[:16], Y, 0.5), PACKETS),
        (usual, normed(X, X[:16], Z, 0.25), PACKETS),
    ],
)
def test_the_same_call_is_planned_once_another_anew(
    driver: Counting,
    kept: PreparedLaunches,
    make: Callable[[], Operation],
    other: Operation,
    algorithm: Algorithm,
) -> None:
    before = kept.launches(make(), PACKETS)
    assert kept.launches(make(), PACKETS) is before
    assert len(driver.prepared) == 1
    assert kept.launches(other, algorithm) is not before
    assert len(driver.prepared) == len({*driver.prepared}) == 2


def test_parts_of_other_sizes_are_planned_anew(driver: Counting, kept: PreparedLaunches) -> None:
    for sizes in ([16, 48], [48, 16], (16, 48)):
        exchange = Operation("all_to_all", X, Y, source_sizes=sizes, output_sizes=sizes)
        kept.launches(exchange, PACKETS)
    assert len(driver.prepared) == 2


def test_a_bounded_number_of_launches_is_kept(
    driver: Counting, kept: PreparedLaunches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "MOST", 3)
    for count in (1, 2, 3, 1, 4, 1, 4):
        kept.launches(reduction(X[:count], Y[:count]), PACKETS)
    assert len(driver.prepared) == 5
