"""The head's port, where torchrun's own store has the port that torchrun names.

The head then listens at any free port, and the store tells it to the other hosts. Whoever alters it
there keeps the hosts from meeting, but learns nothing: the link proves who is at its ends.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from coordinator.setup.launcher import Launch
from shm_broadcast import Deadline, GroupAbortedError, GroupTimeoutError

if TYPE_CHECKING:
    from coordinator.setup.exchange import Exchange

    from .place import Hosts

_WHAT = "port"


def tell_port(hosts: Hosts, port: int, deadline: Deadline) -> None:
    """On the head: say at which port it listens, unless all know it.

    Raises:
        GroupTimeoutError: torchrun's store does not answer in time.
        TransportError: it has gone.
    """
    if hosts.master_port == 0:
        _visit(hosts, deadline).broadcast(_WHAT, b"%d" % port)


def find_port(hosts: Hosts, deadline: Deadline) -> int:
    """On the other hosts: the port at which the head listens.

    Raises:
        GroupTimeoutError: the head has not said it in time, or torchrun's store does not answer.
        TransportError: that store has gone.
    """
    if hosts.master_port:
        return hosts.master_port
    try:
        return _told_port(hosts, deadline)
    except GroupTimeoutError as error:
        if not error.waiting_for:
            raise
        detail = "the head has not said where it listens"
        raise GroupTimeoutError("hosts", deadline.timeout, detail=detail) from error


def _told_port(hosts: Hosts, deadline: Deadline) -> int:
    while True:
        # Where another host gives up, or is started again, the head leaves that visit out, too.
        with suppress(GroupAbortedError):
            return int(_visit(hosts, deadline).broadcast(_WHAT, None))


def _visit(hosts: Hosts, deadline: Deadline) -> Exchange:
    """Keys in torchrun's store that this pool alone has: the n-th on every host is the same."""
    from coordinator import connect_store  # noqa: PLC0415 - loads torch
    from coordinator.setup.exchange import Exchange  # noqa: PLC0415 - likewise

    launch = Launch.from_environment()
    store = connect_store(launch.master_addr, launch.master_port, deadline)
    where = f"{launch.master_addr}:{launch.master_port}"
    members = Exchange(store, hosts.node_rank, hosts.nnodes, "hosts", deadline, where)
    return members.visit(f"hosts/{launch.attempt}")
