"""`status` and `explain` name who is to blame for a program that hangs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.pages.blocks import block_of, read, without_numbers
from tests.server.scenes import playing, shown, told

if TYPE_CHECKING:
    from pathlib import Path


def assert_status_says(pid: int, *wanted: str) -> None:
    text = shown("status", pid)
    assert all(each in text for each in wanted), text


def test_a_rank_that_sleeps(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "The stack of rank 1 (pid 22264)")
    with playing("sleeping", 3, tmp_path) as pids:
        late = f"Rank 1 (pid {pids[1]}) holds up others: it waits for no other process"
        text = told(pids[0], late, "Rank 0", "Rank 2", "in linger", like=like)
        assert f"  Rank 0 (pid {pids[0]}) waits for rank 1 in tp all_reduce #" in text
        assert f"The stack of rank 1 (pid {pids[1]}), the latest call first:" in text
        assert "in sleeping" in text
        assert_status_says(pids[2], late, "computing", "waiting", "tp all_reduce #", "tp 1")
        table = block_of("docs/debugging.md", "3 processes, 1.5 MiB shared").splitlines()[3:]
        assert without_numbers("\n".join(table)) in without_numbers(shown("status", pids[0]))
        (seen,) = json.loads(shown("status", pids[0], "--json"))["programs"]
        assert seen["held_up"]
        assert seen["sentences"][0].startswith(late)


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "No stack of rank 1")
    with playing("stopped", 3, tmp_path) as pids:
        late = f"Rank 1 (pid {pids[1]}) holds up others: its process is stopped"
        text = told(pids[1], late, "Rank 0", "Rank 2", like=like)
        assert f"No stack of rank 1 (pid {pids[1]}): its process is stopped" in text
        assert_status_says(pids[0], late, "stopped")


def test_a_rank_that_waits_in_the_kernel(tmp_path: Path) -> None:
    with playing("suspended", 2, tmp_path) as pids:
        why = "it waits in the kernel, for a disk or another device; last seen in tp barrier #"
        late = f"Rank 1 (pid {pids[1]}) holds up others: {why}"
        text = told(pids[0], late)
        assert f"No stack of rank 1 (pid {pids[1]}): it did not answer in time." in text
        assert_status_says(pids[0], late, "kernel")


def test_two_ranks_that_receive_from_each_other(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "All of them receive")
    with playing("crossed", 2, tmp_path) as pids:
        both = f"Rank 0 (pid {pids[0]}) and rank 1 (pid {pids[1]}) wait for each other"
        text = told(pids[0], both, "in crossed", like=like)
        assert f"  Rank 1 (pid {pids[1]}) waits for rank 0 in tp recv #" in text
        assert "All of them receive, and none has sent." in text
        assert text.count("in crossed") == 2
        assert_status_says(pids[1], both)


def test_ranks_in_different_operations(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "Their operations differ")
    with playing("different", 2, tmp_path) as pids:
        both = f"Rank 0 (pid {pids[0]}) and rank 1 (pid {pids[1]}) wait for each other"
        text = told(pids[0], both, "in different", like=like)
        assert "Their operations differ; the first ones that do: tp all_reduce #" in text
        assert_status_says(pids[1], both, "Their operations differ")


def test_ranks_that_were_told_that_they_diverge(tmp_path: Path) -> None:
    with playing("divergent", 2, tmp_path) as pids:
        text = told(pids[0], "The group was aborted: rank ", "DivergenceError: rank ")
        documented = block_of("docs/debugging.md", "The group was aborted").strip()
        said, one, other = documented.replace(" where this rank", "").split(" issued ")
        either = (
            documented,
            f"{said} issued {other.rstrip('.')} where this rank issued {one}.",
        )
        assert any(without_numbers(each) in without_numbers(text) for each in either)
        assert_status_says(pids[1], "The group was aborted", "DivergenceError")


def test_a_full_queue(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "The queue from rank 0, of 64 KiB, is 97 % full")
    with playing("full", 3, tmp_path) as pids:
        late = f"Rank 2 (pid {pids[2]}) holds up others: it waits for no other process"
        text = told(pids[0], late, "in linger", " % full: rank 2 has ", like=like)
        assert f"  Rank 0 (pid {pids[0]}) waits for rank 2 in enqueue #" in text
        assert_status_says(pids[1], late, " not read by rank 2, ")
        line = without_numbers(block_of("docs/debugging.md", "60 messages, 59 not read"))
        assert line in without_numbers(shown("status", pids[0]))


def test_a_driver_that_reads_no_replies(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "The queue from rank 0, of 64 KiB, is 99 % full")
    with playing("replies", 1, tmp_path) as (driver,):
        late = f"The driver (pid {driver}) holds up others: it waits for no other process"
        text = told(driver, late, "in replies", "Rank 0", "Rank 1", like=like)
        assert "waits for the driver in enqueue #" in text
        assert_status_says(driver, late)


def test_a_pool_that_has_nothing_to_do(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "Readers wait for messages")
    with playing("idle", 1, tmp_path) as (driver,):
        nothing = f"The driver (pid {driver}) sends nothing: it waits for no other process"
        text = told(driver, nothing, "Rank 0", "Rank 1", "in linger", like=like)
        assert "Readers wait for messages. This is a hang only if one is due:" in text
        assert_status_says(driver, nothing)
        assert "holds up" not in shown("status", driver)


def test_a_pool_that_does_not_come_up(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "in the start of the pool")
    with playing("starting", 1, tmp_path) as (driver,):
        text = told(driver, "Rank 1 (pid ", "in linger", "in __init__", like=like)
        assert "it waits for no other process; last seen in Model.__init__ #" in text
        assert f"  The driver (pid {driver}) waits for rank 1 in the start of the pool, " in text
        assert_status_says(driver, "Model.__init__ #", "the start of the pool")


def test_a_rank_that_does_not_set_up_a_group(tmp_path: Path) -> None:
    like = block_of("docs/debugging.md", "in set-up of tp.")
    with playing("missing", 3, tmp_path) as pids:
        late = f"Rank 1 (pid {pids[1]}) holds up others: it waits for no other process"
        text = told(pids[0], late, "in missing", like=like)
        assert f"  Rank 2 (pid {pids[2]}) waits for rank 1 in set-up of tp.sibling, for " in text
        assert_status_says(pids[0], late, "set-up of tp.sibling")


def test_a_rank_that_has_closed_a_group(tmp_path: Path) -> None:
    line = block_of("docs/debugging.md", "has closed tp").strip()
    with playing("closing", 3, tmp_path) as pids:
        told(pids[0], line)
        assert_status_says(pids[0], line)


def test_the_readme_shows_what_the_page_explains() -> None:
    shown = block_of("README.md", "group-coordinator explain 4242").replace(" ...", "")
    page = without_numbers(read("docs/debugging.md"))
    command, *sentences = shown.splitlines()
    assert command == "$ group-coordinator explain 4242"
    assert [each for each in sentences if without_numbers(each) not in page] == []
