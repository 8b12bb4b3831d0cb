"""`SelectingBackend` over two real backends: shared memory and gloo, by turns."""

from __future__ import annotations

import pytest
import torch

from device_comm import (
    ALL_VERBS,
    Backend,
    Capabilities,
    Communicator,
    Identity,
    LoopbackBackend,
    Operation,
    ReduceOp,
    TorchBackend,
)
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.measuring import measure_candidates
from device_comm.selection import Candidate, Measured, SelectingBackend, Selection, Table
from shm_broadcast import Board, BoardHandle, GroupAbortedError, GroupClosedError
from tests.device_comm.meeting import meet
from tests.device_comm.shm_ranks import make_comm
from tests.device_comm.suite import check_table
from tests.device_comm.whole_table import run_whole_table
from tests.ranks import NEW_BOARD, init_gloo, run_ranks

BYTES = [32, 100, 300, 5000]
VERBS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"]


def alternating() -> Table:
    """A table by which neighbouring sizes go to different backends."""
    winners = ["shm", "gloo", "shm", "gloo"]
    rows = [
        Measured(size, {name: 1.0 if name == winner else 2.0 for name in ("shm", "gloo")})
        for size, winner in zip(BYTES, winners, strict=True)
    ]
    return Table({}, dict.fromkeys([*VERBS, "send"], rows))


def make(
    rank: int, n: int, path: str, handle: BoardHandle, table: Table | None
) -> tuple[Communicator, Board]:
    board = Board.attach(handle, rank)
    shm = make_comm(rank, board, f"{path}-shm")
    gloo = TorchBackend(init_gloo(rank, n, path), "cpu", board, name="tp", timeout=20)
    candidates = [Candidate("shm", shm.backend), Candidate("gloo", gloo)]
    return Communicator(SelectingBackend(Selection(candidates, table))), board


def selection_of(comm: Communicator) -> Selection:
    assert isinstance(comm.backend, SelectingBackend)
    return comm.backend.selection


def table(rank: int, n: int, path: str, handle: BoardHandle) -> dict[str, str]:
    comm, _ = make(rank, n, path, handle, alternating())
    with comm:
        dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
        return run_whole_table(comm, dtypes)


@pytest.mark.parametrize("n", [2, 3])
def test_table(n: int, store_path: str) -> None:
    check_table(run_ranks(n, table, store_path, NEW_BOARD))


def both_are_used(rank: int, n: int, path: str, handle: BoardHandle) -> list[str]:
    comm, board = make(rank, n, path, handle, alternating())
    used = []
    with comm:
        for size in BYTES:
            x = torch.full((size // 4,), rank + 1.0)
            assert comm.all_reduce(x, op=ReduceOp.SUM).unique().tolist() == [3.0]
            used.append(selection_of(comm).candidate("all_reduce", x.nbytes).name)
        assert comm.capabilities.backend == "shm+gloo"
        assert not comm.capabilities.detects_divergence
        meet(rank, n, path)
        board.abort("enough")
        with pytest.raises(GroupAbortedError, match="tp all_reduce"):
            comm.all_reduce(torch.ones(1))
    with pytest.raises(GroupClosedError):
        comm.barrier()
    return used


def test_both_are_used_and_end_together(store_path: str) -> None:
    found = run_ranks(2, both_are_used, store_path, NEW_BOARD)
    assert found == [["shm", "gloo", "shm", "gloo"]] * 2


def test_during_a_capture_another_backend_may_do_it() -> None:
    ipc, host = Noting("ipc", stream_ordered=True), Noting("host", stream_ordered=False)
    rows = [Measured(32, {"ipc": 2.0, "host": 1.0})]
    table = Table({}, {"all_reduce": rows, "send": rows})
    capturing = [False]
    backend = SelectingBackend(
        Selection([Candidate("ipc", ipc), Candidate("host", host)], table), lambda: capturing[0]
    )
    x = torch.ones(3)
    for capturing[0] in (False, True, False):
        backend.start(Operation("all_reduce", x, x))
        backend.start(Operation("send", x, peer=1))
    assert [each.verb for each in ipc.started] == ["all_reduce", "send"]
    assert len(host.started) == 4


def test_it_norms_what_a_backend_norms_that_is_chosen_for_some_sum() -> None:
    ipc = Noting("ipc", stream_ordered=True, normed=torch.float16)
    nccl = Noting("nccl", stream_ordered=True, normed=torch.float32)
    host = Noting("host", stream_ordered=False, normed=torch.bfloat16)
    candidates = [Candidate("nccl", nccl), Candidate("ipc", ipc), Candidate("host", host)]

    def normed(*times: dict[str, float], verb: str = "all_reduce") -> frozenset[torch.dtype]:
        rows = [Measured(64**turn, each) for turn, each in enumerate(times, 1)]
        table = Table({}, {verb: rows})
        return SelectingBackend(Selection(candidates, table)).capabilities.normed

    small, large = {"nccl": 3.0, "ipc": 2.0, "host": 9.0}, {"nccl": 1.0, "ipc": 2.0, "host": 9.0}
    assert normed(small, large) == {torch.float16, torch.float32}
    assert normed(large) == normed(small, verb="broadcast") == {torch.float32}
    # In the capture of a graph it is the one that can be captured.
    assert normed({"nccl": 2.0, "ipc": 3.0, "host": 1.0}) == {torch.bfloat16, torch.float32}


def test_whether_it_norms_follows_the_choice_for_the_sum() -> None:
    ipc = Noting("ipc", stream_ordered=True, normed=torch.float32)
    nccl = Noting("nccl", stream_ordered=True)
    rows = [Measured(64, {"nccl": 3.0, "ipc": 2.0}), Measured(4096, {"nccl": 1.0, "ipc": 2.0})]
    table = Table({}, {"all_reduce": rows})
    backend = SelectingBackend(
        Selection([Candidate("nccl", nccl), Candidate("ipc", ipc)], table), lambda: False
    )
    assert [backend.norms(torch.ones(count), torch.ones(1)) for count in (16, 1024)] == [
        True,
        False,
    ]


class Noting(Backend):
    """Keeps what it is told to start."""

    def __init__(
        self, name: str, *, stream_ordered: bool, normed: torch.dtype | None = None
    ) -> None:
        kinds = frozenset(() if normed is None else (normed,))
        has = Capabilities(name, ALL_VERBS, stream_ordered=stream_ordered, normed=kinds)
        super().__init__(Identity.of(0, 2), has)
        self.started: list[Operation] = []

    def start(self, operation: Operation) -> None:
        self.started.append(operation)

    def norms(self, x: torch.Tensor, weight: torch.Tensor) -> bool:  # noqa: ARG002 - any
        return x.dtype in self.capabilities.normed


def measured(rank: int, n: int, path: str, handle: BoardHandle) -> dict[str, list[int]]:
    comm, _ = make(rank, n, path, handle, None)
    with comm:
        sizes = {"all_reduce": (64, 4096), "send": (64,), "barrier": (0,), "gather": (64,)}
        shm = selection_of(comm).candidates[0].backend
        assert shm is not None
        found = measure_candidates(
            selection_of(comm).candidates, {}, all_gather_bytes_over(Communicator(shm)), sizes
        )
        assert found.sound()
        assert all(
            set(row.seconds) == {"shm", "gloo"} for rows in found.verbs.values() for row in rows
        )
        return {verb: [row.size for row in rows] for verb, rows in found.verbs.items()}


def test_measuring_on_real_ranks(store_path: str) -> None:
    found = run_ranks(2, measured, store_path, NEW_BOARD)
    assert found[0] == found[1]
    assert found[0] == {"all_reduce": [64, 4096], "send": [64], "barrier": [0], "gather": [64]}


def test_what_cannot_be_selected_from() -> None:
    with pytest.raises(ValueError, match="needs a candidate"):
        SelectingBackend(Selection([Candidate("ipc", None, "no peer access")]))
    one, other = LoopbackBackend("cpu"), LoopbackBackend("meta")
    with pytest.raises(ValueError, match="not of one group"):
        SelectingBackend(Selection([Candidate("a", one), Candidate("b", other)]))


def test_refused_candidates_are_explained() -> None:
    refused = Candidate("ipc", None, "rank 1: no peer access")
    comm = SelectingBackend(Selection([refused, Candidate("loopback", LoopbackBackend("cpu"))]))
    assert comm.explain().unavailable == (("ipc", "rank 1: no peer access"),)
    assert comm.explain().backend("all_reduce", 1) == "loopback"


def test_a_backend_explains_itself() -> None:
    choices = LoopbackBackend("cpu").explain().choices
    assert {choice.backend for choice in choices} == {"loopback"}
    assert {choice.sizes for choice in choices} == {"any size"}
