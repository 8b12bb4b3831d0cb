"""Pipeline stages exchange trees; dicts and trees in slices; torch's schedules, on real ranks."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import coordinator
from coordinator import GroupCoordinator, ParallelGroups
from coordinator.messages.incoming import Inbox, Incoming
from coordinator.pipeline import Exchanged, Stage
from device_comm import Work
from shm_broadcast import (
    DivergenceError,
    GroupAbortedError,
    GroupTimeoutError,
    MessageRefusedError,
)
from tests.coordinator.sent import agree, counting
from tests.patience import all_here, until
from tests.ranks import init_gloo, run_ranks


class Pair(NamedTuple):
    first: Any
    second: Any


def open_groups(stack: ExitStack, rank: int, path: str, *, pp: int, tp: int = 1) -> ParallelGroups:
    store = dist.FileStore(path, pp * tp)
    return stack.enter_context(
        coordinator.init(tp=tp, pp=pp, rank=rank, store=store, timeout=30, operation_timeout=60)
    )


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
            agree(stage.recv_backward(), sent)
        else:
            found = stage.recv_forward()
            agree(found, sent)
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
    assert work.wait().item() == work.wait().item() == 1 - me
    assert work.is_completed()
    stage.send_forward_recv_forward(torch.tensor([7]), async_op=True)  # dropped, still takes place
    work = stage.send_backward_recv_backward(torch.tensor([me + 10]), async_op=True)
    assert asyncio.run(awaited(work)).item() == 11 - me


def a_receiver_checks_what_it_expects(stage: Stage) -> None:
    """Gradients are required where autograd is on; the sender may change its tensor at once."""
    if stage.is_first:
        x = torch.ones(1 << 16)
        stage.send_forward(x)
        x.zero_()
        for _ in range(3):
            stage.send_forward(torch.ones(4, 4))
        stage.send_forward([torch.ones(2, requires_grad=True), torch.arange(2)])
        stage.send_forward(torch.ones(2, requires_grad=True) * 2)
        return
    assert stage.recv_forward().sum().item() == 1 << 16
    assert stage.recv_forward((4, 4), dtype=torch.float32).shape == (4, 4)
    with pytest.raises(ValueError, match="expected"):
        stage.recv_forward((4, 5))
    with pytest.raises(ValueError, match="expected"):
        stage.recv_forward(dtype=torch.int64)
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
    """Its receivers raise why; the messages behind it arrive."""
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


CASES = (
    every_kind_of_tree_with_nothing_said_before,
    out_one_gives_gradient_two,
    edges_do_nothing,
    a_ring_of_two_does_not_swap,
    asked_for_in_another_order_than_sent,
    sixty_four_mebibytes_each_way,
    handles,
    a_receiver_checks_what_it_expects,
    wrong_calls_send_nothing,
    what_cannot_be_sent_counts_as_a_message,
    what_a_refused_call_was_to_receive_is_dropped,
)


def two_stages(rank: int, n: int, path: str) -> None:
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path, pp=2)
        stage = Stage(groups.pp)
        for case in CASES:
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


def test_two_stages_exchange_trees(store_path: str) -> None:
    run_ranks(2, two_stages, store_path, timeout=240)


def both_arrive_while_one_waits(rank: int, n: int, path: str) -> None:
    """The message asked for arrives after the one before it, which its receive has kept."""
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


def test_a_message_that_arrives_between_two_looks_is_received(store_path: str) -> None:
    run_ranks(2, both_arrive_while_one_waits, store_path)


async def awaited(work: Work[Any]) -> Any:
    return await work


def a_peer_aborts(rank: int, n: int, path: str) -> None:
    for name, wait in (("wait", Work.wait), ("await", lambda work: asyncio.run(awaited(work)))):
        with ExitStack() as stack:
            stage = Stage(open_groups(stack, rank, path + name, pp=2).pp)
            beside = dist.FileStore(path + name + "-beside", n)
            if stage.is_first:
                work = stage.recv_backward(async_op=True)
                all_here(beside, n)
                until(work.is_completed)
                for _ in range(2):
                    with pytest.raises(GroupAbortedError, match="why not"):
                        wait(work)
            else:
                all_here(beside, n)
                stage.pp.abort("why not")


def test_a_wait_for_a_failed_exchange_raises_why(store_path: str) -> None:
    run_ranks(2, a_peer_aborts, store_path)


# --- rings, one stage, torch's schedules ---------------------------------------------------


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
            assert stage.send_forward_recv_forward(None, recv_prev=False) is None
        # past the neighbour
        if rank == 0:
            stage.send_forward(torch.tensor(5), next_rank=2)
        elif rank == 2:
            assert stage.recv_forward(prev_rank=0).item() == 5
        groups.pp.barrier(timeout=120)


def test_three_stages_are_a_ring(store_path: str) -> None:
    run_ranks(3, ring_of_three, store_path, timeout=120)


def test_one_stage_is_the_first_and_the_last() -> None:
    with coordinator.init(rank=0) as groups:
        stage = Stage(groups.pp, groups.tp)
        assert stage.send_forward_recv_backward(torch.ones(1)) is None
        assert stage.exchange() == Exchanged(None, None)


BATCHES = 5


def model(parts: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(parts)]


def torchs_schedules(rank: int, n: int, path: str) -> None:
    from torch.distributed import pipelining

    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 3 * BATCHES, 6, dtype=torch.float64)
    whole = nn.Sequential(*model(n))
    nn.functional.mse_loss(whole(inputs), targets).backward()
    with GroupCoordinator.from_process_group(init_gloo(rank, n, path), "pp") as pp:
        for schedule in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
            part = model(n)[rank]
            stage = pipelining.PipelineStage(part, rank, n, pp.device, group=pp.device_group)
            steps = schedule(stage, n_microbatches=BATCHES, loss_fn=nn.functional.mse_loss)
            if rank == 0:
                steps.step(inputs)
            else:
                steps.step(target=targets)
            pp.barrier(timeout=120)
            for mine, theirs in zip(part.parameters(), whole[rank].parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)


def test_torchs_schedules_compute_the_gradients_of_the_undivided_model(store_path: str) -> None:
    run_ranks(2, torchs_schedules, store_path, timeout=120)


# --- slices: two stages of two, [0, 1] and [2, 3] ------------------------------------------


def trees_in_slices(groups: ParallelGroups) -> None:
    """Each rank sends half, all receive the whole; what does not divide is sent whole."""
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
            agree(stage.recv_backward(), tree)
        else:
            found = stage.recv_forward()
            agree(found, tree)
            stage.send_backward(found)
    if stage.is_first:
        stage.send_forward(trees[0], scatter_gather_tensors=False)
    else:
        agree(stage.recv_forward(), trees[0])
    me = groups.pp.rank_in_group
    # a ring, each way in its own order
    begin = [
        lambda: stage.send_forward_recv_forward(torch.full((4,), 300.0 + me), async_op=True),
        lambda: stage.send_backward_recv_backward(torch.full((4,), 400.0 + me), async_op=True),
    ]
    step = 1 if groups.tp.is_first_rank else -1
    works = [each() for each in begin[::step]][::step]
    found = [each.wait().unique().tolist() for each in works]
    assert found == [[301.0 - me], [401.0 - me]]
    # a second wait for a refused tree gathers nothing again
    if stage.is_first:
        for tree in (trees[0], trees[0] + 100):
            stage.send_forward(tree)
        return
    refuses = groups.tp.is_first_rank
    work = stage.recv_forward((9,) if refuses else None, async_op=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected") if refuses else nullcontext():
            agree(work.wait(), trees[0])
    agree(stage.recv_forward(), trees[0] + 100)


def dicts_in_slices(groups: ParallelGroups) -> None:
    """arange(800) over two: 400 elements per link; the sender alone decides what is cut."""
    pp, tp = groups.pp, groups.tp
    sent: list[int] = []
    comm: Any = pp.device_communicator
    x = torch.arange(800).reshape(2, 400)  # a slice of less would travel with the header
    residual = torch.full((400,), float(tp.rank_in_group))
    many = {
        "x": x,
        "odd": torch.arange(601.0),
        "empty": torch.empty(0),
        "t": x.t(),
        "bf16": torch.ones(2, 800, dtype=torch.bfloat16),
        "residual": residual,
    }
    with pytest.MonkeyPatch.context() as patch:
        for verb in ("send", "isend") if pp.is_first_rank else ():
            patch.setattr(comm, verb, counting(getattr(comm, verb), sent))
        for blocking in (True, False):
            if pp.is_first_rank:
                sent.clear()
                if blocking:
                    pp.send_tensor_dict(many, 1, tp, {"residual": False, "absent": True})
                else:
                    pp.isend_tensor_dict(many, 1, tp, {"residual": False}).wait()
                assert sent == [400, 601, 400, 800, 400]
                pp.send_tensor_dict({"x": x}, 1, tp, {"x": False})
                assert sent[-1] == 800
                pp.send_tensor_dict({"x": x}, 1, tp)
            else:
                later = None if blocking else pp.irecv_tensor_dict(0, tp)
                agree(later.wait() if later else pp.recv_tensor_dict(0, tp), many)
                for mismatched in (True, False):
                    agree(pp.recv_tensor_dict(0, tp, {"x": mismatched}), {"x": x})
    if pp.is_first_rank:
        with pytest.raises(ValueError, match="'odd' has 3 elements, not divisible by 2"):
            pp.send_tensor_dict({"x": x, "odd": torch.ones(3)}, 1, tp, {"odd": True})
        pp.send_tensor_dict({"x": x}, 1, tp)
        pp.send_tensor_dict({"after": x}, 1)
    else:
        with pytest.raises(MessageRefusedError, match="'odd' has 3 elements"):
            pp.recv_tensor_dict(0, tp)
        with pytest.raises(ValueError, match=r"'x' arrived as slice \d of 2: receive it with"):
            pp.recv_tensor_dict(0)
        agree(pp.recv_tensor_dict(0), {"after": x})


def a_dict_that_was_not_sent_does_not_count(groups: ParallelGroups) -> None:
    """One of the two senders is refused a dict, of which nothing moves, and sends it again."""
    pp, tp = groups.pp, groups.tp
    for value in range(3):
        values = {"x": torch.full((800,), value)}
        if not pp.is_first_rank:
            assert pp.recv_tensor_dict(0, tp)["x"].eq(value).all()
            continue
        if tp.is_first_rank:
            entered, leave = threading.Event(), threading.Event()

            def occupy(entered: threading.Event, leave: threading.Event) -> None:
                with pp._messenger._outgoing._turn:
                    entered.set()
                    leave.wait(30)

            thread = threading.Thread(target=occupy, args=(entered, leave))
            thread.start()
            entered.wait(30)
            with pytest.raises(RuntimeError, match="another thread is sending"):
                pp.isend_tensor_dict(values, 1, tp)
            leave.set()
            thread.join()
        pp.send_tensor_dict(values, 1, tp)


def waiting_in_another_order(groups: ParallelGroups) -> None:
    """Of the two receivers, one waits for the second dict first: it gets no others' slices."""
    pp, tp = groups.pp, groups.tp
    if pp.is_first_rank:
        for value in range(2):
            pp.isend_tensor_dict({"x": torch.full((800,), value), "odd": torch.ones(3)}, 1, tp)
            pp.isend_tensor_dict({"odd": torch.ones(tp.rank_in_group * 2 + 1)}, 1, tp)
        return
    works = [pp.irecv_tensor_dict(0, tp) for _ in range(4)]
    for work in works[1::2]:
        work.wait()
    own, other = (1, 2) if tp.is_first_rank else (2, 1)
    told = r"rank {} issued .* sliced dict {}.* this rank issued .* sliced dict {}"
    with pytest.raises(
        (DivergenceError, GroupAbortedError), match=told.format(r"\d", r"\d", r"\d")
    ) as raised:
        works[2 * own - 2].wait()
    if isinstance(raised.value, DivergenceError):
        assert re.search(told.format(5 - pp.rank, other, own), str(raised.value))


def a_peer_that_does_not_gather(groups: ParallelGroups) -> None:
    """Slices are gathered in the time of the call."""
    pp, tp = groups.pp, groups.tp
    if pp.is_first_rank:
        pp.send_tensor_dict({"x": torch.arange(800)}, 1, tp)
    elif tp.is_first_rank:
        with pytest.raises(GroupTimeoutError):
            pp.recv_tensor_dict(0, tp, timeout=1)
    with pytest.raises(GroupAbortedError, match="GroupTimeoutError: tp all_gather"):
        groups.world.barrier(timeout=30)


SLICES = {
    "whole": (trees_in_slices, dicts_in_slices, a_dict_that_was_not_sent_does_not_count),
    "another order": (waiting_in_another_order,),
    "a late peer": (a_peer_that_does_not_gather,),
}


def in_slices(rank: int, n: int, path: str, cases: str) -> None:
    with ExitStack() as stack:
        groups = open_groups(stack, rank, path, pp=2, tp=2)
        for case in SLICES[cases]:
            case(groups)
            if cases == "whole":
                groups.world.barrier(timeout=120)


@pytest.mark.parametrize("cases", SLICES)
def test_slices_of_replicated_tensors_are_gathered(cases: str, store_path: str) -> None:
    run_ranks(4, in_slices, store_path, cases, timeout=120)
