"""What GROUP_COORDINATOR says, and what happens where it is not set."""

from __future__ import annotations

import os

import pytest

from coordinator.plugins.switches import PARTS, Switches, UntestedVersionError
from coordinator.plugins.vllm import hooks
from tests.commands import run_code


@pytest.mark.parametrize("text", ["", "0", " ", ","])
def test_nothing_is_on_by_default(text: str) -> None:
    assert Switches.of(text) == Switches(frozenset())


@pytest.mark.parametrize(
    ("text", "parts", "force"),
    [
        ("1", PARTS, False),
        ("force", PARTS, True),
        ("queue", ["queue"], False),
        ("queue, status", ["queue", "status"], False),
        ("communicator,force", ["communicator"], True),
        ("queue,1", PARTS, False),
    ],
)
def test_parts_are_on_by_name(text: str, parts: list[str], force: bool) -> None:
    assert Switches.of(text) == Switches(frozenset(parts), force)


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no part 'ques'; it is 0, 1, force, or some of commun"):
        Switches.of("queue,ques")


def test_a_version_that_was_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_COORDINATOR", "queue")
    with pytest.raises(UntestedVersionError, match=r"vLLM is 0\.99\.1.*GROUP_COORDINATOR=force"):
        hooks.install(lambda: "0.99.1")


def test_a_build_of_a_tested_version_is_accepted_and_any_is_with_force() -> None:
    Switches.of("1").check_version("vLLM", "0.32.0+cpu", ("0.32.0",))
    Switches.of("force").check_version("vLLM", "0.99.1", ("0.32.0",))


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_but_the_entry_point_is_imported(value: str | None) -> None:
    code = (
        "import sys; from coordinator.plugins.vllm import register; register(); register()\n"
        "from coordinator.plugins.sglang import register; register()\n"
        "ours = {'coordinator', 'device_comm', 'shm_broadcast', 'group_coordinator'}\n"
        "print(*sorted(name for name in sys.modules if name.partition('.')[0] in ours))\n"
        "print('torch' in sys.modules)"
    )
    kept = {name: text for name, text in os.environ.items() if name != "GROUP_COORDINATOR"}
    done = run_code(
        code,
        env=kept if value is None else {**kept, "GROUP_COORDINATOR": value},
    )
    imported, torch = done.stdout.splitlines()
    assert imported.split() == [
        "coordinator",
        "coordinator.plugins",
        "coordinator.plugins.sglang",
        "coordinator.plugins.vllm",
    ]
    assert torch == "False"
