"""All readers of a ring that sleep are woken by one message."""

from __future__ import annotations

import threading
import time

import pytest

from shm_broadcast import layout
from tests.patience import until
from tests.shm_broadcast.rings import CODEC, ring


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_message_wakes_all_readers_that_sleep(n: int) -> None:
    """Each on a doorbell of its own."""

    def sleep(bell: int) -> None:
        words.add32(bell + layout.EVENTCOUNT_WAITERS, 1)
        while words.load32(bell) == 0:
            words.sleep_on(bell, 0, 30.0)

    with ring(n) as made:
        words = made.boards[0].words
        bells = [made.boards[0].eventcount_offset(1 + reader) for reader in range(n)]
        assert [words.load32(bell) for bell in bells] == [0] * n
        threads = [threading.Thread(target=sleep, args=(bell,)) for bell in bells]
        for thread in threads:
            thread.start()
        until(lambda: all(words.load32(bell + layout.EVENTCOUNT_WAITERS) for bell in bells))
        began = time.monotonic()
        assert made.writer.try_write(CODEC, b"small")
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 10
