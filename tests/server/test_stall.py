"""Which calls the workers of a service have, and since when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from server.config import ServiceLimits
from server.errors import CallTimeoutError, WorkerLostError
from server.service.metrics import Metrics
from server.service.pool_service import InstrumentedPool, StallDetector


def test_a_call_that_has_timed_out_counts_until_a_later_one_is_answered() -> None:
    watch = StallDetector(limit=5.0)
    early, late, last = watch.begin(10.0), watch.begin(11.0), watch.begin(12.0)
    watch.timed_out(late)
    watch.answered(early)
    assert (watch.running, watch.oldest(13.0), watch.stalled(13.0)) == (2, 2.0, True)
    assert watch.awaited
    watch.timed_out(last)
    assert not watch.awaited
    probe = watch.begin(20.0)
    assert (watch.running, watch.oldest(21.0), watch.stalled(21.0)) == (3, 10.0, True)
    watch.answered(probe)
    assert (watch.running, watch.oldest(22.0), watch.stalled(22.0)) == (0, 0.0, False)


def test_a_call_that_did_not_come_to_the_workers_says_nothing_of_others() -> None:
    watch = StallDetector(limit=5.0)
    late, unsent = watch.begin(0.0), watch.begin(1.0)
    watch.timed_out(late)
    watch.withdrawn(unsent)
    assert (watch.running, watch.oldest(2.0), watch.stalled(2.0)) == (1, 2.0, True)


def test_a_call_that_takes_longer_than_the_limit_stalls() -> None:
    watch = StallDetector(limit=5.0)
    number = watch.begin(0.0)
    assert not watch.stalled(4.9)
    assert watch.stalled(5.0)
    watch.answered(number)
    assert not watch.stalled(5.0)


def test_a_pool_that_is_being_restarted_answers_again_when_a_call_is_answered() -> None:
    pool: Any = SimpleNamespace(restarting=WorkerLostError(1, 4242, "killed"), status=list)
    watched = InstrumentedPool(pool, Metrics(list, "embedding"), ServiceLimits(16, 16, 60.0, 10.0))
    with pytest.raises(CallTimeoutError), watched.counted([3]):
        raise CallTimeoutError("step", 30.0, (), "not sent", {}, ())
    assert "the pool is being restarted after this: " in watched.stalled
    assert "4242" in watched.stalled
    pool.restarting = None
    assert watched.stalled
    with watched.counted([3]):
        pass
    assert watched.stalled == ""
