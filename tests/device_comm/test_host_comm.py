"""The table over `HostStaging`; the device it moves tensors of is the CPU here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import Communicator, TorchBackend
from device_comm.shm.channel import HEADER_BYTES, RING_BYTES
from device_comm.wrappers import HostStaging
from tests.device_comm.shm_ranks import make_comm
from tests.device_comm.suite import check_table
from tests.device_comm.whole_table import run_whole_table
from tests.ranks import NEW_BOARD, init_gloo, run_ranks

if TYPE_CHECKING:
    from shm_broadcast import BoardHandle


def table(rank: int, n: int, path: str, board: BoardHandle, device: str) -> dict[str, str]:
    with (
        make_comm(rank, board, path) as inner,
        Communicator(HostStaging(inner.backend, device)) as comm,
    ):
        assert comm.capabilities.backend == "host"
        assert comm.capabilities.detects_divergence
        if n > 1:
            with pytest.raises(NotImplementedError, match="host has no irecv_series"):
                comm.irecv_series(list, (rank + 1) % n)
        dtypes = [torch.float32, torch.int64, torch.bfloat16]
        return run_whole_table(comm, dtypes)


@pytest.mark.parametrize("n", [2, 3])
def test_table(n: int, store_path: str) -> None:
    check_table(run_ranks(n, table, store_path, NEW_BOARD, "cpu"))


def over_gloo(rank: int, n: int, path: str) -> dict[str, str]:
    backend = TorchBackend(init_gloo(rank, n, path))
    with Communicator(HostStaging(backend, "cpu")) as comm:
        return run_whole_table(comm, [torch.float32])


def test_table_over_gloo(store_path: str) -> None:
    check_table(run_ranks(2, over_gloo, store_path))


def goes_ahead_as_the_host(rank: int, n: int, path: str, board: BoardHandle) -> None:
    with (
        make_comm(rank, board, path) as inner,
        Communicator(HostStaging(inner.backend, "cpu")) as comm,
    ):
        peer, x = 1 - rank, torch.ones(1)
        sent = 0
        while comm.sends_eagerly(peer, x.nbytes):
            comm.send(x, peer)
            sent += 1
        comm.barrier()
        assert sent == RING_BYTES // (2 * HEADER_BYTES)
        for _ in range(sent):
            assert comm.recv((1,), torch.float32, peer) == 1
        comm.barrier()  # who closes before its messages were found takes them along


def test_it_goes_ahead_as_far_as_the_host(store_path: str) -> None:
    run_ranks(2, goes_ahead_as_the_host, store_path, NEW_BOARD)


@pytest.mark.gpu
def test_table_on_a_gpu(store_path: str) -> None:
    check_table(run_ranks(2, table, store_path, NEW_BOARD, "cuda:0"))
