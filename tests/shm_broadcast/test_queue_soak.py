"""The soak of `benchmarks.soak` with the counts that CI can afford, and cheap kinds of it."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import pytest

from benchmarks.soak_kills import kill_at_random, named_memory
from benchmarks.soak_messages import stress
from shm_broadcast import Board, MessageQueue
from shm_broadcast.queue.handle import SMALLEST_CAPACITY
from tests.ranks import run_ranks
from tests.shm_broadcast.leaks import open_descriptors

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

pytestmark = pytest.mark.stress

QUEUES = 1000
AT_ONCE = 20


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


@pytest.mark.parametrize(("readers", "messages"), [(1, 100_000), (3, 30_000)])
def test_checksummed_messages(context: ForkServerContext, readers: int, messages: int) -> None:
    shown = stress(context, readers, messages, readers, lambda _: None)
    assert shown.messages == messages
    assert shown.payload_bytes > messages


def test_kills_at_random_moments(context: ForkServerContext) -> None:
    with ExitStack() as beside:

        def make_named_memory(_: str) -> None:
            """As another program may at any time."""
            beside.enter_context(NamedTemporaryFile(dir="/dev/shm"))

        # The promise is one second; the rest is for machines that run other tests meanwhile.
        shown = kill_at_random(context, rounds=20, seed=7, say=make_named_memory, limit=5)
    assert shown.wrong == []
    assert shown.rounds == 20


def test_the_soak_sees_named_memory_of_a_process() -> None:
    with NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(mmap.PAGESIZE)
        before = named_memory(os.getpid())  # semaphores of `multiprocessing`, if any
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            assert named_memory(os.getpid()) - before == {file.name}


def create_many(rank: int, n: int) -> int:
    """This rank's share of the queues, in several threads."""
    before = open_descriptors()
    with ThreadPoolExecutor(AT_ONCE // n) as threads:
        nonces = list(threads.map(create_some, range(AT_ONCE // n)))
    assert open_descriptors() == before
    return len(set.union(*nonces))


def create_some(thread: int) -> set[bytes]:
    """A twentieth of the queues, each used once by both of its ends."""
    nonces = set()
    for number in range(QUEUES // AT_ONCE):
        with Board.create(2, member=0) as board, Board.attach(board.handle(), 1) as other:
            queue = MessageQueue.on_board(board, 0, [1], SMALLEST_CAPACITY)
            reader = MessageQueue.attach(queue.export_handle(), other)
            queue.enqueue((thread, number))
            assert reader.dequeue(20) == (thread, number)
            ring = queue.export_handle().ring
            assert ring is not None
            nonces.add(ring.nonce)
            reader.shutdown()
            queue.shutdown()
    return nonces


def test_a_thousand_queues_twenty_at_a_time() -> None:
    assert run_ranks(4, create_many, timeout=120) == [QUEUES // 4] * 4
