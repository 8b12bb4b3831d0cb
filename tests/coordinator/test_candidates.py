"""Backends are built by all members or by none; one table decides for all."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from coordinator.cuda_candidates import select, try_together
from device_comm import Communicator, LoopbackBackend
from device_comm.cuda.agree import all_gather_bytes_over, unanimous
from device_comm.cuda.driver import IpcUnavailableError
from device_comm.measuring import Key, TableCache
from device_comm.selection import Candidate
from shm_broadcast import Board, BoardHandle, CoordinatorError
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from device_comm import Backend

KEY = Key("none", "none", "none", "none", 2, "2 ranks", "a b")


class RefusalError(CoordinatorError):
    pass


def refuse() -> bytes:
    raise RefusalError("not here")


def build_some(rank: int, n: int, path: str, handle: BoardHandle) -> list[str]:
    with Board.attach(handle, rank) as board, make_comm(rank, board, path) as over:
        swap = all_gather_bytes_over(over)
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


def test_what_one_member_cannot_do_is_refused_on_all(store_path: str) -> None:
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


def swap_much(rank: int, n: int, path: str, handle: BoardHandle) -> list[int]:
    with Board.attach(handle, rank) as board, make_comm(rank, board, path) as over:
        swap = all_gather_bytes_over(over)
        payloads = swap(bytes([rank]) * (rank * 100_000))
        assert payloads == [bytes([r]) * (r * 100_000) for r in range(n)]
        assert unanimous(swap, lambda: b"made") == [b"made"] * n
        with pytest.raises(IpcUnavailableError, match="not here") as caught:
            unanimous(swap, lambda: refuse() if rank == 2 else b"")
        assert isinstance(caught.value.__cause__, RefusalError) == (rank == 2)
        return [caught.value.rank]


def test_swapping_and_agreeing(store_path: str) -> None:
    assert run_ranks(3, swap_much, store_path, NEW_BOARD) == [[2]] * 3
