"""A queue whose members are all in this process, each with a view of the board of its own."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shm_broadcast import layout
from shm_broadcast.queue.message_queue import MessageQueue
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CAPACITY = 64 << 10
LIMIT = 20.0
"""Seconds that anything in these tests may take at most."""


class Ends:
    """Member 0 writes, members 1, 2, ... read."""

    def __init__(self, boards: list[Board], **options: Any) -> None:
        self.boards = boards
        members = range(1, len(boards))
        self.options = options
        self.writer = MessageQueue.on_board(boards[0], 0, members, CAPACITY, **options)
        self.readers = [self.attach(boards[member]) for member in members]

    def attach(self, board: Board) -> MessageQueue:
        return MessageQueue.attach(self.writer.export_handle(), board, **self.options)

    @property
    def reader(self) -> MessageQueue:
        return self.readers[0]

    def fill(self) -> int:
        """Enqueue 1,000 bytes until there is no room; how many messages that took."""
        count = 0
        while True:
            try:
                self.writer.enqueue(b"x" * 1000, timeout=0)
            except TimeoutError:
                return count
            count += 1


@contextmanager
def ends(n_readers: int = 1, **options: Any) -> Iterator[Ends]:
    first = Board.create(1 + n_readers, member=0, name="test")
    boards = [first, *(Board.attach(first.handle(), 1 + each) for each in range(n_readers))]
    made = Ends(boards, **options)
    try:
        yield made
    finally:
        for queue in (made.writer, *made.readers):
            queue.shutdown()
        for board in boards:
            board.close()


def sleeps(board: Board) -> bool:
    """Whether a thread sleeps at the doorbell of ``board``'s member, or is about to."""
    eventcount = board.eventcount_offset(board.member or 0)
    return board.words.load32(eventcount + layout.EVENTCOUNT_WAITERS) > 0


class Running:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self._outcome: list[Any] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(call, args), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            self._outcome.append(call(*args))
        except BaseException as error:  # noqa: BLE001 - raised again in `result`
            self._error.append(error)

    def ended(self, within: float = 0.0) -> bool:
        self._thread.join(within)
        return not self._thread.is_alive()

    def result(self) -> Any:
        """What the call returned or raised, at most `LIMIT` seconds from now."""
        assert self.ended(LIMIT), "the call hangs"
        if self._error:
            raise self._error[0]
        return self._outcome[0]
