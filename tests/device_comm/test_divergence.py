"""How calls are compared: what ranks conclude from fingerprints, and what members are told."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import (
    ALL_VERBS,
    Backend,
    Capabilities,
    Communicator,
    Identity,
    Operation,
    ReduceOp,
    divergence,
)
from device_comm.call_number import (
    CALL_ENTRIES,
    CollectiveLog,
    OperationCounts,
    call_number,
    log_memory,
)
from device_comm.divergence import DIGESTS, ComparedLog, FingerprintBackend, Mismatch
from device_comm.shm.signature import sign
from shm_broadcast import (
    Board,
    Deadline,
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
)
from shm_broadcast.layout import (
    COLLECTIVE_SIGNATURE,
    COLLECTIVE_STRIDE,
    COLLECTIVE_WORD,
    FINGERPRINT_ENTRIES,
    LOG_COUNT,
    LOG_ENTRIES,
)
from shm_broadcast.state.fingerprint import Fingerprints
from tests.calls import in_call
from tests.pages.blocks import block_of, without_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


pytestmark = pytest.mark.quick

# --- What ranks begin in a call ------------------------------------------------------------------

N = 2


def test_every_thread_has_a_call_of_its_own() -> None:
    seen: list[int] = []
    with in_call(7):
        assert call_number() == 7
        thread = threading.Thread(target=lambda: seen.append(call_number()))
        thread.start()
        thread.join()
    assert seen == [0]
    assert call_number() == 0


def test_operations_outside_of_calls_do_not_count() -> None:
    begun = OperationCounts(N)
    begun.add(sign("all_reduce"))
    begun.count_sent(1)
    assert begun.take() == (b"", ())
    with in_call(1):
        for verb in ("all_reduce", "barrier", "all_reduce"):
            begun.add(sign(verb))
        begun.count_sent(1)
        begun.count_received(0)
    taken, messages = begun.take()
    log = CollectiveLog(bytearray(taken))
    signatures = [log.signature(number) for number in range(5)]
    assert signatures == [b"", sign("all_reduce"), sign("barrier"), sign("all_reduce"), b""]
    assert (log.count, messages) == (3, (0, 1, 1, 0))
    assert begun.take() == (b"", ())


def test_the_last_collectives_are_kept_in_order() -> None:
    begun = OperationCounts(N)
    signatures = [sign("all_reduce", torch.float32, (n,)) for n in range(20)]
    with in_call(1):
        for signature in signatures:
            begun.add(signature)
    log = CollectiveLog(bytearray(begun.take()[0]))
    kept = [log.signature(n + 1) for n in range(20)]
    assert kept == [b""] * (20 - CALL_ENTRIES) + signatures[20 - CALL_ENTRIES :]


# --- What ranks conclude from fingerprints of each other's calls; by hand ------------------------

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
    log = CollectiveLog(log_memory(FINGERPRINT_ENTRIES))
    for each in signatures:
        log.add(each)
    return log


def test_of_an_older_difference_the_range_is_known() -> None:
    ours, theirs = chain_of(SUM, SUM), told(SUM, SUM)
    assert ours.compare(1, theirs) is None
    for called in (MAX, SUM, SUM, SUM):
        ours.add(SUM)
        theirs.add(called)
    assert ours.compare(1, theirs) == Mismatch(3, 6, b"", b"")
    assert ours.compare(2, theirs) == Mismatch(1, 6, b"", b"")  # told of the first time


@pytest.mark.parametrize(
    ("at", "torn"),
    [
        (LOG_COUNT, 2),  # the count is further than the entry
        (LOG_ENTRIES + COLLECTIVE_STRIDE + COLLECTIVE_WORD, 1),
        (LOG_ENTRIES + COLLECTIVE_STRIDE + COLLECTIVE_SIGNATURE, 7),
        (LOG_ENTRIES + COLLECTIVE_STRIDE + COLLECTIVE_SIGNATURE + 48, 7),
    ],
)
def test_a_torn_log_shows_no_difference(at: int, torn: int) -> None:
    theirs = told(DOUBLE)
    assert chain_of(SUM, SUM).compare(1, theirs) is not None
    theirs.memory[at] = torn
    assert chain_of(SUM, SUM).compare(1, theirs) is None


def test_a_log_too_far_behind_shows_no_difference() -> None:
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


def test_random_calls_and_late_news_show_every_difference_and_no_other() -> None:
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


# --- What members are told; all of them are in this process --------------------------------------

RANKS = (4, 6, 9)
"""The members' global ranks."""
X = torch.ones(4)
DOCUMENTED = without_numbers(
    block_of("docs/hosts.md", "where this rank issued one of its collectives")
).splitlines()


class Late:
    def __init__(self, board: Board) -> None:
        self.board = board

    def ready(self) -> bool:
        return False

    def wait(self, deadline: Deadline) -> None:
        del deadline
        others = tuple(self.board.member_status(member) for member in (1, 2))
        raise GroupTimeoutError("tp all_reduce", 1.0, others, "detail") from ZeroDivisionError()


class Still(Backend):
    def __init__(self, board: Board, rank: int) -> None:
        identity = Identity.of(rank, len(RANKS), name="tp", watch=board)
        super().__init__(identity, Capabilities("still", ALL_VERBS))
        self.started: list[str] = []
        self.pending: Late | None = None

    def start(self, operation: Operation) -> Late | None:
        self.started.append(operation.verb)
        return self.pending


class Group:
    def __init__(
        self, stack: ExitStack, tokens: Sequence[bytes] = (b"one", b"one", b"one")
    ) -> None:
        first = stack.enter_context(Board.create(len(RANKS), 0, "", RANKS))
        others = [Board.attach(first.handle(), member) for member in range(1, len(RANKS))]
        self.boards = [first, *(stack.enter_context(each) for each in others)]
        self.inner = [Still(board, rank) for rank, board in enumerate(self.boards)]
        self.comms = [
            Communicator(FingerprintBackend(inner, board, token))
            for inner, board, token in zip(self.inner, self.boards, tokens, strict=True)
        ]
        for comm in self.comms:
            stack.enter_context(comm)

    def all_reduce(self, *members: int, times: int = 1) -> None:
        for _ in range(times):
            for member in members or range(len(RANKS)):
                self.comms[member].all_reduce(X)


@pytest.fixture
def group() -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(stack)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "LOOK_SECONDS", 0.0)


@pytest.fixture
def when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare by `have_look` only."""
    monkeypatch.setattr(divergence, "LOOK_SECONDS", 1e9)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As members on other hosts, whose entries a rank does not read in each collective."""
    monkeypatch.setattr(Fingerprints, "local_entry", lambda *_: 0)


def have_look(comm: Communicator) -> None:
    backend: Any = comm.backend
    backend._compare_at = 0.0
    backend.poll()


ISSUED = (
    "rank 6 issued all_reduce SUM int32[4] where this rank issued all_reduce SUM float32[4], "
    "collective 17 of tp"
)


@pytest.mark.usefixtures("when_told_to")
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_the_next_collective_raises_and_names_both(group: Group, ahead: int) -> None:
    """Members of one host compare each collective before it starts."""
    group.all_reduce(times=16)
    group.comms[1].all_reduce(X.int())
    group.all_reduce(1, times=ahead)
    with pytest.raises(DivergenceError) as caught:
        group.comms[0].all_reduce(X)
    assert caught.value.rank == RANKS[1]
    assert str(caught.value) == ISSUED
    assert without_numbers(ISSUED) in DOCUMENTED
    assert len(group.inner[0].started) == 16
    for comm in group.comms:
        with pytest.raises(GroupAbortedError, match="rank 4 reported: DivergenceError: rank 6"):
            comm.barrier()


@pytest.mark.usefixtures("when_told_to", "unseen")
@pytest.mark.parametrize("later", [0, 2, 3])
def test_between_hosts_the_first_recent_difference_is_named(group: Group, later: int) -> None:
    group.all_reduce(times=16)
    have_look(group.comms[0])
    group.comms[1].all_reduce(X.int())
    group.all_reduce(0, 2)
    group.all_reduce(times=later)
    have_look(group.comms[0])
    failure = group.boards[1].aborted
    assert failure is not None
    assert (failure.rank, failure.kind) == (RANKS[0], "DivergenceError")
    if later == 3:  # too long ago
        assert failure.message == (
            "rank 6 issued another collective where this rank issued one of its collectives "
            "17 to 20 of tp, checked=True says which"
        )
        assert without_numbers(failure.message) in DOCUMENTED
    else:
        assert failure.message == ISSUED


@pytest.mark.usefixtures("at_once")
def test_a_member_that_has_closed_is_named_at_the_next_collective_only(group: Group) -> None:
    group.all_reduce(times=3)
    group.comms[1].all_reduce(X)
    group.comms[1].close()
    group.all_reduce(0)
    with pytest.raises(GroupClosedError) as caught:
        group.all_reduce(0)
    assert str(caught.value) == "tp all_reduce: rank 6 has closed the group"
    assert caught.value.rank == 6
    with pytest.raises(GroupAbortedError, match="rank 4 reported about rank 6: GroupClosedError"):
        group.comms[2].barrier()


@pytest.mark.usefixtures("at_once")
def test_a_close_after_an_abort_is_not_the_reason(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_before_the_abort(operation: str) -> None:
        del operation

    group.all_reduce(times=3)
    group.boards[2].abort("another reason")
    group.comms[1].close()
    monkeypatch.setattr(group.boards[0], "check", check_before_the_abort)
    group.all_reduce(0)
    assert group.boards[0].aborted is not None
    assert group.boards[0].aborted.message == "another reason"


@pytest.mark.usefixtures("at_once")
def test_tensors_without_elements_count_and_messages_do_not(group: Group) -> None:
    zero, one, two = group.comms
    for comm in (zero, one, two):
        comm.all_gatherv([], 0)
        assert comm.all_reduce(X[:0]).shape == (0,)
    zero.send(X, 1)
    zero.send(X[:0], 1)
    one.recv(X.shape, X.dtype, 0)
    group.all_reduce()
    assert group.inner[2].started == ["all_reduce"]
    one.all_reduce(X[:0])
    with pytest.raises(DivergenceError, match=r"rank 6 issued all_reduce SUM float32\[0\] where"):
        zero.all_reduce(X)


@pytest.mark.usefixtures("at_once")
def test_groups_are_not_compared_with_others_and_closed_ones_do_not_compare() -> None:
    with ExitStack() as stack:
        group = Group(stack, (b"one", b"one", b"another"))
        group.comms[2].barrier()
        group.all_reduce(0, 1)
        group.comms[1].close()
        assert not group.boards[1].fingerprints.comparing
        told = [group.boards[0].fingerprints.of_member(member) for member in range(3)]
        assert [[each.closed for each in of] for of in told] == [[False], [True], [False]]


def test_a_rank_explains_where_its_calls_are_not_compared(group: Group) -> None:
    board, comms = group.boards[0], group.comms
    assert not any("not used" in str(comm.explain()) for comm in comms)
    while board.fingerprints.allocate(1):
        pass
    with Communicator(FingerprintBackend(Still(board, 0), board, b"another")) as comm:
        (refused,) = comm.explain().unavailable
    assert refused[0] == "comparison"
    assert refused[1].startswith("this rank has 32 other open groups in which calls are compared")


@pytest.mark.usefixtures("when_told_to")
def test_a_deadline_names_those_that_have_not_begun_the_collective(group: Group) -> None:
    def behind() -> list[int]:
        with pytest.raises(GroupTimeoutError) as caught:
            pending.wait(Deadline.after(1))
        error = caught.value
        assert (error.operation, error.timeout, error.detail) == ("tp all_reduce", 1.0, "detail")
        assert isinstance(error.__cause__, ZeroDivisionError)
        return [status.rank for status in error.waiting_for]

    group.all_reduce()
    group.inner[0].pending = Late(group.boards[0])
    pending: Any = group.comms[0].backend.start(Operation("all_reduce", X, X, shape=X.shape))
    assert behind() == [6, 9]
    group.all_reduce(1)
    assert behind() == [9]
    group.all_reduce(1)
    group.comms[1].send(X, 0)
    assert behind() == [9]  # the other one is further
    group.all_reduce(2)
    assert behind() == [6, 9]  # all have begun it, and all are waited for


@pytest.mark.usefixtures("at_once")
def test_captured_calls_are_not_counted(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may capture more often than others what it replays as often as they."""
    backend: Any = group.comms[0].backend
    backend._on_device = True
    captured = iter([True, False, False])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", captured.__next__)
    group.all_reduce(0, times=2)
    group.all_reduce(1, 2)
    group.all_reduce()
    assert [len(each.started) for each in group.inner] == [3, 2, 2]
