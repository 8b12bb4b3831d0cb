"""Provide vLLM's helpers: arithmetic, and objects without a default group."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore

from coordinator.compat.state import (
    divide,
    ensure_divisibility,
    layers_of_stage,
    split_tensor_along_last_dim,
)
from coordinator.group import GroupCoordinator
from coordinator.groups import Topology
from coordinator.launcher import Launch
from coordinator.rendezvous import Settings
from coordinator.secret import launcher_secret
from device_comm import ReduceOp
from shm_broadcast import Deadline
from shm_broadcast.process import ForkSafeExitStack

__all__ = [
    "StatelessProcessGroup",
    "divide",
    "ensure_divisibility",
    "get_pp_indices",
    "split_tensor_along_last_dim",
]


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Return the first layer of a stage and the first of the next.

    ``VLLM_PP_LAYER_PARTITION`` in the environment may set the layers of each stage: ``"5,6,5"``.
    Otherwise all have equally many. The stages before the last get one more each, from the last of
    them on; the last stage has the head.

    Raises ValueError if the variable does not fit the layers and stages.
    """
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION")
    if partition is not None:
        return layers_of_stage(partition, num_hidden_layers, pp_rank, pp_size)
    each, left = divmod(num_hidden_layers, pp_size)
    more = range(pp_size - 1 - left, pp_size - 1)
    start = pp_rank * each + sum(stage < pp_rank for stage in more)
    return start, start + each + (pp_rank in more)


_STORE_SECONDS = 300.0


class StatelessProcessGroup:
    """Exchanges objects and CPU tensors between processes that meet at a host and port.

    Ranks are ranks in this group. One thread at a time. ``group`` has all operations.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store, data_expiration_seconds: int = 3600
    ) -> None:
        """Meet the others in ``store``, which is for one group and must outlive it.

        ``data_expiration_seconds`` has no effect: messages do not stay in the store. Collective:
        yes, all of them. Raises GroupTimeoutError, with the ranks that did not arrive in 300 s.
        """
        del data_expiration_seconds
        self._meet(rank, world_size, store, Deadline.after(_STORE_SECONDS))

    @classmethod
    def create(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: float = _STORE_SECONDS,
        listen_socket: socket.socket | None = None,
    ) -> Self:
        """Meet the others at the store that rank 0 hosts.

        ``listen_socket`` is rank 0's, bound to ``port`` and listening: the store owns it.
        ``store_timeout`` is in seconds. ``data_expiration_seconds`` has no effect: messages do not
        stay in the store.

        Collective: yes, all of them.

        Raises:
            GroupTimeoutError: processes did not arrive in time; names them.
        """
        del data_expiration_seconds
        deadline = Deadline.after(store_timeout)
        store = None
        if listen_socket is not None:
            store = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=store_timeout),
                master_listen_fd=listen_socket.detach(),
            )
        group = cls.__new__(cls)
        group._meet(rank, world_size, store, deadline, host, port)
        return group

    @classmethod
    def of(cls, group: GroupCoordinator) -> Self:
        """Return a group that has the members of ``group``, which its owner closes."""
        other = cls.__new__(cls)
        other._use(group, ExitStack())
        return other

    def _meet(
        self,
        rank: int,
        world_size: int,
        store: Store | None,
        deadline: Deadline,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        with ForkSafeExitStack() as undo:
            launch = Launch(rank, world_size, 0, host, port, secret=launcher_secret(None))
            settings = Settings.of("gloo", launch.local_rank, secret=launch.secret)
            topology = Topology.meet(launch, settings, undo, store=store, timeout=deadline)
            with topology.abort_on_error():
                group = topology.group("stateless", list(range(world_size)), deadline)
            undo.enter_context(group)
            undo.enter_context(topology.abort_on_error())
            self._use(group, undo.pop_all())

    def _use(self, group: GroupCoordinator, closing: ExitStack) -> None:
        self.group = group
        self.rank = group.rank_in_group
        self.world_size = group.world_size
        self._closing = closing

    def send_obj(self, obj: Any, dst: int) -> None:
        """Send an object."""
        self.group.send_object(obj, dst)

    def recv_obj(self, src: int) -> Any:
        """Receive an object."""
        return self.group.recv_object(src)

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return the object of rank ``src``. Collective: yes, every process."""
        return self.group.broadcast_object(obj, src)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return every process's object, by rank. Collective: yes, every process."""
        return self.group.all_gather_object(obj)

    def broadcast(self, tensor: Tensor | None, src: int) -> Tensor:
        """Return the tensor of rank ``src``, of any shape and dtype; others may pass None.

        Collective: yes, every process. ``src`` gets its own tensor back, not a copy.
        """
        received = self.group.broadcast_tensor_dict({"tensor": tensor}, src)
        return received["tensor"]  # type: ignore[no-any-return]

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a tensor."""
        self.group.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Receive a tensor of the same shape and dtype into ``tensor`` and return it."""
        return self.group.recv(src=src, out=tensor)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Return the elementwise reduction of all processes' tensors, as a new tensor.

        ``tensor`` has the same shape and dtype on all. Collective: yes, every process. Raises
        TypeError if ``op`` is unknown, or not for such tensors.
        """
        operation = ReduceOp.__members__.get(op.name)
        if operation is None:
            raise TypeError(f"op must be one of {[*ReduceOp.__members__]}, not {op!r}")
        return self.group.all_reduce(tensor, op=operation)

    def barrier(self, timeout: float = 30.0) -> None:
        """Wait ``timeout`` seconds for every process's call. Collective: yes, every process."""
        self.group.barrier(timeout=timeout)

    def expire_data(self) -> None:
        """Do nothing: no message stays in the store."""

    def close(self) -> None:
        """Close the group and the connections. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)
