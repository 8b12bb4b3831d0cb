"""Compiled models take the kernel that sums and norms, as eager ones do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from coordinator import compile_ops
from device_comm.verbs.collectives import Collectives
from tests.device_comm.cuda.host_driver import HostDriver
from tests.device_comm.cuda.ipc_ranks import make_ipc
from tests.device_comm.cuda.test_norm import KERNEL, WIDTH, rows_of
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm import Communicator
    from shm_broadcast import BoardHandle


class Group(Collectives):
    """The verbs of a communicator, also as ops."""

    def __init__(self, comm: Communicator) -> None:
        self.runner = comm.runner
        name = compile_ops.register_ops("tp", comm)
        self._traced = compile_ops.OpsOfGraph(name, comm.world_size)


def over_ipc(
    rank: int, n: int, library: str, path: str, board: BoardHandle
) -> tuple[int, list[str]]:
    driver = HostDriver(library)
    with make_ipc(rank, n, library, path, board, driver) as comm:
        group = Group(comm)
        given = rows_of(rank), rows_of(100), torch.nn.Parameter(rows_of(200, 1)[0])

        def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return group.all_reduce_norm(x.sigmoid(), residual, weight, 0.01)

        ops: list[str] = []

        def backend(module: torch.fx.GraphModule, _: object) -> Any:
            ops.extend(str(node.target) for node in module.graph.nodes)
            return module

        with torch.no_grad():
            fast = torch.compile(model, fullgraph=True, backend=backend)
            before = driver.launched.count(KERNEL)
            found = fast(*given)
            launched = driver.launched.count(KERNEL) - before
            for ours, theirs in zip(found, model(*given), strict=True):
                assert torch.equal(ours, theirs)
        total = sum(rows_of(other).sigmoid() for other in range(n))
        torch.testing.assert_close(found[1], rows_of(100) + total)
        assert found[0].shape == (len(rows_of(0)), WIDTH)
        return launched, [op for op in ops if "group_coordinator" in op]


def test_a_compiled_model_takes_the_kernel(emulation_library: str, store_path: str) -> None:
    found = run_ranks(2, over_ipc, str(emulation_library), store_path, NEW_BOARD)
    assert found == [(1, ["group_coordinator.all_reduce_norm.default"])] * 2
