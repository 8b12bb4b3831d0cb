"""Making a communicator of NCCL step by step: what was begun is freed once, wherever it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from device_comm.cuda.nccl.core import NcclForming
from device_comm.cuda.nccl.library import NcclError, NcclResult

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, SPLIT = 1, 2
STEPS = ["init", "split", "made", "finalize"]


class Library:
    """Knows two communicators; a step may fail."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.freed: list[tuple[str, int]] = []

    def step(self, name: str) -> None:
        if name == self.fails:
            raise NcclError(name, NcclResult.REMOTE_ERROR)

    def begin_init(self, *_: object) -> int:
        return FIRST

    def async_result(self, comm: int) -> NcclResult:
        assert comm == FIRST
        self.step("init")
        return NcclResult.SUCCESS

    def begin_split(self, comm: int, rank: int) -> Callable[[], int]:
        assert (comm, rank) == (FIRST, 0)
        self.step("split")

        def made() -> int:
            self.step("made")
            return SPLIT

        return made

    def finalize(self, comm: int) -> None:
        assert comm == FIRST
        self.step("finalize")

    def destroy(self, comm: int) -> None:
        self.freed.append(("destroy", comm))

    def abort(self, comm: int) -> None:
        self.freed.append(("abort", comm))


def at_once(settled: Callable[[], bool]) -> None:
    assert settled()


def test_the_first_one_is_destroyed_when_the_second_is_there() -> None:
    library: Any = Library("")
    handle = NcclForming(library, 2, b"", 0).finish(at_once)
    assert library.freed == [("destroy", FIRST)]
    handle.issue(lambda _, comm: library.freed.append(("use", comm)))
    assert library.freed[1:] == [("use", SPLIT)]


@pytest.mark.parametrize("fails", STEPS)
def test_what_was_begun_is_aborted_once(fails: str) -> None:
    library: Any = Library(fails)
    forming = NcclForming(library, 2, b"", 0)
    with pytest.raises(NcclError, match=f"{fails}: REMOTE_ERROR"):
        forming.finish(at_once)
    forming.abort()
    begun = [SPLIT, FIRST] if fails == "finalize" else [FIRST]
    assert library.freed == [("abort", comm) for comm in begun]
