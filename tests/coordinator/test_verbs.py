"""Every verb over groups; its cost; captures on the CPU; rows for experts and back.

The table of `tests.device_comm.suite` has what the originals of the verbs get wrong.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import coordinator
from benchmarks.verb_cost import measure
from coordinator import GroupCoordinator
from coordinator.compat.vllm import parallel_state as vllm
from coordinator.verbs import UNDER_WAY, DispatchSizes
from shm_broadcast import Deadline, GroupAbortedError, GroupClosedError, GroupTimeoutError
from tests.device_comm.suite import check_table, run_whole_table
from tests.patience import all_here
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store


class AsCommunicator:
    """A group in the shape that the table asks for: its rank is the rank in the group."""

    def __init__(self, group: GroupCoordinator) -> None:
        self._group = group
        self.rank = group.rank_in_group
        self.capabilities = group.device_communicator.capabilities

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def run_tables(group: GroupCoordinator, dtypes: list[torch.dtype]) -> dict[str, str]:
    comm: Any = AsCommunicator(group)
    return run_whole_table(comm, dtypes)


def table(rank: int, n: int, store: Store) -> dict[str, str]:
    """One rank, or the pipeline groups of a 2 x 2 grid: [0, 2] and [1, 3]."""
    with coordinator.init(tp=n // 2 or 1, pp=min(n, 2), rank=rank, store=store) as groups:
        assert groups.pp.ranks in ([0], [0, 2], [1, 3])
        return run_tables(groups.pp, [torch.float32])


@pytest.mark.parametrize("n", [1, 4])
def test_the_table_of_verbs_holds_over_groups(n: int) -> None:
    check_table(run_ranks(n, table, SharedStore()))


def by_position(rank: int, n: int, store: Store) -> None:
    """``dim``, ``src``, ``dst`` and ``sizes`` may be given by position, as vLLM's users do."""
    with coordinator.init(tp=2, rank=rank, store=store, timeout=30) as groups:
        tp = groups.tp
        x = torch.arange(8.0).reshape(2, 4)
        assert tp.all_gather(x, 1).shape == (2, 8)
        assert tp.reduce_scatter(x, 1).tolist() == (2 * x.chunk(2, 1)[rank]).tolist()
        assert tp.all_gatherv(x[: rank + 1], 0, [1, 2]).shape == (3, 4)
        assert tp.reduce_scatterv(torch.arange(3.0), 0, [1, 2]).tolist() == ([0], [2, 4])[rank]
        assert tp.broadcast(torch.tensor([rank]), 1).item() == 1
        gathered = tp.gather(torch.tensor([rank]), 1, 0)
        assert (gathered is None) if rank == 0 else gathered.tolist() == [0, 1]
        total = torch.tensor([rank + 1])
        assert tp.cpu_all_reduce_(total) is total
        assert total.item() == 3
        assert tp.cpu_all_reduce_(total, async_op=True).wait().item() == 6
        with pytest.raises(ValueError, match="src=-1"):
            tp.broadcast(x, -1)
        tp.send(torch.tensor([rank]))
        assert tp.recv((1,), torch.int64).item() == 1 - rank
        tp.barrier()


def test_arguments_may_be_given_by_position() -> None:
    run_ranks(2, by_position, SharedStore())


def too_dear() -> set[str]:
    return {verb for verb, cost in measure().items() if cost.group >= 3}


def test_a_verb_costs_less_than_three_microseconds_above_its_communicator() -> None:
    dear = too_dear()
    for _ in range(4):  # whatever else the machine does, it does not make the same verb dear again
        dear = dear and dear & too_dear()
    assert dear == set()


# --- captures, where nothing is recorded but every group still takes part ------------------


@pytest.mark.parametrize("fails", [False, True])
def test_every_group_takes_part_in_a_capture_once(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    with coordinator.init() as groups:
        seen: list[str] = []
        every = (groups.world, groups.tp, groups.pp, groups.dp, groups.pcp, groups.dcp, groups.ep)
        members = list({group.unique_name: group for group in every}.values())
        for group in members:

            @contextmanager
            def capture(name: str = group.name) -> Iterator[None]:
                seen.append(f"begin {name}")
                try:
                    yield
                except KeyError:
                    seen.append(f"fail {name}")
                    raise
                seen.append(f"end {name}")

            monkeypatch.setattr(group.device_communicator, "graph_capture", capture)
        with pytest.raises(KeyError) if fails else nullcontext(), groups.graph_capture() as context:
            assert context.stream is None
            assert seen == [f"begin {group.name}" for group in members]
            if fails:
                raise KeyError("of mine")
        ended = "fail" if fails else "end"
        assert seen[len(members) :] == [f"{ended} {group.name}" for group in reversed(members)]
        seen.clear()
        with groups.tp.graph_capture() as first, groups.pp.graph_capture(first) as second:
            assert first == second
        assert seen == ["begin tp", "begin pp", "end pp", "end tp"]


# --- rows for experts ----------------------------------------------------------------------


def there_and_back(group: GroupCoordinator, rank: int, *, known: bool) -> None:
    """Members hold [1] and [2, 3]; expert r multiplies by r + 1: [3] and [6, 9] come back."""
    hidden = torch.tensor([[1.0]] if rank == 0 else [[2.0], [3.0]])
    rows = (hidden, hidden + 10, hidden.long() * 100)
    sizes = [1, 2] if known else None
    dispatched = [[1, 2, 3], [11, 12, 13], [100, 200, 300]]
    every = group.dispatch(*rows, sizes=sizes)
    assert [each.flatten().tolist() for each in every] == dispatched
    assert every[2].dtype == torch.int64
    work = group.dispatch(*rows, sizes=sizes, async_op=True)
    assert [each.flatten().tolist() for each in work.wait()] == dispatched
    result = every[0] * (rank + 1)
    expected = [[3]] if rank == 0 else [[6], [9]]
    assert group.combine(result, sizes=sizes).tolist() == expected
    assert group.combine(result, async_op=True).wait().tolist() == expected
    room = group.allocate_combine_input((3, 1), torch.float32)
    room.copy_(result)
    out = torch.empty(len(hidden), 1)
    for combine in (
        lambda: group.combine(room, out=out.zero_()),
        lambda: group.combine(room, out=out.zero_(), async_op=True).wait(),
    ):
        assert combine() is out
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


def two_micro_batches_at_once(group: GroupCoordinator, rank: int) -> None:
    """`combine` asks for sizes that may be those of either."""

    def dispatched(*sizes: int) -> torch.Tensor:
        return group.dispatch(torch.full((sizes[rank], 1), float(rank)))[0]

    def came_back(rows: torch.Tensor, sizes: list[int] | None = None) -> list[float]:
        return group.combine(rows, sizes=sizes).flatten().tolist()

    first, second = dispatched(1, 2), dispatched(2, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"3 rows .* dispatched as \[1, 2\] and as \[2, 1\]"):
            group.combine(first)
    assert came_back(first, [1, 2]) == [2.0 * rank] * (1, 2)[rank]
    assert came_back(second, [2, 1]) == [2.0 * rank] * (2, 1)[rank]
    first, second = dispatched(1, 2), dispatched(2, 2)
    assert came_back(second) == [2.0 * rank] * 2
    assert came_back(first) == [2.0 * rank] * (1, 2)[rank]
    for sizes in ((1, 2), (2, 1)):
        rows = dispatched(*sizes)
        for _ in range(2):
            assert came_back(rows) == [2.0 * rank] * sizes[rank]
    with pytest.raises(ValueError, match="no 7 rows were dispatched"):
        group.combine(torch.ones(7, 1))


def two_replicas(rank: int, n: int, store: Store) -> None:
    with coordinator.init(dp=2, rank=rank, store=store, timeout=30) as groups:
        with pytest.raises(ValueError, match="combine needs sizes"):
            groups.dp.combine(torch.ones(2, 1))
        there_and_back(groups.dp, rank, known=True)
        there_and_back(groups.dp, rank, known=False)
        two_micro_batches_at_once(groups.dp, rank)
        extra_tensors_are_kept(groups.dp, rank)
        groups.world.barrier()


def test_rows_are_dispatched_and_combined() -> None:
    run_ranks(2, two_replicas, SharedStore())


def test_rows_that_are_never_combined_are_given_up() -> None:
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


@pytest.mark.parametrize(
    ("sizes", "hidden", "back"),
    [
        ({"pcp": 2, "tp": 2}, [0, 1, 1], [[0], [2, 2]]),
        (
            {"pcp": 2, "dp": 2},
            [0, 1, 1, 2, 2, 2, 3, 3, 3, 3],
            [[0], [4, 4], [8, 8, 8], [12, 12, 12, 12]],
        ),
    ],
)
def test_rows_of_ranks_that_share_a_prompt_reach_all_experts(
    sizes: dict[str, int], hidden: list[int], back: list[list[int]]
) -> None:
    for rank, found in enumerate(run_ranks(4, contexts, SharedStore(), sizes)):
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


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups: list[object] = []

    def prepare_communication_buffers(self, group: object) -> None:
        self.groups.append(group)


def test_modules_are_prepared_once() -> None:
    shared = Expert()
    other = Expert()
    model = nn.Sequential(shared, nn.Linear(1, 1), nn.Sequential(shared, other))
    with coordinator.init(rank=0) as groups:
        face = as_vllm(groups.ep)
        face.prepare_communication_buffer_for_model(model)
        assert shared.groups == other.groups == [face]
