"""Words of shared memory."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import layout
from shm_broadcast._native import Words
from shm_broadcast.segment import Segment
from tests.patience import until
from tests.ranks import run_ranks
from tests.shm_broadcast.remote_peers import get, put

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 256


@pytest.fixture
def memory() -> bytearray:
    return bytearray(SIZE)


@pytest.fixture
def words(memory: bytearray) -> Words:
    return Words(memory)


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 1])
def test_a_word_of_32_bits(words: Words, memory: bytearray, value: int) -> None:
    words.store32(8, value)
    assert words.load32(8) == value
    assert memory[8:12] == value.to_bytes(4, "little")
    assert memory[:8] + memory[12:] == bytes(SIZE - 4)


@pytest.mark.parametrize("value", [0, 2**32, 2**63, 2**64 - 1])
def test_a_word_of_64_bits(words: Words, memory: bytearray, value: int) -> None:
    words.store64(16, value)
    assert words.load64(16) == value
    assert memory[16:24] == value.to_bytes(8, "little")
    assert memory[:16] + memory[24:] == bytes(SIZE - 8)


@pytest.mark.parametrize("offset", [1, 2, 3, 254, SIZE, SIZE + 64, 2**40, -4])
def test_offsets_outside_or_not_aligned_are_refused(words: Words, offset: int) -> None:
    for call in (
        lambda: words.load32(offset),
        lambda: words.load64(offset),
        lambda: words.store32(offset, 1),
        lambda: words.store64(offset, 1),
        lambda: words.add32(offset, 1),
        lambda: words.compare_and_swap32(offset, 0, 1),
        lambda: words.compare_and_swap64(offset, 0, 1),
    ):
        with pytest.raises((ValueError, IndexError, OverflowError)):
            call()


def test_a_64_bit_word_must_be_aligned_to_8(words: Words) -> None:
    with pytest.raises(ValueError, match="aligned"):
        words.load64(4)
    with pytest.raises((ValueError, IndexError)):
        words.load64(SIZE - 4)


@pytest.mark.parametrize("value", [-1, 2**32])
def test_values_that_do_not_fit_are_refused(words: Words, value: int) -> None:
    words.store32(0, 7)
    with pytest.raises((ValueError, OverflowError)):
        words.store32(0, value)
    with pytest.raises((ValueError, OverflowError)):
        words.store64(8, -1 if value < 0 else 2**64)
    assert words.load32(0) == 7
    assert words.load64(8) == 0


def test_add_gives_the_value_before_and_wraps(words: Words) -> None:
    assert words.add32(4, 5) == 0
    assert words.add32(4, -7) == 5
    assert words.load32(4) == 2**32 - 2
    assert words.add32(4, 3) == 2**32 - 2
    assert words.load32(4) == 1
    assert words.load32(0) == words.load32(8) == 0


def test_compare_and_swap(words: Words) -> None:
    assert words.compare_and_swap32(0, 0, 9)
    assert not words.compare_and_swap32(0, 0, 1)
    assert words.load32(0) == 9
    assert words.compare_and_swap32(0, 9, 2**32 - 1)
    assert words.load32(0) == 2**32 - 1


def test_compare_and_swap_of_64_bits(words: Words) -> None:
    words.store64(0, 2**63 + 1)
    assert not words.compare_and_swap64(0, 1, 9)
    assert words.compare_and_swap64(0, 2**63 + 1, 2**64 - 1)
    assert words.load64(0) == 2**64 - 1
    assert words.load64(8) == 0


def test_bytes_go_in(words: Words, memory: bytearray) -> None:
    words.write(3, b"hello")
    assert memory[3:8] == b"hello"
    words.write(64, memoryview(b"abcdef")[1:3])
    assert memory[63:67] == b"\0bc\0"


def test_bytes_past_the_end_are_refused(words: Words, memory: bytearray) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        words.write(SIZE - 2, b"abc")
    assert memory == bytes(SIZE)


def test_memory_that_cannot_be_written_makes_no_words() -> None:
    with pytest.raises(BufferError):
        Words(bytes(64))


def test_copies_large_enough_to_let_other_threads_run() -> None:
    size = 1 << 20
    memory = bytearray(size)
    content = bytes(range(256)) * (size // 256)
    Words(memory).write(0, content)
    assert memory == content


def test_a_ring_without_sleepers_changes_nothing(words: Words) -> None:
    words.ring(0)
    assert words.load32(0) == 0


def test_a_ring_with_sleepers_changes_the_doorbell(words: Words) -> None:
    words.add32(layout.EVENTCOUNT_WAITERS, 1)
    words.ring(0)
    assert words.load32(0) == 1


def test_nobody_sleeps_on_a_doorbell_that_has_changed(words: Words) -> None:
    words.store32(0, 4)
    began = time.monotonic()
    words.sleep_on(0, 3, 30.0)
    assert time.monotonic() - began < 10


def test_sleep_ends_with_its_time(words: Words) -> None:
    began = time.monotonic()
    words.sleep_on(0, 0, 0.02)
    assert time.monotonic() - began < 10


def test_a_ring_wakes_sleepers(words: Words) -> None:
    """Two threads sleep until the doorbell changes."""

    def sleep() -> None:
        words.add32(layout.EVENTCOUNT_WAITERS, 1)
        while words.load32(0) == 0:
            words.sleep_on(0, 0, 30.0)

    threads = [threading.Thread(target=sleep) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: words.load32(layout.EVENTCOUNT_WAITERS) == 2)
    words.ring(0)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_stamp_numbers_operations_and_notes_the_time(words: Words, memory: bytearray) -> None:
    before = time.monotonic_ns()
    assert words.stamp(0, layout.STATE_BUSY, "all_reduce") == 1
    assert words.stamp(0, layout.STATE_BUSY, "é" * 40) == 2
    assert words.load32(layout.MEMBER_STATE) == layout.STATE_BUSY
    assert words.load64(layout.MEMBER_SEQUENCE) == 2
    assert before <= words.load64(layout.MEMBER_PROGRESS) <= time.monotonic_ns()
    end = layout.MEMBER_OPERATION + layout.OPERATION_BYTES
    assert memory[layout.MEMBER_OPERATION : end] == ("é" * 24).encode()
    assert memory[end:] == bytes(SIZE - end)
    words.stamp(0, layout.STATE_BUSY, "send")
    assert memory[layout.MEMBER_OPERATION : end] == b"send".ljust(48, b"\0")


def test_progress_changes_time_and_state_only(words: Words) -> None:
    words.stamp(0, layout.STATE_BUSY, "send")
    words.store64(layout.MEMBER_PROGRESS, 0)
    words.progress(0, layout.STATE_IDLE)
    assert words.load64(layout.MEMBER_PROGRESS) > 0
    assert words.load32(layout.MEMBER_STATE) == layout.STATE_IDLE
    assert words.load64(layout.MEMBER_SEQUENCE) == 1


def test_a_stamp_outside_is_refused(words: Words) -> None:
    with pytest.raises((ValueError, IndexError)):
        words.stamp(SIZE - 64, layout.STATE_BUSY, "send")


def test_fence(words: Words) -> None:
    assert words.fence() is None


def add(rank: int, n: int, folder: str, times: int) -> int:
    if rank == 0:
        segment = Segment.create(4096, "test")
        put(folder, "segment", segment.handle())
    else:
        segment = Segment.attach(get(folder, "segment"))
    put(folder, f"ready-{rank}", True)
    for other in range(n):
        get(folder, f"ready-{other}")
    claimed = 0
    for turn in range(times):
        segment.words.add32(128, 1)
        claimed += segment.words.compare_and_swap32(
            256 + 4 * (turn % 512), turn // 512, turn // 512 + 1
        )
    put(folder, f"done-{rank}", True)
    for other in range(n):
        get(folder, f"done-{other}")
    return claimed if rank else segment.words.load32(128) * 2**32 + claimed


def test_processes_add_and_swap_atomically(tmp_path: Path) -> None:
    times = 50_000
    first, claimed = run_ranks(2, add, str(tmp_path), times)
    assert first >> 32 == 2 * times
    # Each (word, value) was claimed by one process, never by both.
    assert (first & 0xFFFFFFFF) + claimed <= times
