"""Seconds of random programs, moves and messages, from fresh seeds that a failure prints."""

from __future__ import annotations

import inspect
import secrets
from unittest import mock

import pytest

from coordinator import GroupCoordinator
from device_comm import ALL_VERBS
from tests.fuzz.execute import begin
from tests.fuzz.generate import KINDS, VERBS, forms_of
from tests.fuzz.program import Step
from tests.fuzz.search import search_layouts, search_programs
from tests.fuzz.sockets import SOCKETS, search_socket
from tests.fuzz.verbs import MESSAGES, Given, receive, send

SECONDS = 2.0
SOCKET_SECONDS = 1.0
NO_VERBS = {
    *("from_device_mesh", "from_context", "from_process_group", "make_sibling_device_group"),
    *("start_broadcaster", "create_mq_broadcaster", "create_single_reader_mq_broadcasters"),
    *("abort", "check", "close", "destroy", "after_fork_in_child", "explain", "status"),
    *("graph_capture", "allocate_combine_input", "exchanging_rows_in", "sharing"),
}
"""What a group can do besides exchanging something among its members."""


def is_composed(name: str) -> bool:
    module = inspect.unwrap(getattr(GroupCoordinator, name)).__module__
    return module.startswith("device_comm.verbs.") and name.rstrip("_") not in ALL_VERBS


def test_programs_call_every_verb() -> None:
    group = mock.create_autospec(GroupCoordinator, instance=True)
    for verb in VERBS:
        for form in forms_of(verb):
            given = Given(Step(verb, "world", form=form, peer=1, sizes=(1, 2, 3, 4)), 0, 0, 2)
            for call in (send, receive) if verb in MESSAGES else (begin,):
                call(group, given)
    called = {name for name, *_ in group.method_calls}
    public = {
        name
        for name, _ in inspect.getmembers(GroupCoordinator, callable)
        if not name.startswith("_")
    }
    assert called == {name for name in public - NO_VERBS if not is_composed(name)}


@pytest.mark.stress
@pytest.mark.parametrize(("transport", "n"), [("shm", 3), ("shm", 4), ("torch", 4)])
def test_random_programs_give_what_the_oracle_does(transport: str, n: int) -> None:
    number = secrets.randbelow(1 << 32)
    print(f"python -m tests.fuzz --seed {number} --transport {transport} --ranks {n}")  # noqa: T201
    assert search_programs(n, transport, number, SECONDS) > 0


@pytest.mark.stress
@pytest.mark.parametrize("fault", KINDS)
def test_all_ranks_find_the_fault_of_one_and_no_other(fault: str) -> None:
    number = secrets.randbelow(1 << 32)
    print(f"python -m tests.fuzz --seed {number} --transport shm --ranks 3 --fault {fault}")  # noqa: T201
    assert search_programs(3, "shm", number, SECONDS, (fault,)) > 0


@pytest.mark.stress
@pytest.mark.parametrize("n", [4, 6])
def test_any_layout_goes_to_any_other(n: int) -> None:
    number = secrets.randbelow(1 << 32)
    print(f"python -m tests.fuzz --seed {number} --what layouts --transport shm --ranks {n}")  # noqa: T201
    assert search_layouts(n, "shm", number, SECONDS) > 0


@pytest.mark.parametrize("kind", SOCKETS)
def test_bytes_from_a_socket_are_understood_or_refused(kind: str) -> None:
    number = secrets.randbelow(1 << 32)
    print(f"python -m tests.fuzz --seed {number} --what {kind}")  # noqa: T201
    assert search_socket(kind, number, SOCKET_SECONDS) > 0
