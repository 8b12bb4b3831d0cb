"""Which cores there are and what they share, by made-up machines; binding this process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from shm_broadcast.cpu import Core, bind_process, cores_of, listed
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def machine(system: Path, nodes: dict[int, str], siblings: list[str]) -> Path:
    """Nodes by their CPUs, and what each core's threads are."""
    for node, cpus in nodes.items():
        folder = system / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    for threads in siblings:
        for cpu in listed(threads):
            folder = system / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(threads + "\n")
    return system


@pytest.mark.parametrize(
    ("nodes", "siblings", "usable", "expected"),
    [
        pytest.param(
            {0: "0-1"}, ["0", "1"], {0, 1}, [Core(0, (0,)), Core(0, (1,))], id="two cores"
        ),
        pytest.param(
            {0: "0-1,4-5", 1: "2-3,6-7"},
            ["0,4", "1,5", "2,6", "3,7"],
            set(range(8)),
            [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3, 7))],
            id="two nodes, two threads a core",
        ),
        pytest.param(
            {0: "0,2", 1: "1,3"},
            ["0", "1", "2", "3"],
            set(range(4)),
            [Core(0, (0,)), Core(0, (2,)), Core(1, (1,)), Core(1, (3,))],
            id="numbered by turns",
        ),
        pytest.param(
            {0: "0-1,4-5", 1: "2-3,6-7"},
            ["0,4", "1,5", "2,6", "3,7"],
            {1, 2, 6},
            [Core(0, (1,)), Core(1, (2, 6))],
            id="only some may be used",
        ),
        pytest.param(
            {0: "0-1", 1: ""}, ["0", "1"], {0, 1}, [Core(0, (0,)), Core(0, (1,))], id="memory alone"
        ),
        pytest.param({}, [], {3, 5}, [Core(0, (3,)), Core(0, (5,))], id="nothing is told"),
    ],
)
def test_cores_by_node(
    tmp_path: Path,
    nodes: dict[int, str],
    siblings: list[str],
    usable: set[int],
    expected: list[Core],
) -> None:
    assert cores_of(usable, machine(tmp_path, nodes, siblings)) == tuple(expected)


def test_the_cores_here_are_those_of_this_process() -> None:
    usable = os.sched_getaffinity(0)
    assert {cpu for core in cores_of(usable) for cpu in core.cpus} == usable


def bound(rank: int, n: int) -> list[set[int]]:
    """The affinity of the threads of a process that was bound while it had two, and of a third."""
    tids, over = [], threading.Event()

    def begin() -> threading.Thread:
        started = threading.Event()

        def stay() -> None:
            tids.append(threading.get_native_id())
            started.set()
            over.wait()

        thread = threading.Thread(target=stay)
        thread.start()
        started.wait()
        return thread

    before = begin()
    bind_process({max(os.sched_getaffinity(0))})
    after = begin()
    found = [os.sched_getaffinity(tid) for tid in (0, *tids)]
    over.set()
    before.join()
    after.join()
    return found


def test_all_threads_are_bound() -> None:
    (found,) = run_ranks(1, bound)
    assert found == [{max(os.sched_getaffinity(0))}] * 3


@pytest.mark.parametrize("text", ["0-999999999", "65536", "1,0-70000"])
def test_more_cores_than_any_machine_has_are_refused_before_they_are_listed(text: str) -> None:
    with pytest.raises(ValueError, match="no machine has so many"):
        listed(text)
