"""Objects and small tensors between processes that meet at a host and port, by vLLM's names."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from coordinator.compat.vllm.stateless_torch_groups import meet_at
from coordinator.setup.launcher import Launch
from coordinator.setup.settings import Settings
from coordinator.setup.topology import Topology
from coordinator.stores.secret import launcher_secret
from device_comm import ReduceOp
from shm_broadcast import Deadline
from shm_broadcast.machine.forked_child import Closing

if TYPE_CHECKING:
    import socket
    from contextlib import ExitStack

    from torch import Tensor

    from coordinator.group import GroupCoordinator


class StatelessProcessGroup:
    """Exchanges objects and CPU tensors between processes that meet at a host and port.

    Ranks are ranks in this group. One thread at a time.

    Attributes:
        rank: this process's rank.
        world_size: the number of processes.
        group: the underlying group, with all operations.
    """

    def __init__(self, group: GroupCoordinator, closing: ExitStack) -> None:
        """Use `create`."""
        self.group = group
        self.rank = group.rank_in_group
        self.world_size = group.world_size
        self._closing = closing

    @classmethod
    def create(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: float = 300,
        listen_socket: socket.socket | None = None,
    ) -> Self:
        """Meet the others at the store that rank 0 hosts.

        Args:
            host: the address of rank 0's host.
            port: the port that rank 0 binds.
            rank: this process's rank among those that meet there.
            world_size: how many processes.
            data_expiration_seconds: no effect: messages do not stay in the store.
            store_timeout: seconds to wait for all of them.
            listen_socket: of rank 0, bound and listening: the store takes it.

        Collective: yes, all of them.

        Raises:
            GroupTimeoutError: some did not come in time; names them.
        """
        del data_expiration_seconds
        deadline = Deadline.after(store_timeout)
        store = None
        if listen_socket is not None:
            store = meet_at(host, port, rank, listen_socket, timedelta(seconds=store_timeout))
        with Closing() as undo:
            launch = Launch(rank, world_size, 0, host, port, secret=launcher_secret(None))
            settings = Settings.of("gloo", launch.local_rank, secret=launch.secret)
            topology = Topology.meet(launch, settings, undo, store=store, timeout=deadline)
            with topology.telling_why():
                group = topology.group("stateless", list(range(world_size)), deadline)
            undo.enter_context(group)
            undo.enter_context(topology.telling_why())
            return cls(group, undo.pop_all())

    def send_obj(self, obj: Any, dst: int) -> None:
        """Send an object. Collective: no, the two processes."""
        self.group.send_object(obj, dst)

    def recv_obj(self, src: int) -> Any:
        """Receive an object. Collective: no, the two processes."""
        return self.group.recv_object(src)

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return the object of rank ``src``. Collective: yes, every process."""
        return self.group.broadcast_object(obj, src)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every process's object, by rank. Collective: yes, every process."""
        return self.group.all_gather_object(obj)

    def broadcast(self, tensor: Tensor | None, src: int) -> Tensor:
        """Return the tensor of rank ``src``, of any shape and dtype; others may pass None.

        Collective: yes, every process. ``src`` gets its own tensor back, not a copy.
        """
        found = self.group.broadcast_tensor_dict({"tensor": tensor}, src)
        return found["tensor"]  # type: ignore[no-any-return]

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a tensor. Collective: no, the two processes."""
        self.group.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Fill ``tensor`` with what ``src`` sends, of the same shape and dtype; returns it.

        Collective: no, the two processes.
        """
        return self.group.recv(src=src, out=tensor)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The elementwise reduction of all processes' tensors, as a new tensor.

        ``tensor`` has the same shape and dtype on all. Collective: yes, every process.

        Raises:
            TypeError: ``op`` is none of those that we have, or not for such tensors.
        """
        ours = ReduceOp.__members__.get(op.name)
        if ours is None:
            raise TypeError(f"op must be one of {[*ReduceOp.__members__]}, not {op!r}")
        return self.group.all_reduce(tensor, op=ours)

    def barrier(self, timeout: float = 30.0) -> None:
        """Wait until every process has called this; ``timeout`` in seconds.

        Collective: yes, every process.
        """
        self.group.barrier(timeout=timeout)

    def expire_data(self) -> None:
        """Nothing: no message stays behind in the store."""

    def close(self) -> None:
        """Close the group and the connections; idempotent. Collective: no."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)
