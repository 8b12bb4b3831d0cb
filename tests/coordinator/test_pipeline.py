"""Exchanges between pipeline stages: every call, every original bug, on real processes."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import coordinator
from coordinator import ParallelGroups
from coordinator.messages.incoming import Inbox, Incoming
from coordinator.pipeline import Exchanged, Stage
from shm_broadcast import (
    DivergenceError,
    GroupAbortedError,
    GroupTimeoutError,
    MessageRefusedError,
)
from tests.coordinator.sent import counting
from tests.patience import all_here, until
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from device_comm import Work


class Pair(NamedTuple):
    first: Any
    second: Any


def open_groups(stack: ExitStack, rank: int, path: str, *, pp: int, tp: int = 1) -> ParallelGroups:
    store = dist.FileStore(path, pp * tp)
    return stack.enter_context(
        coordinator.init(tp=tp, pp=pp, rank=rank, world_size=pp * tp, store=store)
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            and torch.equal(a.contiguous(), b.contiguous())
        )
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def payloads() -> list[Any]:
    return [
        torch.arange(8.0),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),  # int64, not contiguous
        torch.tensor(2.5, dtype=torch.float64),
        torch.empty(0, 7),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(3, requires_grad=True),
        [torch.arange(4), torch.arange(4.0)],
        (torch.ones(2), None, "text", 3),
        {"hidden": torch.ones(2, 2), 7: [{"deep": (torch.zeros(1),)}], "empty": []},
        Pair(torch.ones(1), {"step": 1 << 80}),
        {"prompt": "\ud83d", "\udcff": torch.ones(1)},
    ]


# --- two stages ----------------------------------------------------------------------------


def every_kind_of_tree_with_nothing_said_before(stage: Stage) -> None:
    for sent in payloads():
        if stage.is_first:
            stage.send_forward(sent)
            assert same(stage.recv_backward(), sent)
        else:
            found = stage.recv_forward()
            assert same(found, sent)
            stage.send_backward(found)


def out_one_gives_gradient_two(stage: Stage) -> None:
    if stage.is_first:
        assert stage.send_forward_recv_backward(torch.tensor(1.0)).item() == 2.0
        assert stage.send_backward_recv_forward(torch.tensor(9.0)) is None
    else:
        out = stage.recv_forward()
        assert stage.send_backward_recv_forward(out * 2, recv_prev=False) is None
        assert stage.send_forward_recv_backward(torch.tensor(9.0)) is None


def edges_do_nothing(stage: Stage) -> None:
    x = torch.ones(1)
    if stage.is_first:
        assert stage.recv_forward() is None
        assert stage.send_backward(x) is None
        assert stage.send_backward_recv_forward(x) is None
        assert stage.recv_forward(async_op=True).wait() is None
    else:
        assert stage.recv_backward() is None
        assert stage.send_forward(x) is None
        assert stage.send_forward_recv_backward(x) is None
        assert stage.send_forward(x, async_op=True).wait() is None


def a_ring_of_two_does_not_swap(stage: Stage) -> None:
    """Expected 101 and 201; the original got 201 and 101."""
    me = stage.pp.rank_in_group
    out, grad = torch.tensor(100.0 + me), torch.tensor(200.0 + me)
    found = stage.send_forward_backward_recv_forward_backward(out, grad)
    other = 1 - me
    assert [each.item() for each in found] == [100 + other, 200 + other]


def asked_for_in_another_order_than_sent(stage: Stage) -> None:
    me = stage.pp.rank_in_group
    first = stage.exchange(send_next=torch.tensor(1), async_op=True)
    second = stage.exchange(send_prev=torch.tensor(2), async_op=True)
    third = stage.exchange(send_next=torch.tensor(3), async_op=True)
    assert stage.exchange(recv_next=True).from_next.item() == 2
    late = stage.exchange(recv_prev=True, async_op=True)
    later = stage.exchange(recv_prev=True, async_op=True)
    assert later.wait().from_prev.item() == 3
    assert late.wait().from_prev.item() == 1
    for work in (first, second, third):
        assert work.wait() == Exchanged(None, None)
    assert me in (0, 1)


def sixty_four_mebibytes_each_way(stage: Stage) -> None:
    """Mutual blocking sends of the original never ended."""
    me = stage.pp.rank_in_group
    big = torch.full((16 << 20,), float(me))
    found = stage.exchange(send_next=big, recv_prev=True).from_prev
    assert found[0].item() == found[-1].item() == 1 - me
    # both send first, and only then receive
    if stage.is_first:
        stage.send_forward(big)
        assert stage.recv_backward()[-1].item() == 1
    else:
        stage.send_backward(big)
        assert stage.recv_forward()[-1].item() == 0


def handles(stage: Stage) -> None:
    me = stage.pp.rank_in_group
    work = stage.send_forward_recv_forward(torch.tensor([me]), async_op=True)
    assert work.wait().item() == 1 - me
    assert work.wait().item() == 1 - me
    assert work.is_completed()
    stage.send_forward_recv_forward(torch.tensor([7]), async_op=True)  # dropped, still takes place
    work = stage.send_backward_recv_backward(torch.tensor([me + 10]), async_op=True)

    async def awaited() -> Any:
        return await work

    assert asyncio.run(awaited()).item() == 11 - me


def what_is_sent_may_be_changed_afterwards(stage: Stage) -> None:
    if stage.is_first:
        x = torch.ones(1 << 16)
        stage.send_forward(x)
        x.zero_()
    else:
        assert stage.recv_forward().sum().item() == 1 << 16


def shapes_that_are_given_are_checked(stage: Stage) -> None:
    if stage.is_first:
        for _ in range(3):
            stage.send_forward(torch.ones(4, 4))
    else:
        assert stage.recv_forward((4, 4), dtype=torch.float32).shape == (4, 4)
        with pytest.raises(ValueError, match="expected"):
            stage.recv_forward((4, 5))
        with pytest.raises(ValueError, match="expected"):
            stage.recv_forward(dtype=torch.int64)


def gradients_are_asked_for_where_they_are_wanted(stage: Stage) -> None:
    if stage.is_first:
        stage.send_forward([torch.ones(2, requires_grad=True), torch.arange(2)])
        stage.send_forward(torch.ones(2, requires_grad=True) * 2)
    else:
        floats, integers = stage.recv_forward()
        assert (floats.requires_grad, floats.is_leaf, integers.requires_grad) == (True, True, False)
        with torch.no_grad():
            assert not stage.recv_forward().requires_grad


def wrong_calls_send_nothing(stage: Stage) -> None:
    me = stage.pp.rank_in_group
    x = torch.ones(2)
    for options, error in (
        ({"send_next": x, "next_rank": me}, ValueError),
        ({"send_next": x, "next_rank": 2}, ValueError),
        ({"recv_prev": True, "prev_rank": -1}, ValueError),
        ({"send_next": x, "scatter_gather_tensors": True}, ValueError),
        ({"send_next": x, "timeout": -1}, ValueError),
    ):
        with pytest.raises(error):
            stage.exchange(**options)
    found = stage.exchange(send_next=x, recv_prev=True)
    assert torch.equal(found.from_prev, x)


def what_cannot_be_sent_counts_as_a_message(stage: Stage) -> None:
    """Its receivers hear why, and everything behind it is what was sent for it."""
    x = torch.ones(2)
    for send, error, why in (
        ({"send_next": {"x": x, "f": [0, lambda: 0]}}, TypeError, r"tree\['f'\]\[1\].*a function"),
        ({"send_next": x.to_sparse()}, TypeError, "'tree' is not a dense tensor"),
        ({"send_next": (x, x.to("meta"))}, ValueError, r"tree\[1\].* is on meta"),
        ({"send_prev": lambda: 0, "send_next": x}, TypeError, "'tree': cannot pickle a function"),
    ):
        for step in range(3):
            fails = step == 1
            grads = dict.fromkeys(set(send) & {"send_prev"}, torch.tensor(step))
            if stage.is_first:
                with pytest.raises(error, match=why) if fails else nullcontext():
                    stage.exchange(**(send if fails else {"send_next": {"step": step}, **grads}))
                continue
            for recv, sent in (("recv_next", "send_prev"), ("recv_prev", "send_next")):
                if sent == "send_next" or grads:
                    told = f"rank 0 sends nothing: .*{why}"
                    with pytest.raises(MessageRefusedError, match=told) if fails else nullcontext():
                        found = stage.exchange(**{recv: True})
                        assert found in ((None, torch.tensor(step)), ({"step": step}, None))


def what_a_refused_call_was_to_receive_is_dropped(stage: Stage) -> None:
    me = stage.pp.rank_in_group
    for step in range(3):
        if step == 1:
            with pytest.raises(MessageRefusedError, match="rank 0 sends nothing: 'tree' "):
                stage.send_forward_recv_forward(torch.ones(1).to_sparse() if me == 0 else (1, step))
        else:
            assert stage.send_forward_recv_forward((me, step)) == (1 - me, step)


def other_messages_of_the_group_are_told_apart(stage: Stage) -> None:
    if stage.is_first:
        stage.pp.send_object("an object", 1)
        stage.send_forward(torch.tensor(5))
        stage.pp.send_tensor_dict({"x": torch.tensor(6)}, 1)
    else:
        assert stage.pp.recv_object(0) == "an object"
        assert stage.recv_forward().item() == 5
        with pytest.raises(DivergenceError, match="send of tensor dict"):
            stage.recv_forward()


TWO = (
    every_kind_of_tree_with_nothing_said_before,
    out_one_gives_gradient_two,
    edges_do_nothing,
    a_ring_of_two_does_not_swap,
    asked_for_in_another_order_than_sent,
    sixty_four_mebibytes_each_way,
    handles,
    what_is_sent_may_be_changed_afterwards,
    shapes_that_are_given_are_checked,
    gradients_are_asked_for_where_they_are_wanted,
    wrong_calls_send_nothing,
    what_cannot_be_sent_counts_as_a_message,
    what_a_refused_call_was_to_receive_is_dropped,
)


def two_stages(rank: int, n: int, path: str) -> None:
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path, pp=2)
        stage = Stage(groups.pp)
        for case in TWO:
            case(stage)
            groups.pp.barrier(timeout=120)
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path + "-apart", pp=2)
        other_messages_of_the_group_are_told_apart(Stage(groups.pp))
        with pytest.raises(GroupAbortedError, match="send of tensor dict"):
            groups.pp.barrier(timeout=120)
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path + "-late", pp=2)
        all_here(dist.FileStore(path + "-beside", n), n)
        stage = Stage(groups.pp)
        if stage.is_first:
            work = stage.recv_backward(async_op=True, timeout=0.05)
            with pytest.raises(GroupTimeoutError):
                work.wait()
            with pytest.raises(GroupTimeoutError):
                stage.recv_backward(timeout=0.05)
            with pytest.raises(GroupAbortedError):
                stage.recv_backward()
        else:
            with pytest.raises(GroupAbortedError):
                stage.recv_forward()


def test_two_stages(store_path: str) -> None:
    run_ranks(2, two_stages, store_path, timeout=240)


def both_arrive_while_one_waits(rank: int, n: int, path: str) -> None:
    """The message asked for arrives after the one before it, which its receive has taken in."""
    store = dist.FileStore(path + "-beside", n)
    keep = Inbox.keep

    def keep_and_dawdle(inbox: Inbox, incoming: Incoming) -> None:
        keep(inbox, incoming)
        all_here(store, n, "the first was seen")
        all_here(store, n, "the second is there")

    with ExitStack() as stack:
        stage = Stage(open_groups(stack, rank, path, pp=2).pp)
        if stage.is_first:
            all_here(store, n, "nothing is there")
            stage.exchange(send_next=torch.tensor(1))
            all_here(store, n, "the first was seen")
            stage.exchange(send_prev=torch.tensor(2))
            all_here(store, n, "the second is there")
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Inbox, "keep", keep_and_dawdle)
                wanted = stage.exchange(recv_next=True, async_op=True)
                all_here(store, n, "nothing is there")
                assert wanted.wait().from_next.item() == 2
            assert stage.recv_forward().item() == 1
        stage.pp.barrier(timeout=120)


def test_a_message_that_comes_between_two_looks(store_path: str) -> None:
    run_ranks(2, both_arrive_while_one_waits, store_path)


def a_peer_aborts(rank: int, n: int, path: str, awaits: bool) -> None:
    with ExitStack() as stack:
        stage = Stage(open_groups(stack, rank, path, pp=2).pp)
        if stage.is_first:
            work = stage.recv_backward(async_op=True)
            all_here(dist.FileStore(path + "-beside", n), n)
            until(work.is_completed)
            for _ in range(2):
                with pytest.raises(GroupAbortedError, match="why not"):
                    asyncio.run(awaited(work)) if awaits else work.wait()
        else:
            all_here(dist.FileStore(path + "-beside", n), n)
            stage.pp.abort("why not")


async def awaited(work: Work[Any]) -> Any:
    return await work


@pytest.mark.parametrize("awaits", [False, True])
def test_what_was_seen_to_have_failed_raises_why(store_path: str, awaits: bool) -> None:
    run_ranks(2, a_peer_aborts, store_path, awaits)


# --- three stages, and slices --------------------------------------------------------------


def ring_of_three(rank: int, n: int, path: str) -> None:
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path, pp=3)
        before, after = (rank - 1) % 3, (rank + 1) % 3
        stage = Stage(groups.pp)
        for _ in range(3):
            mine = torch.tensor(rank)
            assert stage.send_forward_recv_forward(mine).item() == before
            assert stage.send_backward_recv_backward(mine).item() == after
            both = stage.send_forward_backward_recv_forward_backward(mine, mine + 10)
            assert [each.item() for each in both] == [before, after + 10]
            break_ = stage.send_forward_recv_forward(None, recv_prev=False)
            assert break_ is None
        # past the neighbour
        if rank == 0:
            stage.send_forward(torch.tensor(5), next_rank=2)
        elif rank == 2:
            assert stage.recv_forward(prev_rank=0).item() == 5
        groups.pp.barrier(timeout=120)


def slices(rank: int, n: int, path: str) -> None:
    """PP=2, TP=2: each rank sends half, all receive the whole; what does not divide goes whole."""
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path, pp=2, tp=2)
        stage = Stage(groups.pp, groups.tp)
        trees: list[Any] = [
            torch.arange(8.0),
            torch.arange(8).reshape(2, 4).t(),  # the original fails on what is not contiguous
            torch.arange(7, dtype=torch.bfloat16),
            [torch.arange(4), torch.arange(3), torch.arange(6.0)],  # the last one's flag counted
        ]
        for tree in trees:
            if stage.is_first:
                stage.send_forward(tree)
                assert same(stage.recv_backward(), tree)
            else:
                found = stage.recv_forward()
                assert same(found, tree)
                stage.send_backward(found)
        # what travels: half of 8 elements; all of them if the sender says so
        if stage.is_first:
            half = groups.tp.rank_in_group
            _, parts = groups.pp._messenger.pack(
                {"x": trees[0]}, groups.tp._messenger.slicing(None)
            )
            assert parts[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][half]
            stage.send_forward(trees[0], scatter_gather_tensors=False)
        else:
            assert same(stage.recv_forward(), trees[0])
        # a ring, both ways, in slices
        me = groups.pp.rank_in_group
        both = stage.send_forward_backward_recv_forward_backward(
            torch.full((4,), 100.0 + me), torch.full((4,), 200.0 + me)
        )
        assert [each.unique().tolist() for each in both] == [[101.0 - me], [201.0 - me]]
        # of each way in its own order
        begin = [
            lambda: stage.send_forward_recv_forward(torch.full((4,), 300.0 + me), async_op=True),
            lambda: stage.send_backward_recv_backward(torch.full((4,), 400.0 + me), async_op=True),
        ]
        step = 1 if groups.tp.is_first_rank else -1
        works = [each() for each in begin[::step]][::step]
        found = [each.wait().unique().tolist() for each in works]
        assert found == [[301.0 - me], [401.0 - me]]
        # waiting again for what was refused gathers nothing again
        if stage.is_first:
            for tree in (trees[0], trees[0] + 100):
                stage.send_forward(tree)
        else:
            refuses = groups.tp.is_first_rank
            work = stage.recv_forward((9,) if refuses else None, async_op=True)
            for _ in range(2):
                if refuses:
                    with pytest.raises(ValueError, match="expected"):
                        work.wait()
                else:
                    assert same(work.wait(), trees[0])
            assert same(stage.recv_forward(), trees[0] + 100)
        groups.world.barrier(timeout=120)


def what_does_not_divide_by_four(rank: int, n: int, path: str) -> None:
    """PP=2, TP=4: 3200 elements travel in quarters, 802 whole; all receivers hold all of them."""
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path, pp=2, tp=4)
        stage = Stage(groups.pp, groups.tp)
        comm: Any = groups.pp.device_communicator
        sent: list[int] = []
        comm.send = counting(comm.send, sent)
        for count, travel in ((3200, 800), (802, 802)):
            x = torch.arange(count)
            if stage.is_first:
                stage.send_forward(x)
                assert sent == [travel]
                sent.clear()
                assert same(stage.recv_backward(), x * 2)
            else:
                found = stage.recv_forward()
                assert same(found, x)
                stage.send_backward(found * 2)
        groups.world.barrier(timeout=120)


def one_stage(rank: int, n: int, path: str) -> None:
    """It is the first and the last."""
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path, pp=1, tp=4)
        stage = Stage(groups.pp, groups.tp)
        assert stage.send_forward_recv_backward(torch.ones(1)) is None
        assert stage.exchange() == Exchanged(None, None)


def test_a_ring_of_three(store_path: str) -> None:
    run_ranks(3, ring_of_three, store_path, timeout=120)


def four_ranks(rank: int, n: int, path: str) -> None:
    slices(rank, n, path)
    one_stage(rank, n, path + "-one")


def test_slices(store_path: str) -> None:
    run_ranks(4, four_ranks, store_path, timeout=120)


def test_what_four_cannot_divide_goes_whole(store_path: str) -> None:
    run_ranks(8, what_does_not_divide_by_four, store_path, timeout=120)
