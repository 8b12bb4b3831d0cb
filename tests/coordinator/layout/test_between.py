"""Moving tensors between meshes of real processes, some ranks in neither."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator import ReduceOp
from coordinator.layout import (
    Layout,
    Partial,
    Replicate,
    Shard,
    SubMesh,
    redistribute_between,
    reshard,
)
from tests.coordinator.layout.by_hand import hold
from tests.coordinator.layout.meshes import open_mesh
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from coordinator import GroupCoordinator

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
FOUR, FRONT, BACK = SubMesh((0, 1, 2, 3)), SubMesh((0, 1)), SubMesh((3, 2))


def four_to_two_and_back(world: GroupCoordinator) -> None:
    whole = torch.arange(35.0).reshape(7, 5)
    rank = world.rank_in_group
    x = hold(whole, Layout((S0,)), FOUR.places(rank))
    halves = redistribute_between(
        x, S0, S1, world, source_mesh=FOUR, target_mesh=FRONT, shape=(7, 5)
    )
    assert torch.equal(halves, whole[:, 3 * rank : 3 * rank + 3] if rank < 2 else torch.empty(0))
    back = redistribute_between(
        halves if rank < 2 else None,
        S1,
        Shard(0, padded=True),
        world,
        source_mesh=FRONT,
        target_mesh=FOUR,
        shape=(7, 5),
        dtype=whole.dtype,
    )
    assert torch.equal(back, hold(whole, Layout((Shard(0, padded=True),)), FOUR.places(rank)))


def from_one_mesh_to_a_disjoint_one_with_gradients(world: GroupCoordinator) -> None:
    """Ranks 0 and 1 hold terms, ranks 3 and 2 shards; the gradient of a term is that of the sum."""
    rank = world.rank_in_group
    x = None
    if rank < 2:
        x = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
        x.requires_grad_()
    y = redistribute_between(
        x,
        P,
        S0,
        world,
        source_mesh=FRONT,
        target_mesh=BACK,
        shape=(3,),
        dtype=torch.float32,
        requires_grad=True,
    )
    expected = {3: [3.0, 6.0], 2: [9.0]}
    assert y.tolist() == expected.get(rank, [])
    y.backward(y.detach() * 10)
    if x is not None:
        assert x.grad is not None
        assert x.grad.tolist() == [30, 60, 90]


def terms_are_reduced_in_the_order_of_the_mesh(world: GroupCoordinator) -> None:
    """Half precision is accumulated in float32; every receiver gets the same bits."""
    rank = world.rank_in_group
    x = torch.tensor([1.0, 0.001, 0.001, 0.001])[rank].repeat(3).to(torch.bfloat16)
    y = redistribute_between(x, P, R, world, source_mesh=FOUR, target_mesh=FOUR, shape=(3,))
    assert y.tolist() == [torch.tensor(1.003).to(torch.bfloat16).item()] * 3
    most = redistribute_between(
        torch.tensor([rank]), Partial(ReduceOp.MAX), R, world, source_mesh=FOUR, target_mesh=FOUR,
        shape=(1,),
    )  # fmt: skip
    assert most.tolist() == [3]


def every_dtype_moves(world: GroupCoordinator) -> None:
    rank = world.rank_in_group
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2):
        whole = (torch.arange(8.0) % 2).to(dtype)
        y = redistribute_between(
            whole[2 * rank : 2 * rank + 2], S0, S0, world,
            source_mesh=FOUR, target_mesh=BACK, shape=(8,),
        )  # fmt: skip
        assert y.dtype == dtype
        kept = {3: whole[:4], 2: whole[4:]}.get(rank, whole[:0])
        assert torch.equal(y.view(torch.uint8), kept.view(torch.uint8))
    scalar = redistribute_between(
        torch.tensor(7) if rank == 1 else None, R, R, world, source_mesh=SubMesh((1,)),
        target_mesh=FOUR, shape=(), dtype=torch.int64,
    )  # fmt: skip
    assert scalar.item() == 7


def a_mesh_of_two_axes(world: GroupCoordinator) -> None:
    rank = world.rank_in_group
    grid = SubMesh((3, 2, 1, 0), (2, 2))
    whole = torch.arange(30.0).reshape(5, 6)
    x = hold(whole, Layout((S0,)), FOUR.places(rank))
    y = redistribute_between(
        x, S0, Layout((S1, S0)), world, source_mesh=FOUR, target_mesh=grid, shape=(5, 6)
    )
    assert torch.equal(y, hold(whole, Layout((S1, S0)), grid.places(rank)))


def a_whole_model(world: GroupCoordinator) -> None:
    rank = world.rank_in_group
    with torch.device("meta"):
        wholes = dict(torch.nn.Linear(6, 5).named_parameters())
    full = {name: torch.arange(float(p.numel())).reshape(p.shape) + 1 for name, p in wholes.items()}
    old = {"weight": S0, "bias": S0}
    new = {"bias": R, "weight": S1}
    held = {}
    if rank < 2:
        held = {
            name: hold(full[name], Layout((layout,)), FRONT.places(rank))
            for name, layout in old.items()
        }
    moved = reshard(held, old, new, world, source_mesh=FRONT, target_mesh=FOUR, wholes=wholes)
    assert list(moved) == ["bias", "weight"]
    assert torch.equal(moved["bias"], full["bias"])
    assert torch.equal(moved["weight"], hold(full["weight"], Layout((S1,)), FOUR.places(rank)))
    there = reshard(moved, new, old, world, source_mesh=FOUR, target_mesh=FRONT, wholes=wholes)
    assert set(there) == (set(old) if rank < 2 else set())


def refused(world: GroupCoordinator) -> None:
    if world.rank_in_group:
        return
    x = torch.ones(2)
    meshes = {"source_mesh": FOUR, "target_mesh": FRONT}
    for given, options, message in (
        (x, {"shape": (4,), **meshes}, "this rank passes"),
        (None, {"shape": (8,), **meshes}, "this rank passes"),
        (x, {"shape": (8,), "dtype": torch.int8, **meshes}, "this rank passes"),
        (None, {"shape": (8,), "source_mesh": BACK, "target_mesh": FOUR}, "dtype="),
        (x, {"shape": (8,), "source_mesh": SubMesh((0, 9)), "target_mesh": FOUR}, "rank 9"),
    ):
        with pytest.raises(ValueError, match=message):
            redistribute_between(given, S0, S0, world, **options)
    with pytest.raises(NotImplementedError, match="MIN"):
        redistribute_between(
            torch.ones(8, requires_grad=True), Partial(ReduceOp.MIN), R, world, shape=(8,),
            source_mesh=FOUR, target_mesh=FRONT,
        )  # fmt: skip


CASES = (
    four_to_two_and_back,
    from_one_mesh_to_a_disjoint_one_with_gradients,
    terms_are_reduced_in_the_order_of_the_mesh,
    every_dtype_moves,
    a_mesh_of_two_axes,
    a_whole_model,
    refused,
)


def between(rank: int, n: int, path: str) -> None:
    with ExitStack() as stack:
        mesh = open_mesh(stack, rank, (4,), path)
        for case in CASES:
            case(mesh.axes[0])


def test_between_meshes(store_path: str) -> None:
    run_ranks(4, between, store_path, timeout=90)
