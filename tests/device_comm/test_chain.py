"""What ranks conclude from each other's checksums, worked out by hand; no rank is needed."""

from __future__ import annotations

import random
from dataclasses import replace
from zlib import crc32

import pytest
import torch

from device_comm import ReduceOp
from device_comm.divergence import KEPT, Mismatch, RollingChecksum, first_difference
from device_comm.shm.signature import sign
from shm_broadcast.state.fingerprint import Fingerprint
from shm_broadcast.state.flight_recorder import OperationRecord

SUM = sign("all_reduce", torch.float32, (4,), ReduceOp.SUM)
MAX = sign("all_reduce", torch.float32, (4,), ReduceOp.MAX)
DOUBLE = sign("all_reduce", torch.float64, (4,), ReduceOp.SUM)
BARRIER = sign("barrier")


def chain_of(*signatures: bytes) -> RollingChecksum:
    chain = RollingChecksum(3)
    for each in signatures:
        chain.add(each)
    return chain


def told(chain: RollingChecksum, last: bytes = b"") -> Fingerprint:
    digest = chain.digest(chain.count)
    assert digest is not None
    return Fingerprint(7, chain.count & 0xFFFFFFFF, digest, last.rstrip(b"\0"))


def test_a_digest_is_the_checksum_of_all_signatures() -> None:
    chain = RollingChecksum(2)
    assert [chain.add(each) for each in (SUM, BARRIER)] == [crc32(SUM), crc32(SUM + BARRIER)]
    assert [chain.digest(n) for n in range(4)] == [0, crc32(SUM), crc32(SUM + BARRIER), None]
    assert chain.digest(-1) is None


def test_ranks_that_call_the_same_agree_whoever_is_further() -> None:
    ours = chain_of(SUM, BARRIER, SUM)
    for n in range(1, 6):
        assert ours.compare(1, told(chain_of(*[SUM, BARRIER, SUM, MAX, MAX][:n]))) is None


def test_who_has_called_nothing_says_nothing() -> None:
    assert chain_of(SUM).compare(1, Fingerprint(7, 0, 0, b"")) is None
    assert RollingChecksum(3).compare(1, told(chain_of(SUM))) is None
    assert chain_of(SUM).compare(1, Fingerprint(7, 0, 99, b"")) is None  # as nobody says it


@pytest.mark.parametrize("theirs", [MAX, DOUBLE, BARRIER])
def test_the_first_other_call_is_shown_with_both_signatures(theirs: bytes) -> None:
    ours = chain_of(BARRIER, SUM, SUM)
    assert ours.compare(1, told(chain_of(BARRIER, theirs), theirs)) == Mismatch(2, 2, SUM, theirs)


def test_ranks_that_have_differed_once_differ_for_good() -> None:
    ours, theirs = chain_of(SUM), chain_of(MAX)
    for _ in range(100):
        slip = ours.compare(1, told(theirs, BARRIER))
        assert slip is not None
        ours.add(BARRIER)
        theirs.add(BARRIER)


def test_of_a_later_difference_it_is_known_since_when_it_may_be() -> None:
    ours, theirs = chain_of(SUM, SUM), chain_of(SUM, SUM)
    assert ours.compare(1, told(theirs)) is None
    for called in (MAX, SUM, SUM):
        ours.add(SUM)
        theirs.add(called)
    assert ours.compare(1, told(theirs, SUM)) == Mismatch(3, 5, SUM, b"")
    assert ours.compare(2, told(theirs, SUM)) == Mismatch(1, 5, SUM, b"")  # told of the first time


def test_one_collective_less_is_a_difference_as_soon_as_another_follows() -> None:
    ours = chain_of(SUM, SUM, BARRIER)
    assert ours.compare(1, told(chain_of(SUM))) is None
    slip = ours.compare(1, told(chain_of(SUM, BARRIER), BARRIER))
    assert slip == Mismatch(2, 2, SUM, BARRIER)


@pytest.mark.parametrize("last", [b"", b"\1", MAX[:30] + SUM[30:], b"x" * 100, SUM])
def test_a_torn_signature_is_not_shown(last: bytes) -> None:
    slip = chain_of(SUM).compare(1, told(chain_of(DOUBLE), last))
    assert slip == Mismatch(1, 1, SUM, b"")


def test_what_is_too_long_ago_says_nothing() -> None:
    old, differs = told(chain_of(SUM)), told(chain_of(MAX))
    ours = chain_of(SUM)
    for number in range(2, 3 * KEPT):
        ours.add(SUM)
        assert ours.compare(1, old) is None
        assert (ours.compare(1, differs) is not None) == (number < KEPT)


def test_counts_begin_anew_after_32_bits() -> None:
    ours, theirs = RollingChecksum(2), RollingChecksum(2)
    for chain in (ours, theirs):
        chain.count = (1 << 32) - 3
    for called in (SUM, BARRIER, SUM, MAX, SUM):
        assert ours.compare(1, told(theirs)) is None
        ours.add(called)
        assert ours.compare(1, told(theirs)) is None
        theirs.add(called)
    ours.add(SUM)
    theirs.add(MAX)
    assert told(theirs).count == 3
    assert ours.compare(1, told(theirs, MAX)) == Mismatch(ours.count, ours.count, SUM, MAX)


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
        ours, theirs = RollingChecksum(2), RollingChecksum(2)
        news = [told(theirs)]
        while ours.count < 60 or theirs.count < 60:
            if ours.count < 60 and rng.random() < 0.5:
                ours.add(called[ours.count])
            elif theirs.count < 60:
                theirs.add(other[theirs.count])
                news.append(told(theirs, other[theirs.count - 1]))
            heard = rng.choice(news)
            slip = ours.compare(1, heard)
            differ = slip_at is not None and slip_at < heard.count <= ours.count
            assert (slip is not None) == differ
            if slip is not None and slip_at is not None:
                assert slip.first <= slip_at + 1 <= slip.last
                if slip.theirs:
                    number = slip_at + 1
                    assert slip == Mismatch(number, number, called[slip_at], other[slip_at])


# --- histories ------------------------------------------------------------------------------


def past(number: int, verb: str = "all_reduce", **other: object) -> OperationRecord:
    plain = OperationRecord(verb, "tp", number, None, "done", number, number, 16, None, "float32")
    return replace(plain, **other)


@pytest.mark.parametrize(
    "other",
    [
        past(3, "barrier"),
        past(3, dtype="float64"),
        past(3, size=8),
    ],
)
def test_histories_show_the_first_call_that_differs(other: OperationRecord) -> None:
    ours, theirs = [past(n) for n in range(1, 6)], [past(n) for n in range(2, 9)]
    assert first_difference(ours, theirs, "tp", 1) is None
    theirs[1] = other
    theirs[2] = past(4, "barrier")
    assert first_difference(ours, theirs, "tp", 1) == (past(3), other)
    assert first_difference(ours, theirs, "tp", 4) == (past(4), past(4, "barrier"))
    assert first_difference(ours, theirs, "tp", 5) is None


def test_a_root_is_compared_where_there_is_one() -> None:
    ours, theirs = past(1, "broadcast", peer=0), past(1, "broadcast", peer=1)
    assert first_difference([ours], [theirs], "tp", 1) == (ours, theirs)


def test_shares_of_different_sizes_and_messages_and_other_groups_are_no_difference() -> None:
    ours = [past(1, "all_gatherv"), past(2, "scatter", size=64), past(3, "send", peer=1)]
    theirs = [past(1, "all_gatherv", size=9), past(2, "scatter"), past(3, "recv", peer=0)]
    assert first_difference(ours, theirs, "tp", 1) is None
    assert first_difference([past(1)], [past(1, "barrier", group="pp")], "tp", 1) is None
