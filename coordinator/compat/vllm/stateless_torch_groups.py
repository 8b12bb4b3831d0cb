"""Torch stores and process groups that need no default process group, by vLLM's names.

Waiting in these is torch's: its errors, and its timeouts. A group of ours over the same members
(`coordinator.StatelessGroupCoordinator`) names who is late.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from coordinator.setup import torch_groups
from coordinator.setup.addresses import own_address
from coordinator.setup.bootstrap import connect_store, host_store
from coordinator.setup.torch_groups import SocketChoice
from device_comm import ReduceOp
from shm_broadcast import Deadline

if TYPE_CHECKING:
    import socket

    from torch import Tensor
    from torch.distributed import ProcessGroup, Store

_TIMEOUT = timedelta(minutes=30)
"""What torch's process groups allow each operation."""


def create_tcp_store(
    host: str, port: int, listen_socket: socket.socket | None = None, **kwargs: Any
) -> TCPStore:
    """A torch store, over a socket that listens already if one is given.

    Args:
        host: where the store is.
        port: its port.
        listen_socket: bound and listening; it belongs to the store from now on.
        kwargs: torch's own.
    """
    if listen_socket is None:
        return TCPStore(host, port, **kwargs)
    descriptor = listen_socket.detach()
    try:
        return TCPStore(host, port, master_listen_fd=descriptor, **kwargs)
    except TypeError:  # of the arguments: torch closes what it has taken
        os.close(descriptor)
        raise


@lru_cache(maxsize=1)
def get_cached_tcp_store_client(host: str, port: int) -> TCPStore:
    """A connection to a store; the last one again, if it leads there."""
    return connect_store(host, port)


def init_gloo_process_group(
    prefix_store: Store, group_rank: int, group_size: int, timeout: timedelta
) -> ProcessGroup:
    """A gloo process group of those who meet in a store. Collective: yes, every member."""
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
    """A torch process group of those who meet at a host and port.

    Args:
        host: the address of rank 0's host; gloo listens on the way to it.
        port: the port that rank 0 binds.
        rank: this process's rank among those that meet there.
        world_size: how many processes.
        backend: ``"gloo"`` or ``"nccl"``.
        group_name: for torch.
        return_store: return the store as well.
        listen_socket: of rank 0, bound and listening: the store takes it.
        timeout: for all to come, and of each operation; None: 30 minutes.

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
    """Close the group's connections and forget it. Collective: no."""
    torch_groups.destroy(pg)


def cpu_all_reduce_(
    tensor: Tensor, group: ProcessGroup, timeout: timedelta | None = None
) -> Tensor:
    """Sum a CPU tensor into itself; the same bits on all members.

    Args:
        tensor: of the same shape and dtype on all members.
        group: whose backend takes CPU tensors; torch need not know it.
        timeout: to wait; None: what the group allows.

    Collective: yes, every member of ``group``.

    Raises:
        RuntimeError: torch's: it took longer, or a member has gone.
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
    """The store at a host and port, which rank 0 hosts, over ``listen_socket`` if it has one."""
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
