"""One answer under way: its prompt, its progress, and the tokens that have not been read yet.

A lane of the engine writes it, and whoever asked for it reads it, from any thread or event loop.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from shm_broadcast import CoordinatorError, GroupClosedError
from shm_broadcast.deadline import Deadline
from shm_broadcast.machine.forked_child import DISOWNED, disown_in_children

from ...errors import again
from .kv_cache import Row
from .sampling import Draw

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterator, Sequence

    from .sampling import Sampling

    Reason = Literal["stop", "length", "cancelled"]


class GenerationTimeoutError(CoordinatorError, TimeoutError):
    """A token did not come in time, the wait for a free slot included; the answer was cancelled."""


class Generation:
    """The tokens of one answer as they are made: iterate over it, by ``for`` or ``async for``.

    Each token is given out once; who iterates again after the end comes to it at once. Leaving the
    loop before the end does not end the answer: `cancel` does, and ``with`` does so.

    Args:
        prompt: token ids, one or more.
        stop: its length with the answer, at most.
        ends: tokens that end the answer; they are not given out.
        sampling: how tokens are drawn.
        timeout: seconds for each token; ``None``, or infinite: as long as the engine lives.

    Attributes:
        reason: once it has ended: ``"stop"``, a token that ends it; ``"length"``, no room for more;
            ``"cancelled"``, also if the workers failed.
        cancelled: whether nobody wants more of it.
        cached: how many of its tokens the workers have; the lane's.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        stop: int,
        ends: Collection[int],
        sampling: Sampling,
        timeout: float | None,
    ) -> None:
        self.reason: Reason | None = None
        self.cancelled = False
        self.cached = 0
        self._sequence = uuid.uuid4().int
        self._tokens = list(prompt)
        self._stop = stop
        self._ends = ends
        self._sampling = sampling
        self._timeout = timeout
        # `Random` takes -1 for 1. It is not for secrets.
        self._random = random.Random(sampling.seed and sampling.seed % (1 << 64))
        self._number = self._random.random()
        self._news: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()
        self._ring = _nobody_waits
        self._told = False
        disown_in_children(self)

    def disown(self) -> None:
        """In a forked child: nothing comes any more, and what has come is the parent's."""
        self._news = queue.SimpleQueue()
        self._news.put(GroupClosedError(f"the tokens of an answer: {DISOWNED}"))

    @property
    def behind(self) -> int:
        """How many of its tokens the workers do not have yet."""
        return len(self._tokens) - self.cached

    def row(self, slot: int, most: int) -> Row:
        """The next ``most`` of these tokens, and whether another one is to be drawn after them."""
        tokens = self._tokens[self.cached : self.cached + most]
        is_last = self.cached + len(tokens) == len(self._tokens)
        draw = Draw(self._sampling, self._number) if is_last else None
        return Row(self._sequence, slot, self.cached, tokens, draw)

    def take(self, token: int) -> None:
        """Go on with a token that was drawn."""
        if self.reason is not None:
            return
        if token in self._ends:
            self.end("stop")
            return
        self._tokens.append(token)
        self._number = self._random.random()
        self._tell(token)
        if len(self._tokens) >= self._stop:
            self.end("length")

    def end(self, how: Reason | Exception) -> None:
        """Give out no more tokens."""
        self.reason = self.reason or ("cancelled" if isinstance(how, Exception) else how)
        if not self._told:
            self._tell(None if isinstance(how, str) else how)
            self._told = True  # last: a signal handler may raise before

    def cancel(self) -> None:
        """Want no more of it: its slot is free after the present step. Idempotent."""
        self.cancelled = True

    def __iter__(self) -> Iterator[int]:
        """Wait for one token after another.

        Raises:
            GenerationTimeoutError: one did not come in time.
            CoordinatorError: the workers failed, or the engine was closed.
        """
        while True:
            try:
                news = self._news.get(timeout=self._seconds())
            except queue.Empty:
                raise self._late() from None
            if (token := self._given_out(news)) is None:
                return
            yield token

    async def __aiter__(self) -> AsyncIterator[int]:
        """As ``__iter__``, for ``async for``."""
        loop, rung = asyncio.get_running_loop(), asyncio.Event()
        self._ring = lambda: _ring_in(loop, rung)
        while True:
            try:
                news = self._news.get_nowait()
            except queue.Empty:
                try:
                    await asyncio.wait_for(rung.wait(), self._seconds())
                except TimeoutError:
                    raise self._late() from None
                rung.clear()
                continue
            if (token := self._given_out(news)) is None:
                return
            yield token

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _given_out(self, news: int | Exception | None) -> int | None:
        """A token; ``None`` at the end. The end stays, for whoever iterates again."""
        if not isinstance(news, int):
            self._news.put(news)
        if isinstance(news, Exception):
            raise again(news)
        return news

    def _tell(self, news: int | Exception | None) -> None:
        self._news.put(news)
        self._ring()

    def _seconds(self) -> float:
        """How long to wait for a token, as Python's own waits take it."""
        return Deadline.after(self._timeout).remaining(threading.TIMEOUT_MAX)

    def _late(self) -> GenerationTimeoutError:
        self.cancel()
        return GenerationTimeoutError(f"no token within {self._timeout:g} s")


def _nobody_waits() -> None:
    """Wake nobody: the queue does."""


def _ring_in(loop: asyncio.AbstractEventLoop, rung: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop was closed: nobody reads on
        loop.call_soon_threadsafe(rung.set)
