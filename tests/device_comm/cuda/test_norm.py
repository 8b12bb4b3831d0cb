"""An all-reduce with residual and norm: in steps everywhere, in one kernel where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import Communicator, LoopbackBackend
from shm_broadcast import Board, BoardHandle
from tests.device_comm.cuda.host_driver import HostDriver
from tests.device_comm.cuda.ipc_ranks import make_ipc
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, WIDTH = 5, 16
KERNEL = "ipc_packets_norm_float32"


def rows_of(rank: int, rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))


def in_double(n: int, epsilon: float, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm and the new residual, by their definitions."""
    total = sum(rows_of(rank, width=width).double() for rank in range(n))
    kept = rows_of(100, width=width).double() + total
    mean = kept.square().mean(-1, keepdim=True)
    return kept / (mean + epsilon).sqrt() * rows_of(200, 1, width)[0].double(), kept


def normed(
    comm: Communicator,
    width: int = WIDTH,
    *,
    learns: bool = False,
    strided: bool = False,
    **how: Any,
) -> None:
    x, residual, weight = (
        rows_of(comm.rank, width=width),
        rows_of(100, width=width),
        rows_of(200, 1, width)[0].requires_grad_(learns),
    )
    if strided:
        residual = residual.t().contiguous().t()
    before = [each.clone() for each in (x, residual, weight)]
    found = comm.all_reduce_norm(x, residual, weight, 0.01, **how)
    for result, expected in zip(found, in_double(comm.world_size, 0.01, width), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, before, (x, residual, weight)))


def over_shm(rank: int, n: int, path: str, handle: BoardHandle) -> None:
    with Board.attach(handle, rank) as board, make_comm(rank, board, path) as comm:
        normed(comm)


def test_in_steps_over_shared_memory(store_path: str) -> None:
    run_ranks(3, over_shm, store_path, NEW_BOARD)


def test_of_one_rank_nothing_is_summed() -> None:
    normed(Communicator(LoopbackBackend("cpu")))


def over_ipc(rank: int, n: int, library: str, path: str, board: BoardHandle) -> tuple[int, ...]:
    driver = HostDriver(library)

    def launches(call: Callable[[], object]) -> int:
        before = driver.launched.count(KERNEL)
        call()
        return driver.launched.count(KERNEL) - before

    with make_ipc(rank, n, library, path, board, driver) as comm:
        once = launches(lambda: normed(comm))
        twice = launches(lambda: [normed(comm, timeout=15.0), normed(comm)])
        # Ranks must launch the same, whatever the layout of one's tensors.
        strided = launches(lambda: normed(comm, strided=rank == 1))
        too_large = launches(lambda: normed(comm, width=64))
        odd = launches(lambda: normed(comm, width=7))
        learning = launches(lambda: normed(comm, learns=True))
        with torch.no_grad():
            learnt = launches(lambda: normed(comm, learns=True))
        x, residual, weight = rows_of(rank), rows_of(100), rows_of(200, 1)[0]
        with comm.graph_capture(), driver.capture() as graph:
            output, kept = comm.all_reduce_norm(x, residual, weight, 0.01)
        for turn in range(3):
            x.copy_(rows_of(rank) * (turn + 1))
            graph.replay()
            total = sum(rows_of(other) for other in range(n)) * (turn + 1)
            torch.testing.assert_close(kept, residual + total)
            expected = torch.nn.functional.rms_norm(kept, (WIDTH,), weight, 0.01)
            torch.testing.assert_close(output, expected)
        comm.flush()
        return once, twice, strided, too_large, odd, learning, learnt


def test_in_one_kernel_where_it_fits(emulation_library: str, store_path: str) -> None:
    found = run_ranks(2, over_ipc, str(emulation_library), store_path, NEW_BOARD)
    assert found == [(1, 2, 1, 0, 0, 0, 1)] * 2


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"x": torch.ones(5, 16, dtype=torch.int64)}, TypeError, "x must be rows of floats"),
        ({"x": torch.tensor(1.0)}, TypeError, "x must be rows of floats, not 0 dimensions"),
        ({"residual": torch.ones(4, 16)}, ValueError, r"residual has shape \(4, 16\), not \(5, 16"),
        ({"residual": torch.ones(5, 16).half()}, TypeError, r"residual is torch.float16; x is"),
        ({"weight": torch.ones(5)}, ValueError, r"weight has shape \(5,\), not \(16,\)"),
        ({"weight": [1.0]}, TypeError, "weight must be a tensor"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[Exception], said: str) -> None:
    right = {"x": torch.ones(5, 16), "residual": torch.ones(5, 16), "weight": torch.ones(16)}
    with pytest.raises(error, match=said):
        Communicator(LoopbackBackend("cpu")).all_reduce_norm(**(right | wrong))
