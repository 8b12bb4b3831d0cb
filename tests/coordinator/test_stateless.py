"""Groups without a default process group: grown, shrunk, and remade after a death."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator import (
    ReduceOp,
    StatelessGroupCoordinator,
    StatelessProcessGroup,
    connect_store,
    host_store,
)
from shm_broadcast import CoordinatorError, GroupTimeoutError, PeerLostError
from tests.patience import STALL_SECONDS, all_here
from tests.ranks import run_ranks


def objects_and_tensors(rank: int, n: int, port: int) -> None:
    store = connect_store("127.0.0.1", port)
    with StatelessProcessGroup.create("127.0.0.1", port, rank, n, store) as group:
        assert (group.rank, group.world_size) == (rank, 3)
        for src in range(n):
            assert group.broadcast_obj({"from": rank} if rank == src else None, src) == {
                "from": src
            }
            sent = torch.full((src + 1, 2), float(src), dtype=torch.float16)
            found = group.broadcast(sent if rank == src else None, src)
            assert torch.equal(found, sent)
            assert (found is sent) == (rank == src)
        assert group.all_gather_obj("x" * rank) == ["", "x", "xx"]
        # two senders to one: their messages do not mix
        if rank == 0:
            assert [group.recv_obj(2), group.recv_obj(1), group.recv_obj(1)] == [2, 1, "again"]
            out = torch.empty(4, dtype=torch.int64)
            assert group.recv(out, 2) is out
            assert out.tolist() == [0, 1, 2, 3]
        else:
            group.send_obj(rank, 0)
            if rank == 1:
                group.send_obj("again", 0)
            else:
                group.send(torch.arange(4), 0)
        x = torch.tensor([rank + 1])
        assert group.all_reduce(x).item() == 6
        assert group.all_reduce(x, ReduceOp.MAX).item() == 3
        assert x.item() == rank + 1
        group.barrier()
        assert not dist.is_initialized()
    group.close()


def test_objects_and_tensors() -> None:
    store = host_store()
    run_ranks(3, objects_and_tensors, store.port)


def two_groups_of_a_process(rank: int, n: int, port: int) -> None:
    """Rank 0 is in both; each has ranks of its own."""
    if rank in (0, 1):
        first = StatelessProcessGroup.create("127.0.0.1", port, rank, 2, store=_store(port, "a"))
    if rank in (0, 2):
        second = StatelessProcessGroup.create(
            "127.0.0.1", port, rank // 2, 2, store=_store(port, "b")
        )
    if rank == 0:
        assert first.all_gather_obj(rank) == [0, 1]
        assert second.all_gather_obj(rank) == [0, 2]
        first.close()
        second.close()
    else:
        (first if rank == 1 else second).all_gather_obj(rank)


def _store(port: int, name: str) -> dist.PrefixStore:
    return dist.PrefixStore(name, connect_store("127.0.0.1", port))


def test_a_process_may_be_in_several() -> None:
    store = host_store()
    run_ranks(3, two_groups_of_a_process, store.port)


def missing(rank: int, n: int, port: int) -> None:
    if rank == 0:
        with pytest.raises(GroupTimeoutError) as caught:
            StatelessProcessGroup.create(
                "127.0.0.1", port, 0, 3, connect_store("127.0.0.1", port), timeout=0.4
            )
        assert [member.rank for member in caught.value.waiting_for] == [1, 2]


def test_missing_members_are_named() -> None:
    store = host_store()
    run_ranks(1, missing, store.port)


def build(rank: int, port: int, ranks: list[int], **options: Any) -> StatelessGroupCoordinator:
    return StatelessGroupCoordinator(
        [ranks],
        rank,
        "gloo",
        True,
        connect_store("127.0.0.1", port),
        group_name="tp",
        global_rank=rank,
        timeout=20,
        **options,
    )


def grow_and_shrink(rank: int, n: int, port: int) -> None:
    """[0, 1] → [0, 1, 2] → [0, 2] → [0, 1, 2] again; rank 2 comes later."""
    one = torch.ones(1)
    if rank < 2:
        pair = build(rank, port, [0, 1], use_message_queue_broadcaster=True)
        assert pair.all_reduce(one).item() == 2
        assert pair.broadcast_object("x" if rank == 0 else None) == "x"
        three = pair.resized([[0, 1, 2]])
        assert pair.all_reduce(one).item() == 2
        pair.close()
    else:
        time.sleep(0.3)
        three = build(rank, port, [0, 1, 2], use_message_queue_broadcaster=True)
    assert three.all_gather(torch.tensor([rank])).tolist() == [0, 1, 2]
    assert three.broadcast_object(rank if rank == 0 else None) == 0
    if rank != 1:
        ends = three.resized([[0, 2]])
        assert ends.all_gather(torch.tensor([rank])).tolist() == [0, 2]
        assert (ends.rank, ends.rank_in_group) == (rank, rank // 2)
    again = three.resized([[0, 1, 2]])
    assert again.all_reduce(one).item() == 3
    again.barrier()
    assert not dist.is_initialized()
    for group in (again, three):
        group.close()
    if rank != 1:
        ends.close()


def test_grow_and_shrink() -> None:
    store = host_store()
    run_ranks(3, grow_and_shrink, store.port)


def remade(rank: int, n: int, port: int) -> None:
    """Rank 1 is killed; the others notice, and go on without it."""
    group = build(rank, port, [0, 1, 2])
    store = connect_store("127.0.0.1", port)
    all_here(store, n)
    if rank == 1:
        store.set("killed", repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CoordinatorError, match="rank 1"):
        group.all_reduce(torch.ones(1))
    ended = time.monotonic()
    assert ended - float(store.get("killed")) < 1 + STALL_SECONDS
    left = group.resized([[0, 2]])
    group.close()
    assert left.all_reduce(torch.tensor([rank])).item() == 2
    left.barrier()
    left.close()


def test_remade_without_a_dead_member() -> None:
    store = host_store()
    run_ranks(3, remade, store.port, may_die=[1])


def other_ranks_than_in_the_group(rank: int, n: int, port: int) -> None:
    """Ranks 1 and 2 are 0 and 1 in their group; errors call them what the caller does."""
    if rank == 0:
        return
    group = build(rank, port, [1, 2])
    all_here(connect_store("127.0.0.1", port), 2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="lost rank 2 ") as raised:
        group.all_reduce(torch.ones(1))
    assert raised.value.rank == 2
    with pytest.raises(GroupTimeoutError, match="rank 2"):
        group.resized([[1, 2]], timeout=0.2)
    group.close()


def test_errors_name_global_ranks() -> None:
    store = host_store()
    run_ranks(3, other_ranks_than_in_the_group, store.port, may_die=[2])


def told_differently(rank: int, n: int, port: int) -> list[str]:
    """By the constructor, which meets in the caller's store."""
    said = []
    for name, given in (("secret", b"sixteen or more bytes"), ("use_device_communicator", False)):
        options: dict[str, Any] = {name: given} if rank == 0 else {}
        with pytest.raises(ValueError, match="give all ranks the same") as caught:
            StatelessGroupCoordinator(
                [[0, 1]], 0, "gloo", coord_store=connect_store("127.0.0.1", port),
                group_name="tp", global_rank=rank, timeout=STALL_SECONDS,
                **({"use_device_communicator": True} | options),
            )  # fmt: skip
        said.append(str(caught.value))
    return said


def test_members_that_were_told_different_things_all_say_so() -> None:
    store = host_store()
    assert (
        run_ranks(2, told_differently, store.port)
        == [
            [
                "tp: secret is given on ranks [0], not given on ranks [1]: give all ranks the same",
                "tp: torch_only is True on ranks [0], False on ranks [1]: give all ranks the same",
            ]
        ]
        * 2
    )
