"""Recycled memory: it comes back when its last reference goes, and never before."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shm_broadcast._native import RecyclingPool
from shm_broadcast.ring.buffers import RECYCLED_BYTES, size_class

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def taken(pool: RecyclingPool, size: int) -> Any:
    """An array over a block."""
    return np.frombuffer(memoryview(pool.take(size)), dtype=np.uint8)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("size", [-1, 1 << 63, 1 << 200])
def test_sizes_that_cannot_be_are_refused(size: int) -> None:
    with pytest.raises((OverflowError, MemoryError)):
        RecyclingPool().take(size)
    with pytest.raises(TypeError):
        RecyclingPool().take("1")


def test_memory_that_the_system_has_not_is_an_error_and_nothing_is_lost() -> None:
    pool = RecyclingPool()
    with pytest.raises(MemoryError):
        pool.take(1 << 61)
    assert taken(pool, MIB).nbytes == MIB


@given(st.integers(MIB, 64 * MIB))
def test_the_extension_rounds_sizes_alike(size: int) -> None:
    pool = RecyclingPool()
    pool.take(size)
    assert pool.kept_bytes == size_class(size)


def test_small_requests_take_ordinary_memory() -> None:
    pool = RecyclingPool()
    array = taken(pool, RECYCLED_BYTES - 1)
    assert array.nbytes == RECYCLED_BYTES - 1
    del array
    assert pool.kept_bytes == 0
    assert taken(pool, 0).nbytes == 0


def test_memory_is_used_again() -> None:
    pool = RecyclingPool()
    first = taken(pool, 3 * MIB)
    first[:] = 7
    at = address(first)
    assert pool.kept_bytes == 0
    del first
    assert pool.kept_bytes == size_class(3 * MIB)
    again = taken(pool, 3 * MIB)
    assert address(again) == at
    assert pool.kept_bytes == 0


def test_another_size_of_the_same_class_fits() -> None:
    pool = RecyclingPool()
    first = taken(pool, 3 * MIB)
    at = address(first)
    del first
    again = taken(pool, 3 * MIB - 100)
    assert address(again) == at
    assert again.nbytes == 3 * MIB - 100


VIEWS: list[Callable[[Any], Any]] = [
    lambda array: array,
    lambda array: array[10:20],
    lambda array: array.view(np.float32).reshape(2, -1).T,
    lambda array: memoryview(array),
    lambda array: memoryview(array)[5:].cast("B"),
    lambda array: memoryview(array)[:10].toreadonly(),
    lambda array: np.frombuffer(array, dtype=np.int64),
    lambda array: np.asarray(memoryview(array)),
    lambda array: torch.frombuffer(array, dtype=torch.uint8),
    lambda array: torch.frombuffer(array, dtype=torch.uint8).view(torch.bfloat16)[3:7],
    lambda array: torch.from_numpy(array).view(2, -1).t(),
    lambda array: torch.frombuffer(array, dtype=torch.float32).numpy()[::2],
    lambda array: torch.nn.Parameter(torch.frombuffer(array, dtype=torch.float32)),
]


@pytest.mark.parametrize("view", VIEWS)
def test_any_view_keeps_the_memory(view: Callable[[Any], Any]) -> None:
    pool = RecyclingPool()
    shown = view(taken(pool, 2 * MIB))
    gc.collect()
    assert pool.kept_bytes == 0
    other = taken(pool, 2 * MIB)
    assert not np.shares_memory(other, np.asarray(numpy_of(shown)))
    del other
    kept = pool.kept_bytes
    assert kept > 0
    del shown
    gc.collect()
    assert pool.kept_bytes == 2 * kept


def numpy_of(shown: Any) -> Any:
    return (
        shown.detach().view(torch.int16 if shown.element_size() == 2 else shown.dtype)
        if (isinstance(shown, torch.Tensor))
        else shown
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(MIB - 1, 5 * MIB)), max_size=25))
def test_no_two_living_arrays_share_memory(steps: list[tuple[bool, int]]) -> None:
    pool = RecyclingPool(kept_bytes=12 * MIB)
    living: list[tuple[int, Any]] = []
    for number, (takes, size) in enumerate(steps):
        if takes or not living:
            array = taken(pool, size)
            assert array.nbytes == size
            array[::4096] = number % 256
            array[-1] = number % 256
            living.append((number % 256, array))
        else:
            living.pop(size % len(living))
        for mark, array in living:
            assert (array[::4096] == mark).all()
            assert array[-1] == mark
        spans = sorted((address(array), array.nbytes) for _, array in living)
        for (start, size_), (following, _) in itertools.pairwise(spans):
            assert start + size_ <= following
        assert 0 <= pool.kept_bytes <= 12 * MIB


def test_what_is_above_the_limit_goes_back() -> None:
    pool = RecyclingPool(kept_bytes=4 * MIB)
    arrays = [taken(pool, 2 * MIB) for _ in range(5)]
    arrays.clear()
    assert pool.kept_bytes == 4 * MIB
    none = RecyclingPool(kept_bytes=0)
    array = taken(none, 2 * MIB)
    del array
    assert none.kept_bytes == 0


def test_old_sizes_make_room_for_new_ones() -> None:
    """A pool that is full of a size nobody asks for any more still recycles."""
    pool = RecyclingPool(kept_bytes=8 * MIB)
    arrays = [taken(pool, 2 * MIB) for _ in range(4)]
    arrays.clear()
    assert pool.kept_bytes == 8 * MIB
    at = set()
    for _ in range(3):
        array = taken(pool, 5 * MIB)
        at.add(address(array))
        del array
    assert pool.kept_bytes <= 8 * MIB
    assert len(at) == 1
    oversized = taken(pool, 9 * MIB)
    del oversized
    assert pool.kept_bytes > 0


def test_arrays_may_outlive_their_pool() -> None:
    pool = RecyclingPool()
    array = taken(pool, 2 * MIB)
    del pool
    gc.collect()
    array[:] = 1
    assert array.sum() == 2 * MIB


def test_many_threads() -> None:
    pool = RecyclingPool(kept_bytes=16 * MIB)
    wrong: list[str] = []

    def work(mark: int) -> None:
        for turn in range(150):
            array = taken(pool, MIB + turn * 1000)
            array[::65536] = mark
            if not (array[::65536] == mark).all():
                wrong.append(f"{mark} in turn {turn}")

    threads = [threading.Thread(target=work, args=[mark]) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert pool.kept_bytes <= 16 * MIB


@given(st.integers(1, 1 << 40))
def test_at_most_an_eighth_is_wasted(size: int) -> None:
    assert size <= size_class(size) <= size + size // 8 + 1
    assert size_class(size_class(size)) == size_class(size)
