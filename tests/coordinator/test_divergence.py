"""Ranks that issue different operations get an error that names both, with every transport."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store

import coordinator
from coordinator import GroupCoordinator, ParallelGroups, ReduceOp
from device_comm import divergence
from shm_broadcast import CoordinatorError, DivergenceError, GroupAbortedError, layout
from tests.coordinator.hosts import beside, groups_over, note, since
from tests.coordinator.test_verbs import run_tables
from tests.device_comm.soak import draw, run
from tests.device_comm.suite import check_table
from tests.netns import two_hosts
from tests.patience import all_here, failure_of, quickest, until
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

N = 3
X, TWO, NONE, CUBE = torch.ones(4), torch.ones(2, 3), torch.ones(0, 3), torch.ones(N, N, N)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
TRANSPORTS = pytest.mark.parametrize("torch_only", [True, False], ids=["torch", "shared memory"])


def join(rank: int, n: int, store: Store, torch_only: bool, **options: Any) -> ParallelGroups:
    options |= {"timeout": 60, "torch_only": torch_only, "checked": torch_only}
    return coordinator.init(tp=n, rank=rank, store=store, **options)


SLIPS: dict[str, Callable[[GroupCoordinator, bool], object]] = {
    "verb": lambda tp, odd: tp.all_gather(X) if odd else tp.all_reduce(X),
    "dtype": lambda tp, odd: tp.all_reduce(X.double() if odd else X),
    "float8": lambda tp, odd: [tp.broadcast(CUBE.to(FLOAT8[odd])), tp.barrier()],
    "shape": lambda tp, odd: tp.all_reduce(X[:2] if odd else X),
    "op": lambda tp, odd: tp.all_reduce(X, op=ReduceOp.MAX if odd else ReduceOp.SUM),
    "root": lambda tp, odd: [tp.broadcast(X, int(odd)), tp.barrier()],
    "destination": lambda tp, _: [tp.reduce(X, (tp.rank_in_group + 1) % N), tp.barrier()],
    "empty": lambda tp, odd: tp.all_reduce(NONE if odd else TWO),
    "empty, later": lambda tp, odd: tp.all_gather(NONE if odd else TWO, 0, async_op=True).wait(),
    "empty gathered": lambda tp, odd: tp.all_gatherv(NONE if odd else TWO, 0),
    "empty among empty": lambda tp, odd: tp.all_reduce(NONE.T if odd else NONE),
    "dim of all_gather": lambda tp, odd: tp.all_gather(CUBE, int(odd)),
    "dim of reduce_scatter": lambda tp, odd: tp.reduce_scatter(CUBE, int(odd)),
    "dim of all_to_all": lambda tp, odd: tp.all_to_all(CUBE, int(odd)),
    "dim of all_gatherv": lambda tp, odd: tp.all_gatherv(CUBE, int(odd)),
    "dim of reduce_scatterv": lambda tp, odd: tp.reduce_scatterv(CUBE, int(odd)),
    "dim of sizes": lambda tp, odd: tp.all_to_all(
        CUBE, int(odd), input_sizes=[1] * N, output_sizes=[1] * N
    ),
    "columns": lambda tp, odd: tp.all_gatherv(torch.ones(2, 6) if odd else torch.ones(3, 4), 0),
}
"""What all ranks call, and rank 1 in its place."""


def diverge(rank: int, n: int, store: Store, torch_only: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, slip in SLIPS.items():
        meeting = PrefixStore(kind, store)
        with join(rank, n, meeting, torch_only, operation_timeout=60) as groups:
            tp = groups.tp
            with pytest.raises(ValueError, match="not divisible"):  # on all ranks: no divergence
                tp.reduce_scatter(torch.ones(4))
            assert tp.all_reduce(X).tolist() == [n] * 4
            all_here(meeting, n)
            error, _ = failure_of(lambda: slip(tp, rank == 1))  # noqa: B023
            found[kind] = f"{type(error).__name__}: {error}"
    return found


@TRANSPORTS
def test_ranks_that_diverge_get_both_operations(torch_only: bool) -> None:
    for found in run_ranks(N, diverge, SharedStore(), torch_only, timeout=140):
        for kind, text in found.items():
            assert text.startswith(("DivergenceError", "GroupAbortedError")), (kind, text)
            assert "issued" in text, kind
            assert "where this rank issued" in text, (kind, text)


def diverge_under_torchs_switch(rank: int, n: int, store: Store) -> str:
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG does
    with coordinator.init(tp=n, rank=rank, store=store, torch_only=True) as groups:
        x = torch.ones(4, dtype=torch.int32 if rank else torch.float32)
        with pytest.raises((DivergenceError, GroupAbortedError)) as caught:
            groups.tp.all_reduce(x)
        return str(caught.value)


def test_torchs_switch_turns_the_checks_on() -> None:
    for text in run_ranks(2, diverge_under_torchs_switch, SharedStore()):
        assert "issued all_reduce SUM int32[4]" in text
        assert "all_reduce SUM float32[4]" in text


def checked_table(rank: int, n: int, store: Store) -> dict[str, str]:
    with join(rank, n, store, True) as groups:
        assert groups.tp.device_communicator.capabilities.detects_divergence
        return run_tables(groups.tp, [torch.int64])


def test_the_debug_mode_changes_no_result() -> None:
    check_table(run_ranks(2, checked_table, SharedStore(), timeout=180))


def wrong_on_one(rank: int, n: int, store: Store, torch_only: bool) -> None:
    with join(rank, n, store, torch_only) as groups:
        groups.tp.barrier()
        if rank == 1:
            with pytest.raises(TypeError):
                groups.tp.all_reduce(torch.ones(2), op=ReduceOp.BAND)
            all_here(store, n)
            until(lambda: groups.board.aborted is not None)  # a wait on the board would raise it
            return
        all_here(store, n)
        start = time.monotonic()
        with pytest.raises(CoordinatorError, match="rank 1"):
            groups.tp.all_reduce(torch.ones(2), timeout=1)
        assert time.monotonic() - start < 30


@TRANSPORTS
def test_a_call_that_is_wrong_on_one_rank_is_named_by_the_others(torch_only: bool) -> None:
    run_ranks(2, wrong_on_one, SharedStore(), torch_only, timeout=120)


# --- errors name global ranks: rank 3 of the world is rank 1 of [2, 3] ----------------------------


def object_in_place_of_dict(tp: GroupCoordinator, odd: bool) -> object:
    if not odd:
        return tp.recv_tensor_dict(1)
    tp.send_object(1, 0)
    return tp.barrier()


PAIRS: dict[str, Callable[[GroupCoordinator, bool], object]] = {
    "collective": SLIPS["verb"],
    "later": lambda tp, odd: (tp.all_gather if odd else tp.all_reduce)(X, async_op=True).wait(),
    "message": object_in_place_of_dict,
}


def diverge_in_one_pair(
    rank: int, n: int, path: str, torch_only: bool
) -> dict[str, CoordinatorError]:
    found = {}
    for kind, call in PAIRS.items():
        store = PrefixStore(kind, FileStore(path, n))
        with coordinator.init(tp=2, pp=2, rank=rank, store=store, torch_only=torch_only) as groups:
            tp = groups.tp
            groups.world.barrier()
            found[kind], _ = failure_of(
                lambda: tp.recv_object(1 - rank) if rank < 2 else call(tp, rank == 3)  # noqa: B023
            )
            all_here(store, n)
    return found


@TRANSPORTS
def test_a_divergence_names_global_ranks_in_all_groups(torch_only: bool, store_path: str) -> None:
    found = run_ranks(4, diverge_in_one_pair, store_path, torch_only)
    for kind in PAIRS:
        assert_global_ranks([errors[kind] for errors in found], torch_only)


def assert_global_ranks(found: list[CoordinatorError], torch_only: bool) -> None:
    if not torch_only:
        assert any(isinstance(error, DivergenceError) for error in found[2:])
    for rank, error in enumerate(found):
        if rank >= 2 and isinstance(error, DivergenceError):
            assert error.rank == 5 - rank
            assert str(error).startswith(f"rank {5 - rank} issued ")
        else:
            assert isinstance(error, GroupAbortedError)
            by = error.failure.rank  # over torch also this rank, which may find it while it waits
            assert by == 5 - rank or rank < 2 or (torch_only and by == rank)
            assert error.failure.message.startswith(f"rank {5 - by} issued ")
            assert f": DivergenceError: rank {5 - by} issued " in str(error)


# --- over gloo, on one host or two: soon, without a comparison in each call -----------------------

PLACES = pytest.mark.parametrize(
    "place", ["one host", pytest.param("two hosts", marks=pytest.mark.namespaces)]
)

M = 4
LATE_WITHIN = 1.5
"""Seconds: about one is promised."""

LATE_SLIPS: dict[str, Callable[[GroupCoordinator, bool], object]] = {
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


def odd_of(kind: str) -> int:
    return len(kind) % M


SHOWN = {
    "dtype": ("all_reduce SUM int32[4]", "all_reduce SUM float32[4]"),
    "shape": ("all_reduce SUM float32[2, 2]", "all_reduce SUM float32[4]"),
    "op": ("all_reduce MAX float32[4]", "all_reduce SUM float32[4]"),
    "dim": ("all_gather float32[4, 4] along dim 1", "all_gather float32[4, 4] along dim 0"),
}
"""The texts of both, where they are the last collectives."""


def each_slips(
    rank: int, n: int, folder: str, hosts: Any, kinds: Sequence[str], pause: float, at: int
) -> dict[str, tuple[CoordinatorError, float]]:
    """Of each kind of slip: the error, and the seconds until it is raised."""
    found = {}
    for kind in kinds:
        inside = f"{folder}/{kind}"
        Path(inside).mkdir(exist_ok=True)
        store = beside(inside, n)
        with groups_over(rank, n, inside, hosts, torch_only=hosts is None) as groups:
            error, raised = failure_of(lambda: slip_at(groups.tp, kind, pause, at, store))  # noqa: B023
            found[kind] = error, since(store, "slipped", raised)
        all_here(store, n, "closed")
    return found


def slip_at(tp: GroupCoordinator, kind: str, pause: float, at: int, store: FileStore) -> None:
    odd = tp.rank == odd_of(kind)
    for step in range(100_000):
        if step == at and odd:
            note(store, "slipped")
        if step == at:
            LATE_SLIPS[kind](tp, odd)
        elif step % 2:
            tp.all_gather(X)
        else:
            tp.all_reduce(X)
        time.sleep(pause)


def on_ranks(place: str, body: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    if place == "one host":
        return run_ranks(M, body, mkdtemp(dir=folder), None, *args, timeout=140)
    with two_hosts("IPv4") as hosts:
        return run_ranks(M, body, mkdtemp(dir=folder), hosts, *args, timeout=140)


def assert_diverged(error: CoordinatorError, kind: str) -> None:
    """The rank that slips is one of the two that the error names."""
    odd = odd_of(kind)
    if isinstance(error, DivergenceError):
        return
    assert isinstance(error, GroupAbortedError), (kind, error)
    assert error.failure.kind == "DivergenceError", kind
    assert re.search(rf"rank {odd} issued|rank {odd}( on host-.)? reported", str(error)), error


@PLACES
def test_ranks_that_have_diverged_get_an_error_soon(place: str, tmp_path: Path) -> None:
    slow = list(LATE_SLIPS)

    def attempt() -> float:
        results = on_ranks(place, each_slips, tmp_path, tuple(slow), 0.02, 10)
        seconds = {kind: max(found[kind][1] for found in results) for kind in slow}
        for kind in slow:
            for rank, found in enumerate(results):
                error, _ = found[kind]
                assert_diverged(error, kind)
                if rank != odd_of(kind) and isinstance(error, DivergenceError):
                    assert error.rank == odd_of(kind), kind
        slow[:] = [kind for kind in slow if seconds[kind] >= LATE_WITHIN]
        return max(seconds.values())

    assert quickest(attempt, LATE_WITHIN) < LATE_WITHIN, slow


@PLACES
def test_both_last_collectives_are_shown(place: str, tmp_path: Path) -> None:
    for found in on_ranks(place, each_slips, tmp_path, tuple(SHOWN), 1.0, 1):
        for kind, (error, _) in found.items():
            assert_diverged(error, kind)
            for shown in SHOWN[kind]:
                assert shown in str(error), kind
            assert "collective 2 of tp" in str(error), kind


@PLACES
def test_an_earlier_collective_is_found_between_two_numbers(place: str, tmp_path: Path) -> None:
    for found in on_ranks(place, each_slips, tmp_path, ("op",), 0.0, 250):
        error, _ = found["op"]
        assert_diverged(error, "op")
        between = re.search(r"one of its collectives (\d+) to (\d+) of tp", str(error))
        exact = "collective 251 of tp" in str(error)
        assert exact or (between and int(between[1]) <= 251 <= int(between[2])), error
        if place == "one host":  # where the log of each rank is at hand
            assert exact
            for shown in SHOWN["op"]:
                assert shown in str(error)


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
def test_ranks_that_wait_get_the_divergence(place: str, tmp_path: Path) -> None:
    for error in on_ranks(place, one_waits, tmp_path):
        assert "DivergenceError" in f"{type(error).__name__}: {error}"
        assert "broadcast float32[1000] from rank" in str(error)


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
        for turn in range(2):
            comms = [each.device_communicator for each in (world, tp, outer)]
            done += run(draw(seed + turn, 150, [n, 2, 2]), comms)
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
                done += run(draw(seed + 10 + turn, 40 + 20 * turn, [n, n]), comms)
                again[turn % 2].barrier()
    return done


@PLACES
@pytest.mark.parametrize("room", [None, 1])
def test_ranks_that_have_not_diverged_get_no_error(
    place: str, room: int | None, tmp_path: Path
) -> None:
    assert min(on_ranks(place, correct, tmp_path, 11, room)) > 200
