"""What ranks conclude from each other's checksums, worked out by hand; no rank is needed."""

from __future__ import annotations

import random

import pytest
import torch

from device_comm import ReduceOp
from device_comm.call_number import CollectiveLog, log_memory
from device_comm.divergence import DIGESTS, ComparedLog, Mismatch
from device_comm.shm.signature import sign
from shm_broadcast.layout import (
    COLLECTIVE_SIGNATURE,
    COLLECTIVE_STRIDE,
    COLLECTIVE_WORD,
    FINGERPRINT_ENTRIES,
    LOG_COUNT,
    LOG_ENTRIES,
)

SUM = sign("all_reduce", torch.float32, (4,), ReduceOp.SUM)
MAX = sign("all_reduce", torch.float32, (4,), ReduceOp.MAX)
DOUBLE = sign("all_reduce", torch.float64, (4,), ReduceOp.SUM)
BARRIER = sign("barrier")


def chain_of(*signatures: bytes) -> ComparedLog:
    chain = ComparedLog(3)
    for each in signatures:
        chain.add(each)
    return chain


def told(*signatures: bytes) -> CollectiveLog:
    """Another rank's log on the board."""
    log = CollectiveLog(log_memory(FINGERPRINT_ENTRIES))
    for each in signatures:
        log.add(each)
    return log


def test_ranks_that_call_the_same_agree_whoever_is_further() -> None:
    ours = chain_of(SUM, BARRIER, SUM)
    for n in range(1, 6):
        assert ours.compare(1, told(*[SUM, BARRIER, SUM, MAX, MAX][:n])) is None


def test_who_has_called_nothing_says_nothing() -> None:
    assert chain_of(SUM).compare(1, told()) is None
    assert ComparedLog(3).compare(1, told(SUM)) is None


@pytest.mark.parametrize("theirs", [MAX, DOUBLE, BARRIER])
@pytest.mark.parametrize("further", [0, 1, 2])
def test_the_first_other_call_is_shown_with_both_signatures(theirs: bytes, further: int) -> None:
    found = Mismatch(2, 2, SUM, theirs)
    rest = [SUM] * further
    assert chain_of(BARRIER, SUM, SUM).compare(1, told(BARRIER, theirs, *rest[1:])) == found
    assert chain_of(BARRIER, SUM, *rest).compare(1, told(BARRIER, theirs)) == found
    assert chain_of(BARRIER, SUM).compare(1, told(BARRIER, theirs, *rest[1:])) == found


def test_who_is_too_far_ahead_says_nothing() -> None:
    assert chain_of(BARRIER, SUM).compare(1, told(BARRIER, MAX, SUM, SUM, SUM)) is None


def test_ranks_that_have_differed_once_differ_for_good() -> None:
    ours, theirs = chain_of(SUM), told(MAX)
    for _ in range(100):
        assert ours.compare(1, theirs) is not None
        ours.add(BARRIER)
        theirs.add(BARRIER)


def test_of_an_older_difference_it_is_known_since_when_it_may_be() -> None:
    ours, theirs = chain_of(SUM, SUM), told(SUM, SUM)
    assert ours.compare(1, theirs) is None
    for called in (MAX, SUM, SUM, SUM):
        ours.add(SUM)
        theirs.add(called)
    assert ours.compare(1, theirs) == Mismatch(3, 6, b"", b"")
    assert ours.compare(2, theirs) == Mismatch(1, 6, b"", b"")  # told of the first time


def test_one_collective_less_is_a_difference_as_soon_as_another_follows() -> None:
    ours = chain_of(SUM, SUM, BARRIER)
    assert ours.compare(1, told(SUM)) is None
    assert ours.compare(1, told(SUM, BARRIER)) == Mismatch(2, 2, SUM, BARRIER)


@pytest.mark.parametrize(
    ("at", "torn"),
    [
        (LOG_COUNT, 2),  # the count is further than the entry
        (LOG_ENTRIES + COLLECTIVE_STRIDE + COLLECTIVE_WORD, 1),
        (LOG_ENTRIES + COLLECTIVE_STRIDE + COLLECTIVE_SIGNATURE, 7),
        (LOG_ENTRIES + COLLECTIVE_STRIDE + COLLECTIVE_SIGNATURE + 48, 7),
    ],
)
def test_what_is_torn_says_nothing(at: int, torn: int) -> None:
    theirs = told(DOUBLE)
    assert chain_of(SUM, SUM).compare(1, theirs) is not None
    theirs.memory[at] = torn
    assert chain_of(SUM, SUM).compare(1, theirs) is None


def test_what_is_too_long_ago_says_nothing() -> None:
    old, differs = told(SUM), told(MAX)
    ours = chain_of(SUM)
    for number in range(2, 3 * DIGESTS):
        ours.add(SUM)
        assert ours.compare(1, old) is None
        assert (ours.compare(1, differs) is not None) == (number <= DIGESTS)


def test_counts_go_on_after_32_bits() -> None:
    ours, theirs = ComparedLog(2), told()
    for log in (ours, theirs):
        log._words[0] = (1 << 32) - 1
        log._words[log._at(log.count) // 8] = 0xFFFFFFFF << 32
    for called in (SUM, BARRIER, SUM, MAX, SUM):
        ours.add(called)
        assert ours.compare(1, theirs) is None
        theirs.add(called)
        assert ours.compare(1, theirs) is None
    ours.add(SUM)
    theirs.add(MAX)
    assert ours.compare(1, theirs) == Mismatch((1 << 32) + 5, (1 << 32) + 5, SUM, MAX)


def test_whatever_is_told_when_only_what_differs_is_found() -> None:
    """Two ranks that call at random times, and hear of each other late, twice, or not at all."""
    rng = random.Random(3)
    kinds = [SUM, MAX, DOUBLE, BARRIER]
    for _ in range(300):
        called = [rng.choice(kinds) for _ in range(60)]
        slip_at = rng.choice([None, rng.randrange(60)])
        other = list(called)
        if slip_at is not None:
            other[slip_at] = rng.choice([each for each in kinds if each != called[slip_at]])
        ours, theirs = ComparedLog(2), told()
        news = [CollectiveLog(bytearray(theirs.memory))]
        while ours.count < 60 or theirs.count < 60:
            if ours.count < 60 and rng.random() < 0.5:
                ours.add(called[ours.count])
            elif theirs.count < 60:
                theirs.add(other[theirs.count])
                news.append(CollectiveLog(bytearray(theirs.memory)))
            heard = rng.choice(news)
            slip = ours.compare(1, heard)
            last = min(heard.count, ours.count)
            known = heard.count - last <= FINGERPRINT_ENTRIES - 2
            assert (slip is not None) == (slip_at is not None and slip_at < last and known)
            if slip is not None and slip_at is not None:
                assert slip.first <= slip_at + 1 <= slip.last
                if slip.theirs:
                    number = slip_at + 1
                    assert slip == Mismatch(number, number, called[slip_at], other[slip_at])
