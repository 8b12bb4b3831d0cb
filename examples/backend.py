"""A backend of your own: it moves tensors through a torch store.

    python examples/backend.py

The smallest that waits as backends must: until the deadline, an abort, or the loss of a peer.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore, Store

from device_comm import Backend, Capabilities, Communicator, Identity, Operation
from device_comm.operation import NO_TENSOR, Verb, reduce_in_rank_order
from device_comm.torch_backend import as_bytes


class StoreBackend(Backend):
    """Collectives over a store. It never deletes what it has written there."""

    def __init__(self, store: Store, identity: Identity) -> None:
        """Use ``store``, which all ranks share."""
        verbs = frozenset[Verb](("all_gather", "all_reduce", "barrier", "broadcast"))
        super().__init__(identity, Capabilities("store", verbs))
        self._store = store
        self._number = 0

    def start(self, operation: Operation) -> None:
        """Write this rank's tensor, wait for the others' and combine them."""
        self._number += 1
        senders = [operation.peer] if operation.verb == "broadcast" else range(self.world_size)
        keys = [f"{self.name}/{self._number}/{rank}" for rank in senders]
        if self.rank in senders:
            key, data = keys[senders.index(self.rank)], as_bytes(operation.source).numpy()
            self._store.set(key, data.tobytes())  # type: ignore[arg-type] # the stub has text only
        self.watch.wait(
            lambda: self._store.check(keys),
            operation.deadline,
            operation.name,
            lambda: [self.members[rank] for rank in senders if rank != self.rank],
            poll=0.001,
        )
        output = operation.output.view(-1)
        if operation.output is NO_TENSOR:
            return
        parts = [decode(self._store.get(key), output.dtype) for key in keys]
        if operation.verb == "all_reduce":
            reduce_in_rank_order(parts, operation.op, output)
        else:
            output.copy_(torch.cat(parts))


def decode(data: bytes, dtype: torch.dtype) -> Tensor:
    """Return the elements in ``data``."""
    return torch.frombuffer(bytearray(data), dtype=dtype)


def rank_main(rank: int, n: int, path: str) -> None:
    """Sum the ranks' numbers."""
    backend = StoreBackend(FileStore(path, n), Identity.of(rank, n, name="example", timeout=30))
    with Communicator(backend) as comm:
        total = comm.all_reduce(torch.tensor([rank + 1.0]))
        print(f"rank {rank}: {total.item():g} over {comm.explain().choices[0].backend}")


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ranks = [context.Process(target=rank_main, args=(rank, 3, path)) for rank in range(3)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
