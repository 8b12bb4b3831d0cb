"""Topologies: who is in which group, how they are started, what they cost."""

from __future__ import annotations

import copy
import os
import pickle
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import Store

import coordinator
from coordinator import ParallelGroups
from coordinator.secret import SecretError
from shm_broadcast import Board, CoordinatorError
from tests.commands import run_code
from tests.patience import STALL_SECONDS, all_here
from tests.ranks import NEW_BOARD, init_gloo, run_ranks
from tests.shared_store import SharedStore

AGENT = """
import os, torch, coordinator
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def sum_of_ranks():
    with coordinator.init(tp=2) as groups:
        total = groups.world.all_reduce(torch.tensor([groups.rank + 1]))
        return groups.rank, groups.world.ranks, groups.tp.ranks, total.tolist()

for hosted in ("1", "0"):
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = hosted
    config = LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", start_method="fork"
    )
    print(sorted(elastic_launch(config, sum_of_ranks)().values()))
"""


def join(rank: int, n: int, store: Store, **sizes: int) -> ParallelGroups:
    return coordinator.init(rank=rank, world_size=n, store=store, timeout=30, **sizes)


def each_shape(rank: int, n: int, store: Store) -> None:
    with join(rank, n, store, tp=2, pp=2) as groups:
        assert groups.rank == groups.world.rank == rank
        assert groups.device == torch.device("cpu")
        pp, half = groups.pp, [0, 1] if rank < 2 else [2, 3]
        assert groups.world.ranks == [0, 1, 2, 3]
        assert groups.tp.ranks == half
        assert pp.ranks == ([0, 2] if rank % 2 == 0 else [1, 3])
        assert groups.dp.ranks == [rank]
        assert (pp.first_rank, pp.last_rank) == (pp.ranks[0], pp.ranks[1])
        assert pp.next_rank == pp.prev_rank == pp.ranks[1 - pp.rank_in_group]
        assert (pp.is_first_rank, pp.is_last_rank) == (rank < 2, rank >= 2)
        assert groups.world.next_rank == (rank + 1) % 4
        assert groups.world.prev_rank == (rank - 1) % 4
        assert groups.world.all_reduce(torch.tensor([rank])).item() == 6
        assert groups.tp.nodes == [[0, 1]]
        assert [status.pid > 0 for status in groups.world.status()] == [True] * 4
        use_with_torch(groups)
    with join(rank, n, store, tp=2, dp=2, dcp=2, axes={"shard": 1}) as groups:
        assert groups.ep.token_group is groups.dp
        assert groups.axes["shard"].ranks == groups.pcp.ranks == [rank]
        assert (groups.ep.ranks, groups.dcp.ranks) == ([0, 1, 2, 3], half)
        assert groups.ep.all_reduce(torch.ones(1)).item() == 4
        assert groups.dcp.all_reduce(torch.ones(1)).item() == 2
        groups.world.barrier()
    with join(rank, n, store, tp=1, pcp=2, dp=1, axes={"replica": 2}) as groups:
        assert groups.axes["replica"].ranks == [rank % 2, rank % 2 + 2]  # outermost
        assert groups.pcp.ranks == half
        assert groups.ep.unique_name == groups.pcp.unique_name
        groups.world.barrier()
    with join(rank, n, store, tp=2, pcp=2, dcp=2) as groups:
        assert groups.dcp.ranks == [rank % 2, rank % 2 + 2]  # along pcp first
        assert groups.dcp.all_gather(torch.tensor([rank])).tolist() == groups.dcp.ranks
        groups.world.barrier()


def use_with_torch(groups: ParallelGroups) -> None:
    """Its functions take the process groups."""
    pp = groups.pp.device_group
    x = torch.tensor([float(groups.rank)])
    dist.all_reduce(x, group=pp)
    assert x.item() == sum(groups.pp.ranks)
    dist.broadcast(x, src=groups.pp.last_rank, group=pp)
    assert dist.get_process_group_ranks(pp) == groups.pp.ranks
    assert (dist.get_world_size(pp), pp.rank()) == (2, groups.pp.rank_in_group)
    assert dist.get_backend(groups.pp.cpu_group) == "gloo"
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, groups.rank, group=groups.pp.cpu_group)
    assert everyone == groups.pp.ranks
    assert functional.all_reduce(torch.ones(1), "sum", groups.tp.device_group).item() == 2
    assert not dist.is_initialized()


def test_each_rank_is_in_its_groups() -> None:
    run_ranks(4, each_shape, SharedStore())


def two_at_once(rank: int, n: int, store: Store) -> None:
    first, second = join(rank, n, store, tp=2), join(rank, n, store, pp=2)
    x = torch.tensor([rank + 1.0])
    assert first.tp.all_reduce(x).item() == 3
    assert second.pp.all_reduce(x * 10).item() == 30
    assert first.pp.all_reduce(x).item() == rank + 1
    first.close()
    first.close()
    assert second.world.all_reduce(x).item() == 3
    assert first.world.closed
    assert not second.world.closed
    second.close()
    with join(rank, n, store, dp=2) as third:
        assert third.dp.all_reduce(x).item() == 3


def test_two_topologies_live_in_one_process() -> None:  # D6
    run_ranks(2, two_at_once, SharedStore())


def on_a_given_board(rank: int, n: int, store: Store, handle: Any) -> None:
    with Board.attach(handle, rank) as board:
        groups = coordinator.init(
            tp=2, pp=2, rank=rank, world_size=n, store=store, board=board, timeout=30
        )
        with groups:
            assert groups.board is board
            assert groups.pp.board is board
            groups.pp.all_reduce(torch.ones(1))
            seen = [status.rank for status in groups.pp.status()]
            assert seen == groups.pp.ranks
            assert "all_reduce" in groups.pp.status()[groups.pp.rank_in_group].operation
            groups.world.barrier()
        assert not board.closed
        with (
            pytest.raises(ValueError, match="=4 is not a rank"),
            coordinator.init(n, rank=rank, store=store, board=board) as groups,
        ):
            groups.world.broadcast(torch.ones(1), src=n)
        all_here(store, n)
        assert board.aborted is None  # the launcher learns of it otherwise


def test_a_launchers_board_is_used_and_never_aborted() -> None:
    run_ranks(4, on_a_given_board, SharedStore(), NEW_BOARD)


def leaves(rank: int, n: int, store: Store, error: BaseException) -> str:
    """Rank 1 leaves with an error while the others wait for it."""

    def fail(x: torch.Tensor) -> None:
        raise error

    with (
        pytest.raises(type(error) if rank == 1 else CoordinatorError) as caught,
        join(rank, n, store, tp=n) as groups,
    ):
        (fail if rank == 1 else groups.tp.all_reduce)(torch.ones(2))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ValueError("layer 3 is missing"), "GroupAbortedError: .*rank 1.*layer 3 is missing"),
        (KeyboardInterrupt(), "GroupAbortedError: .*rank 1.*KeyboardInterrupt"),
        (SystemExit(0), r"\w+Error: .*rank 1 (|\(.*)has closed the group"),
    ],
)
def test_an_error_that_ends_one_rank_reaches_the_others(error: BaseException, why: str) -> None:
    first, _, last = run_ranks(3, leaves, SharedStore(), error)
    for told in (first, last):
        assert re.match(why, told), told


SECRET = b"sixteen or more bytes"
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"tp": 3}, {"pp": 3}, "tp is 3 on ranks [0], 1 on ranks [1, 2]"),
    ({"tp": 3}, {"dp": 3}, "tp is 3 on ranks [0], 1 on ranks [1, 2]"),
    ({"tp": 3, "dcp": 3}, {"tp": 3}, "dcp is 3 on ranks [0], 1 on ranks [1, 2]"),
    ({"axes": {"a": 3}}, {"axes": {"b": 3}}, "a is 3 on ranks [0], not given on ranks [1, 2]"),
    (
        {"axes": {"a": 3, "b": 1}},
        {"axes": {"b": 1, "a": 3}},
        "axes is a, b on ranks [0], b, a on ranks [1, 2]",
    ),
    ({}, {"torch_only": True}, "torch_only is False on ranks [0], True on ranks [1, 2]"),
    (
        {"torch_only": True, "checked": True},
        {"torch_only": True},
        "checked is True on ranks [0], False on ranks [1, 2]",
    ),
    ({"secret": SECRET}, {}, "secret is given on ranks [0], not given on ranks [1, 2]"),
    ({}, {"secret": SECRET}, "secret is not given on ranks [0], given on ranks [1, 2]"),
]
"""What rank 0 gives to `init`, the others, and the error."""


def call_differently(rank: int, n: int, path: str) -> list[str]:
    said = []
    for number, (first, others, _) in enumerate(DIFFERENT):
        store = dist.FileStore(f"{path}{number}", n)
        begun = time.monotonic()
        with pytest.raises(SecretError if "secret" in first | others else ValueError) as caught:
            coordinator.init(
                rank=rank,
                world_size=n,
                store=store,
                timeout=STALL_SECONDS,
                **(others if rank else first),
            )
        assert time.monotonic() - begun < STALL_SECONDS
        said.append(str(caught.value))
    for name, given in (("secret", SECRET), ("use_device_communicator", False)):
        with pytest.raises(ValueError, match="give all ranks the same") as different:
            coordinator.StatelessGroupCoordinator(
                [[*range(n)]], 0, "gloo", coord_store=dist.FileStore(f"{path}{name}", n),
                group_name="tp", global_rank=rank, timeout=STALL_SECONDS,
                **({"use_device_communicator": True} | ({name: given} if rank == 0 else {})),
            )  # fmt: skip
        said.append(str(different.value))
    return said


def test_different_arguments_are_an_error_on_all_ranks_at_once(store_path: str) -> None:
    expected = [f"world: {said}: give all ranks the same" for _, _, said in DIFFERENT] + [
        "tp: secret is given on ranks [0], not given on ranks [1, 2]: give all ranks the same",
        "tp: torch_only is True on ranks [0], False on ranks [1, 2]: give all ranks the same",
    ]
    assert run_ranks(3, call_differently, store_path) == [expected] * 3


@pytest.mark.quick
def test_a_world_of_one_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    starts = [time.perf_counter()]
    for _ in range(3):
        with coordinator.init() as groups:
            for group in (groups.tp, groups.pp, groups.dp, groups.world):
                assert group.all_gather_object(1) == [1]
        starts.append(time.perf_counter())
    assert min(end - start for start, end in pairwise(starts)) < 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 2, "pp": 2, "world_size": 6}, "dp=1 x pp=2 x pcp=1 x tp=2 takes 4 ranks, not 6"),
        ({"tp": 2, "dp": 2, "world_size": 2}, "takes 4 ranks, not 2"),
        ({"tp": 4, "world_size": 2}, "dp=1 x pp=1 x pcp=1 x tp=4 takes 4 ranks, not 2"),
        ({"tp": 2, "world_size": 1}, "takes 2 ranks, not 1; start them by torchrun"),
        ({"axes": {"tp": 1}}, r"axes named \['tp'\]: built-in groups"),
        (
            {"axes": {"world": 1, "a": 1, "ep": 1, "dcp": 1}},
            r"axes named \['world', 'ep', 'dcp'\]: built-in groups have these names; choose others",
        ),
        ({"tp": 1, "dcp": 2}, "dcp=2 does not divide tp=1 x pcp=1"),
        ({"tp": 0, "world_size": 2}, "tp must be 1 or more; got 0"),
        ({"tp": 2, "rank": 2}, "rank 2 is not in a world of 2"),
        ({"tp": 2, "rank": 1, "master_port": 0}, "master_port 0 is no port to connect to"),
        ({"tp": 2, "rank": 0, "master_port": 0}, "master_port 0 is no port to connect to"),
        ({"rank": "0"}, "rank must be an integer; got '0'"),
        ({"rank": 0, "world_size": 1.0}, "world_size must be an integer; got 1.0"),
        ({"rank": 0, "local_rank": "1"}, "local_rank must be an integer; got '1'"),
        ({"rank": 0, "master_port": "29400"}, "master_port must be an integer; got '29400'"),
        ({"rank": 0, "timeout": "1"}, "timeout must be a number of seconds, or None; got '1'"),
    ],
)
@pytest.mark.quick
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    wrong = TypeError if "; got '" in message or "1.0" in message else ValueError
    with pytest.raises(wrong, match=message):
        coordinator.init(**{"rank": 0, **arguments})


def test_what_is_given_beside_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with coordinator.init(local_rank=3) as groups:
        assert groups.tp.local_rank == 3
    for given in ({"master_addr": "127.0.0.1"}, {"master_port": 0}):
        with pytest.raises(ValueError, match="master_addr and master_port need rank="):
            coordinator.init(**given)


def numbers_of_numpy(rank: int, n: int, path: str) -> None:
    """And where torch has a default group."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        os.environ.pop(name, None)
    init_gloo(rank, n, path)
    with pytest.raises(ValueError, match="distributed has 2 ranks here, and the environment has"):
        coordinator.init()
    store = dist.FileStore(path + "-groups", n)
    mine, other = np.int64(dist.get_rank()), np.int32(1 - rank)
    with coordinator.init(tp=np.int64(n), rank=mine, store=store, timeout=30) as groups:
        group: Any = groups.tp
        x = torch.full((2,), float(rank))
        group.send_object(rank, other)
        assert group.recv_object(other) == 1 - rank
        group.send_tensor_dict({"x": x}, other)
        assert group.irecv_tensor_dict(other).wait()["x"].tolist() == [1 - rank] * 2
        group.send(x, other)
        assert group.recv(np.int64(2), x.dtype, other).tolist() == [1 - rank] * 2
        assert group.broadcast(x, np.int64(1)).tolist() == [1, 1]
        assert group.broadcast_object(rank, np.int64(1)) == 1
        assert group.all_gatherv(x, 0, [np.int64(2)] * 2).tolist() == [0, 0, 1, 1]
        assert group.reduce_scatterv(x, 0, [np.int64(1)] * 2).tolist() == [1]
        assert (group.gather(x, np.int64(1), 0) is None) == (rank == 0)
        for wrong in (True, np.bool_(True), 1.0, "1"):
            with pytest.raises(TypeError, match="must be a rank in the group"):
                group.send_object(0, wrong)
        groups.world.barrier()


def test_numbers_of_numpy_are_numbers(store_path: str) -> None:
    run_ranks(2, numbers_of_numpy, store_path)


@pytest.mark.quick
def test_a_group_is_copied_as_itself_and_not_pickled() -> None:
    with coordinator.init() as groups:
        module = torch.nn.Module()
        module.group = groups.tp
        assert copy.deepcopy(module).group is copy.copy(groups.tp) is groups.tp
        with pytest.raises(TypeError, match="group 'tp' cannot be pickled"):
            pickle.dumps(module)


def test_torchrun() -> None:
    """From torchrun's environment alone; rank 0 hosts the store, or torchrun's agent does."""
    ran = run_code(
        AGENT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(coordinator.__file__).parents[1]),
        },
    )
    assert ran.stdout.splitlines() == ["[(0, [0, 1], [0, 1], [3]), (1, [0, 1], [0, 1], [3])]"] * 2
