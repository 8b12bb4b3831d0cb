"""The engine over a decoder in this process: its schedule, and answers that survive losses."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import server.workers
from server.errors import (
    CallStuckError,
    CallTimeoutError,
    PoolClosedError,
    QueueFullError,
    WorkerLostError,
)
from server.workers.decoder import (
    Engine,
    GeneratedSequence,
    GenerationTimeoutError,
    PromptTooLongError,
    Sampling,
)
from server.workers.decoder.decoder_cache import ScheduledSequence
from shm_broadcast import GroupClosedError
from tests.forked import in_a_child
from tests.interruptions import LIBRARY, interruptions
from tests.patience import PATIENCE_SECONDS, until
from tests.server.one_worker import LOST, OneWorker
from tests.server.tiny_llama import PROMPTS, greedy, make_llama

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT = 20


@pytest.fixture
def pool(llama: Path) -> OneWorker:
    return OneWorker(llama)


@pytest.fixture
def engine(pool: OneWorker) -> Iterator[Engine]:
    with Engine(pool, chunk=16, max_waiting=8) as made:
        yield made
        pool.go()
    assert not slot_threads()


def slot_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "decoder-slots"]


def test_prompts_together_give_what_each_gives_alone(
    llama: Path, pool: OneWorker, engine: Engine
) -> None:
    expected = [greedy(llama, prompt, COUNT) for prompt in PROMPTS]
    pool.hold()
    asked = [engine.submit(prompt, COUNT) for prompt in PROMPTS]
    pool.go()
    assert [list(each) for each in asked] == expected
    assert {each.reason for each in asked} == {"length"}
    assert max(map(len, pool.steps)) == 3
    assert max(sum(len(row.tokens) for row in rows) for rows in pool.steps) <= 16
    assert [list(engine.submit(prompt, COUNT)) for prompt in PROMPTS] == expected


def test_an_interrupt_anywhere_in_a_request_blocks_no_other(
    pool: OneWorker, engine: Engine
) -> None:
    pool.hold()
    asked = [engine.submit([5], 2, timeout=PATIENCE_SECONDS)]
    until(lambda: engine.running == 1)
    asked += [engine.submit([5], 2, timeout=PATIENCE_SECONDS) for _ in range(7)]

    def submit() -> None:
        engine.submit([5], 1)

    places = []
    engine.submit([5], 1).cancel()
    for place in interruptions(submit, server.workers, LIBRARY):
        places.append(place)
        assert engine.waiting >= 7, place
        for each in list(engine._waiting):
            if each not in asked:
                each.cancel()
        engine.submit([5], 1).cancel()
    assert len(places) > 10
    pool.go()
    assert [len(list(each)) for each in asked] == [2] * len(asked)


def under_way(pool: OneWorker) -> tuple[Engine, list[GeneratedSequence]]:
    """An engine with an answer whose step is held, one cancelled, and two that wait."""
    made = Engine(pool, max_waiting=3)
    asked = [made.submit([5], 2, timeout=PATIENCE_SECONDS)]
    until(lambda: made.running > 0)
    asked += [made.submit([5], 2, timeout=PATIENCE_SECONDS) for _ in range(3)]
    asked[1].cancel()
    return made, asked


def test_an_engine_whose_close_is_interrupted_anywhere_can_be_closed(llama: Path) -> None:
    pool = OneWorker(llama)
    pool.hold()

    def close() -> None:
        made.close(0.0)

    made, asked = under_way(pool)
    for _ in interruptions(close, server.workers):
        close()
        for each in (asked[0], *asked[2:]):
            with pytest.raises(PoolClosedError):
                list(each)
        made, asked = under_way(pool)
    pool.go()
    made.close()
    until(lambda: not slot_threads())


@pytest.mark.parametrize("what", ["submit", "close"])
def test_a_signal_handler_may_close_the_engine_anywhere(llama: Path, what: str) -> None:
    pool = OneWorker(llama)
    pool.hold()

    def act() -> None:
        if what == "close":
            made.close(0.0)
            return
        with suppress(PoolClosedError):
            asked.append(made.submit([5], 2, timeout=PATIENCE_SECONDS))

    def close() -> None:
        made.close(0.0)

    made, asked = under_way(pool)
    for place in interruptions(act, server.workers, handler=close):
        for each in asked:
            with suppress(PoolClosedError):
                assert list(each) == [], place
            assert each.reason == "cancelled"
        made, asked = under_way(pool)
    pool.go()
    made.close()
    until(lambda: not slot_threads())


def test_answers_go_on_while_a_long_prompt_is_read(pool: OneWorker, engine: Engine) -> None:
    pool.hold()
    first = engine.submit([5], 30)
    until(lambda: engine.running == 1)
    long = engine.submit(PROMPTS[2], 1)
    pool.go()
    list(long)
    list(first)
    reading = [rows for rows in pool.steps if any(len(row.tokens) > 1 for row in rows)]
    assert len(reading) == 3
    assert all(any(row.tokens != rows[0].tokens for row in rows) for rows in reading)


def test_an_answer_ends_at_its_end_token(llama: Path, tmp_path: Path) -> None:
    """At the token that ends it, which is not given out; unless that is not asked for."""
    whole = greedy(llama, PROMPTS[0], COUNT)
    other = make_llama(tmp_path / "model", eos_token_id=whole[6])
    with Engine(OneWorker(other)) as engine:
        ended = engine.submit(PROMPTS[0], COUNT)
        assert list(ended) == whole[: whole.index(whole[6])]
        assert ended.reason == "stop"
        assert list(engine.submit(PROMPTS[0], COUNT, ignore_ends=True)) == whole


def test_an_answer_ends_with_the_context(engine: Engine) -> None:
    for max_tokens in (None, 1000):
        asked = engine.submit(PROMPTS[0], max_tokens, ignore_ends=True)
        assert len(list(asked)) == 64 - len(PROMPTS[0])
        assert asked.reason == "length"
    assert len(list(engine.submit([1] * 63))) == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "text"),
    [
        ([], 5, ValueError, "the prompt is empty"),
        ([1] * 64, 5, PromptTooLongError, "has 64 tokens; with its answer at most 64 fit"),
        ([257], 5, ValueError, "token id 257 is not in 0 to 256"),
        ([3, -1], 5, ValueError, "token id -1 is not in"),
        ([3], 0, ValueError, "max_tokens must be 1 or more; got 0"),
        ([3, 2.0], 5, TypeError, "a prompt has token ids: 'float' object"),
        ("33", 5, TypeError, "a prompt has token ids: 'str' object"),
        (np.array([3.0]), 5, TypeError, "a prompt has token ids: 'numpy"),
    ],
)
def test_a_wrong_request_is_refused(
    engine: Engine, prompt: Any, max_tokens: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine.submit(prompt, max_tokens)


@pytest.mark.parametrize("timeout", [-1, math.nan, "3"])
def test_a_wrong_timeout_is_refused(engine: Engine, timeout: Any) -> None:
    with pytest.raises(TypeError if timeout == "3" else ValueError):
        engine.submit([5], 3, timeout=timeout)
    assert engine.waiting == engine.running == 0


def test_a_prompt_is_any_iterable_of_ids(llama: Path, engine: Engine) -> None:
    for prompt in (np.array(PROMPTS[0]), tuple(PROMPTS[0]), iter(PROMPTS[0])):
        assert list(engine.submit(prompt, COUNT)) == greedy(llama, PROMPTS[0], COUNT)


def test_a_seed_draws_the_same_in_any_company(engine: Engine) -> None:
    how = Sampling(temperature=2.0, seed=11)
    alone = list(engine.submit(PROMPTS[0], COUNT, how))
    asked = [engine.submit(prompt, COUNT, how) for prompt in PROMPTS]
    assert list(asked[0]) == alone
    assert list(engine.submit(PROMPTS[0], COUNT)) != alone
    for other in (12, -11):
        how = Sampling(temperature=2.0, seed=other)
        assert list(engine.submit(PROMPTS[0], COUNT, how)) != alone
    unseeded = Sampling(temperature=5.0)
    assert len({tuple(engine.submit(PROMPTS[0], COUNT, unseeded)) for _ in range(3)}) == 3


def test_cancelled_answers_free_their_slots(pool: OneWorker, engine: Engine) -> None:
    pool.hold()
    asked = [engine.submit([5], ignore_ends=True) for _ in range(3)]
    pool.hold(after=2)
    until(lambda: engine.running == 3)
    waits, gone = engine.submit([7], 1), engine.submit([7], 1)
    gone.cancel()
    asked[1].cancel()
    pool.go()
    assert len(list(waits)) == 1
    assert (list(gone), gone.reason) == ([], "cancelled")
    assert len(list(asked[1])) <= 3
    assert asked[1].reason == "cancelled"
    with asked[0], asked[2]:
        pass
    until(lambda: engine.running == 0)


def test_the_queue_has_a_limit(pool: OneWorker, engine: Engine) -> None:
    pool.hold()
    begun = [engine.submit([5], 1)]
    until(lambda: engine.running == 1)
    waiting = [engine.submit([5], 1) for _ in range(8)]
    with pytest.raises(QueueFullError, match="no room for 1 more: 8 of at most 8 wait"):
        engine.submit([5], 1)
    waiting[0].cancel()
    again = engine.submit([5], 1)
    pool.go()
    assert [len(list(each)) for each in (*begun, *waiting, again)] == [1, 0] + [1] * 8


def test_lost_workers_change_no_answer(llama: Path, pool: OneWorker, engine: Engine) -> None:
    how = Sampling(temperature=3.0, seed=4)
    expected = [greedy(llama, prompt, COUNT) for prompt in PROMPTS]
    drawn = list(engine.submit(PROMPTS[1], COUNT, how))
    begun = len(pool.steps)

    def lose_sometimes(step: int) -> None:
        if (step - begun) % 7 == 3:
            pool.lose()  # and the call is answered by an error of the worker
        if (step - begun) % 7 == 5:
            pool.lose()
            raise LOST
        if (step - begun) == 13:
            raise CallStuckError("step", 1.0)

    pool.before = lose_sometimes
    asked = [engine.submit(prompt, COUNT) for prompt in PROMPTS]
    sampled = engine.submit(PROMPTS[1], COUNT, how)
    assert [list(each) for each in asked] == expected
    assert list(sampled) == drawn
    assert len(pool.steps) - begun > 14


def test_a_sequence_whose_slot_was_taken_begins_anew(
    llama: Path, pool: OneWorker, engine: Engine
) -> None:
    """Even where the other one is as long."""

    def take_its_slot(step: int) -> None:
        if step == 4:
            (row,) = pool.steps[-1]
            pool.worker.step([ScheduledSequence(0, row.slot, 0, [9] * row.start, None)])

    pool.before = take_its_slot
    assert list(engine.submit(PROMPTS[0], COUNT)) == greedy(llama, PROMPTS[0], COUNT)


def test_a_step_that_is_always_lost_fails_and_the_engine_goes_on(
    pool: OneWorker, engine: Engine
) -> None:
    def lose_a_seven(_: int) -> None:
        if any(7 in row.tokens for row in pool.steps[-1]):
            raise LOST

    pool.before = lose_a_seven
    with pytest.raises(WorkerLostError):
        list(engine.submit([7], 5))
    assert len(pool.steps) == 3
    assert len(list(engine.submit([5], 5))) == 5


def test_a_late_step_is_not_repeated(pool: OneWorker, engine: Engine) -> None:
    def late(step: int) -> None:
        if step == 3:
            raise CallTimeoutError("step", 1.0)

    pool.before = late
    asked = engine.submit([5], 9, ignore_ends=True)
    tokens = iter(asked)
    assert [next(tokens), next(tokens)]
    with pytest.raises(CallTimeoutError):
        next(tokens)
    assert len(list(engine.submit([5], 9, ignore_ends=True))) == 9


def test_a_broken_pool_ends_all_answers(pool: OneWorker, engine: Engine) -> None:
    def fail(step: int) -> None:
        if step == 5:
            pool.failure = LOST
            raise LOST

    pool.before = fail
    pool.hold()
    asked = [engine.submit([5], ignore_ends=True) for _ in range(4)]
    pool.go()
    for each in asked:
        with pytest.raises(WorkerLostError, match="rank 0"):
            list(each)
    with pytest.raises(WorkerLostError, match="rank 0"):
        engine.submit([5])


def test_an_error_of_the_engine_itself_hangs_no_caller(
    pool: OneWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.hold()
    first = engine.submit([5], ignore_ends=True, timeout=PATIENCE_SECONDS)
    until(lambda: engine.running == 1)
    monkeypatch.setattr(GeneratedSequence, "row", lambda *_: [][0])
    second = engine.submit([7], timeout=PATIENCE_SECONDS)
    pool.go()
    for each in (first, second):
        with pytest.raises(IndexError):
            list(each)
    with pytest.raises(IndexError):
        engine.submit([5])


def test_a_wrong_step_ends_the_answers(
    pool: OneWorker, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool.worker, "step", lambda _: [])
    with pytest.raises(ValueError, match="drew 0 tokens for 1 sequences"):
        list(engine.submit([5], 3, timeout=PATIENCE_SECONDS))
    with pytest.raises(ValueError, match="drew 0 tokens"):
        engine.submit([5], 3)


def test_closing_ends_answers_under_way(pool: OneWorker, engine: Engine) -> None:
    pool.hold()
    asked = [engine.submit([5], ignore_ends=True) for _ in range(4)]
    pool.hold(after=1)
    next(iter(asked[0]))
    engine.close(0.01)
    for each in asked:
        with pytest.raises(PoolClosedError, match="the engine was closed"):
            list(each)
    with pytest.raises(PoolClosedError):
        engine.submit([5])


def test_a_token_that_is_late_raises(pool: OneWorker, engine: Engine) -> None:
    pool.hold()
    with pytest.raises(GenerationTimeoutError, match=r"no token within 0.05 s"):
        list(engine.submit([5], timeout=0.05))
    with pytest.raises(GenerationTimeoutError, match=r"no token within 0.05 s"):
        asyncio.run(tokens(engine.submit([5], timeout=0.05)))
    pool.go()
    until(lambda: engine.running == 0)


async def tokens(asked: GeneratedSequence) -> list[int]:
    return [token async for token in asked]


@pytest.mark.parametrize("timeout", [math.inf, 10**400], ids=["inf", "10**400"])
def test_a_token_may_take_for_ever(engine: Engine, timeout: float) -> None:
    found = asyncio.run(tokens(engine.submit([5], 3, timeout=timeout)))
    assert list(engine.submit([5], 3, timeout=timeout)) == found


def test_a_forked_child_is_refused(pool: OneWorker, engine: Engine) -> None:
    def meddle() -> None:
        engine.close()
        with pytest.raises(PoolClosedError, match=f"belongs to process {os.getppid()}, from which"):
            engine.submit([7])

        with pytest.raises(GroupClosedError, match="forked from"):
            next(iter(asked))

    pool.hold()
    asked = engine.submit([5], 3, ignore_ends=True)
    in_a_child(meddle)
    pool.go()
    assert len(list(asked)) == 3


def test_a_second_iteration_ends_at_once(pool: OneWorker, engine: Engine) -> None:
    asked = engine.submit([5], 3, ignore_ends=True)
    assert len(list(asked)) == 3
    assert list(asked) == []

    assert asyncio.run(tokens(asked)) == []
    pool.hold()
    lost = engine.submit([5], 3)
    engine.close(0.0)
    pool.go()
    for _ in range(2):
        with pytest.raises(PoolClosedError):
            list(lost)


def test_a_closed_event_loop_does_not_harm_the_engine(pool: OneWorker, engine: Engine) -> None:
    async def leave() -> None:
        async for _ in engine.submit([5], ignore_ends=True):
            return

    asyncio.run(leave())
    assert len(list(engine.submit([7], 5, ignore_ends=True))) == 5


def test_a_step_must_have_room_for_every_sequence(pool: OneWorker) -> None:
    with pytest.raises(ValueError, match="chunk must be 3, the slots, or more; got 2"):
        Engine(pool, chunk=2)


def test_every_stage_has_a_step_under_way(llama: Path) -> None:
    """Two lanes, each with slots of its own."""
    pool = OneWorker(llama, slots=5)
    limits = pool.worker.limits()
    pool.worker._limits = replace(limits, stages=2)
    with Engine(pool) as engine:
        pool.hold()
        asked = [engine.submit([5], 4, ignore_ends=True) for _ in range(2)]
        until(lambda: pool.under_way == 2)
        assert [len(lane.taken) for lane in engine._slot_groups] == [1, 1]
        asked += [engine.submit([5], 4, ignore_ends=True) for _ in range(9)]
        pool.go()
        assert [len(list(each)) for each in asked] == [4] * 11
    # Which of its slots a lane needs depends on how long the other one keeps the only worker.
    assert {4, 3} <= {row.slot for rows in pool.steps for row in rows} <= {*range(5)}
    assert all(len({row.slot % 2 for row in rows}) == 1 for rows in pool.steps)


def test_short_prompts_do_not_starve_a_long_one(pool: OneWorker, engine: Engine) -> None:
    """A step has room for 16 tokens, and a worker for 3 sequences."""
    pool.hold()
    long = engine.submit([1] * 40, 1)
    asked = [engine.submit([2] * 12, 1) for _ in range(7)]
    pool.go()
    for each in (long, *asked):
        assert len(list(each)) == 1
    assert sum(list(row.tokens).count(1) for step in pool.steps[:4] for row in step) == 40


def test_an_engine_whose_thread_is_refused_leaves_none(
    pool: OneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, begin = replace(pool.call("limits"), stages=2), threading.Thread.start
    begun: list[threading.Thread] = []

    def start_one(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        begin(thread)

    monkeypatch.setattr(pool, "call", lambda _: limits)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="new thread"):
        Engine(pool, chunk=16, max_waiting=8)
    until(lambda: not begun[0].is_alive())
