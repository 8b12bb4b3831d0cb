"""The pool's errors, and a worker's exception on its way to the caller."""

from __future__ import annotations

import pickle
import sys
import traceback
from typing import Any

import pytest

from server.control.protocol import describe, rebuild
from server.errors import (
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
from tests.server.workers import BadInputError, Unpicklable, UnpicklableError

STATUS = MemberStatus(1, 4242, "busy", "embed", 7, 2.5)


@pytest.mark.parametrize(
    "error",
    [
        WorkerError(1, "embed", "ValueError", "bad", "Traceback ..."),
        WorkerLostError(1, 4242, "killed by SIGSEGV", "Fatal Python error"),
        CallRefusedError(1),
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
    late = CallTimeoutError("embed", 2.0, (STATUS,), stacks={1: "in embed"})
    assert isinstance(late, TimeoutError)
    assert str(late) == f"embed: timed out after 2 s, waiting for {STATUS}"
    assert "Stack of rank 1:\nin embed" in "".join(traceback.format_exception(late))


def test_a_late_call_shows_the_stacks_of_those_that_hold_up_others_and_each_stack_once() -> None:
    stacks = {0: "in wait\n", 1: "in embed\n", 2: "in wait\n"}
    late = CallTimeoutError("embed", 2.0, (STATUS,), stacks=stacks, blocked_by=(1,))
    assert (late.stacks, late.__notes__) == (stacks, ["Stack of rank 1:\nin embed"])
    late = CallTimeoutError("embed", 2.0, (STATUS,), stacks=stacks, blocked_by=(3,))
    assert late.__notes__ == ["Stack of rank 0 and rank 2:\nin wait", "Stack of rank 1:\nin embed"]


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


@pytest.mark.parametrize(
    "error", [UnpicklableError(1, 2), ValueError(Unpicklable()), ValueError(lambda: None)]
)
def test_an_exception_that_cannot_be_pickled_comes_back_as_text(error: Exception) -> None:
    rebuilt = rebuild(describe(_raised(error), 1, 0), 0, "embed")
    assert rebuilt.__cause__ is None
    assert rebuilt.message == str(error)


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


def test_a_text_that_utf8_does_not_have_is_written_out() -> None:
    failed = describe(_raised(FileNotFoundError("no file \udce9")), 1, 0)
    assert failed.message == "no file \\udce9"
    assert "no file \\udce9" in failed.traceback


def test_an_exception_without_a_text_says_so() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise KeyError("mute")

    assert describe(_raised(MuteError()), 1, 0).message == "(no text: its __str__ raised KeyError)"


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


class LeavesWhenUnpickled(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


def test_an_exception_that_ends_who_unpickles_it_is_told_by_its_text() -> None:
    error = rebuild(describe(LeavesWhenUnpickled("late"), 1), 0, "embed")
    assert error.__cause__ is None
    assert "LeavesWhenUnpickled: late" in str(error)


def test_of_a_large_exception_the_ends_of_its_text_travel() -> None:
    failed = describe(ValueError("begin" + "x" * (1 << 21) + "end"), 1)
    error = rebuild(failed, 0, "embed")
    assert error.__cause__ is None
    assert failed.exception == b""
    assert failed.message.startswith("begin") and failed.message.endswith("end")
    assert f"\n... {(1 << 21) + 8 - (1 << 16)} characters are left out ...\n" in failed.message
    assert len(failed.message) + len(failed.traceback) < 3 << 16
