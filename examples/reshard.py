"""Re-shard a running model from two tensor-parallel ranks to four, and get the same outputs.

    python examples/reshard.py

Starts four processes. Two of them hold a model in halves; its weights move, without a checkpoint,
to all four, in quarters. Then it prints the plan for changing one weight's layout on a mesh of
(2, 2): what it should cost on this machine, and how long it took.
"""

from __future__ import annotations

import multiprocessing
import time

import torch
from torch import nn
from torch.nn import functional

import coordinator
from coordinator.layout import (
    Layout,
    Mesh,
    Replicate,
    Shard,
    SubMesh,
    calibrate_mesh,
    moves,
    plan,
    redistribute,
    reshard,
)

RANKS = 4
SIZE, INNER = 64, 250  # 250 does not divide by four: the last rank's shard is smaller

LAYOUTS = {
    "up.weight": Shard(0),
    "up.bias": Shard(0),
    "down.weight": Shard(1),
    "down.bias": Replicate(),
}


def whole_model() -> nn.ModuleDict:
    """The model before it is cut, the same on every rank."""
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(SIZE, INNER), "down": nn.Linear(INNER, SIZE)})


def run(
    weights: dict[str, torch.Tensor], x: torch.Tensor, tp: coordinator.GroupCoordinator
) -> torch.Tensor:
    """The model on the ranks of ``tp``: [batch, SIZE] → [batch, SIZE], the same on each."""
    hidden = functional.gelu(functional.linear(x, weights["up.weight"], weights["up.bias"]))
    terms = functional.linear(hidden, weights["down.weight"])
    return moves.reduce(terms, tp) + weights["down.bias"]


def main(rank: int, port: int) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    store = coordinator.connect_store("127.0.0.1", port)
    # two topologies of the same processes, side by side, and a group of this process only
    with (
        coordinator.init(tp=2, dp=2, rank=rank, world_size=RANKS, store=store) as two,
        coordinator.init(tp=4, rank=rank, world_size=RANKS, store=store) as four,
        coordinator.init(rank=0, world_size=1) as lone,
    ):
        old, new = SubMesh((0, 1)), SubMesh((0, 1, 2, 3))
        x = torch.linspace(-1, 1, 3 * SIZE).reshape(3, SIZE)
        dense = dict(whole_model().named_parameters())
        expected = run({name: tensor.detach() for name, tensor in dense.items()}, x, lone.tp)

        held = {}
        if rank in old.ranks:
            held = {
                name: redistribute(dense[name].detach(), Replicate(), layout, two.tp)
                for name, layout in LAYOUTS.items()
            }
            before = run(held, x, two.tp)
            torch.testing.assert_close(before, expected)
        with torch.device("meta"):
            wholes = dict(whole_model().named_parameters())
        start = time.perf_counter()
        moved = reshard(
            held, LAYOUTS, LAYOUTS, four.world, source_mesh=old, target_mesh=new, wholes=wholes
        )
        took = time.perf_counter() - start
        after = run(moved, x, four.tp)
        torch.testing.assert_close(after, expected)
        shapes = four.world.all_gather_object(tuple(moved["up.weight"].shape))
        if rank == 0:
            print(f"TP=2 held {tuple(held['up.weight'].shape)} of up.weight, TP=4 holds {shapes}")
            error = (after - expected).abs().max().item()
            print(f"moved in {took * 1e3:.1f} ms; the outputs differ by at most {error:.1e}\n")
        show_a_plan(Mesh((two.dp, two.tp), two.world), rank)


def show_a_plan(mesh: Mesh, rank: int) -> None:
    """What changing a layout on the mesh of (2, 2) should cost, and what it does."""
    costs = calibrate_mesh(mesh.axes)
    source, target = Layout((Shard(0), Shard(0))), Layout((Replicate(), Shard(0)))
    shape = (1024, 1024)
    steps = plan(source, target, shape, costs)
    x = torch.ones(source.local_shape(shape, mesh.axes))
    taken = []
    for _ in range(5):
        mesh.axes[0].barrier()
        start = time.perf_counter()
        redistribute(x, source, target, mesh.axes, shape=shape, costs=costs)
        taken.append((time.perf_counter() - start) * 1e6)
    if rank == 0:
        print(f"{steps}\nmeasured {sorted(taken)[2]:.0f} µs")


if __name__ == "__main__":
    store = coordinator.host_store()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=main, args=(rank, store.port)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    raise SystemExit(any(process.exitcode for process in processes))
