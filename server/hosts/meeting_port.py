"""The head's port, where torchrun's own store has the port that torchrun names.

The head then listens at any free port, and the store tells it to the other hosts. Whoever alters it
there keeps the hosts from meeting, but learns nothing: the link proves who is at its ends.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from coordinator.setup.launcher import Launch
from shm_broadcast import Deadline, GroupTimeoutError

if TYPE_CHECKING:
    from torch.distributed import Store

    from .place import Hosts

_NAP_SECONDS = 0.1


def tell_port(hosts: Hosts, port: int, deadline: Deadline) -> None:
    """On the head: say at which port it listens, unless all know it.

    Raises:
        GroupTimeoutError: torchrun's store does not answer in time.
    """
    if hosts.master_port == 0:
        store, place = _visit(hosts, deadline)
        store.set(f"{place}/port", str(port))


def find_port(hosts: Hosts, deadline: Deadline) -> int:
    """On the other hosts: the port at which the head listens.

    Raises:
        GroupTimeoutError: the head has not said it in time.
    """
    if hosts.master_port:
        return hosts.master_port
    store, place = _visit(hosts, deadline)
    while not store.check([f"{place}/port"]):
        if deadline.expired:
            raise GroupTimeoutError(
                "hosts", deadline.timeout, detail="the head has not said where it listens"
            )
        time.sleep(deadline.remaining(_NAP_SECONDS))
    return int(store.get(f"{place}/port"))


def _visit(hosts: Hosts, deadline: Deadline) -> tuple[Store, str]:
    """The store, and keys in it that this pool alone has: the n-th on every host is the same."""
    from coordinator import connect_store  # noqa: PLC0415 - loads torch

    launch = Launch.from_environment()
    store = connect_store(launch.master_addr, launch.master_port, deadline)
    place = f"group-coordinator/hosts/{launch.attempt}"
    return store, f"{place}/{store.add(f'{place}/visits/{hosts.node_rank}', 1)}"
