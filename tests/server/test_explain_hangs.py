"""`status` and `explain` name who is to blame for a program that hangs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.server.scenes import assert_documented, playing, shown, told

if TYPE_CHECKING:
    from pathlib import Path


def assert_status_says(pid: int, *wanted: str) -> None:
    text = shown("status", pid)
    assert all(each in text for each in wanted), text


def test_a_rank_that_sleeps(tmp_path: Path) -> None:
    with playing("sleeping", 3, tmp_path) as pids:
        late = f"Rank 1 (pid {pids[1]}) holds up others: it waits for no other process"
        text = told(pids[0], late, "Rank 0", "Rank 2", "in linger")
        assert f"  Rank 0 (pid {pids[0]}) waits for rank 1 in tp all_reduce #" in text
        assert f"The stack of rank 1 (pid {pids[1]}), the latest call first:" in text
        assert "in sleeping" in text
        assert_documented(text)
        assert_status_says(pids[2], late, "runs", "waits", "tp all_reduce #", "tp 1")
        (seen,) = json.loads(shown("status", pids[0], "--json"))["programs"]
        assert seen["held_up"]
        assert seen["sentences"][0].startswith(late)


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    with playing("stopped", 3, tmp_path) as pids:
        late = f"Rank 1 (pid {pids[1]}) holds up others: its process is stopped"
        text = told(pids[1], late, "Rank 0", "Rank 2")
        assert f"No stack of rank 1 (pid {pids[1]}): its process is stopped" in text
        assert_documented(text)
        assert_status_says(pids[0], late, "stopped")


def test_two_ranks_that_receive_from_each_other(tmp_path: Path) -> None:
    with playing("crossed", 2, tmp_path) as pids:
        both = f"Rank 0 (pid {pids[0]}) and rank 1 (pid {pids[1]}) wait for each other"
        text = told(pids[0], both, "in crossed")
        assert f"  Rank 1 (pid {pids[1]}) waits for rank 0 in tp recv #" in text
        assert "All of them receive, and none has sent." in text
        assert text.count("in crossed") == 2
        assert_documented(text)
        assert_status_says(pids[1], both)


def test_ranks_in_different_operations(tmp_path: Path) -> None:
    with playing("different", 2, tmp_path) as pids:
        both = f"Rank 0 (pid {pids[0]}) and rank 1 (pid {pids[1]}) wait for each other"
        text = told(pids[0], both, "in different")
        assert "Their operations differ; the first ones that do: tp all_reduce #" in text
        assert_documented(text)
        assert_status_says(pids[1], both, "Their operations differ")


def test_ranks_that_were_told_that_they_diverge(tmp_path: Path) -> None:
    with playing("divergent", 2, tmp_path) as pids:
        text = told(pids[0], "The group was aborted: rank ", "DivergenceError: rank ")
        assert "issued all_" in text
        assert_status_says(pids[1], "The group was aborted", "DivergenceError")


def test_a_full_queue(tmp_path: Path) -> None:
    with playing("full", 3, tmp_path) as pids:
        late = f"Rank 2 (pid {pids[2]}) holds up others: it waits for no other process"
        text = told(pids[0], late, "in linger", " % full: rank 2 has ")
        assert f"  Rank 0 (pid {pids[0]}) waits for rank 2 in enqueue #" in text
        assert_documented(text)
        assert_status_says(pids[1], late, " not read by rank 2, ")


def test_a_driver_that_reads_no_replies(tmp_path: Path) -> None:
    with playing("replies", 1, tmp_path) as (driver,):
        late = f"The driver (pid {driver}) holds up others: it waits for no other process"
        text = told(driver, late, "in replies", "Rank 0", "Rank 1")
        assert "waits for the driver in enqueue #" in text
        assert_documented(text)
        assert_status_says(driver, late)


def test_a_pool_that_has_nothing_to_do(tmp_path: Path) -> None:
    with playing("idle", 1, tmp_path) as (driver,):
        nothing = f"The driver (pid {driver}) sends nothing: it waits for no other process"
        text = told(driver, nothing, "Rank 0", "Rank 1", "in linger")
        assert "Readers wait for messages. Nobody is held up, unless one is due:" in text
        assert_documented(text)
        assert_status_says(driver, nothing)
        assert "holds up" not in shown("status", driver)
