"""What is launched for which verb and size, without launching it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import (
    KERNELS,
    Algorithm,
    KernelLaunch,
    Limits,
    kernels_reduce,
    warm_up,
)
from device_comm.cuda.ipc.planner import Planner

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1 << 10
TO, FROM, TABLE = 1 << 40, 1 << 41, 1 << 42
SUM = ReduceOp.SUM


def planner(rank: int = 0, n: int = 4, limits: Limits | None = None) -> Planner:
    sizes = {"staging_bytes": 64 * KIB, "packet_bytes": 8 * KIB, "channel_bytes": 64 * KIB}
    layout = abi.RegionLayout(n, **sizes)
    group = abi.Group(tuple(range(1, n + 1)), 99, rank, layout, 10**9)
    usual = Limits(lanes=8, packets_up_to=8 * KIB, one_shot_up_to=128 * KIB)
    return Planner(group, limits or usual)


def fields(launch: KernelLaunch) -> tuple[int, ...]:
    """The job of a launch, without its group: table, offset, piece, op, set, puts, takes."""
    return struct.unpack("<3QII8x32Q", launch.args[0][abi.GROUP_BYTES :])


def puts(launch: KernelLaunch) -> list[tuple[int, int]]:
    numbers = fields(launch)[5:21]
    return [(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True) if b]


def takes(launch: KernelLaunch) -> list[tuple[int, int]]:
    numbers = fields(launch)[21:]
    return [(a, b) for a, b in zip(numbers[::2], numbers[1::2], strict=True) if b]


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
def test_the_size_decides_how_an_all_reduce_is_done(size: int, kernel: str) -> None:
    launches = planner().all_reduce(TO, FROM, size, torch.float16, SUM)
    assert {launch.kernel for launch in launches} == {kernel}


def test_an_all_reduce_in_packets_is_no_larger_than_their_area() -> None:
    plan = planner(limits=Limits(packets_up_to=64 * KIB))
    assert plan.algorithm(8 * KIB + 4) is Algorithm.ONE_SHOT
    with pytest.raises(ValueError, match="packets carry at most 8192 bytes, not 8196"):
        plan.all_reduce(TO, FROM, 8196, torch.float32, SUM, algorithm=Algorithm.PACKETS)


def test_one_shot_goes_in_chunks_of_a_staging() -> None:
    launches = planner().all_reduce(
        TO, FROM, 150 * KIB, torch.float32, SUM, algorithm=Algorithm.ONE_SHOT
    )
    sizes = [64 * KIB, 64 * KIB, 22 * KIB]
    begins = [0, 64 * KIB, 128 * KIB]
    assert [puts(launch) for launch in launches] == [
        [(FROM + begin, size)] for begin, size in zip(begins, sizes, strict=True)
    ]
    assert [takes(launch) for launch in launches] == [
        [(TO + begin, size)] for begin, size in zip(begins, sizes, strict=True)
    ]
    assert [launch.grid for launch in launches] == [8, 8, 3]


def test_one_shot_from_a_table_is_one_launch_and_not_in_place() -> None:
    arguments = (150 * KIB, torch.float32, SUM)
    how = {"algorithm": Algorithm.ONE_SHOT, "table": TABLE}
    (launch,) = planner().all_reduce(TO, FROM, *arguments, **how)
    assert (fields(launch)[0], puts(launch), takes(launch)) == (TABLE, [], [(TO, 150 * KIB)])
    with pytest.raises(ValueError, match="cannot be in place"):
        planner().all_reduce(FROM, FROM, *arguments, **how)


@pytest.mark.parametrize("table", [0, TABLE])
def test_two_shot_gives_each_rank_a_part_of_each_chunk(table: int) -> None:
    launches = planner(rank=3).all_reduce(
        TO, FROM, 64 * KIB + 36, torch.float32, SUM, algorithm=Algorithm.TWO_SHOT, table=table
    )
    first, last = launches
    parts = [(r * 16 * KIB, 16 * KIB) for r in range(4)]
    assert puts(first) == [(FROM + begin, size) for begin, size in parts]
    assert takes(first) == [(TO + begin, size) for begin, size in parts]
    assert fields(first)[:3] == (table, 48 * KIB, 16 * KIB)
    # 36 bytes: parts of one cell; the last rank has none.
    begin = 64 * KIB
    assert takes(last) == [(TO + begin + 16 * r, size) for r, size in enumerate((16, 16, 4))]
    assert fields(last)[:3] == (table, (begin if table else 0) + 48, 16)


def test_reduce_scatter_of_uneven_parts() -> None:
    sizes = [20 * KIB, 0, 4, 16 * KIB]
    first, last = planner(rank=3).reduce_scatter(TO, FROM, sizes, torch.float32, SUM)
    begins = [0, 20 * KIB, 20 * KIB, 20 * KIB + 4]
    assert puts(first) == [
        (FROM + begins[r], min(sizes[r], 16 * KIB)) for r in range(4) if sizes[r]
    ]
    assert takes(first) == [(TO, 16 * KIB)]
    assert fields(first)[1:3] == (48 * KIB, 16 * KIB)
    assert (puts(last), takes(last)) == ([(FROM + 16 * KIB, 4 * KIB)], [])
    (launch,) = planner(rank=3).reduce_scatter(TO, 0, sizes, torch.float32, SUM, table=TABLE)
    assert fields(launch)[:2] == (TABLE, 20 * KIB + 4)
    assert takes(launch) == [(TO, 16 * KIB)]


VERBS: dict[str, Callable[[Planner], list[KernelLaunch]]] = {
    "all_reduce": lambda plan: plan.all_reduce(TO, FROM, 400 * KIB, torch.float32, SUM),
    "reduce": lambda plan: plan.reduce(TO, FROM, 70 * KIB, torch.bfloat16, SUM, 1),
    "reduce_scatter": lambda plan: plan.reduce_scatter(
        TO, FROM, [0, 300, 40 * KIB, 4], torch.float16, SUM
    ),
    "all_gather": lambda plan: plan.all_gather(TO, FROM, [1, 200 * KIB, 0, 17]),
    "gather": lambda plan: plan.gather(TO, FROM, 100 * KIB, 2),
    "scatter": lambda plan: plan.scatter(TO, FROM, 100 * KIB, 2),
    "broadcast": lambda plan: plan.broadcast(TO, 100 * KIB, 3),
    "barrier": lambda plan: plan.barrier(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_all_ranks_launch_the_same_and_again_the_same(verb: str) -> None:
    plans = [planner(rank) for rank in range(4)]
    shapes = [[launch[:3] for launch in VERBS[verb](plan)] for plan in plans]
    assert shapes[0] and all(shape == shapes[0] for shape in shapes)
    assert VERBS[verb](plans[1]) == VERBS[verb](plans[1])
    assert all(len(launch.args[0]) == abi.JOB_BYTES for launch in VERBS[verb](plans[2]))


def test_only_the_root_gives_or_takes() -> None:
    root, other = planner(rank=1), planner(rank=2)
    (launch,) = root.broadcast(TO, 64, 1)
    assert (puts(launch), takes(launch)) == ([(TO, 64)], [])
    (launch,) = other.broadcast(TO, 64, 1)
    assert fields(launch)[21:25] == (0, 0, TO, 64)
    (launch,) = other.reduce(0, FROM, 64, torch.float32, SUM, 1)
    assert (puts(launch), takes(launch)) == ([(FROM, 64)], [])
    (launch,) = other.scatter(TO, 0, 64, 1)
    assert (puts(launch), fields(launch)[1]) == ([], 2 * 16 * KIB)


@pytest.mark.parametrize(("size", "grid"), [(1, 1), (4 * KIB, 1), (4 * KIB + 1, 2), (1 << 30, 8)])
def test_messages_take_as_many_lanes_as_they_fill(size: int, grid: int) -> None:
    for verb, launches in (
        ("send", planner(0).send(FROM, size, 3)),
        ("recv", planner(3).recv(TO, size, 0)),
    ):
        (launch,) = launches
        assert (launch.kernel, launch.grid) == ("ipc_transfer", grid), verb
        assert fields(launch)[4] == abi.MESSAGES


def test_what_is_empty_launches_nothing() -> None:
    plan = planner()
    assert plan.send(FROM, 0, 1) == plan.recv(TO, 0, 1) == []
    assert plan.all_to_all(TO, FROM, (0,) * 4, (0,) * 4) == []
    assert plan.all_gather(TO, FROM, (0,) * 4) == []


def test_limits_that_cannot_be() -> None:
    most = {"max_blocks": 64, "lanes": 32, "threads": 512}
    for name, largest in most.items():
        Limits(**{name: largest})
        for wrong in (0, largest + 1):
            with pytest.raises(ValueError, match=f"{name} must be from"):
                Limits(**{name: wrong})
    layout = abi.RegionLayout(2, channel_bytes=512)
    with pytest.raises(ValueError, match="32 lanes do not fit into channel_bytes=512"):
        Planner(abi.Group((0, 0), 0, 0, layout, 0), Limits())


@pytest.mark.parametrize("n", range(2, abi.MAX_RANKS + 1))
def test_limits_for_ranks_that_share_a_device(n: int) -> None:
    limits = Limits.for_ranks(n, ranks_on_device=n)
    assert n * limits.max_blocks <= 64  # multiprocessors; larger devices have more than 100
    layout = abi.RegionLayout(n)
    Planner(abi.Group((0,) * n, 0, 0, layout, 0), limits)  # does not refuse
    assert Limits.for_ranks(n).max_blocks == 36


@pytest.mark.parametrize(
    ("n", "shared", "lanes"),
    [(2, 1, 16), (4, 1, 16), (8, 1, 16), (2, 2, 16), (4, 2, 16), (4, 4, 8), (6, 3, 7), (8, 8, 2)],
)
def test_lanes_of_messages_between_all_ranks(n: int, shared: int, lanes: int) -> None:
    assert Limits.for_ranks(n, ranks_on_device=shared).lanes == lanes
    begun_until_two_meet = shared * (n - 1) * lanes
    assert begun_until_two_meet < 2 * 64  # two on each multiprocessor


def test_a_collective_has_more_lanes_than_a_message() -> None:
    layout = abi.RegionLayout(4, channel_bytes=64 * KIB)
    group = abi.Group((0,) * 4, 0, 0, layout, 0)
    plan = Planner(group, Limits(max_blocks=20, lanes=5))
    sizes = (1 << 20,) * 4
    assert [launch.grid for launch in plan.all_to_all(TO, FROM, sizes, sizes)] == [20]
    assert [launch.grid for launch in plan.send(FROM, 1 << 20, 1)] == [5]
    sizes = (layout.slot_bytes(20) + 1,) * 4
    assert [launch.grid for launch in plan.all_to_all(TO, FROM, sizes, sizes)] == [2]


def test_every_kernel_is_warmed_up_for_nobody() -> None:
    launches = warm_up(Limits())
    assert [launch.kernel for launch in launches] == list(KERNELS)
    assert {launch.args for launch in launches} == {(bytes(abi.JOB_BYTES),)}


def test_which_reductions_have_kernels() -> None:
    assert kernels_reduce(ReduceOp.AVG, torch.bfloat16)
    assert not kernels_reduce(ReduceOp.SUM, torch.int64)
    assert not kernels_reduce(ReduceOp.BOR, torch.float32)
