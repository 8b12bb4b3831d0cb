"""Most of a minute of random programs, from fresh seeds that a failure prints.

Not over torch process groups: what is begun asynchronously there goes on only while its rank waits
for it, so that programs which wait for it out of order time out.
"""

from __future__ import annotations

import secrets

import pytest

from tests.fuzz.faults import KINDS
from tests.fuzz.search import search
from tests.fuzz.sockets import SOCKETS, search_socket

SECONDS = 10.0
FAULT_SECONDS = 5.0
SOCKET_SECONDS = 3.0


@pytest.mark.stress
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("transport", ["shm", "python"])
def test_random_programs_give_what_the_oracle_does(transport: str, n: int) -> None:
    number = secrets.randbelow(1 << 32)
    print(f"python -m tests.fuzz --seed {number} --transport {transport} --ranks {n}")  # noqa: T201
    assert search(n, transport, number, SECONDS) > 0


@pytest.mark.stress
@pytest.mark.parametrize("fault", KINDS)
def test_what_befalls_one_rank_is_found_by_all_and_nothing_else_is(fault: str) -> None:
    number = secrets.randbelow(1 << 32)
    print(f"python -m tests.fuzz --seed {number} --transport shm --ranks 3 --fault {fault}")  # noqa: T201
    assert search(3, "shm", number, FAULT_SECONDS, (fault,)) > 0


@pytest.mark.parametrize("kind", SOCKETS)
def test_whatever_comes_over_a_socket_is_understood_or_refused(kind: str) -> None:
    number = secrets.randbelow(1 << 32)
    print(f"python -m tests.fuzz --seed {number} --what {kind}")  # noqa: T201
    assert search_socket(kind, number, SOCKET_SECONDS) > 0
