"""Rows go to the experts and come back, also where members hold different numbers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import coordinator
from coordinator import GroupCoordinator
from coordinator.compat.vllm import parallel_state as vllm
from coordinator.verbs import UNDER_WAY, DispatchSizes
from shm_broadcast import GroupAbortedError, GroupClosedError, GroupTimeoutError
from shm_broadcast.deadline import Deadline
from tests.patience import all_here
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups: list[object] = []

    def prepare_communication_buffers(self, group: object) -> None:
        self.groups.append(group)


def there_and_back(group: GroupCoordinator, rank: int, *, known: bool) -> None:
    """Members hold [1] and [2, 3]; expert r multiplies by r + 1: [3] and [6, 9] come back."""
    hidden = torch.tensor([[1.0]] if rank == 0 else [[2.0], [3.0]])
    weights, ids = hidden + 10, hidden.long() * 100
    sizes = [1, 2] if known else None
    every = group.dispatch(hidden, weights, ids, sizes=sizes)
    assert [each.flatten().tolist() for each in every] == [
        [1, 2, 3],
        [11, 12, 13],
        [100, 200, 300],
    ]
    assert every[2].dtype == torch.int64
    result = every[0] * (rank + 1)
    expected = [[3]] if rank == 0 else [[6], [9]]
    assert group.combine(result, sizes=sizes).tolist() == expected
    room = group.allocate_combine_input((3, 1), torch.float32)
    room.copy_(result)
    out = torch.empty(len(hidden), 1)
    assert group.combine(room, out=out) is out
    assert out.tolist() == expected
    work = group.dispatch(hidden, weights, ids, sizes=sizes, async_op=True)
    assert [len(each) for each in work.wait()] == [3, 3, 3]
    two = group.dispatch(hidden, ids, async_op=True).wait()
    assert [each.flatten().tolist() for each in two] == [[1, 2, 3], [100, 200, 300]]
    assert group.combine(result, async_op=True).wait().tolist() == expected
    assert group.combine(room, out=out.zero_(), async_op=True).wait() is out
    assert out.tolist() == expected


def as_vllm(native: GroupCoordinator) -> vllm.GroupCoordinator:
    """Return a second end of a group, with vLLM's arguments."""
    group = vllm.GroupCoordinator.__new__(vllm.GroupCoordinator)
    vars(group).update(vars(native))
    return group


def extra_tensors_are_kept(native: GroupCoordinator, rank: int) -> None:
    """In vLLM's words."""
    group = as_vllm(native)
    rows = torch.full((rank + 1, 2), float(rank))
    extra = [rows[:, 0].to(torch.int8), rows.bool()]
    hidden, logits, more = group.dispatch_router_logits(rows, rows * 2, extra_tensors=extra)
    assert hidden[:, 0].tolist() == [0, 1, 1]
    assert logits[:, 0].tolist() == [0, 2, 2]
    assert [each.dtype for each in more] == [torch.int8, torch.bool]
    assert [len(each) for each in more] == [3, 3]
    assert len(group.dispatch_router_logits(rows, rows)) == 2
    *_, none_extra = group.dispatch(rows, rows, rows, extra_tensors=[])
    assert none_extra == []


def both(rank: int, n: int, store: Store) -> None:
    with coordinator.init(dp=2, rank=rank, store=store, timeout=30) as groups:
        with pytest.raises(ValueError, match="combine needs sizes"):
            groups.dp.combine(torch.ones(2, 1))
        there_and_back(groups.dp, rank, known=True)
        there_and_back(groups.dp, rank, known=False)
        extra_tensors_are_kept(groups.dp, rank)
        groups.world.barrier()


def test_dispatch_and_combine() -> None:
    run_ranks(2, both, SharedStore())


def two_at_once(rank: int, n: int, store: Store) -> None:
    """Rows of two micro-batches are under way; `combine` asks for sizes that may be either's."""
    with coordinator.init(dp=2, rank=rank, store=store, timeout=30) as groups:
        group = groups.dp

        def dispatched(*sizes: int) -> torch.Tensor:
            rows = torch.full((sizes[rank], 1), float(rank))
            return group.dispatch(rows)[0]

        def came_back(rows: torch.Tensor, sizes: list[int] | None = None) -> list[float]:
            return group.combine(rows, sizes=sizes).flatten().tolist()

        for total_differs in range(2):
            first, second = dispatched(1, 2), dispatched(2, 1 + total_differs)
            if not total_differs:
                why = r"3 rows were dispatched as \[1, 2\] and as \[2, 1\]"
                for _ in range(2):
                    with pytest.raises(ValueError, match=why):
                        group.combine(first)
                assert came_back(first, [1, 2]) == ([0] if rank == 0 else [2, 2])
                assert came_back(second, [2, 1]) == ([0, 0] if rank == 0 else [2])
            else:
                assert came_back(second) == ([0, 0] if rank == 0 else [2, 2])
                assert came_back(first) == ([0] if rank == 0 else [2, 2])
        for sizes in ((1, 2), (2, 1)):
            rows = dispatched(*sizes)
            for _ in range(2):
                assert came_back(rows) == [2.0 * rank] * sizes[rank]
        with pytest.raises(ValueError, match="no 7 rows were dispatched"):
            group.combine(torch.ones(7, 1))
        groups.world.barrier()


def test_two_dispatches_under_way() -> None:
    run_ranks(2, two_at_once, SharedStore())


def test_what_is_never_combined_is_given_up() -> None:
    """By hand: as [1, 2] once, and then as [2, 1], each combined at once."""
    dispatches = DispatchSizes()
    dispatches.add([1, 2])
    refused = []
    for _ in range(2 * UNDER_WAY):
        dispatches.add([2, 1])
        try:
            assert dispatches.sizes_of(3) == (2, 1)
        except ValueError:
            refused.append(True)
        dispatches.combined([2, 1])
    assert len(refused) == UNDER_WAY - 1
    assert dispatches.sizes_of(3) == (2, 1)


def late(rank: int, n: int, store: Store) -> str:
    """Rank 1 does not dispatch until rank 0 has given up."""
    rows = torch.ones(2, 1)
    with coordinator.init(dp=2, rank=rank, store=store, timeout=30) as groups:
        all_here(store, n)
        if rank == 1:
            groups.board.wait(
                lambda: groups.board.aborted is not None,
                Deadline.after(30),
                "until the other has given up",
                list,
            )
        with pytest.raises((GroupTimeoutError, GroupAbortedError)) as caught:
            groups.dp.dispatch(rows, rows, rows, timeout=0.2)
        return str(caught.value)


def test_a_dispatch_ends_at_its_deadline() -> None:
    first, second = run_ranks(2, late, SharedStore())
    assert "timed out after 0.2 s, waiting for rank 1" in first
    assert "rank 0 reported" in second


def replicas(rank: int, n: int, store: Store) -> None:
    """Experts over 2 x 2 ranks: rows differ between replicas, or on all four."""
    with coordinator.init(dp=2, tp=2, rank=rank, store=store, timeout=30) as groups:
        ep, replica = groups.ep, groups.dp.rank_in_group
        assert ep.ranks == [0, 1, 2, 3]
        rows = torch.full((replica + 1, 1), float(replica))
        (hidden,) = ep.dispatch(rows)
        assert hidden.flatten().tolist() == [0, 1, 1]
        assert ep.combine(hidden).flatten().tolist() == [2.0 * replica] * (replica + 1)
        rows = torch.full((rank, 1), float(rank))
        (hidden,) = ep.dispatch(rows, is_sequence_parallel=True)
        assert hidden.flatten().tolist() == [1, 2, 2, 3, 3, 3]
        back = ep.combine(hidden, is_sequence_parallel=True)
        assert back.flatten().tolist() == [4.0 * rank] * rank
        groups.world.barrier()


def test_sequence_parallel_rows_differ_on_all_members() -> None:
    run_ranks(4, replicas, SharedStore())


def contexts(rank: int, n: int, store: Store, sizes: dict[str, int]) -> tuple[list[Any], ...]:
    """The tensor-parallel ranks hold the same rows; of all others, each one row more."""
    with coordinator.init(rank=rank, store=store, timeout=30, **sizes) as groups:
        number = rank // groups.tp.world_size
        (hidden,) = groups.ep.dispatch(torch.full((number + 1, 1), float(number)))
        back = groups.ep.combine(hidden)
        with groups.graph_capture():
            groups.world.barrier()
        return hidden.flatten().tolist(), back.flatten().tolist()


TWO = ([0, 1, 1], [[0], [2, 2]])
FOUR = ([0, 1, 1, 2, 2, 2, 3, 3, 3, 3], [[0], [4, 4], [8, 8, 8], [12, 12, 12, 12]])


@pytest.mark.parametrize(
    ("n", "sizes", "expected"),
    [
        (2, {"pcp": 2}, TWO),
        (4, {"pcp": 2, "tp": 2}, TWO),
        (4, {"pcp": 2, "dp": 2}, FOUR),
        (8, {"pcp": 2, "dp": 2, "tp": 2}, FOUR),
    ],
)
def test_rows_of_ranks_that_share_a_prompt_reach_all_experts(
    n: int, sizes: dict[str, int], expected: tuple[list[int], list[list[int]]]
) -> None:
    hidden, back = expected
    for rank, found in enumerate(run_ranks(n, contexts, SharedStore(), sizes)):
        assert found == (hidden, back[rank // sizes.get("tp", 1)])


def one_replica(rank: int, n: int, store: Store) -> None:
    """The ranks of ``ep`` hold the same rows, those of ``tp`` do not, though they are the same."""
    with coordinator.init(tp=2, rank=rank, store=store, timeout=30) as groups:
        rows = torch.full((1, 1), float(rank))
        assert groups.tp.dispatch(rows, rows, rows)[0].flatten().tolist() == [0, 1]
        assert groups.ep.dispatch(rows, rows, rows)[0] is rows
        (alone,) = groups.ep.dispatch(rows, is_sequence_parallel=True)
        assert alone.flatten().tolist() == [0, 1]
        assert groups.ep.unique_name == groups.tp.unique_name == "tp:0"
        with groups.graph_capture():
            groups.world.barrier()
        groups.ep.close()
        assert groups.tp.closed
        with pytest.raises(GroupClosedError):
            groups.tp.all_reduce(rows)


def test_ranks_of_one_replica_hold_the_same_rows() -> None:
    run_ranks(2, one_replica, SharedStore())


def test_alone_nothing_is_dropped() -> None:
    """vLLM's group without a communicator drops the extra tensors."""
    with coordinator.init(rank=0) as groups:
        x, extra = torch.ones(2, 1), torch.zeros(2)
        face = as_vllm(groups.dp)
        hidden, weights, ids, more = face.dispatch(x, x, x, extra_tensors=[extra])
        assert hidden is weights is ids is x
        assert more[0] is extra
        assert groups.dp.combine(x) is x


def test_modules_are_prepared_once() -> None:
    shared = Expert()
    other = Expert()
    model = nn.Sequential(shared, nn.Linear(1, 1), nn.Sequential(shared, other))
    with coordinator.init(rank=0) as groups:
        face = as_vllm(groups.ep)
        face.prepare_communication_buffer_for_model(model)
        assert shared.groups == other.groups == [face]
