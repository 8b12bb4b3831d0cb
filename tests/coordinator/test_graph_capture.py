"""Captures on the CPU, where nothing is recorded but every group still takes part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import coordinator
from coordinator import ParallelGroups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from coordinator import GroupCoordinator


def watch_captures(
    groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[GroupCoordinator]]:
    """What the communicators of the groups see, and these groups, each once."""
    seen: list[str] = []
    every = (groups.world, groups.tp, groups.pp, groups.dp, groups.pcp, groups.dcp, groups.ep)
    members = list({group.unique_name: group for group in every}.values())
    for group in members:

        @contextmanager
        def capture(name: str = group.name) -> Iterator[None]:
            seen.append(f"begin {name}")
            try:
                yield
            except KeyError:
                seen.append(f"fail {name}")
                raise
            seen.append(f"end {name}")

        monkeypatch.setattr(group.device_communicator, "graph_capture", capture)
    return seen, members


def test_all_groups_begin_and_end_a_capture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator.init() as groups:
        seen, members = watch_captures(groups, monkeypatch)
        with groups.graph_capture() as context:
            assert context.stream is None
            assert seen == [f"begin {group.name}" for group in members]
        assert seen[len(members) :] == [f"end {group.name}" for group in reversed(members)]


def test_all_groups_hear_that_a_capture_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator.init() as groups:
        seen, members = watch_captures(groups, monkeypatch)
        with pytest.raises(KeyError), groups.graph_capture():
            raise KeyError("of mine")
        assert seen[len(members) :] == [f"fail {group.name}" for group in reversed(members)]


def test_one_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator.init() as groups:
        seen, _ = watch_captures(groups, monkeypatch)
        with groups.tp.graph_capture() as first, groups.pp.graph_capture(first) as second:
            assert first == second
        assert seen == ["begin tp", "begin pp", "end pp", "end tp"]
