"""Readers on other hosts, and writers: peers that die or fall silent."""

from __future__ import annotations

import os
import signal
import threading
import time
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest

from shm_broadcast.errors import GroupClosedError, PeerLostError
from tests.patience import NAMED_WITHIN, quickest, until
from tests.ranks import run_ranks
from tests.shm_broadcast.remote_peers import (
    CREDIT,
    LIMIT,
    SILENCE,
    assert_after_silence,
    drain,
    fill,
    get,
    make_reader,
    make_writer,
    put,
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
        # What the writer sent last may be lost when it closes.
        with pytest.raises((GroupClosedError, PeerLostError)):
            drain(reader)
        return None


@pytest.mark.parametrize("stalled", [[], [2], [1], [1, 2]], ids=str)
def test_killed_reader_is_named(tmp_path: Path, stalled: list[int]) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        (rank, pid, named), *_ = run_ranks(3, kill_a_reader, folder, stalled, may_die=[2])
        assert (rank, pid) == (2, get(folder, "pid 2"))
        return float(named)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def kill_the_writer(rank: int, _n: int, folder: str, signal_number: int, silence: float) -> Any:
    if rank == 0:
        with make_writer(folder, [1], credit_bytes=CREDIT, silence=silence) as writer:
            put(folder, "pid", os.getpid())
            writer.wait_ready(LIMIT)
            for number in range(2):
                writer.send([bytes([number])], LIMIT)
            with pytest.raises(PeerLostError):
                until(writer.poll)
        return None
    with make_reader(folder, rank) as reader:
        pid = get(folder, "pid")
        until(reader.readable)  # takes in the first message
        assert reader._zmq.poll(LIMIT * 1000)  # the second has arrived
        struck = time.monotonic()
        os.kill(pid, signal_number)
        assert [bytes(reader.recv(LIMIT)[0]) for _ in range(2)] == [b"\0", b"\1"]
        with pytest.raises(PeerLostError) as caught:
            reader.recv(LIMIT)
        named = time.monotonic() - struck
        with pytest.raises(PeerLostError, match="lost rank 0"):
            reader.recv(LIMIT)
        if signal_number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        return caught.value.rank, caught.value.pid == pid, named


def test_killed_writer_is_named_after_all_that_it_sent(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        _, found = run_ranks(2, kill_the_writer, folder, signal.SIGKILL, 10.0, may_die=[0])
        assert found[:2] == (0, True)
        return float(found[2])

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def test_silent_writer_is_named_within_the_silence(tmp_path: Path) -> None:
    _, found = run_ranks(2, kill_the_writer, str(tmp_path), signal.SIGSTOP, SILENCE)
    assert found[:2] == (0, True)
    assert_after_silence(found[2])


def stop_a_reader(rank: int, _n: int, folder: str, silence: float) -> Any:
    if rank == 0:
        with make_writer(folder, [1], credit_bytes=CREDIT, silence=silence) as writer:
            writer.wait_ready(LIMIT)
            pid = get(folder, "pid 1")
            struck = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
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
    named, _ = run_ranks(2, stop_a_reader, str(tmp_path), SILENCE)
    assert_after_silence(named)


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


def interrupt_the_writer(rank: int, _n: int, folder: str) -> Any:
    if rank == 0:
        with make_writer(folder, [1, 2], credit_bytes=CREDIT) as writer:
            writer.wait_ready(LIMIT)
            send_to = writer._send_to
            sent: list[bytes] = []

            def send_to_one(identity: bytes, frames: Any) -> bool:
                if sent:
                    raise KeyboardInterrupt
                sent.append(identity)
                return send_to(identity, frames)

            writer._send_to = send_to_one
            with pytest.raises(KeyboardInterrupt):
                writer.send([b"x" * 1000], LIMIT)
            writer._send_to = send_to
            with pytest.raises(GroupClosedError, match="interrupted an earlier message"):
                writer.send([b""], LIMIT)
            return "closed"
    with make_reader(folder, rank) as reader:
        with pytest.raises(PeerLostError) as caught:
            drain(reader)
        return str(caught.value)


def test_an_interrupt_in_the_middle_of_sending_ends_the_queue(tmp_path: Path) -> None:
    said = run_ranks(3, interrupt_the_writer, str(tmp_path))
    assert said[0] == "closed"
    assert all("lost rank 0" in text for text in said[1:])
