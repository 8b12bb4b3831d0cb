"""Each algorithm of an all-reduce by itself, and a table that chooses among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import Communicator, ReduceOp
from device_comm.cuda.ipc.ipc_backend import ipc_algorithms
from device_comm.measuring import measure_candidates
from device_comm.selection import Candidate, Measured, SelectingBackend, Selection, Table
from tests.device_comm.cuda.host_driver import HostDriver
from tests.device_comm.cuda.ipc_ranks import ipc_of, make_ipc
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from shm_broadcast import BoardHandle

NORM = "ipc_packets_norm_float32"
NAMES = ["ipc packets", "ipc one-shot", "ipc two-shot"]


def reduced(rank: int, n: int, library: str, path: str, board: BoardHandle) -> list[str]:
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver) as ipc:
        candidates = [*ipc_algorithms(ipc_of(ipc)), Candidate("ipc", ipc.backend)]
        assert [each.name for each in candidates[:3]] == NAMES
        limit = candidates[0].up_to
        assert limit == ipc_of(ipc).packet_bytes
        for each in candidates[:3]:
            assert each.backend is not None
            way = Communicator(each.backend)
            for count in (1, 37, limit // 4):
                x = torch.arange(count, dtype=torch.float32) + rank
                expected = 2 * torch.arange(count, dtype=torch.float32) + 1
                assert torch.equal(way.all_reduce(x), expected)
            with pytest.raises(NotImplementedError, match=r"no kernel for SUM of torch\.int64"):
                way.all_reduce(torch.ones(2, dtype=torch.int64))
        sizes = {"all_reduce": (64, 2 * limit), "barrier": (0,)}
        found = measure_candidates(candidates, {}, ipc_of(ipc)._endpoint.swap, sizes).verbs
        assert list(found) == ["all_reduce"]
        assert [sorted(row.seconds) for row in found["all_reduce"]] == [
            sorted([*NAMES, "ipc"]),
            sorted([*NAMES[1:], "ipc"]),
        ]
        rows = [
            Measured(size, {name: 1.0 + (name != best) for name in [*NAMES, "ipc"]})
            for size, best in zip((16, 256, 4096), NAMES, strict=True)
        ]
        selection = Selection(candidates, Table({}, {"all_reduce": rows}))
        comm = Communicator(SelectingBackend(selection))
        # What the plain sum is chosen for decides: here 256 bytes go in one shot.
        for count, is_one in ((4, True), (64, False)):
            x, launched = torch.full((1, count), rank + 1.0), driver.launched.count(NORM)
            normed, kept = comm.all_reduce_norm(x, torch.ones_like(x), torch.ones(count), 0.0)
            assert kept.unique().tolist() == [4.0]
            assert normed.unique().tolist() == [1.0]
            assert driver.launched.count(NORM) - launched == is_one, count
        used = []
        for count in (4, 64, 1024):
            x = torch.full((count,), rank + 1.0)
            used.append(selection.reducer("all_reduce", x.nbytes, ReduceOp.SUM, x.dtype).name)
            assert comm.all_reduce(x).unique().tolist() == [3.0]
        whole = comm.all_reduce(torch.tensor([rank + 5]), op=ReduceOp.PRODUCT)
        assert whole.tolist() == [30]
        assert comm.all_gather(torch.tensor([rank])).tolist() == [0, 1]
        assert comm.capabilities.backend == "ipc"
        captured = driver.tensor((1024,), torch.float32)
        with comm.graph_capture(), driver.capture() as graph:
            total = comm.all_reduce(captured)
        captured.fill_(rank + 2)
        graph.replay()
        comm.flush()
        assert total.unique().tolist() == [5.0]
        assert ipc_of(ipc).reasons == ()
        comm.close()
        return used


def test_ways(emulation_library: str, store_path: str) -> None:
    found = run_ranks(2, reduced, str(emulation_library), store_path, NEW_BOARD)
    assert found == [NAMES, NAMES]
