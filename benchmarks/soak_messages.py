"""Checksummed messages of random sizes, with random pauses at both ends, to several readers.

Sizes go from nothing to several rings, so that records wrap, are padded, and stream in fragments;
pauses are shorter and longer than a spin window and a wait slice, so that every way of waiting is
taken. Each reader checks the number, the size and the checksum of every message.
"""

from __future__ import annotations

import random
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shm_broadcast import Board, MessageQueue
from shm_broadcast.queue.handle import SMALLEST_CAPACITY

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerContext

    from shm_broadcast import QueueHandle

LIMIT = 60.0
"""Seconds that one message may take."""

_LARGEST = 5 * SMALLEST_CAPACITY
_POOL = 1 << 20
_REPORT_EVERY = 100_000


@dataclass(frozen=True)
class Stressed:
    """What a run has shown.

    Attributes:
        readers: how many there were.
        messages: how many each of them got and found right.
        payload_bytes: the bytes in them.
        seconds: how long it took.
    """

    readers: int
    messages: int
    payload_bytes: int
    seconds: float


def stress(
    context: ForkServerContext,
    readers: int,
    messages: int,
    seed: int,
    say: Callable[[str], None],
) -> Stressed:
    """Send ``messages`` to ``readers`` processes.

    Args:
        context: starts the readers.
        readers: how many.
        messages: how many to each of them.
        seed: decides sizes, contents and pauses.
        say: told of progress.

    Raises:
        RuntimeError: a reader found a message that is wrong, or failed.
    """
    started = time.monotonic()
    members = range(1, readers + 1)
    with Board.create(readers + 1, member=0, name="soak") as board:
        queue = MessageQueue.on_board(board, 0, members, SMALLEST_CAPACITY)
        processes, pipes = [], []
        for member in members:
            ours, theirs = context.Pipe()
            arguments = (theirs, queue.export_handle(), member, messages, seed)
            process = context.Process(target=_read, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            queue.wait_until_ready(LIMIT)
            payload_bytes = _write(queue, messages, seed, readers, say)
            wrong = [verdict for verdict in map(_verdict, pipes) if verdict != messages]
        finally:
            for process in processes:
                process.kill()
                process.join()
            queue.shutdown()
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {readers} readers: {wrong}")
    say(f"{readers} readers: {messages:,} messages, {payload_bytes:,} bytes right")
    return Stressed(readers, messages, payload_bytes, time.monotonic() - started)


def _verdict(pipe: Any) -> Any:
    if not pipe.poll(LIMIT):
        return "no answer"
    try:
        return pipe.recv()
    except EOFError:
        return "it died"


def _write(
    queue: MessageQueue, messages: int, seed: int, readers: int, say: Callable[[str], None]
) -> int:
    draw, pool, total = random.Random(seed), _random_bytes(seed), 0
    for number in range(messages):
        _pause(draw)
        size = _size(draw)
        start = draw.randrange(_POOL - size)
        data: Any = pool[start : start + size]
        checksum = zlib.crc32(data)
        if number % 3 == 0:
            data = np.frombuffer(data, dtype=np.uint8)  # out of band, if it is large enough
        queue.enqueue((number, size, checksum, data), LIMIT)
        total += size
        if number % _REPORT_EVERY == _REPORT_EVERY - 1:
            say(f"{readers} readers: {number + 1:,} of {messages:,} messages")
    return total


def _read(pipe: Any, handle: QueueHandle, member: int, messages: int, seed: int) -> None:
    draw = random.Random(seed * 1000 + member)
    verdict: int | str = messages
    with Board.attach(handle.board, member) as board:
        queue = MessageQueue.attach(handle, board)
        try:
            for wanted in range(messages):
                _pause(draw)
                number, size, checksum, data = queue.dequeue(LIMIT)
                if (number, size, checksum) != (wanted, len(data), zlib.crc32(data)):
                    raise ValueError(f"{number} of {size} bytes came as {wanted} of {len(data)}")
        except Exception as error:  # noqa: BLE001 - told to the writer
            verdict = f"{type(error).__name__}: {error}"
        pipe.send(verdict)
        pipe.poll(LIMIT)  # the writer may still ring


def _random_bytes(seed: int) -> bytes:
    return random.Random(seed).randbytes(_POOL)


def _size(draw: random.Random) -> int:
    kind = draw.random()
    if kind < 0.8:
        return draw.randrange(300)
    if kind < 0.98:
        return draw.randrange(9000)
    return draw.randrange(_LARGEST if kind > 0.998 else 40_000)


def _pause(draw: random.Random) -> None:
    kind = draw.random()
    if kind < 0.001:
        time.sleep(draw.random() * 0.0003)
    elif kind < 0.00102:
        time.sleep(0.05)
