"""Errors name global ranks, also of groups whose ranks are others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import FileStore

import coordinator
from shm_broadcast import (
    CoordinatorError,
    DivergenceError,
    GroupAbortedError,
    MessageRefusedError,
)
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator import GroupCoordinator

OTHER = 1
"""The last rank of the world is this one of its tensor-parallel group, which is [2, 3]."""


def gather_in_place_of_reduce(tp: GroupCoordinator, odd: bool) -> object:
    x = torch.ones(4)
    return tp.all_gather(x) if odd else tp.all_reduce(x)


def gather_later_in_place_of_reduce(tp: GroupCoordinator, odd: bool) -> object:
    x = torch.ones(4)
    verb = tp.all_gather if odd else tp.all_reduce
    return verb(x, async_op=True).wait()


def object_in_place_of_dict(tp: GroupCoordinator, odd: bool) -> object:
    if not odd:
        return tp.recv_tensor_dict(OTHER)
    tp.send_object(1, 0)
    return tp.barrier()


def diverge(rank: int, n: int, path: str, torch_only: bool, calls: Callable[..., object]) -> Any:
    store = FileStore(path, n)
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, torch_only=torch_only) as groups:
        groups.world.barrier()
        if rank < 2:
            return None
        with pytest.raises(CoordinatorError) as raised:
            calls(groups.tp, rank == 3)
        return raised.value


@pytest.mark.parametrize("torch_only", [False, True])
@pytest.mark.parametrize(
    "calls",
    [gather_in_place_of_reduce, gather_later_in_place_of_reduce, object_in_place_of_dict],
)
def test_who_does_another_thing_is_named(
    store_path: str, torch_only: bool, calls: Callable[..., object]
) -> None:
    found = run_ranks(4, diverge, store_path, torch_only, calls)[2:]
    if not torch_only:
        assert any(isinstance(error, DivergenceError) for error in found)
    for rank, error in enumerate(found, 2):
        other = 5 - rank
        if isinstance(error, DivergenceError):
            assert error.rank == other
            assert str(error).startswith(f"rank {other} issued ")
        else:
            assert isinstance(error, GroupAbortedError)
            by = error.failure.rank
            assert by == other or (torch_only and by == rank)  # which may find it while it waits
            assert f": DivergenceError: rank {5 - by} issued " in str(error)


def diverge_beside(rank: int, n: int, path: str, calls: Callable[..., object]) -> Any:
    store = FileStore(path, n)
    with coordinator.init(tp=2, pp=2, rank=rank, store=store) as groups:
        groups.world.barrier()
        with pytest.raises(CoordinatorError) as raised:
            groups.tp.recv_object(1 - rank) if rank < 2 else calls(groups.tp, rank == 3)
        return raised.value


@pytest.mark.parametrize(
    "calls", [gather_in_place_of_reduce, gather_later_in_place_of_reduce, object_in_place_of_dict]
)
def test_the_other_groups_are_told_the_same_rank(
    store_path: str, calls: Callable[..., object]
) -> None:
    for error in run_ranks(4, diverge_beside, store_path, calls)[:2]:
        assert isinstance(error, GroupAbortedError)
        other = 5 - error.failure.rank
        assert error.failure.message.startswith(f"rank {other} issued ")


def refuse(rank: int, n: int, path: str, torch_only: bool) -> Any:
    store = FileStore(path, n)
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, torch_only=torch_only) as groups:
        groups.world.barrier()
        if rank < 2:
            return []
        unsendable = iter(lambda: 0, 1)
        calls: list[Callable[[], object]] = [
            (lambda: groups.tp.send_object(unsendable, 0))
            if rank == 3
            else (lambda: groups.tp.recv_object(OTHER)),
            lambda: groups.tp.broadcast_object(unsendable if rank == 3 else None, OTHER),
            lambda: groups.tp.all_gather_object(unsendable if rank == 3 else None),
        ]
        errors = []
        for call in calls:
            with pytest.raises(MessageRefusedError) as raised:
                call()
            errors.append(raised.value)
        source = "rank 3 is the source: it needs a dict"
        with pytest.raises((MessageRefusedError, ValueError), match=source):
            groups.tp.broadcast_tensor_dict(None, OTHER)
        return errors


@pytest.mark.parametrize("torch_only", [False, True])
def test_who_sends_nothing_is_named(store_path: str, torch_only: bool) -> None:
    for errors in run_ranks(4, refuse, store_path, torch_only)[2:]:
        assert [error.rank for error in errors] == [3, 3, 3]
        assert all(str(error).startswith("rank 3 sends nothing: ") for error in errors)
