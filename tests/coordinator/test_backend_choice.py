"""Backends are built by all members or by none, chosen by one table; `explain` shows why."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator, init
from coordinator.cuda_candidates import select, try_together
from coordinator.member import explain
from device_comm import ALL_VERBS, Backend, Communicator, LoopbackBackend
from device_comm.cuda.agree import all_gather_bytes_over, unanimous
from device_comm.cuda.driver import IpcUnavailableError
from device_comm.measuring import Key, TableCache
from device_comm.selection import Candidate, SelectingBackend, Selection
from shm_broadcast import Board, BoardHandle, CoordinatorError
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, init_gloo, run_ranks

KEY = Key("none", "none", "none", "none", 2, "2 ranks", "a b")


class RefusalError(CoordinatorError):
    pass


def refuse() -> bytes:
    raise RefusalError("not here")


def build_some(rank: int, n: int, path: str, handle: BoardHandle) -> list[str]:
    with Board.attach(handle, rank) as board, make_comm(rank, board, path) as over:
        swap = all_gather_bytes_over(over)
        payloads = swap(bytes([rank]) * (rank * 100_000))
        assert payloads == [bytes([r]) * (r * 100_000) for r in range(n)]
        assert unanimous(swap, lambda: b"made") == [b"made"] * n
        with pytest.raises(IpcUnavailableError, match="not here") as caught:
            unanimous(swap, lambda: refuse() if rank == 2 else b"")
        assert caught.value.rank == 2
        assert isinstance(caught.value.__cause__, RefusalError) == (rank == 2)
        built: list[Backend] = []

        def build(number: int) -> Backend:
            if number == 2 and rank == 1:
                refuse()
            first = number == 1
            built.append(make_comm(rank, board, f"{path}1").backend if first else LoopbackBackend())
            return built[-1]

        closing = ExitStack()
        with closing:
            first = try_together("one", lambda: 1, build, swap, closing)
            second = try_together("two", lambda: 2, build, swap, closing)
            third = try_together(
                "three", refuse if rank == 0 else (lambda: None), lambda _: built[0], swap, closing
            )
            assert first.backend is built[0]
            assert all(each.closed for each in built[1:])
        assert built[0].closed
        return [each.unavailable for each in (first, second, third)]


def test_a_backend_that_one_member_cannot_build_is_refused_on_all(store_path: str) -> None:
    found = run_ranks(3, build_some, store_path, NEW_BOARD)
    assert found == [["", "rank 1: not here", "rank 0: not here"]] * 3


def choose(rank: int, n: int, path: str, handle: BoardHandle, folder: str) -> list[str]:
    cache = TableCache(Path(folder) if rank == 0 else None)
    with Board.attach(handle, rank) as board, make_comm(rank, board, path) as over:
        swap = all_gather_bytes_over(over)
        ways = [make_comm(rank, board, f"{path}-{name}", name=name).backend for name in "ab"]
        candidates = [Candidate("a", ways[0]), Candidate("b", ways[1])]
        candidates.append(Candidate("c", None, "rank 1: not here"))
        tables = []
        for sizes, limit in (((64,), 60.0), ((64, 4096), 0.0), ((64, 4096), 60.0), ((), 60.0)):
            chosen = select(candidates, KEY, cache, swap, {"all_reduce": sizes}, limit)
            assert chosen.selection.table is not None
            tables.append(str(chosen.selection.table))
            assert Communicator(chosen).all_reduce(torch.ones(16))[0] == n
        chosen.close()
        assert [table.count("Measured") for table in tables] == [1, 1, 2, 2]
        assert tables[0] == tables[1] and tables[2] == tables[3]
        return tables


def test_a_table_is_measured_once_and_is_that_of_rank_0(store_path: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, choose, store_path, NEW_BOARD, str(tmp_path / "cache"))
    assert first == second
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


def test_a_lone_candidate_needs_no_table() -> None:
    backend = LoopbackBackend("cpu")
    chosen = select(
        [Candidate("no", None, "why"), Candidate("yes", backend)],
        KEY,
        TableCache(None),
        lambda _: pytest.fail("swapped"),
    )
    assert chosen.selection.table is None
    assert Communicator(chosen).all_reduce(torch.ones(1)).item() == 1
    chosen.close()
    assert backend.closed


# --- explain ------------------------------------------------------------------------------


def explained(rank: int, n: int, path: str) -> list[Any]:
    init_gloo(rank, n, path)
    found = []
    for use_device_communicator in (True, False):
        with GroupCoordinator([[0, 1]], rank, "gloo", use_device_communicator, False, "tp") as tp:
            found.append(tp.explain())
            tp.barrier()
    return found


def test_explain_names_the_backend_of_each_verb_and_why_not_others(store_path: str) -> None:
    first, second = run_ranks(2, explained, store_path)
    assert first == second
    shm, gloo = first
    assert shm.group == "tp: 2 members on cpu"
    assert {choice.verb for choice in shm.choices} == ALL_VERBS
    assert {(each.backend, each.reason) for each in shm.choices} == {
        ("shm", "all members share a host")
    }
    why = "all members share a host: shared memory is faster than sockets"
    assert shm.unavailable[0][0] in ("writing through the caches", "writing past the caches")
    assert shm.unavailable[0][1].startswith("not measured yet; Linux reports ")
    assert shm.unavailable[1:] == (("gloo", why),)
    assert shm.backend("all_reduce", 1 << 30) == "shm"
    assert gloo.backend("all_reduce", 4) == "gloo"
    assert gloo.unavailable == (("shm", "the settings allow torch's process groups only"),)


def of(communicator: Any, hosts: int) -> Any:
    """Of a group of two that exists nowhere."""
    nodes = SimpleNamespace(all=lambda: [[rank] for rank in range(hosts)])
    settings, device = SimpleNamespace(torch_only=False), communicator
    group: Any = SimpleNamespace(
        name="tp", ranks=(0, 1), device=device, nodes=nodes, settings=settings
    )
    return explain(group)


def test_explain_of_other_groups() -> None:
    with init(rank=0, backend="gloo") as groups:
        told = groups.tp.explain()
    assert told.group == "tp: 1 member on cpu"
    assert told.backend("broadcast", 8) == "loopback"
    assert "a group of one: every verb is the identity" in str(told)
    told = of(Communicator(LoopbackBackend("cpu")), hosts=2)
    assert told.unavailable == (("shm", "the members are on 2 hosts"),)
    refused = Candidate("nccl", None, "2 members share 1 devices")
    able = Candidate("ipc", LoopbackBackend("meta"))
    comm = Communicator(SelectingBackend(Selection([able, refused])))
    comm.device = torch.device("cuda", 0)
    told = of(comm, hosts=1)
    assert told.group == "tp: 2 members on cuda"
    assert told.unavailable == (("nccl", "2 members share 1 devices"),)
    assert {choice.reason for choice in told.choices} == {"the only one"}
