"""What signal handlers, and code that runs inside an operation, may do to a group's operations."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm.shm import shm_backend
from shm_broadcast import BoardHandle, GroupAbortedError
from tests.device_comm.meeting import meet, wait_for_abort
from tests.device_comm.shm_ranks import make_comm, shm_of
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 6 << 20
"""Elements of a tensor that takes longer than a signal."""


def on_alarm(do: Callable[[], object]) -> None:
    signal.signal(signal.SIGALRM, lambda *_: do())


# --- a handler calls the group whose call it interrupts ---------------------------------------


def nested(rank: int, n: int, path: str, board: BoardHandle, dtype: torch.dtype) -> list[str]:
    """Rank 1's handler calls the group while its own call waits; rank 0 makes both calls."""
    failures: list[str] = []

    def call(value: float, dtype: torch.dtype) -> None:
        try:
            comm.all_reduce(torch.full((4,), value * (rank + 1)).to(dtype))
        except (RuntimeError, GroupAbortedError) as error:
            failures.append(type(error).__name__)

    with make_comm(rank, board, path) as comm:
        comm.barrier()
        if rank == 1:
            on_alarm(lambda: call(10.0, torch.float32))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            wait_for_abort(comm.watch)
        call(1.0, dtype)
        if rank == 0:
            call(10.0, torch.float32)
    return failures


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_call_by_a_handler_is_not_mixed_up_with_the_one_it_interrupts(
    store_path: str, dtype: torch.dtype
) -> None:
    failures = run_ranks(2, nested, store_path, NEW_BOARD, dtype)
    assert failures == [["GroupAbortedError"] * 2, ["RuntimeError", "GroupAbortedError"]]


def calls_while_it_makes_room(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """What makes room for a large result is interrupted by a handler that calls the group."""
    with make_comm(rank, board, path) as comm:
        x, make = torch.full((LARGE,), rank + 1.0), shm_backend._recycled

        def interrupted(*args: Any) -> torch.Tensor:
            with pytest.raises(RuntimeError, match="interrupted"):
                comm.barrier()
            return make(*args)

        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(shm_backend, "_recycled", interrupted)
            else:
                wait_for_abort(comm.watch)
            with pytest.raises(GroupAbortedError):
                comm.all_reduce(x)


def test_a_call_while_room_is_made_for_a_result_ends_the_group(store_path: str) -> None:
    run_ranks(2, calls_while_it_makes_room, store_path, NEW_BOARD)


# --- a handler looks at an operation that its thread is waiting for ----------------------------


def looked_at(rank: int, n: int, path: str, board: BoardHandle) -> None:
    with make_comm(rank, board, path) as comm:
        seen: list[str] = []

        def look(work: object) -> None:
            seen.append(repr(work))
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

        for _ in range(20):
            x = torch.full((LARGE,), rank + 1.0)
            meet(rank, n, path)
            work = comm.all_reduce(x, async_op=True)
            if rank == 1:
                on_alarm(lambda work=work: look(work))  # type: ignore[misc]
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
            result = work.wait(30)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert result[0] == result[-1] == 3.0
        assert rank == 0 or any("under way" in each for each in seen)


def test_a_handler_may_look_at_the_operation_that_is_awaited(store_path: str) -> None:
    run_ranks(2, looked_at, store_path, NEW_BOARD)


# --- something raises in the middle of an operation --------------------------------------------


def raised_in_a_wait(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """A handler raises when a message is taken out: nobody must get the next one for it."""
    with make_comm(rank, board, path) as comm:
        if rank == 1:
            meet(rank, n, path)
            comm.send(torch.ones(5), 0)
            wait_for_abort(comm.watch)
            return
        end = shm_of(comm)._pipes.from_(1)
        find = end.find_mover

        def pull(*args: Any) -> int:
            mover = find()
            if mover is None or mover.pull(*args) == 0:
                return 0
            raise KeyboardInterrupt

        work = comm.irecv((5,), torch.float32, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(end, "find_mover", lambda: SimpleNamespace(pull=pull))
            meet(rank, n, path)
            with pytest.raises((KeyboardInterrupt, GroupAbortedError)):
                work.wait()
        for late in (work.wait, lambda: comm.recv((5,), torch.float32, 1)):
            with pytest.raises(GroupAbortedError, match="KeyboardInterrupt"):
                late()


def test_a_wait_that_was_interrupted_midway_ends_the_group(store_path: str) -> None:
    run_ranks(2, raised_in_a_wait, store_path, NEW_BOARD)


def raised_by_the_user(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """What is asked where the next message goes raises, in the background."""
    with make_comm(rank, board, path) as comm:
        places = [torch.empty(5)]

        def following() -> list[torch.Tensor]:
            if not places:
                raise ValueError("no more room")
            return [places.pop()]

        if rank == 1:
            comm.recv((1,), torch.float32, 0)
            comm.send(torch.ones(5), 0)
        else:
            comm.irecv_series(following, 1)
            comm.send(torch.ones(1), 1)
        wait_for_abort(comm.watch)
        with pytest.raises(GroupAbortedError, match="no more room"):
            comm.barrier()
        if rank == 0:
            thread = shm_of(comm)._execution._progress._thread
            assert thread is not None
            assert thread.is_alive()


def test_an_error_of_the_users_in_the_background_ends_the_group_and_not_the_thread(
    store_path: str,
) -> None:
    run_ranks(2, raised_by_the_user, store_path, NEW_BOARD)
