"""Provide vLLM's helpers: arithmetic, stores, process groups and objects without a default group.

Waiting raises torch's errors, after torch's timeouts. `coordinator.StatelessGroupCoordinator` names
late ranks.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from datetime import timedelta
from functools import lru_cache
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore

from coordinator import torch_groups
from coordinator.compat.shared import (
    NotInitializedError,
    divide,
    ensure_divisibility,
    layers_as_told,
    split_tensor_along_last_dim,
)
from coordinator.compat.vllm import parallel_state
from coordinator.group import GroupCoordinator
from coordinator.groups import Topology
from coordinator.launcher import Launch, own_address
from coordinator.rendezvous import Settings, connect_store, host_store
from coordinator.secret import launcher_secret
from coordinator.torch_groups import SocketChoice
from device_comm import ReduceOp
from shm_broadcast import Deadline
from shm_broadcast.process import ForkSafeExitStack

_TIMEOUT = timedelta(minutes=30)
"""The operation timeout of torch's process groups."""


def create_tcp_store(
    host: str, port: int, listen_socket: socket.socket | None = None, **kwargs: Any
) -> TCPStore:
    """Return a torch store, over a bound and listening socket if given, which it then owns."""
    if listen_socket is None:
        return TCPStore(host, port, **kwargs)
    descriptor = listen_socket.detach()
    try:
        return TCPStore(host, port, master_listen_fd=descriptor, **kwargs)
    except TypeError:  # from the arguments; torch closes the descriptor in all other errors
        os.close(descriptor)
        raise


@lru_cache(maxsize=1)
def get_cached_tcp_store_client(host: str, port: int) -> TCPStore:
    """Return a connection to a store; the last one again for the same address."""
    return connect_store(host, port)


def init_gloo_process_group(
    prefix_store: Store, group_rank: int, group_size: int, timeout: timedelta
) -> ProcessGroup:
    """Return a gloo process group of the members of a store. Collective: yes, every member."""
    return _new_group(prefix_store, "gloo", group_rank, group_size, "gloo", timeout, SocketChoice())


def stateless_init_torch_distributed_process_group(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    backend: str,
    group_name: str | None = None,
    return_store: bool = False,
    listen_socket: socket.socket | None = None,
    timeout: timedelta | None = None,
) -> ProcessGroup | tuple[ProcessGroup, Store]:
    """Return a torch process group of the processes that meet at a host and port.

    Args:
        host: the address of rank 0's host; gloo listens on the interface to it.
        port: the port that rank 0 binds.
        rank: this process's rank.
        world_size: the number of processes.
        backend: ``"gloo"`` or ``"nccl"``.
        group_name: for torch.
        return_store: return the store as well.
        listen_socket: rank 0's, bound and listening: the store owns it.
        timeout: until all arrive, and of each operation; None: 30 minutes.

    Collective: yes, all of them. `stateless_destroy_torch_distributed_process_group` ends it.
    """
    timeout = timeout or _TIMEOUT
    store = meet_at(host, port, rank, listen_socket, timeout)
    sockets = SocketChoice(os.environ.get("GLOO_SOCKET_IFNAME", ""), own_address(host, port))
    group = _new_group(
        PrefixStore(f"tcp://{host}:{port}", store),
        group_name or "stateless",
        rank,
        world_size,
        backend,
        timeout,
        sockets,
    )
    return (group, store) if return_store else group


def stateless_destroy_torch_distributed_process_group(pg: ProcessGroup) -> None:
    """Close the group's connections and remove it."""
    torch_groups.destroy(pg)


def cpu_all_reduce_(
    tensor: Tensor, group: ProcessGroup, timeout: timedelta | None = None
) -> Tensor:
    """Sum a CPU tensor into itself; the same bits on all members.

    ``group`` needs a backend for CPU tensors, and no registration in torch. ``timeout`` None: the
    group's.

    Collective: yes, every member of ``group``.

    Raises:
        RuntimeError: from torch: the timeout passed, or a member exited.
    """
    whole = tensor.contiguous()
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp.SUM.torch
    work = group.allreduce([whole], options)
    work.wait() if timeout is None else work.wait(timeout)
    return tensor if whole is tensor else tensor.copy_(whole)


def meet_at(
    host: str, port: int, rank: int, listen_socket: socket.socket | None, timeout: timedelta
) -> TCPStore:
    """Return the store at a host and port; rank 0 hosts it, over ``listen_socket`` if given."""
    if listen_socket is not None:
        return create_tcp_store(
            host,
            port,
            listen_socket,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timeout,
        )
    if rank == 0:
        return host_store(host, port)
    return connect_store(host, port, timeout.total_seconds())


def _new_group(
    store: Store,
    name: str,
    rank: int,
    size: int,
    backend: str,
    timeout: timedelta,
    sockets: SocketChoice,
) -> ProcessGroup:
    deadline = Deadline.after(timeout.total_seconds())
    group = torch_groups.connect_process_group(
        store, name, range(size), rank, backend, sockets, deadline
    )
    torch_groups.set_timeout(group, timeout)
    return group


class StatelessProcessGroup:
    """Exchanges objects and CPU tensors between processes that meet at a host and port.

    Ranks are ranks in this group. One thread at a time. ``group`` has all operations.
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

        ``host``, ``port``, ``rank``, ``world_size`` and ``listen_socket`` are as for
        `stateless_init_torch_distributed_process_group`. ``store_timeout`` is in seconds.
        ``data_expiration_seconds`` has no effect: messages do not stay in the store.

        Collective: yes, all of them.

        Raises:
            GroupTimeoutError: processes did not arrive in time; names them.
        """
        del data_expiration_seconds
        deadline = Deadline.after(store_timeout)
        store = None
        if listen_socket is not None:
            store = meet_at(host, port, rank, listen_socket, timedelta(seconds=store_timeout))
        with ForkSafeExitStack() as undo:
            launch = Launch(rank, world_size, 0, host, port, secret=launcher_secret(None))
            settings = Settings.of("gloo", launch.local_rank, secret=launch.secret)
            topology = Topology.meet(launch, settings, undo, store=store, timeout=deadline)
            with topology.abort_on_error():
                group = topology.group("stateless", list(range(world_size)), deadline)
            undo.enter_context(group)
            undo.enter_context(topology.abort_on_error())
            return cls(group, undo.pop_all())

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


__all__ = [
    "StatelessProcessGroup",
    "cpu_all_reduce_",
    "create_tcp_store",
    "divide",
    "ensure_divisibility",
    "get_cached_tcp_store_client",
    "get_pp_indices",
    "get_worker_rank_suffix",
    "init_gloo_process_group",
    "is_weak_contiguous",
    "split_tensor_along_last_dim",
    "stateless_destroy_torch_distributed_process_group",
    "stateless_init_torch_distributed_process_group",
    "verify_group_size_divides_partition",
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
        return layers_as_told(partition, num_hidden_layers, pp_rank, pp_size)
    each, left = divmod(num_hidden_layers, pp_size)
    more = range(pp_size - 1 - left, pp_size - 1)
    start = pp_rank * each + sum(stage < pp_rank for stage in more)
    return start, start + each + (pp_rank in more)


def verify_group_size_divides_partition(
    input_size_per_partition: int,
    group_size: int,
    layer_name: str | None = None,
    extra_suggestion: str = "",
) -> None:
    """Check that a part of a layer holds whole groups of quantised weights.

    ``input_size_per_partition`` is a rank's part of the layer's input; ``group_size`` weights share
    a scale. ``layer_name`` and ``extra_suggestion`` are for the error. Raises ValueError if the
    size is not a multiple.
    """
    if input_size_per_partition % group_size:
        layer = f" of layer {layer_name!r}" if layer_name else ""
        raise ValueError(
            f"{input_size_per_partition} weights a rank{layer} are not divisible into groups of "
            f"{group_size}: choose a smaller tensor_parallel_size{extra_suggestion}"
        )


def is_weak_contiguous(inp: Tensor) -> bool:
    """Return whether a tensor fills the rest of its storage in one block, in any order."""
    if inp.is_contiguous():
        return True
    rest = inp.untyped_storage().nbytes() - inp.storage_offset() * inp.element_size()
    return rest == inp.numel() * inp.element_size()


def get_worker_rank_suffix(global_rank: int | None = None) -> str:
    """Return this process's ranks: ``"dp0_pp0_tp1_dcp0_ep1_rank1"``; without groups ``"rank1"``.

    ``global_rank`` comes last, unless it is None.
    """
    last = [] if global_rank is None else [f"rank{global_rank}"]
    try:
        groups = {
            "dp": parallel_state.get_dp_group(),
            "pp": parallel_state.get_pp_group(),
            "tp": parallel_state.get_tp_group(),
            "dcp": parallel_state.get_dcp_group(),
            "ep": parallel_state.get_ep_group(),
        }
    except NotInitializedError:
        return "".join(last)
    return "_".join([*(f"{name}{group.rank_in_group}" for name, group in groups.items()), *last])
