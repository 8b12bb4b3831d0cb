"""The errors of calls: how they travel, what they say, and how a divergence is found."""

from __future__ import annotations

import pickle
import sys
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import ReduceOp
from device_comm.call_number import CollectiveLog, log_memory
from device_comm.operation import Operation
from device_comm.shm.signature import sign, signature_text, signature_with_sizes
from server.calls.pending_call import Difference, fatal_divergence, first_divergence
from server.control.protocol import describe, rebuild
from server.errors import (
    CallDivergedError,
    CallRefusedError,
    CallTimeoutError,
    DescriptorLimitError,
    HostError,
    PoolClosedError,
    ProcessLimitError,
    QueueFullError,
    StreamLostError,
    WorkerError,
    WorkerLostError,
    WorkerStartError,
    again,
)
from shm_broadcast import Failure, GroupAbortedError, GroupTimeoutError, MemberStatus, PeerLostError
from shm_broadcast.layout import FINGERPRINT_ENTRIES
from shm_broadcast.state.fingerprint import Fingerprint
from tests.server.book import begun
from tests.server.workers import BadInputError, Unpicklable, UnpicklableError

if TYPE_CHECKING:
    from coordinator.call_counts import GroupOperationCounts

pytestmark = pytest.mark.quick

STATUS = MemberStatus(1, 4242, "busy", "embed", 7, 2.5)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError(1, "embed", "ValueError", "bad", "Traceback ..."),
        WorkerLostError(1, 4242, "killed by SIGSEGV", "Fatal Python error"),
        CallRefusedError(1),
        CallDivergedError(3, "forward", "tp", (0, 1), ("began 1 barrier", "began no barrier")),
        WorkerStartError(1, "ValueError: bad", "Traceback ..."),
        CallTimeoutError("embed", 2.0, (STATUS,), "why", {1: 'File "x.py", line 1 in embed'}, (0,)),
        PoolClosedError("the pool was shut down"),
        QueueFullError(3, 9, 10),
        HostError(1, "node 1 did not connect in 2 s", absent=True),
        DescriptorLimitError(1024, 2000),
        ProcessLimitError(100),
    ],
)
def test_errors_survive_pickling_and_raising_again(error: Exception) -> None:
    for copy in (pickle.loads(pickle.dumps(error)), again(error)):
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)
        assert "".join(traceback.format_exception(copy)) == "".join(
            traceback.format_exception(error)
        )


def test_an_error_again_keeps_its_cause_and_leaves_the_original_alone() -> None:
    error = WorkerError(1, "embed", "ValueError", "bad", "where it was")
    error.__cause__ = ValueError("bad")
    copy = again(error, "and a note")
    assert copy is not error
    assert copy.__cause__ is error.__cause__
    assert copy.__notes__[-1] == "and a note"
    assert "and a note" not in error.__notes__
    other = KeyError("not ours")
    assert again(other, "note") is other


def test_the_texts_name_rank_process_method_and_stack() -> None:
    lost = WorkerLostError(1, 4242, "killed by SIGKILL")
    assert str(lost) == "lost the worker of rank 1 (pid 4242): killed by SIGKILL"
    diverged = CallDivergedError(3, "forward", "tp", (0, 1), ("began 1 barrier", "began none"))
    assert str(diverged) == (
        "call 3 (forward): in group tp, rank 0 began 1 barrier where rank 1 began none"
    )
    late = CallTimeoutError("embed", 2.0, (STATUS,), stacks={1: "in embed"})
    assert isinstance(late, TimeoutError)
    assert str(late) == f"embed: timed out after 2 s, waiting for {STATUS}"
    assert "Stack of rank 1:\nin embed" in "".join(traceback.format_exception(late))


@pytest.mark.parametrize(
    ("blocked_by", "notes"),
    [
        (1, ["Stack of rank 1:\nin embed"]),
        (3, ["Stack of rank 0 and rank 2:\nin wait", "Stack of rank 1:\nin embed"]),
    ],
)
def test_a_late_call_shows_each_stack_once(blocked_by: int, notes: list[str]) -> None:
    stacks = {0: "in wait\n", 1: "in embed\n", 2: "in wait\n"}
    late = CallTimeoutError("embed", 2.0, (STATUS,), stacks=stacks, blocked_by=(blocked_by,))
    assert (late.stacks, late.__notes__) == (stacks, notes)


def _raised(error: BaseException) -> BaseException:
    with pytest.raises(type(error)) as raised:
        raise error
    return raised.value


def test_an_exception_comes_back_with_its_type_text_and_traceback() -> None:
    failed = describe(_raised(BadInputError("line 3")), number=5)
    assert (failed.number, failed.consequence) == (5, False)
    error = rebuild(failed, 1, "embed")
    assert str(error) == "rank 1 failed in embed: tests.server.workers.BadInputError: line 3"
    assert "in _raised" in error.traceback
    assert isinstance(error.__cause__, BadInputError)
    assert error.__cause__.args == ("line 3",)
    assert "in _raised" in "".join(traceback.format_exception(error))


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("mute")


class LeavesWhenUnpickledError(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UnpicklableError(1, 2), "1 and 2"),
        (ValueError(Unpicklable()), "<tests.server.workers.Unpicklable object"),
        (ValueError(lambda: None), "<function <lambda>"),
        (LeavesWhenUnpickledError("late"), "late"),
        (FileNotFoundError("no file \udce9"), "no file \\udce9"),
        (MuteError(), "(no text: its __str__ raised KeyError)"),
    ],
)
def test_an_exception_that_cannot_travel_comes_back_as_text(error: Exception, text: str) -> None:
    rebuilt = rebuild(describe(_raised(error), 1, 0), 0, "embed")
    assert rebuilt.message.startswith(text)
    assert type(error).__name__ in str(rebuilt)
    assert "in _raised" in rebuilt.traceback
    assert isinstance(rebuilt.__cause__, FileNotFoundError | MuteError | None)


def test_an_exception_of_a_class_that_the_driver_lacks_comes_back_as_text() -> None:
    failed = describe(_raised(ValueError("x")), 1, 0)
    foreign = type(failed)(
        1,
        0,
        "gone.Error",
        "x",
        "trace",
        exception=pickle.dumps(BadInputError).replace(b"Bad", b"Odd"),
    )
    assert rebuild(foreign, 0, "embed").__cause__ is None


def test_an_error_wrapped_around_anothers_failure_is_a_consequence() -> None:
    lost = RuntimeError("step failed")
    lost.__cause__ = PeerLostError("all_reduce", STATUS)
    outer = ValueError("while handling")
    outer.__context__ = lost
    assert describe(_raised(outer), 1, 0).consequence


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (GroupAbortedError("all_reduce", Failure(1, "E", "text", 1)), True),
        (GroupAbortedError("all_reduce", Failure(0, "PeerLostError", "text", 1)), True),
        (GroupAbortedError("all_reduce", Failure(1, "E", "text", 0)), True),
        (GroupAbortedError("all_reduce", Failure(0, "E", "its own thread's", 0)), False),
        (GroupTimeoutError("all_reduce", 1.0), False),
        (ConnectionError("reset"), False),
        (CallRefusedError(), False),
        (CallRefusedError(0), True),
    ],
)
def test_only_what_another_rank_caused_is_a_consequence(error: Any, consequence: bool) -> None:
    assert describe(_raised(error), 1, rank=0).consequence is consequence


def test_a_refusal_travels_as_what_it_was_raised_from() -> None:
    refusal = CallRefusedError()
    refusal.__cause__ = _raised(BadInputError("no such word"))
    told = describe(_raised(refusal), 1, 3)
    assert (told.kind, told.message) == ("tests.server.workers.BadInputError", "no such word")
    assert not told.consequence
    assert isinstance(rebuild(told, 0, "embed").__cause__, BadInputError)
    passed_on = describe(_raised(CallRefusedError(0)), 1, 4)
    assert passed_on.message == "rank 0 has refused the call"


def test_a_lost_stream_is_what_it_is_called() -> None:
    error = rebuild(describe(_raised(StreamLostError("count")), 1), 0, "count")
    assert type(error) is StreamLostError
    assert (error.method, str(error)) == ("count", str(StreamLostError("count")))


def test_of_a_large_exception_the_ends_of_its_text_travel() -> None:
    failed = describe(ValueError("begin" + "x" * (1 << 21) + "end"), 1)
    error = rebuild(failed, 0, "embed")
    assert error.__cause__ is None
    assert failed.exception == b""
    assert failed.message.startswith("begin") and failed.message.endswith("end")
    assert f"\n... {(1 << 21) + 8 - (1 << 16)} characters are left out ...\n" in failed.message
    assert len(failed.message) + len(failed.traceback) < 3 << 16


# Whether ranks have begun the same operations in a call.

F32 = sign("all_reduce", torch.float32, (4,), ReduceOp.SUM)

UNLIKE = {
    "dtype": sign("all_reduce", torch.int32, (4,), ReduceOp.SUM),
    "shape": sign("all_reduce", torch.float32, (2, 2), ReduceOp.SUM),
    "reduction": sign("all_reduce", torch.float32, (4,), ReduceOp.MAX),
}


def gathered(*sizes: int) -> tuple[GroupOperationCounts, ...]:
    operation = Operation("all_gatherv", torch.ones(1), output_sizes=sizes, shape=(-1,))
    return begun((0, 1), signatures=(signature_with_sizes(operation),))


def swapped(gives: tuple[int, ...], takes: tuple[int, ...]) -> tuple[GroupOperationCounts, ...]:
    operation = Operation(
        "all_to_all", torch.ones(4), source_sizes=gives, output_sizes=takes, shape=(-1,)
    )
    return begun((0, 1), signatures=(signature_with_sizes(operation),))


def rooted(verb: str, place: int) -> tuple[GroupOperationCounts, ...]:
    return begun((0, 1), signatures=(sign(verb, torch.float32, (2, 2), None, place),))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ()),
        (begun((0, 1), all_reduce=3, barrier=1), begun((0, 1), all_reduce=3, barrier=1)),
        (gathered(1, 3), gathered(1, 3)),
        (swapped((1, 3), (1, 2)), swapped((2, 2), (3, 2))),  # an all-to-all's parts may differ
        (rooted("broadcast", 1), rooted("broadcast", 1)),
    ],
)
def test_ranks_that_did_the_same_agree(
    first: tuple[GroupOperationCounts, ...], second: tuple[GroupOperationCounts, ...]
) -> None:
    assert first_divergence({}) is None
    assert first_divergence({0: first, 1: second}) is None


REST = (sign("barrier"),) * 20


@pytest.mark.parametrize(
    ("first", "second", "did"),
    [
        (
            begun((0, 1), all_reduce=3, barrier=1),
            begun((0, 1), all_reduce=2, barrier=1),
            ("all_reduce (collective 3)", "barrier (collective 3)"),
        ),
        (
            begun((0, 1), all_reduce=2),
            begun((0, 1), all_reduce=3),
            ("2 collectives", "all_reduce (collective 3)"),
        ),
        (
            (),
            begun((0, 1), broadcast=1),
            ("no collective", "broadcast from rank 0 (collective 1)"),
        ),
        (
            begun((0, 1), all_reduce=1),
            begun((0, 1), broadcast=1),
            ("all_reduce (collective 1)", "broadcast from rank 0 (collective 1)"),
        ),
        (
            begun((0, 1), signatures=(F32, UNLIKE["dtype"], *REST)),
            begun((0, 1), signatures=(UNLIKE["dtype"], F32, *REST)),
            ("22 collectives", "22 others: they differ before the last 8"),
        ),
        (
            gathered(1, 3),
            gathered(2, 2),
            (
                "all_gatherv float32[-1] (collective 1)",
                "all_gatherv float32[-1] (collective 1), of other sizes",
            ),
        ),
    ],
)
def test_the_first_collective_that_differs_is_named_with_both_ranks(
    first: tuple[GroupOperationCounts, ...],
    second: tuple[GroupOperationCounts, ...],
    did: tuple[str, str],
) -> None:
    began = f"began {did[0]}", f"began {did[1]}"
    assert first_divergence({0: first, 1: second}) == Difference("tp", (0, 1), began)


def test_another_root_dimension_or_group_of_the_same_ranks_differs() -> None:
    for verb in ("broadcast", "all_gather"):
        assert first_divergence({0: rooted(verb, 0), 1: rooted(verb, 1)}) is not None
    two_groups = begun((0, 1), number=0, barrier=1) + begun((0, 1), number=1, all_reduce=1)
    one_group = begun((0, 1), number=0, barrier=1, all_reduce=1)
    assert first_divergence({0: two_groups, 1: one_group}) is not None


def test_a_rank_without_a_report_is_not_compared() -> None:
    did = begun((0, 1, 2), all_reduce=1)
    assert first_divergence({0: did, 2: did}) is None
    assert first_divergence({0: did, 2: ()}) is not None


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("n_before", [0, 7, 20])
def test_a_collective_of_another_kind_is_named_with_the_odd_rank(what: str, n_before: int) -> None:
    before = (sign("barrier"),) * n_before
    same = begun((0, 1, 2), signatures=(*before, F32, F32))
    odd = begun((0, 1, 2), signatures=(*before, UNLIKE[what], F32))
    found = first_divergence({0: odd, 1: same, 2: same})
    number = n_before + 1
    assert found == Difference(
        "tp",
        (1, 0),
        (
            f"began {signature_text(F32)} (collective {number})",
            f"began {signature_text(UNLIKE[what])} (collective {number})",
        ),
    )


def test_groups_are_compared_apart() -> None:
    reports = {rank: begun((0, 1), all_reduce=2) for rank in (0, 1)}
    reports |= {rank: begun((2, 3), all_reduce=5) for rank in (2, 3)}
    assert first_divergence(reports) is None
    reports[3] = begun((2, 3), all_reduce=4)
    found = first_divergence(reports)
    assert found is not None
    assert found.ranks == (2, 3)


def test_messages_are_compared_by_pair_and_direction() -> None:
    """Ranks 4 and 6 are 0 and 1 in their group."""
    sends = begun((4, 6), "pp", sent={1: 2}, received={1: 1})
    takes = begun((4, 6), "pp", sent={0: 1}, received={0: 2})
    assert first_divergence({4: sends, 5: (), 6: takes}) is None
    fewer = begun((4, 6), "pp", sent={0: 1}, received={0: 1})
    assert first_divergence({4: sends, 6: fewer}) == Difference(
        "pp", (4, 6), ("sent 2 messages to rank 6", "received 1 message from it")
    )
    silent = begun((4, 6), "pp", received={0: 2})
    assert first_divergence({4: sends, 6: silent}) == Difference(
        "pp", (6, 4), ("sent no messages to rank 4", "received 1 message from it")
    )


def tally(*signatures: bytes, group: int = 9) -> tuple[Fingerprint, ...]:
    """On the board: a member's collectives after four barriers."""
    log = CollectiveLog(log_memory(FINGERPRINT_ENTRIES))
    for each in (*(sign("barrier"),) * 4, *signatures):
        log.add(each)
    return (Fingerprint(group, bytes(log.memory)),)


WIDER = sign("all_reduce", torch.float32, (8,), ReduceOp.SUM)

NARROW_AND_WIDE = "began all_reduce SUM float32[4]", "began all_reduce SUM float32[8]"


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("further", [0, 1, 3])
def test_the_odd_rank_is_named_whichever_rank_ends(rank: int, further: int) -> None:
    ahead = (F32,) * further
    rests = [() if each == rank else ahead for each in range(3)]
    fingerprints = {
        0: tally(WIDER, *rests[0]),
        1: tally(F32, *rests[1]),
        2: tally(F32, *rests[2]),
    }
    assert fatal_divergence(rank, "tp all_reduce", fingerprints) == Difference(
        "tp", (1, 0), NARROW_AND_WIDE
    )


def test_a_collective_behind_others_that_differ_is_not_the_difference() -> None:
    fingerprints = {0: tally(WIDER, F32), 1: tally(F32, F32)}
    assert fatal_divergence(0, "tp all_reduce", fingerprints) == Difference(
        "tp", (0, 1), (NARROW_AND_WIDE[0], f"{NARROW_AND_WIDE[0]}, after others")
    )


@pytest.mark.parametrize(
    ("operation", "other"),
    [
        ("tp all_reduce", tally(F32)),  # the same
        ("tp all_reduce", tally()),  # not as far
        ("tp all_reduce", tally(WIDER, F32, F32, F32, F32)),  # too far ahead
        ("tp all_reduce", tally(WIDER, group=8)),
        ("tp all_reduce", ()),
        ("tp barrier", tally(WIDER)),  # it has ended in another one
        ("dequeue", tally(WIDER)),
        ("", tally(WIDER)),
    ],
)
def test_a_rank_that_ends_where_nothing_differs_is_lost(
    operation: str, other: tuple[Fingerprint, ...]
) -> None:
    assert fatal_divergence(0, operation, {0: tally(F32), 1: other}) is None
