"""What members are told that have called different collectives; all of them are in one process."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
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
from device_comm.divergence import FingerprintBackend
from shm_broadcast import (
    Board,
    Deadline,
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
)
from shm_broadcast.state.fingerprint import Fingerprint, Fingerprints
from shm_broadcast.state.table import NoRemoteMembers
from tests.pages.blocks import block_of, without_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


RANKS = (4, 6, 9)
"""The members' global ranks."""

X = torch.ones(4)
DOCUMENTED = without_numbers(
    block_of("docs/hosts.md", "where this rank issued one of its collectives")
).splitlines()


class Late:
    """An operation that ends too late for this rank, which waits for all others."""

    def __init__(self, board: Board) -> None:
        self.board = board

    def ready(self) -> bool:
        return False

    def wait(self, deadline: Deadline) -> None:
        del deadline
        others = tuple(self.board.member_status(member) for member in (1, 2))
        raise GroupTimeoutError("tp all_reduce", 1.0, others, "detail") from ZeroDivisionError()


class Still(Backend):
    """One of several, whose operations do nothing."""

    def __init__(self, board: Board, rank: int) -> None:
        identity = Identity.of(rank, len(RANKS), name="tp", watch=board)
        super().__init__(identity, Capabilities("still", ALL_VERBS))
        self.started: list[str] = []
        self.pending: Late | None = None

    def start(self, operation: Operation) -> Late | None:
        self.started.append(operation.verb)
        return self.pending


class Group:
    """All members, on the boards of one host."""

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
    monkeypatch.setattr(divergence, "LOOK_SECONDS", 1e9)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As members on other hosts, whose entries a rank does not read in each collective."""
    monkeypatch.setattr(Fingerprints, "local_entry", lambda *_: 0)


def have_look(comm: Communicator) -> None:
    """The time has come to compare."""
    backend: Any = comm.backend
    backend._compare_at = 0.0
    backend.poll()


@pytest.mark.usefixtures("at_once")
def test_the_next_collective_tells_and_both_are_named(group: Group) -> None:
    group.all_reduce(times=16)
    group.comms[1].all_reduce(X.int())
    with pytest.raises(DivergenceError) as caught:
        group.comms[0].all_reduce(X)
    error = caught.value
    assert error.rank == RANKS[1]
    assert str(error) == (
        "rank 6 issued all_reduce SUM int32[4] where this rank issued all_reduce SUM float32[4], "
        "collective 17 of tp"
    )
    assert without_numbers(str(error)) in DOCUMENTED
    assert len(group.inner[0].started) == 16
    for comm in group.comms:
        with pytest.raises(GroupAbortedError, match="rank 4 reported: DivergenceError: rank 6"):
            comm.barrier()


@pytest.mark.usefixtures("when_told_to")
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_members_of_a_host_compare_each_collective_before_it_starts(
    group: Group, ahead: int
) -> None:
    group.all_reduce(times=16)
    group.comms[1].all_reduce(X.int())
    group.all_reduce(1, times=ahead)
    with pytest.raises(DivergenceError) as caught:
        group.comms[0].all_reduce(X)
    assert str(caught.value) == (
        "rank 6 issued all_reduce SUM int32[4] where this rank issued all_reduce SUM float32[4], "
        "collective 17 of tp"
    )
    assert len(group.inner[0].started) == 16


@pytest.mark.usefixtures("when_told_to", "unseen")
@pytest.mark.parametrize("later", [0, 1, 2])
def test_of_the_last_collectives_the_first_that_differs_is_named(group: Group, later: int) -> None:
    group.all_reduce(times=16)
    group.comms[1].all_reduce(X.int())
    group.all_reduce(0, 2)
    group.all_reduce(times=later)
    have_look(group.comms[2])
    failure = group.boards[0].aborted
    assert failure is not None
    assert (failure.rank, failure.kind) == (RANKS[2], "DivergenceError")
    assert failure.message == (
        "rank 6 issued all_reduce SUM int32[4] where this rank issued all_reduce SUM float32[4], "
        "collective 17 of tp"
    )


@pytest.mark.usefixtures("when_told_to", "unseen")
def test_otherwise_it_is_said_between_which_it_was(group: Group) -> None:
    group.all_reduce(times=10)
    have_look(group.comms[0])
    group.comms[1].all_reduce(X, op=ReduceOp.MAX)
    group.all_reduce(0, 2)
    group.all_reduce(times=3)
    have_look(group.comms[0])
    failure = group.boards[1].aborted
    assert failure is not None
    assert failure.message == (
        "rank 6 issued another collective where this rank issued one of its collectives 11 to 14 "
        "of tp, checked=True says which"
    )
    assert without_numbers(failure.message) in DOCUMENTED


@pytest.mark.usefixtures("unseen")
def test_comparing_is_due_ten_times_a_second(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(divergence, "time", SimpleNamespace(monotonic=lambda: now))
    group.all_reduce(times=2)
    group.comms[1].all_reduce(X.int())
    group.all_reduce(0)
    now += 0.09
    group.all_reduce(0)
    now += 0.02
    with pytest.raises(DivergenceError):
        group.all_reduce(0)


@pytest.mark.usefixtures("at_once")
def test_who_has_closed_the_group_is_missed_in_the_next_collective_only(group: Group) -> None:
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
def test_who_has_closed_a_group_that_was_aborted_is_not_why(
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


@pytest.mark.usefixtures("when_told_to")
def test_whoever_waits_for_who_has_closed_the_group_is_told(group: Group) -> None:
    group.all_reduce(times=3)
    group.comms[1].close()
    have_look(group.comms[0])
    assert group.boards[0].aborted is None
    group.all_reduce(0)
    have_look(group.comms[0])
    with pytest.raises(GroupClosedError, match="rank 6 has closed the group"):
        group.boards[0].wait(lambda: False, Deadline.after(30), "tp all_reduce", lambda: [1, 2])


@pytest.mark.usefixtures("unseen")
def test_whoever_waits_on_the_board_compares(group: Group) -> None:
    group.all_reduce()
    group.comms[1].barrier()
    group.all_reduce(0)
    with pytest.raises(GroupAbortedError, match="rank 6 issued barrier"):
        group.boards[0].wait(lambda: False, Deadline.after(30), "something", lambda: [2])


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


def test_a_group_outlives_its_board() -> None:
    with ExitStack() as stack:
        group = Group(stack)
        group.boards[1].close()


@pytest.mark.usefixtures("at_once")
def test_what_is_heard_of_other_hosts_is_compared(group: Group) -> None:
    there = group.boards[1]

    class Heard(NoRemoteMembers):
        """Of member 1, nothing yet, and then what it told some time ago."""

        told: Sequence[Fingerprint] = ()

        def fingerprints(self, member: int) -> Any:
            return self.told if member == 1 else None

    heard = Heard()
    group.boards[0].set_remote_members(heard)
    group.comms[1].barrier()
    group.all_reduce(0)
    heard.told = there.fingerprints.of_member(1)
    group.comms[1].close()
    with pytest.raises(DivergenceError, match="rank 6 issued barrier where this rank issued all_r"):
        group.all_reduce(0)


@pytest.mark.usefixtures("at_once")
def test_what_is_captured_is_not_counted(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may capture more often than others what it replays as often as they."""
    backend: Any = group.comms[0].backend
    backend._on_device = True
    captured = iter([True, False, False])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", captured.__next__)
    group.all_reduce(0, times=2)
    group.all_reduce(1, 2)
    group.all_reduce()
    assert [len(each.started) for each in group.inner] == [3, 2, 2]
