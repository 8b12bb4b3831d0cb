"""What the five reference systems get wrong, each under its own name.

The groups are [0, 2] and [1, 3]: ranks in the group are not global ranks. A case is run by
both members of both, over torch's process groups and through shared memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator import GroupCoordinator, ParallelGroups, ReduceOp, Work
from shm_broadcast import MessageRefusedError
from tests.patience import until
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

# --- ColossalAI, communication.collective -------------------------------------------------

if TYPE_CHECKING:
    from torch.distributed import Store


def colossalai_all_gather_of_dim_1_is_a_view(group: GroupCoordinator, me: int) -> None:
    """Theirs is not contiguous, and valid only after wait."""
    work = group.all_gather(torch.full((2, 1), float(me)), 1, async_op=True)
    result = work.wait()
    assert result.is_contiguous()
    assert result.tolist() == [[0, 1], [0, 1]]


def colossalai_reduce_scatter_does_not_check_divisibility(group: GroupCoordinator, me: int) -> None:
    with pytest.raises(ValueError, match="not divisible"):
        group.reduce_scatter(torch.ones(1, 3), 1)
    x = torch.tensor([[1.0, 2, 3, 4]]) * (me + 1)
    assert group.reduce_scatter(x, 1).tolist() == ([[3, 6]], [[9, 12]])[me]


def colossalai_all_reduce_of_a_view_reduces_a_copy(group: GroupCoordinator, me: int) -> None:
    """In place means in place, contiguous or not; else the input stays."""
    whole = torch.ones(2, 3)
    column = whole[:, 1]
    assert group.all_reduce_(column) is column
    assert whole.tolist() == [[1, 2, 1], [1, 2, 1]]
    assert group.all_reduce(whole[:, 0]).tolist() == [2, 2]
    assert whole[:, 0].tolist() == [1, 1]


def colossalai_broadcast_takes_global_ranks(group: GroupCoordinator, me: int) -> None:
    assert group.broadcast(torch.tensor([group.rank]), 1).item() == group.ranks[1]
    with pytest.raises(ValueError, match="src=3"):
        group.broadcast(torch.ones(1), 3)


def colossalai_reduce_leaves_garbage_elsewhere(group: GroupCoordinator, me: int) -> None:
    x = torch.tensor([me + 1.0])
    result = group.reduce(x, 0)
    assert (result.item() if result is not None else None) == (3 if me == 0 else None)
    assert x.item() == me + 1


# --- Bagua, torch_api.communication -------------------------------------------------------


def bagua_complex_tensors_abort(group: GroupCoordinator, me: int) -> None:
    x = torch.tensor([1 + 1j] * 2, dtype=torch.cfloat)
    assert group.all_reduce(x).tolist() == [2 + 2j] * 2


def bagua_broadcast_object_compares_global_ranks(group: GroupCoordinator, me: int) -> None:
    for src in (0, 1):
        sent = {"rank": group.rank} if me == src else None
        assert group.broadcast_object(sent, src) == {"rank": group.ranks[src]}


def bagua_reduce_scatter_in_place_overlaps(group: GroupCoordinator, me: int) -> None:
    x = torch.tensor([1.0, 2] if me == 0 else [3.0, 4])
    assert group.reduce_scatter_(x).tolist() == ([4], [6])[me]


def bagua_all_gather_in_place_has_ones_own_slot(group: GroupCoordinator, me: int) -> None:
    x = torch.zeros(2)
    x[me] = me + 1
    assert group.all_gather_(x).tolist() == [1, 2]


def bagua_gather_and_scatter_take_big_buffers_at_the_root(group: GroupCoordinator, me: int) -> None:
    gathered = group.gather(torch.tensor([me]), 1)
    assert (gathered.tolist() if gathered is not None else None) == (None, [0, 1])[me]
    part = torch.empty(1)
    group.scatter(torch.tensor([5.0, 6]) if me == 1 else None, 1, out=part)
    assert part.item() == 5 + me


def bagua_average_is_for_what_it_is_right_for(group: GroupCoordinator, me: int) -> None:
    assert group.all_reduce(torch.tensor([1.0 + 2 * me]), op=ReduceOp.AVG).item() == 2
    with pytest.raises(TypeError, match="AVG"):
        group.all_reduce(torch.tensor([1]), op=ReduceOp.AVG)


# --- vLLM, GroupCoordinator ---------------------------------------------------------------


def vllm_all_reduce_changes_its_input_on_the_cpu(group: GroupCoordinator, me: int) -> None:
    x = torch.ones(3)
    assert group.all_reduce(x).tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


def vllm_reduce_scatter_moves_dimensions_wrongly(group: GroupCoordinator, me: int) -> None:
    """Theirs makes (6, 2, 2) of (2, 4, 6) with dim=-1."""
    x = torch.arange(48.0).reshape(2, 4, 6)
    for dim in (-3, -2, -1, 0, 1, 2):
        expected = (2 * x).chunk(2, dim)[me]
        assert torch.equal(group.reduce_scatter(x, dim), expected)


def vllm_all_gatherv_is_missing_on_the_cpu(group: GroupCoordinator, me: int) -> None:
    mine = torch.tensor([1.0] if me == 0 else [2.0, 3])
    assert group.all_gatherv(mine, sizes=[1, 2]).tolist() == [1, 2, 3]
    first, second = group.all_gatherv([mine, mine * 10], sizes=[1, 2])
    assert (first * 10).tolist() == second.tolist() == [10, 20, 30]


def vllm_broadcast_accepts_src_minus_1(group: GroupCoordinator, me: int) -> None:
    for call in (
        lambda: group.broadcast(torch.ones(1), -1),
        lambda: group.broadcast_object(1, -1),
        lambda: group.broadcast_object_list([1], -1),
        lambda: group.broadcast_tensor_dict({}, -1),
    ):
        with pytest.raises(ValueError, match="src=-1"):
            call()


def vllm_queue_carries_rank_0_only(group: GroupCoordinator, me: int) -> None:
    group.mq_broadcaster = group.create_mq_broadcaster()
    for src in (0, 1, 0, 1):
        assert group.broadcast_object([src] if me == src else None, src) == [src]
    group.barrier()
    group.mq_broadcaster.shutdown()
    group.mq_broadcaster = None


def vllm_broadcast_tensor_dict_and_empty_tensors(group: GroupCoordinator, me: int) -> None:
    sent = {"n": 1, "empty": torch.empty(0, 3), "x": torch.ones(2).bfloat16(), "none": None}
    found = group.broadcast_tensor_dict(sent if me == 1 else None, 1)
    assert list(found) == list(sent)
    assert found["empty"].shape == (0, 3)
    assert found["x"].dtype == torch.bfloat16


def vllm_non_contiguous_tensors_cannot_be_sent(group: GroupCoordinator, me: int) -> None:
    x = torch.arange(6.0).reshape(2, 3).t()
    if me == 0:
        group.send_tensor_dict({"x": x}, 1)
        group.send(x, 1)
    else:
        assert torch.equal(group.recv_tensor_dict(0)["x"], x)
        assert torch.equal(group.recv((3, 2), torch.float32, 0), x)


def vllm_raises_after_the_metadata_has_left(group: GroupCoordinator, me: int) -> None:
    """A tensor that cannot be sliced is refused at both ends, and the next message is right."""
    if me == 0:
        with pytest.raises(ValueError, match="not divisible by 2"):
            group.send_tensor_dict({"x": torch.ones(3)}, 1, group, {"x": True})
        group.send_tensor_dict({"after": torch.ones(1)}, 1)
    else:
        with pytest.raises(MessageRefusedError, match="not divisible by 2"):
            group.recv_tensor_dict(0)
        assert list(group.recv_tensor_dict(0)) == ["after"]


def vllm_drops_extra_tensors(group: GroupCoordinator, me: int) -> None:
    rows = torch.full((me + 1, 1), float(me))
    *_, extra = group.dispatch(rows, rows, rows.int())
    assert extra.flatten().tolist() == [0, 1, 1]


def vllm_neighbours_are_global_ranks(group: GroupCoordinator, me: int) -> None:
    assert group.next_rank == group.prev_rank == group.ranks[1 - me]
    assert (group.is_first_rank, group.is_last_rank) == (me == 0, me == 1)


CASES = [
    case
    for name, case in list(globals().items())
    if name.startswith(("colossalai_", "bagua_", "vllm_"))
]


def run_cases(rank: int, n: int, store: Store, torch_only: bool) -> list[str]:
    groups: ParallelGroups = coordinator.init(
        tp=2, pp=2, rank=rank, store=store, timeout=60, torch_only=torch_only
    )
    with groups:
        for case in CASES:
            case(groups.pp, groups.pp.rank_in_group)
            groups.world.barrier()
    return [case.__name__ for case in CASES]


@pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])
def test_bugs_of_the_originals(torch_only: bool) -> None:
    before = set(Path("/dev/shm").iterdir())
    done = run_ranks(4, run_cases, SharedStore(), torch_only, timeout=120)
    assert done == [[case.__name__ for case in CASES]] * 4
    until(lambda: set(Path("/dev/shm").iterdir()) <= before)


@pytest.mark.parametrize(
    "verb",
    ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "all_to_all"],
)
def test_colossalai_async_in_a_group_of_one_cannot_be_waited_for(verb: str) -> None:
    with coordinator.init(rank=0) as groups:
        x = torch.ones(2, 2)
        work: Any = getattr(groups.tp, verb)(x, async_op=True)
        assert isinstance(work, Work)
        assert work.is_completed()
        assert work.wait() is work.wait() is x
