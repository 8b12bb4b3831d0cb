"""Errors keep their values across processes, and name rank, pid and age."""

from __future__ import annotations

import pickle

import pytest

from shm_broadcast import (
    CoordinatorError,
    DivergenceError,
    Failure,
    ForeignMemoryError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    MessageDecodeError,
    MessageRefusedError,
    MessageSealError,
    PeerLostError,
    PeerProtocolError,
    SharedMemoryError,
    TransportError,
    errors,
)

pytestmark = pytest.mark.quick

LOST = MemberStatus(3, 4242, "lost", "all_reduce", 1041, 2.13)
BUSY = MemberStatus(1, 77, "busy", "dequeue", 9, 0.04)

EVERY = [
    GroupTimeoutError("all_reduce", 2.0, (LOST, BUSY), "detail"),
    GroupTimeoutError("all_reduce", None),
    PeerLostError("dequeue", LOST),
    PeerProtocolError("recv", 4, "too large"),
    TransportError("connect", "refused"),
    GroupAbortedError("send", Failure(2, "ValueError", "no", 3)),
    GroupClosedError("closed"),
    DivergenceError(1, "all_reduce", "barrier"),
    SharedMemoryError("5 bytes"),
    ForeignMemoryError("pid 1 is no member"),
    MessageDecodeError("bad"),
    MessageRefusedError(3, "a socket"),
    MessageSealError(3, "not the next"),
]


def test_every_error_is_here() -> None:
    leaves = {
        each
        for each in vars(errors).values()
        if isinstance(each, type)
        and issubclass(each, CoordinatorError)
        and not each.__subclasses__()
    }
    assert {type(each) for each in EVERY} >= leaves


@pytest.mark.parametrize("error", EVERY, ids=lambda each: type(each).__name__)
def test_an_error_travels(error: CoordinatorError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert type(error).__name__ in (errors.__doc__ or "")


def test_an_error_that_does_not_keep_its_arguments_travels_as_exceptions_do() -> None:
    class Forgetful(CoordinatorError):
        def __init__(self, reason: str) -> None:
            super().__init__(f"for {reason}")

    error = Forgetful("nothing")
    assert error.__reduce__()[:2] == (Forgetful, ("for nothing",))


def test_builtin_classes_catch_what_they_should() -> None:
    assert issubclass(GroupTimeoutError, TimeoutError)
    assert issubclass(PeerLostError, ConnectionError)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            PeerLostError("tp:0 all_reduce", LOST),
            "tp:0 all_reduce: lost rank 3 (pid 4242), last seen in all_reduce #1041, 2.1 s ago",
        ),
        (
            GroupTimeoutError("enqueue", 0.5, (BUSY,), "rank 1 is 7 messages behind"),
            "enqueue: timed out after 0.5 s, waiting for rank 1 (pid 77), last seen in dequeue #9, "
            "0.0 s ago (rank 1 is 7 messages behind)",
        ),
        (GroupTimeoutError("enqueue", None), "enqueue: timed out"),
        (MemberStatus(2, 0, "absent"), "rank 2 (never joined)"),
        (MemberStatus(2, 5, "idle"), "rank 2 (pid 5), has begun no operation"),
        (
            MemberStatus(2, 5, "lost", age=1.25),
            "rank 2 (pid 5) is lost, has begun no operation, joined 1.2 s ago",
        ),
        (Failure(2, "ValueError", "no", 2), "rank 2 reported: ValueError: no"),
        (
            Failure(2, "PeerLost", "gone", 3),
            "rank 2 reported about rank 3: PeerLost: gone",
        ),
    ],
)
def test_a_text_names_the_rank_its_last_operation_and_the_limit(said: object, text: str) -> None:
    assert str(said) == text
