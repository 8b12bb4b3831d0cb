"""A descriptor that any thread or signal handler rings, also while another one closes it."""

from __future__ import annotations

import functools
import os
import select
import threading
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import eventcount
from shm_broadcast.eventcount import WakeFd
from tests.forked import in_a_child

if TYPE_CHECKING:
    from collections.abc import Callable


def readable(fd: WakeFd) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_it_is_readable_from_a_ring_until_it_is_cleared() -> None:
    wake = WakeFd()
    assert not readable(wake)
    wake.clear()
    wake.notify()
    wake.notify()
    assert readable(wake)
    wake.clear()
    assert not readable(wake)
    wake.close()


def in_its_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Where no other thread opens or closes descriptors."""

    @functools.wraps(test)
    def run() -> None:
        in_a_child(test)

    return run


@in_its_own_process
def test_after_close_the_descriptor_is_gone_and_a_ring_writes_nowhere() -> None:
    wake = WakeFd()
    wake.close()
    wake.close()
    reused = os.eventfd(0, os.EFD_NONBLOCK)
    assert reused == wake.fileno()
    wake.notify()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(reused)
    os.close(reused)


@in_its_own_process
def test_a_close_within_a_ring_leaves_the_descriptor_open_until_the_ring_is_over() -> None:
    """By a signal handler that interrupts it just before it writes."""
    wake = WakeFd()
    seen: list[bool] = []

    class InterruptedOs:
        @staticmethod
        def eventfd_write(fd: int, value: int) -> None:
            wake.close()
            wake.notify()
            seen.append(is_open(fd))
            os.eventfd_write(fd, value)

    vars(eventcount)["os"] = InterruptedOs
    wake.notify()
    assert seen == [True]
    assert not is_open(wake.fileno())


@in_its_own_process
def test_rings_of_several_threads_beside_a_close_write_nowhere_else() -> None:
    for _ in range(200):
        wake = WakeFd()
        begin = threading.Barrier(3)
        does: list[Callable[[], None]] = [wake.notify, wake.notify, wake.close]

        def run(do: Callable[[], None], begin: threading.Barrier = begin) -> None:
            begin.wait()
            do()

        threads = [threading.Thread(target=run, args=(do,)) for do in does]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not is_open(wake.fileno())
