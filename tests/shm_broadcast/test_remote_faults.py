"""Readers on other hosts, and writers: peers that die or fall silent."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from shm_broadcast.errors import PeerLostError
from tests.ranks import run_ranks
from tests.shm_broadcast.remote_peers import (
    BOUND,
    CREDIT,
    LIMIT,
    drain,
    fill,
    get,
    make_reader,
    make_writer,
    put,
    read_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def kill_a_reader(rank: int, _n: int, folder: str, stalled: list[int]) -> Any:
    if rank == 0:
        with make_writer(folder, [1, 2], credit_bytes=CREDIT) as writer:
            writer.wait_ready(LIMIT)
            struck = kill_soon(get(folder, "pid 2"))
            with pytest.raises(PeerLostError) as caught:
                fill(writer)
            named = time.monotonic() - struck()
            with pytest.raises(PeerLostError, match="lost rank 2"):
                writer.send([b""], LIMIT)
            with pytest.raises(PeerLostError, match="lost rank 2"):
                writer.poll()
            put(folder, "over", True)
            return caught.value.rank, caught.value.pid, named
    with make_reader(folder, rank) as reader:
        put(folder, f"pid {rank}", os.getpid())
        if rank in stalled:
            get(folder, "over")
        read_all(reader)
        return None


@pytest.mark.parametrize("stalled", [[], [2], [1], [1, 2]], ids=str)
def test_killed_reader_is_named(tmp_path: Path, stalled: list[int]) -> None:
    folder = str(tmp_path)
    (rank, pid, named), *_ = run_ranks(3, kill_a_reader, folder, stalled, may_die=[2])
    assert (rank, pid) == (2, get(folder, "pid 2"))
    assert named < BOUND


def kill_the_writer(rank: int, _n: int, folder: str, signal_number: int, silence: float) -> Any:
    if rank == 0:
        with make_writer(folder, [1], credit_bytes=CREDIT, silence=silence) as writer:
            put(folder, "pid", os.getpid())
            writer.wait_ready(LIMIT)
            for number in range(3):
                writer.send([bytes([number])], LIMIT)
            put(folder, "sent", True)
            with pytest.raises(PeerLostError):
                writer.send([bytes(20 * CREDIT)], LIMIT)
        return None
    with make_reader(folder, rank) as reader:
        get(folder, "sent")
        time.sleep(0.2)
        pid = get(folder, "pid")
        os.kill(pid, signal_number)
        struck = time.monotonic()
        assert [bytes(reader.recv(LIMIT)[0]) for _ in range(3)] == [b"\0", b"\1", b"\2"]
        with pytest.raises(PeerLostError) as caught:
            reader.recv(LIMIT)
        named = time.monotonic() - struck
        with pytest.raises(PeerLostError, match="lost rank 0"):
            reader.recv(LIMIT)
        if signal_number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        return caught.value.rank, caught.value.pid == pid, named


def test_killed_writer_is_named_after_all_that_it_sent(tmp_path: Path) -> None:
    folder = str(tmp_path)
    _, found = run_ranks(2, kill_the_writer, folder, signal.SIGKILL, 10.0, may_die=[0])
    assert found[:2] == (0, True)
    assert found[2] < BOUND


def test_silent_writer_is_named_within_the_silence(tmp_path: Path) -> None:
    silence = 1.0
    _, found = run_ranks(2, kill_the_writer, str(tmp_path), signal.SIGSTOP, silence)
    assert found[:2] == (0, True)
    assert 0.5 * silence < found[2] < silence + BOUND


def stop_a_reader(rank: int, _n: int, folder: str, silence: float) -> Any:
    if rank == 0:
        with make_writer(folder, [1], credit_bytes=CREDIT, silence=silence) as writer:
            writer.wait_ready(LIMIT)
            pid = get(folder, "pid 1")
            os.kill(pid, signal.SIGSTOP)
            struck = time.monotonic()
            with pytest.raises(PeerLostError, match="lost rank 1"):
                fill(writer)
            named = time.monotonic() - struck
            os.kill(pid, signal.SIGCONT)
            return named
    with make_reader(folder, rank) as reader:
        put(folder, "pid 1", os.getpid())
        with pytest.raises(PeerLostError, match="lost rank 0"):
            drain(reader)
    return None


def test_silent_reader_is_named_within_the_silence(tmp_path: Path) -> None:
    silence = 1.0
    named, _ = run_ranks(2, stop_a_reader, str(tmp_path), silence)
    assert 0.5 * silence < named < silence + BOUND


def kill_soon(pid: int) -> Callable[[], float]:
    """Kill a process in a while; the function returned tells when it was done."""
    at: list[float] = []

    def strike() -> None:
        os.kill(pid, signal.SIGKILL)
        at.append(time.monotonic())

    timer = threading.Timer(0.4, strike)
    timer.start()

    def struck() -> float:
        timer.join(LIMIT)
        return at[0]

    return struck
