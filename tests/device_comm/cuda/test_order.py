"""Several streams and one communicator: ordered, or refused in a capture."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm.cuda.ipc.ipc_backend import SideStreams, StreamOrder, StreamPlace
from tests.device_comm.cuda.host_driver import HostDriver
from tests.device_comm.cuda.ipc_ranks import make_ipc
from tests.patience import PATIENCE_SECONDS
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from shm_broadcast import BoardHandle


@pytest.fixture
def driver() -> HostDriver:
    return HostDriver(None)


def test_another_stream_comes_behind_the_last_one(driver: HostDriver) -> None:
    order = StreamOrder(driver, "tp")
    assert len(order.marks()) == 1
    a, b = driver.make_stream(), driver.make_stream()
    for stream in (0, 0, a, b, b, 0):
        with driver.on(stream):
            assert order.look() == order.place() == StreamPlace(stream, False)
    assert driver.orders == [(0, a), (a, b), (b, 0)]
    assert order.marks()[0].query()
    with driver.on(a):
        assert len(order.marks()) == 2
    driver.free_stream(a)
    driver.free_stream(b)


def test_a_capture_has_one_stream(driver: HostDriver) -> None:
    order = StreamOrder(driver, "tp")
    order.place()
    driver.orders.clear()
    with driver.on(1), driver.capture():
        assert order.place() == StreamPlace(1, True)
        assert order.place() == StreamPlace(1, True)
        with driver.on(2), driver.capture(), pytest.raises(ValueError, match="stream 0x1"):
            order.place()
    with driver.on(2), driver.capture():
        assert order.place() == StreamPlace(2, True)
        with driver.on(0):
            assert order.place() == StreamPlace(0, False)
    assert driver.orders == []


def test_no_call_beside_a_capture_on_the_stream_of_the_last_one(driver: HostDriver) -> None:
    order = StreamOrder(driver, "tp")
    with driver.on(1):
        order.place()
        with driver.capture(), driver.on(0), pytest.raises(ValueError, match="under way on"):
            order.place()
        with driver.capture():
            assert order.marks() == []


def test_messages_of_one_way_share_a_stream(driver: HostDriver) -> None:
    sides = SideStreams(driver)
    first = sides.run(("send", 1), [], 0, "kept")
    second = sides.run(("send", 1), [], 0, None)
    other = sides.run(("recv", 1), [], 0, None)
    assert driver.held == 2
    ((_, one), (_, two), (_, three)) = driver.orders
    assert one == two != three
    for each in (first, second, other):
        driver.order(one, 0)
        driver.order(three, 0)
        assert each.ready()
    sides.close()
    assert driver.held == 0
    first.wait(None)


def test_a_message_is_waited_for_without_those_behind_it(driver: HostDriver) -> None:
    sides, late = SideStreams(driver), threading.Event()
    first = sides.run(("recv", 1), [], 0, None)
    second = sides.run(("recv", 1), [lambda side: driver.give(side, late.wait)], 0, None)
    too_long = threading.Timer(PATIENCE_SECONDS, late.set)
    too_long.start()
    first.wait(None)
    assert not late.is_set()
    too_long.cancel()
    late.set()
    second.wait(None)
    sides.close()


def use_streams(rank: int, n: int, library: str, path: str, board: BoardHandle) -> None:
    driver = HostDriver(library)
    a, b = driver.make_stream(), driver.make_stream()
    with make_ipc(rank, n, library, path, board, driver) as comm:
        for turn in range(20):
            x = torch.full((700,), float(rank + turn))
            with driver.on(a):
                once = comm.all_reduce(x)
            with driver.on(b):
                twice = comm.all_reduce(once)
            thrice = comm.all_reduce(twice)
            assert thrice[-1] == n * n * (n * turn + n * (n - 1) / 2)
            x = once = twice = thrice
        comm.flush()
    driver.free_stream(a)
    driver.free_stream(b)
    assert not driver.held


def test_results_on_alternating_streams(emulation_library: str, store_path: str) -> None:
    run_ranks(2, use_streams, str(emulation_library), store_path, NEW_BOARD)
