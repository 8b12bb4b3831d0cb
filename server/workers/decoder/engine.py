"""Batch continuously: the sequences of all requests share every step of the workers.

Each step is one call of the pool, with the next tokens of each sequence: one of an answer, many of
a prompt. Sequences join and end between steps. There is one slot group per pipeline stage, with its
own thread, slots and one step in flight, so that no stage idles while another computes.

The workers' only state is the cache of keys and values. If workers are lost and the pool restarts,
each sequence is computed again from its first token and continues; readers see a pause. This replay
is the only retry: steps are called without ``retry=True``, since fresh workers lack the cache. The
driver draws the random numbers, so no token is drawn twice.

Any thread or event loop may read a sequence while its slot group's thread appends tokens.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
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


class TokenObserver(Protocol):
    """Is called in a thread of the engine as the workers compute tokens; must not block."""

    def prompt(self, tokens: int) -> None:
        """Count a prompt of so many ``tokens``, which is in the cache now."""

    def token(self, seconds: float, *, first: bool) -> None:
        """Count a token, ``seconds`` after the one before, or after `Engine.submit`."""


class GenerationTimeoutError(CoordinatorError, TimeoutError):
    """A token did not arrive in time, including the wait for a slot; the answer was cancelled."""


class GeneratedSequence:
    """Tokens of one answer as they are generated; iterate with ``for`` or ``async for``.

    Each token is yielded once; iterating after the end ends at once. Leaving the loop early does
    not end the answer: `cancel` and the end of a ``with`` block do.

    Args:
        prompt: token ids, one or more.
        stop: maximum length with the answer.
        ends: tokens that end the answer; they are not yielded.
        sampling: parameters of sampling.
        timeout: seconds for each token; ``None`` or infinite: no limit.
        observer: counts the tokens; ``None``: not counted.

    Attributes:
        reason: after the end: ``"stop"`` (a token of ``ends``), ``"length"`` (no room), or
            ``"cancelled"``, also if the workers failed.
        cancelled: whether `cancel` was called.
        cached: number of its tokens in the workers' cache; only the slot group's thread uses it.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        stop: int,
        ends: Collection[int],
        sampling: Sampling,
        timeout: float | None,
        observer: TokenObserver | None = None,
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
        self._observer = observer
        self._prompt_length = len(self._tokens)
        self._since = time.monotonic()
        # `Random(-1)` equals `Random(1)`, hence the modulo. Not for secrets.
        self._random = random.Random(sampling.seed and sampling.seed % (1 << 64))
        self._number = self._random.random()
        self._tokens_out: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None  # the queue wakes a waiting thread
        self._ended = False
        call_in_forked_children(self)

    def after_fork_in_child(self) -> None:
        """Raise in a forked child, where no token arrives; queued tokens are the parent's."""
        self._tokens_out = queue.SimpleQueue()
        self._tokens_out.put(GroupClosedError(f"the tokens of an answer: {IN_FORKED_CHILD}"))

    @property
    def behind(self) -> int:
        """Return the number of its tokens that are not in the cache."""
        return len(self._tokens) - self.cached

    def row(self, slot: int, most: int) -> ScheduledSequence:
        """Return the next ``most`` uncached tokens, with a draw after the last known token."""
        tokens = self._tokens[self.cached : self.cached + most]
        is_last = self.cached + len(tokens) == len(self._tokens)
        draw = SampleRequest(self._sampling, self._number) if is_last else None
        return ScheduledSequence(self._sequence, slot, self.cached, tokens, draw)

    def take(self, token: int) -> None:
        """Append a drawn token."""
        if self.reason is not None:
            return
        now, first = time.monotonic(), len(self._tokens) == self._prompt_length
        if self._observer is not None and first:
            self._observer.prompt(self._prompt_length)
        if token in self._ends:
            self.end("stop")
            return
        if self._observer is not None:
            self._observer.token(now - self._since, first=first)
        self._since = now
        self._tokens.append(token)
        self._number = self._random.random()
        self._publish(token)
        if len(self._tokens) >= self._stop:
            self.end("length")

    def end(self, how: Reason | Exception) -> None:
        """End the answer."""
        self.reason = self.reason or ("cancelled" if isinstance(how, Exception) else how)
        if not self._ended:
            self._publish(None if isinstance(how, str) else how)
            self._ended = True  # last: a signal handler may raise earlier

    def cancel(self) -> None:
        """End the answer: the slot is free after the current step. Idempotent."""
        self.cancelled = True

    def __iter__(self) -> Iterator[int]:
        """Yield tokens as they arrive.

        Raises:
            GenerationTimeoutError: a token timed out.
            CoordinatorError: the workers failed, or the engine was closed.
        """
        while True:
            try:
                item = self._tokens_out.get(timeout=self._seconds())
            except queue.Empty:
                raise self._late() from None
            if (token := self._token_of(item)) is None:
                return
            yield token

    async def __aiter__(self) -> AsyncIterator[int]:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: _wake_loop(loop, woken)
        while True:
            try:
                item = self._tokens_out.get_nowait()
            except queue.Empty:
                try:
                    await asyncio.wait_for(woken.wait(), self._seconds())
                except TimeoutError:
                    raise self._late() from None
                woken.clear()
                continue
            if (token := self._token_of(item)) is None:
                return
            yield token

    def __enter__(self) -> GeneratedSequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _token_of(self, item: int | Exception | None) -> int | None:
        """Return a token, or ``None`` at the end; the end stays queued for later iterations."""
        if not isinstance(item, int):
            self._tokens_out.put(item)
        if isinstance(item, Exception):
            raise again(item)
        return item

    def _publish(self, item: int | Exception | None) -> None:
        self._tokens_out.put(item)
        self._wake()

    def _seconds(self) -> float:
        return Deadline.after(self._timeout).remaining(threading.TIMEOUT_MAX)

    def _late(self) -> GenerationTimeoutError:
        self.cancel()
        return GenerationTimeoutError(f"no token within {self._timeout:g} s")


def _wake_loop(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop is closed, so no reader waits
        loop.call_soon_threadsafe(woken.set)


_MAX_FAILURES = 3
"""Failures of one step before its sequences are taken for the cause, and ended."""


class StepPool(Protocol):
    """Pool whose workers compute every step together; a `WorkerPool` of `DecoderWorker`."""

    @property
    def failure(self) -> CoordinatorError | None:
        """Return the error that broke the pool for good."""

    def call(self, method: str, *args: Any) -> Any:
        """See `WorkerPool.call`."""


class Engine:
    """Generates answers to prompts, both as token ids; thread-safe.

    Args:
        pool: pool of `DecoderWorker`; with ``restart="worker"``, answers continue after a lost
            worker.
        chunk: maximum tokens of a step; a longer prompt takes several steps.
        max_waiting: maximum requests that wait for a slot.

    Raises:
        TypeError: ``pool`` is `Replicas`, which spread the steps of a sequence.
        ValueError: ``chunk`` has no room for one token of each sequence.
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
        # Used directly: a Condition keeps its lock if a signal handler raises in __enter__.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ended: Exception | None = None
        n_groups = min(self.limits.stages, self.limits.slots)
        self._slot_groups = [
            _SlotGroup(range(at, self.limits.slots, n_groups)) for at in range(n_groups)
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(group,), name="decoder-slots", daemon=True)
            for group in self._slot_groups
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self._end(PoolClosedError("the engine has not started"))  # ends started threads
            raise

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a slot."""
        with self._lock:
            return sum(not each.cancelled for each in self._waiting)

    @property
    def running(self) -> int:
        """Return the number of requests that have a slot."""
        return sum(len(group.taken) for group in self._slot_groups)

    @property
    def cache_usage(self) -> float:
        """Return the share of the cache's positions that are in use, from 0 to 1."""
        taken = [each for group in self._slot_groups for each in list(group.taken.values())]
        return sum(each.cached for each in taken) / (self.limits.slots * self.limits.context)

    def submit(
        self,
        prompt: Iterable[int],
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        *,
        timeout: float | None = None,
        ignore_ends: bool = False,
        observer: TokenObserver | None = None,
    ) -> GeneratedSequence:
        """Start an answer.

        Args:
            prompt: token ids.
            max_tokens: maximum tokens of the answer; ``None``: up to the context's end.
            sampling: parameters of sampling; ``None``: greedy.
            timeout: seconds for each token; ``None``: no limit.
            ignore_ends: continue after tokens that end an answer.
            observer: counts the tokens; ``None``: not counted.

        Raises:
            TypeError: the prompt has other items than ids, or ``timeout`` is no number.
            ValueError: the prompt is empty, too long, or has an id outside the vocabulary;
                ``max_tokens`` is less than 1, or ``timeout`` less than 0.
            QueueFullError: too many requests wait.
            PoolClosedError: the engine was closed, or belongs to the parent of this forked process.
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
        sequence = GeneratedSequence(tokens, stop, ends, sampling or Sampling(), timeout, observer)
        with self._lock:
            if (ended := self._ended) is not None:
                raise again(ended)
            if len(self._waiting) >= self._max_waiting:
                self._forget_cancelled()
            if len(self._waiting) >= self._max_waiting:
                raise QueueFullError(1, len(self._waiting), self._max_waiting)
            self._waiting.append(sequence)
            self._changed.notify_all()
            if self._ended is not None:  # a signal handler has closed the engine
                self._end(self._ended)
        return sequence

    def close(self, timeout: float = 10.0) -> None:
        """End all answers with `PoolClosedError`, and wait for steps in flight. Idempotent.

        Does nothing in a forked child.

        Args:
            timeout: seconds; a longer step continues.
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

    def _run(self, group: _SlotGroup) -> None:
        """Make steps; all readers get an error of the engine itself."""
        try:
            self._make_steps(group)
        except Exception as error:  # noqa: BLE001 - raised by all readers
            self._end(error)

    def _make_steps(self, group: _SlotGroup) -> None:
        lost = 0
        while rows := self._next_step(group):
            try:
                group.advance(rows, self._pool.call("step", rows))
            except Exception as error:  # noqa: BLE001 - raised by all readers
                lost += 1
                if self._pool.failure is not None or not isinstance(error, CoordinatorError):
                    self._end(error)
                elif lost == _MAX_FAILURES or not _is_repeatable(error):
                    group.end(error)
                    lost = 0
                else:
                    group.replay()
            else:
                lost = 0

    def _next_step(self, group: _SlotGroup) -> list[ScheduledSequence]:
        with self._lock:
            while self._ended is None:
                group.drop()
                while self._waiting and group.free and self._is_emptiest(group):
                    first = self._waiting.popleft()
                    group.add(first)
                    group.drop()
                if group.taken:
                    self._changed.notify_all()  # another group may be the emptiest now
                    return group.rows(self._chunk)
                self._changed.wait()
            group.drop()
            return []

    def _forget_cancelled(self) -> None:
        for each in tuple(self._waiting):  # a signal handler may submit or close meanwhile
            if each.cancelled:
                each.end("cancelled")
                with suppress(ValueError):
                    self._waiting.remove(each)

    def _is_emptiest(self, group: _SlotGroup) -> bool:
        return len(group.taken) == min(len(each.taken) for each in self._slot_groups if each.free)

    def _end(self, error: Exception) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = error
            for each in tuple(self._waiting):
                each.end(self._ended)
            self._waiting.clear()
            for group in self._slot_groups:
                group.end(self._ended)
            self._changed.notify_all()


class PromptTooLongError(ValueError):
    """A prompt of ``length`` tokens leaves no room for an answer within ``limit`` tokens."""

    def __init__(self, length: int, limit: int) -> None:
        self.length = length
        self.limit = limit
        super().__init__(f"the prompt has {length} tokens; with its answer at most {limit} fit")


class _SlotGroup:
    """Slots of one thread, and the sequences that have them."""

    def __init__(self, slots: range) -> None:
        self.free = list(slots)
        self.taken: dict[int, GeneratedSequence] = {}

    def add(self, sequence: GeneratedSequence) -> None:
        self.taken[self.free.pop()] = sequence

    def drop(self) -> None:
        for slot, each in list(self.taken.items()):
            if each.cancelled:
                each.end("cancelled")
            if each.reason is not None:
                del self.taken[slot]
                self.free.append(slot)

    def rows(self, chunk: int) -> list[ScheduledSequence]:
        """Return each sequence's next tokens; answers first, then prompts in order of arrival."""
        rows = []
        for slot, each in sorted(self.taken.items(), key=lambda item: item[1].behind > 1):
            if chunk:
                rows.append(each.row(slot, chunk))
                chunk -= len(rows[-1].tokens)
        return rows

    def advance(self, rows: Sequence[ScheduledSequence], drawn: Sequence[int]) -> None:
        """Append a step's tokens; raise `ValueError` if their number is not that of draws."""
        drawing = sum(row.draw is not None for row in rows)
        if len(drawn) != drawing:
            raise ValueError(f"the workers drew {len(drawn)} tokens for {drawing} sequences")
        tokens = iter(drawn)
        for row in rows:
            sequence = self.taken[row.slot]
            sequence.cached = row.stop
            if row.draw is not None:
                sequence.take(next(tokens))

    def replay(self) -> None:
        for each in self.taken.values():
            each.cached = 0

    def end(self, error: Exception) -> None:
        for each in self.taken.values():
            each.end(error)


def _ids(prompt: Iterable[int], limits: EngineLimits) -> list[int]:
    try:
        tokens = [*map(index, prompt)]
    except TypeError as error:
        raise TypeError(f"a prompt has token ids: {error}") from None
    if not tokens:
        raise ValueError("the prompt is empty: it has no token")
    if len(tokens) >= limits.context:
        raise PromptTooLongError(len(tokens), limits.context)
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < limits.vocabulary:
            raise ValueError(f"token id {token} is not in 0 to {limits.vocabulary - 1}")
    return tokens


def _is_repeatable(error: CoordinatorError) -> bool:
    """Return whether the step may be repeated: not while workers may still compute it."""
    return isinstance(error, CallStuckError) or not isinstance(error, CallTimeoutError)
