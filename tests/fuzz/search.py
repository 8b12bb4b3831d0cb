"""Looking for an example that fails, and for the shortest one that still does."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.execute import ProgramRank
from tests.fuzz.fleet import Fleet
from tests.fuzz.generate import programs, struck_programs
from tests.fuzz.moves import MovingRank, moves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis.strategies import SearchStrategy

    from tests.fuzz.fleet import Rank
    from tests.fuzz.generate import Fault

T = TypeVar("T")
_ANY_NUMBER = 1_000_000


class RanksFailedError(AssertionError):
    def __init__(
        self, example: object, fault: Fault | None, transport: str, wrong: dict[int, str]
    ) -> None:
        told = "\n".join(f"--- rank {rank} {text}" for rank, text in sorted(wrong.items()))
        super().__init__(f"over {transport}:\n{example}\n{fault or ''}\n{told}")


class _TimeOverError(BaseException):
    """Ends a search."""


def falsify(
    examples: SearchStrategy[T], check: Callable[[T], None], number: int, seconds: float
) -> int:
    """Check one example after the other for so long; how many it were."""
    end = 0.0
    count = 0
    failed = False

    @seed(number)
    @settings(
        max_examples=_ANY_NUMBER,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(examples)
    def one_after_the_other(example: T) -> None:
        nonlocal count, end, failed
        if count == 0:  # what Hypothesis prepares for the first one may take as long as the search
            end = time.monotonic() + seconds
        elif time.monotonic() > end and not failed:
            raise _TimeOverError
        count += 1
        try:
            check(example)
        except Exception as error:
            if not failed:
                sys.stdout.write(f"fails, and is made shorter: {error}\n")
                sys.stdout.flush()
            failed = True
            raise

    with suppress(_TimeOverError):
        one_after_the_other()
    return count


def search_programs(
    n: int, transport: str, number: int, seconds: float, faults: Sequence[str] = ()
) -> int:
    plain = st.tuples(programs(n), st.none())
    struck = struck_programs(n, tuple(faults)) if faults else plain
    return _search(ProgramRank, n, transport, struck, number, seconds)


def search_layouts(n: int, transport: str, number: int, seconds: float) -> int:
    examples = st.tuples(moves(n), st.none())
    return _search(MovingRank, n, transport, examples, number, seconds)


def _search(
    rank_type: type[Rank],
    n: int,
    transport: str,
    examples: SearchStrategy[tuple[Any, Fault | None]],
    number: int,
    seconds: float,
) -> int:
    with ExitStack() as fleets:
        fleet = fleets.enter_context(Fleet(rank_type, n, transport))

        def check(example: tuple[Any, Fault | None]) -> None:
            nonlocal fleet
            if fleet.broken:
                fleets.close()
                fleet = fleets.enter_context(Fleet(rank_type, n, transport))
            wrong = fleet.run(*example)
            if wrong:
                raise RanksFailedError(*example, transport, wrong)

        return falsify(examples, check, number, seconds)
