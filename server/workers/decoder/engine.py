"""Batch continuously: the sequences of all requests share every step of the workers.

A lane of the engine writes it, and whoever asked for it reads it, from any thread or event loop.

Each step is one call of the pool, with the next tokens of each sequence: one of an answer, many of
a prompt. Sequences come and go between steps. There are as many *lanes* as stages in the pipeline;
each has slots of its own and one step under way, so that no stage is idle while another computes.

The workers' only state is keys and values. If they are lost and the pool is restarted, each
sequence starts again with all the tokens it has so far, and continues where it was: readers see a
pause. This replay is the only retry: steps are called without ``retry=True`` of the pool, as the
same step, made again, would find no keys and values. The driver draws the random numbers, so no
token is drawn twice.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from shm_broadcast import CoordinatorError, GroupClosedError
from shm_broadcast.deadline import Deadline
from shm_broadcast.process import IN_FORKED_CHILD, call_in_forked_children

from ...config import CHUNK_TOKENS
from ...errors import CallStuckError, CallTimeoutError, PoolClosedError, QueueFullError, again
from ...replicas import Replicas
from .decoder_cache import SampleRequest, Sampling, ScheduledSequence
from .decoder_worker import EngineLimits

if TYPE_CHECKING:
    Reason = Literal["stop", "length", "cancelled"]


class GenerationTimeoutError(CoordinatorError, TimeoutError):
    """A token did not come in time, the wait for a free slot included; the answer was cancelled."""


class GeneratedSequence:
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
        call_in_forked_children(self)

    def after_fork_in_child(self) -> None:
        """In a forked child: nothing comes any more, and what has come is the parent's."""
        self._news = queue.SimpleQueue()
        self._news.put(GroupClosedError(f"the tokens of an answer: {IN_FORKED_CHILD}"))

    @property
    def behind(self) -> int:
        """How many of its tokens the workers do not have yet."""
        return len(self._tokens) - self.cached

    def row(self, slot: int, most: int) -> ScheduledSequence:
        """The next ``most`` of these tokens, and whether another one is to be drawn after them."""
        tokens = self._tokens[self.cached : self.cached + most]
        is_last = self.cached + len(tokens) == len(self._tokens)
        draw = SampleRequest(self._sampling, self._number) if is_last else None
        return ScheduledSequence(self._sequence, slot, self.cached, tokens, draw)

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

    def __enter__(self) -> GeneratedSequence:
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


_TRIES = 3
"""How often the same step may be lost: after that, what is in it is taken for the cause."""


class StepPool(Protocol):
    """What an engine asks of its workers, which make every step; a `WorkerPool` of `DecoderWorker`
    is one.
    """

    @property
    def failure(self) -> CoordinatorError | None:
        """What broke it for good."""

    def call(self, method: str, *args: Any) -> Any:
        """See `WorkerPool.call`."""


class Engine:
    """Answers prompts, given and returned as token ids. Any thread, or event loop, may ask.

    Args:
        pool: of `DecoderWorker`; with ``restart="worker"``, answers go on when a worker is lost.
        chunk: tokens of a step at most: longer prompts take several, in which others go on.
        max_waiting: requests that may wait for a slot.

    Raises:
        TypeError: ``pool`` is `Replicas`, each of which would have some steps of a sequence.
        ValueError: a step could not take a token of each sequence.
        CoordinatorError: the workers failed.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self,
        pool: StepPool,
        *,
        chunk: int = CHUNK_TOKENS,
        max_waiting: int = 1024,
    ) -> None:
        if isinstance(pool, Replicas):
            raise TypeError("an engine has one pool: make one for each of Replicas.pools")
        self.limits: EngineLimits = pool.call("limits")
        if chunk < self.limits.slots:
            raise ValueError(f"chunk must be {self.limits.slots}, the slots, or more; got {chunk}")
        self._owner = os.getpid()
        self._pool = pool
        self._chunk = chunk
        self._max_waiting = max_waiting
        self._waiting: deque[GeneratedSequence] = deque()
        # Taken by itself: a Condition would keep it where a signal handler raises on its way in.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ended: Exception | None = None
        n_lanes = min(self.limits.stages, self.limits.slots)
        self._slot_groups = [
            _SlotGroup(range(at, self.limits.slots, n_lanes)) for at in range(n_lanes)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name="decoder-lane", daemon=True)
            for lane in self._slot_groups
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._end(PoolClosedError("the engine has not started"))  # those that have end
            raise

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        with self._lock:
            return sum(not each.cancelled for each in self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return sum(len(lane.taken) for lane in self._slot_groups)

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        *,
        timeout: float | None = None,
        ignore_ends: bool = False,
    ) -> GeneratedSequence:
        """Ask for an answer.

        Args:
            prompt: token ids.
            max_tokens: of the answer; ``None``: as many as there is room for. It also ends where
                the context does.
            sampling: how tokens are drawn; ``None``: always the most likely.
            timeout: seconds for each token; ``None``: for ever.
            ignore_ends: go on after tokens that end an answer.

        Raises:
            TypeError: the prompt has something else than ids, or ``timeout`` is no number.
            ValueError: the prompt is empty, leaves no room for an answer, or has an id outside the
                vocabulary; or ``max_tokens`` is less than 1, or ``timeout`` than 0.
            QueueFullError: too many requests wait.
            PoolClosedError: the engine was closed, or belongs to the process from which this one
                was forked.
            CoordinatorError: the workers have failed for good.
        """
        if os.getpid() != self._owner:
            raise PoolClosedError(
                f"submit: the engine belongs to process {self._owner}, from which this one was "
                "forked"
            )
        Deadline.after(timeout)  # checks it
        limits = self.limits
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more; got {max_tokens}")
        tokens = _ids(prompt, limits)
        stop = min(limits.context, len(tokens) + (max_tokens or limits.context))
        ends = frozenset[int]() if ignore_ends else limits.ends
        made = GeneratedSequence(tokens, stop, ends, sampling or Sampling(), timeout)
        with self._lock:
            self._check()
            if len(self._waiting) >= self._max_waiting:
                self._forget_cancelled()
            if len(self._waiting) >= self._max_waiting:
                raise QueueFullError(1, len(self._waiting), self._max_waiting)
            self._waiting.append(made)
            self._changed.notify_all()
            if self._ended is not None:  # a signal handler has closed it meanwhile
                self._end(self._ended)
        return made

    def close(self, timeout: float = 10.0) -> None:
        """End all answers with `PoolClosedError`, and wait until no step is under way. Idempotent.
        Does nothing in a process that was forked from the engine's.

        Args:
            timeout: seconds; a step that takes longer goes on.
        """
        if os.getpid() != self._owner:
            return
        self._end(PoolClosedError("the engine was closed"))
        for thread in self._threads:
            thread.join(timeout / len(self._threads))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._ended is not None:
            raise again(self._ended)

    def _run(self, lane: _SlotGroup) -> None:
        """Make one step after another; an error in between is told to all who wait for answers."""
        try:
            self._make_steps(lane)
        except Exception as error:  # noqa: BLE001 - readers get it
            self._end(error)

    def _make_steps(self, lane: _SlotGroup) -> None:
        lost = 0
        while rows := self._next_step(lane):
            try:
                lane.advance(rows, self._pool.call("step", rows))
            except Exception as error:  # noqa: BLE001 - readers get it
                lost += 1
                if self._pool.failure is not None or not isinstance(error, CoordinatorError):
                    self._end(error)
                elif lost == _TRIES or not _may_go_on(error):
                    lane.end(error)
                    lost = 0
                else:
                    lane.begin_anew()
            else:
                lost = 0

    def _next_step(self, lane: _SlotGroup) -> list[ScheduledSequence]:
        """What the lane's next step computes, once there is something; empty at the end."""
        with self._lock:
            while self._ended is None:
                lane.drop()
                while self._waiting and lane.free and self._is_emptiest(lane):
                    first = self._waiting.popleft()
                    lane.add(first)
                    lane.drop()
                if lane.taken:
                    self._changed.notify_all()  # another lane may be the emptiest now
                    return lane.rows(self._chunk)
                self._changed.wait()
            lane.drop()
            return []

    def _forget_cancelled(self) -> None:
        for each in tuple(self._waiting):  # a signal handler may ask or close meanwhile
            if each.cancelled:
                each.end("cancelled")
                with suppress(ValueError):
                    self._waiting.remove(each)

    def _is_emptiest(self, lane: _SlotGroup) -> bool:
        return len(lane.taken) == min(len(each.taken) for each in self._slot_groups if each.free)

    def _end(self, error: Exception) -> None:
        """Take no more requests, and end those that there are."""
        with self._lock:
            if self._ended is None:
                self._ended = error
            for each in tuple(self._waiting):
                each.end(self._ended)
            self._waiting.clear()
            for lane in self._slot_groups:
                lane.end(self._ended)
            self._changed.notify_all()


class PromptTooLongError(ValueError):
    """A prompt leaves no room for an answer.

    Attributes:
        length: its tokens.
        limit: tokens of a prompt and its answer.
    """

    def __init__(self, length: int, limit: int) -> None:
        self.length = length
        self.limit = limit
        super().__init__(f"the prompt has {length} tokens; with its answer at most {limit} fit")


class _SlotGroup:
    """Some slots, and the generations that have them."""

    def __init__(self, slots: range) -> None:
        self.free = list(slots)
        self.taken: dict[int, GeneratedSequence] = {}

    def add(self, generation: GeneratedSequence) -> None:
        self.taken[self.free.pop()] = generation

    def drop(self) -> None:
        """Free the slots of what has ended, or nobody wants."""
        for slot, each in list(self.taken.items()):
            if each.cancelled:
                each.end("cancelled")
            if each.reason is not None:
                del self.taken[slot]
                self.free.append(slot)

    def rows(self, chunk: int) -> list[ScheduledSequence]:
        """The next tokens of each sequence; those that need one come before prompts, which come in
        the order in which they were taken in.
        """
        rows = []
        for slot, each in sorted(self.taken.items(), key=lambda item: item[1].behind > 1):
            if chunk:
                rows.append(each.row(slot, chunk))
                chunk -= len(rows[-1].tokens)
        return rows

    def advance(self, rows: Sequence[ScheduledSequence], drawn: Sequence[int]) -> None:
        """Go on with what a step has drawn for those rows that draw.

        Raises:
            ValueError: it drew another number of tokens than there are such rows.
        """
        drawing = sum(row.draw is not None for row in rows)
        if len(drawn) != drawing:
            raise ValueError(f"the workers drew {len(drawn)} tokens for {drawing} sequences")
        tokens = iter(drawn)
        for row in rows:
            generation = self.taken[row.slot]
            generation.cached = row.stop
            if row.draw is not None:
                generation.take(next(tokens))

    def begin_anew(self) -> None:
        """The workers have none of the tokens."""
        for each in self.taken.values():
            each.cached = 0

    def end(self, error: Exception) -> None:
        for each in self.taken.values():
            each.end(error)


def _ids(prompt: Iterable[int], limits: EngineLimits) -> list[int]:
    """The prompt's token ids, checked; see `Engine.submit`."""
    tokens = list(prompt)
    if not tokens:
        raise ValueError("the prompt is empty: it has no token")
    if len(tokens) >= limits.context:
        raise PromptTooLongError(len(tokens), limits.context)
    tokens = [_id(each) for each in tokens]
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < limits.vocabulary:
            raise ValueError(f"token id {token} is not in 0 to {limits.vocabulary - 1}")
    return tokens


def _id(token: int) -> int:
    try:
        return index(token)
    except TypeError:
        raise TypeError(f"a prompt has token ids; got {token!r}") from None


def _may_go_on(error: CoordinatorError) -> bool:
    """Whether the step may be made again: not while the workers may still be in it."""
    return isinstance(error, CallStuckError) or not isinstance(error, CallTimeoutError)
