"""A group of one: each verb returns its input itself; its process groups hold one member."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh

import coordinator
from coordinator import GroupCoordinator, ReduceOp
from shm_broadcast import Board, GroupClosedError
from tests.ranks import init_gloo, run_ranks
from tests.shared_store import SharedStore

Verb = Callable[..., Any]

TENSORS: dict[str, tuple[Verb, Verb | None]] = {
    "all_reduce": (GroupCoordinator.all_reduce, GroupCoordinator.all_reduce_),
    "all_gather": (GroupCoordinator.all_gather, GroupCoordinator.all_gather_),
    "all_gatherv": (GroupCoordinator.all_gatherv, None),
    "reduce_scatter": (GroupCoordinator.reduce_scatter, GroupCoordinator.reduce_scatter_),
    "reduce_scatterv": (GroupCoordinator.reduce_scatterv, None),
    "all_to_all": (GroupCoordinator.all_to_all, GroupCoordinator.all_to_all_),
    "broadcast": (GroupCoordinator.broadcast, GroupCoordinator.broadcast_),
    "reduce": (GroupCoordinator.reduce, GroupCoordinator.reduce_),
    "gather": (GroupCoordinator.gather, GroupCoordinator.gather_),
    "scatter": (GroupCoordinator.scatter, GroupCoordinator.scatter_),
}


@pytest.fixture(params=["without a board", "on a board"])
def group(request: pytest.FixtureRequest) -> Iterator[GroupCoordinator]:
    if request.param == "on a board":
        with Board.create(1) as board, coordinator.init(rank=0, board=board) as groups:
            yield groups.tp
            groups.tp.barrier()
            assert board.status()[0].operation == "tp barrier"
    else:
        with coordinator.init(rank=0) as groups:
            assert groups.board is None
            yield groups.tp


def inputs() -> Iterator[torch.Tensor]:
    yield torch.ones(2, 3)
    yield torch.arange(6).reshape(2, 3).t()
    yield torch.ones(4, requires_grad=True)
    yield torch.empty(0, 2)
    yield torch.tensor([1 + 2j, 3]).conj()


@pytest.mark.quick
def test_tensors_are_returned_themselves(group: GroupCoordinator) -> None:
    for call, in_place in TENSORS.values():
        for x in inputs():
            assert call(group, x) is x
            assert call(group, x, async_op=True).wait() is x
            out = torch.zeros_like(x)
            assert call(group, x, out=out) is out
            assert torch.equal(out, x)
            assert call(group, x, out=x) is x
            if in_place is not None:
                assert in_place(group, x) is x
                assert in_place(group, x, async_op=True).wait() is x
    x, y = torch.ones(2), torch.zeros(3)
    assert group.all_reduce(x, hierarchical=True) is x
    assert group.all_reduce(x, op=ReduceOp.AVG) is x
    assert group.all_gatherv(x, sizes=[2]) is x
    assert group.all_to_all(x, input_sizes=[2], output_sizes=[2]) is x
    several = group.all_gatherv([x, y])
    assert [each is given for each, given in zip(several, (x, y), strict=True)] == [True, True]
    wanted = torch.zeros(2, requires_grad=True)
    assert group.all_gatherv(x, out=wanted) is wanted
    assert group.hierarchy.inter is group


@pytest.mark.quick
def test_objects_are_returned_themselves(group: GroupCoordinator) -> None:
    values = {"cannot be pickled": lambda: 0, "x": torch.ones(1)}
    for call, given in (
        (group.broadcast_object, values),
        (group.broadcast_object_list, [values]),
        (group.broadcast_tensor_dict, values),
    ):
        verb: Verb = call
        assert verb(given) is given
        assert verb(given, async_op=True).wait() is given
        with pytest.raises(ValueError, match="src=1 is not a rank"):
            verb(given, 1)
    assert group.all_gather_object(values)[0] is values
    assert group.all_gather_object(values, async_op=True).wait()[0] is values


@pytest.mark.quick
def test_messages_are_neither_sent_nor_received_as_in_vllm(group: GroupCoordinator) -> None:
    values = {"x": torch.ones(2), 3: object()}
    assert group.send_tensor_dict(values) is values
    assert group.send_tensor_dict(values, 0, group, {"x": True}) is values
    assert group.isend_tensor_dict(values).wait() is None
    assert group.recv_tensor_dict() is None
    assert group.recv_tensor_dict(0, group) is None
    assert group.irecv_tensor_dict().wait() is None
    for call in (
        lambda: group.send(torch.ones(1)),
        lambda: group.recv(1, torch.float32),
        lambda: group.send_object(1, 0),
        lambda: group.recv_object(0),
    ):
        with pytest.raises(ValueError, match="is this rank itself"):
            call()


@pytest.mark.quick
def test_a_closed_group_refuses_calls() -> None:
    with coordinator.init(rank=0) as groups:
        group = groups.tp
    for call in (
        lambda: group.all_reduce(torch.ones(1)),
        lambda: group.broadcast_object(1),
        lambda: group.all_gather_object(1),
        lambda: group.broadcast_tensor_dict({}),
        lambda: group.send_tensor_dict({}),
        lambda: group.recv_tensor_dict(),
    ):
        with pytest.raises(GroupClosedError):
            call()


# --- process groups -----------------------------------------------------------------------


def torch_in_each_group_of_one(rank: int, n: int, store: Store, path: str) -> None:
    init_gloo(rank, n, path)  # torch takes it for WORLD; it is not used
    with coordinator.init(pp=n, rank=rank, world_size=n, store=store, timeout=30) as groups:
        assert groups.tp.world_size == groups.dp.world_size == 1
        for group in (groups.tp, groups.dp):
            for made in (group.device_group, group.cpu_group):
                x = torch.tensor([rank + 1.0])
                dist.all_reduce(x, group=made)
                assert x.item() == rank + 1.0
                dist.broadcast(x, src=rank, group=made)
                dist.barrier(made)
                assert (made.size(), made.rank()) == (1, 0)
                assert dist.get_process_group_ranks(made) == [rank]
                assert dist.get_world_size(made) == 1
            assert group.cpu_group is group.cpu_group
        assert groups.tp.cpu_group is not groups.dp.cpu_group
        mesh = DeviceMesh.from_group(groups.tp.device_group, "cpu", mesh_dim_names=("tp",))
        assert mesh.size() == 1
        over_both = torch.tensor([rank + 1.0])
        dist.all_reduce(over_both, group=groups.pp.device_group)
        assert over_both.item() == 3.0
    alone = GroupCoordinator([[0], [1]], rank, "gloo", True, group_name="tp")
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x, group=alone.device_group)
    sibling = alone.make_sibling_device_group("beside")
    dist.all_reduce(x, group=sibling)
    assert x.item() == rank + 1.0
    assert sibling is not alone.device_group
    kept = alone.device_group
    alone.close()
    with pytest.raises(KeyError):  # torch has forgotten it
        dist.get_process_group_ranks(kept)
    with pytest.raises(GroupClosedError, match="tp is closed"):
        _ = alone.cpu_group
    with pytest.raises(GroupClosedError, match="tp is closed"):
        alone.make_sibling_device_group("late")


def test_a_sum_in_a_group_of_one_is_over_its_member(store_path: str) -> None:
    run_ranks(2, torch_in_each_group_of_one, SharedStore(), store_path)


def test_a_wrapped_process_group_of_one_is_used(store_path: str) -> None:
    given = init_gloo(0, 1, store_path)
    try:
        with GroupCoordinator.from_process_group(given) as group:
            assert group.cpu_group is group.device_group is given
        assert dist.get_process_group_ranks(given) == [0]
    finally:
        dist.destroy_process_group()


def test_process_groups_are_made_on_first_use() -> None:
    def open_files() -> set[str]:
        return {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists()}

    before = open_files()
    with coordinator.init() as groups:
        assert groups.tp.all_reduce(torch.ones(1)).item() == 1.0
        assert not open_files() - before
        assert groups.tp.device_group.size() == 1
        assert open_files() - before
