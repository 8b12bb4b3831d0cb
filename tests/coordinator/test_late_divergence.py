"""Over gloo, between hosts or not, members that have called something else are told a little later,
without being asked to compare; and nobody ever who has not.
"""

from __future__ import annotations

import re
import time
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
import torch

from coordinator import GroupCoordinator, ReduceOp
from device_comm import divergence
from shm_broadcast import DivergenceError, GroupAbortedError, layout
from tests.coordinator.hosts import beside, groups_over, note, since
from tests.device_comm.soak import draw, run
from tests.netns import two_hosts
from tests.patience import all_here, failure_of, quickest
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shm_broadcast import CoordinatorError

PLACES = pytest.mark.parametrize(
    "place", ["one host", pytest.param("two hosts", marks=pytest.mark.namespaces)]
)

N = 4
TOLD_WITHIN = 1.5
"""Seconds: about one is promised."""

X = torch.ones(4)
SLIPS: dict[str, Callable[[GroupCoordinator, bool], object]] = {
    "verb": lambda tp, odd: tp.barrier() if odd else tp.all_reduce(X),
    "dtype": lambda tp, odd: tp.all_reduce(X.int() if odd else X),
    "shape": lambda tp, odd: tp.all_reduce(X.view(2, 2) if odd else X),
    "op": lambda tp, odd: tp.all_reduce(X, op=ReduceOp.MAX if odd else ReduceOp.SUM),
    "root": lambda tp, odd: tp.broadcast(X, int(odd)),
    "dim": lambda tp, odd: tp.all_gather(torch.ones(4, 4), int(odd)),
    "empty": lambda tp, odd: tp.all_reduce(X[:0] if odd else X),
    "later": lambda tp, odd: tp.all_reduce(X.int() if odd else X, async_op=True).wait(),
    "left out": lambda tp, odd: None if odd else tp.all_reduce(X),
}
"""What all members call, and what the odd one calls in its place."""

SHOWN = {
    "dtype": ("all_reduce SUM int32[4]", "all_reduce SUM float32[4]"),
    "shape": ("all_reduce SUM float32[2, 2]", "all_reduce SUM float32[4]"),
    "op": ("all_reduce MAX float32[4]", "all_reduce SUM float32[4]"),
    "dim": ("all_gather float32[4, 4] along dim 1", "all_gather float32[4, 4] along dim 0"),
}
"""What is said of both, where it is the last that they have called."""


def one_slips(
    rank: int, n: int, folder: str, hosts: Any, kind: str, odd: int, pause: float, at: int
) -> tuple[CoordinatorError, float]:
    store = beside(folder, n)
    with groups_over(rank, n, folder, hosts, torch_only=hosts is None) as groups:
        tp = groups.tp

        def steps() -> None:
            for step in range(100_000):
                if step == at and rank == odd:
                    note(store, "slipped")
                if step == at:
                    SLIPS[kind](tp, rank == odd)
                elif step % 2:
                    tp.all_gather(X)
                else:
                    tp.all_reduce(X)
                time.sleep(pause)

        error, raised = failure_of(steps)
        return error, since(store, "slipped", raised)


def told_to_all(
    folder: str, place: str, kind: str, odd: int, pause: float, at: int
) -> list[tuple[CoordinatorError, float]]:
    if place == "one host":
        return run_ranks(N, one_slips, folder, None, kind, odd, pause, at)
    with two_hosts("IPv4") as hosts:
        return run_ranks(N, one_slips, folder, hosts, kind, odd, pause, at)


def assert_told(error: CoordinatorError, odd: int) -> None:
    """It is a divergence, and the odd one is one of the two that it is about."""
    if isinstance(error, DivergenceError):
        return
    assert isinstance(error, GroupAbortedError), error
    assert error.failure.kind == "DivergenceError"
    assert re.search(rf"rank {odd} issued|rank {odd}( on host-.)? reported", str(error)), error


@PLACES
@pytest.mark.parametrize("kind", SLIPS)
def test_members_that_have_slipped_are_told_soon(kind: str, place: str, tmp_path: Path) -> None:
    def attempt() -> float:
        odd = len(kind) % N
        results = told_to_all(mkdtemp(dir=tmp_path), place, kind, odd, 0.02, 50)
        for rank, (error, _) in enumerate(results):
            assert_told(error, odd)
            if rank != odd and isinstance(error, DivergenceError):
                assert error.rank == odd
        return max(seconds for _, seconds in results)

    assert quickest(attempt, TOLD_WITHIN) < TOLD_WITHIN


@PLACES
@pytest.mark.parametrize("kind", SHOWN)
def test_what_is_the_last_that_both_have_called_is_shown(
    kind: str, place: str, tmp_path: Path
) -> None:
    for error, _ in told_to_all(str(tmp_path), place, kind, 2, 1.0, 2):
        assert_told(error, 2)
        odd, other = SHOWN[kind]
        assert odd in str(error)
        assert other in str(error)
        assert "collective 3 of tp" in str(error)


@pytest.mark.parametrize("kind", ["dtype", "op"])
def test_on_one_host_the_first_that_differs_is_shown(kind: str, tmp_path: Path) -> None:
    for error, _ in told_to_all(str(tmp_path), "one host", kind, 2, 0.0, 500):
        assert_told(error, 2)
        assert "collective 501 of tp" in str(error)
        for shown in SHOWN[kind]:
            assert shown in str(error)


@PLACES
def test_it_is_said_between_which_collectives_else(place: str, tmp_path: Path) -> None:
    for error, _ in told_to_all(str(tmp_path), place, "op", 2, 0.0, 500):
        assert_told(error, 2)
        said = re.search(r"one of its collectives (\d+) to (\d+) of tp", str(error))
        exact = "collective 501 of tp" in str(error)
        assert exact or (said and int(said[1]) <= 501 <= int(said[2])), error


def one_waits(rank: int, n: int, folder: str, hosts: Any) -> CoordinatorError:
    """Each broadcasts from itself: some wait there, some in the next collective of all."""
    store = beside(folder, n)
    with groups_over(rank, n, folder, hosts, torch_only=hosts is None) as groups:
        all_here(store, n)
        tp = groups.tp
        error, _ = failure_of(
            lambda: [tp.broadcast(torch.ones(1000), rank, timeout=60), groups.world.barrier()]
        )
        return error


@PLACES
def test_whoever_waits_is_told(place: str, tmp_path: Path) -> None:
    if place == "one host":
        errors = run_ranks(N, one_waits, str(tmp_path), None)
    else:
        with two_hosts("IPv4") as hosts:
            errors = run_ranks(N, one_waits, str(tmp_path), hosts)
    for error in errors:
        assert "DivergenceError" in f"{type(error).__name__}: {error}"
        assert "broadcast float32[1000] from rank" in str(error)


# --- nobody is told who has not slipped ----------------------------------------------------


def correct(rank: int, n: int, folder: str, hosts: Any, seed: int, room: int | None) -> int:
    """Everything at random, in groups that stay, and in two of one name that are made again."""
    divergence.LOOK_SECONDS = 0.0  # type: ignore[misc] # in every call
    if room is not None:
        layout.FINGERPRINTS = room  # type: ignore[misc]
    done = 0
    with groups_over(
        rank, n, folder, hosts, torch_only=hosts is None, tp=2, pp=1, axes={"outer": 2}
    ) as groups:
        world, tp, outer = groups.world, groups.tp, groups.axes["outer"]
        for turn in range(3):
            comms = [each.device_communicator for each in (world, tp, outer)]
            done += run(draw(seed + turn, 400, [n, 2, 2]), comms)
            for group in (world, tp, outer):
                me = group.rank_in_group
                values = {"x": torch.ones(turn + 3), "none": torch.ones(0), "n": turn}
                assert group.broadcast_object(turn if me == 0 else None) == turn
                assert group.all_gather_object(me) == list(range(group.world_size))
                found = group.broadcast_tensor_dict(values if me == 1 else None, src=1)
                assert found["n"] == turn
                group.all_gatherv([torch.ones(2, 3), torch.ones(2, 0)], 0)
                group.all_gatherv([], 0)
                group.all_gatherv(torch.ones(me, 2), 0, range(group.world_size))
            again = [
                GroupCoordinator.from_context(world._context.subgroup("again", list(range(n))))
                for _ in range(2)
            ]
            with again[0], again[1]:
                comms = [each.device_communicator for each in again]
                done += run(draw(seed + 10 + turn, 50 + 20 * turn, [n, n]), comms)
                again[turn % 2].barrier()
    return done


@PLACES
@pytest.mark.parametrize("room", [None, 1])
def test_nobody_is_told_that_has_not_slipped(place: str, room: int | None, tmp_path: Path) -> None:
    if place == "one host":
        done = run_ranks(N, correct, str(tmp_path), None, 11, room, timeout=240)
    else:
        with two_hosts("IPv4") as hosts:
            done = run_ranks(N, correct, str(tmp_path), hosts, 12, room, timeout=240)
    assert min(done) > 300
