"""Find the head of a pool, its port, and a route to it.

With torchrun the head listens at any free port, and publishes it in torchrun's store. A forged port
prevents the connection, but reveals nothing: the link authenticates both ends.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, TypeVar

from coordinator.launcher import Launch, own_address
from shm_broadcast import Deadline, GroupAbortedError, GroupTimeoutError
from shm_broadcast.net.endpoint import one_address

from ..errors import HostError

if TYPE_CHECKING:
    from coordinator.rendezvous import Rendezvous

    from .place import Hosts


_WHAT = "port"


def publish_port(hosts: Hosts, port: int, deadline: Deadline) -> None:
    """Publish the head's port in torchrun's store, unless it is fixed; called on the head."""
    if hosts.master_port == 0:
        _begin_round(hosts, deadline).broadcast(_WHAT, b"%d" % port)


def discover_port(hosts: Hosts, deadline: Deadline) -> int:
    """Return the head's port; called on the other hosts.

    Raises:
        GroupTimeoutError: the head has not published it in time, or the store does not reply.
        TransportError: torchrun's store has closed.
    """
    if hosts.master_port:
        return hosts.master_port
    try:
        return _published_port(hosts, deadline)
    except GroupTimeoutError as error:
        if not error.waiting_for:
            raise
        detail = "the head has not published its port"
        raise GroupTimeoutError("hosts", deadline.timeout, detail=detail) from error


def _published_port(hosts: Hosts, deadline: Deadline) -> int:
    while True:
        # If another host fails or restarts, the head skips that round, too.
        with suppress(GroupAbortedError):
            return int(_begin_round(hosts, deadline).broadcast(_WHAT, None))


def _begin_round(hosts: Hosts, deadline: Deadline) -> Rendezvous:
    """Return a round in torchrun's store for this pool; the n-th on every host is the same."""
    from coordinator import connect_store  # noqa: PLC0415 - loads torch
    from coordinator.rendezvous import Rendezvous  # noqa: PLC0415 - likewise

    launch = Launch.from_environment()
    store = connect_store(launch.master_addr, launch.master_port, deadline)
    where = f"{launch.master_addr}:{launch.master_port}"
    members = Rendezvous(store, hosts.node_rank, hosts.nnodes, "hosts", deadline, where)
    return members.begin_round(f"hosts/{launch.attempt}")


T = TypeVar("T")

_TRANSIENT = frozenset(
    {
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH),
        *(socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_NODATA),
    }
)
"""Transient errors: this host's interface is down, for example, or the head has just started, and
its name is not published yet."""
_LINE_SECONDS = 10.0
"""The interval of log lines."""
_RETRY_SECONDS = 0.5
"""The interval of tries."""
_log = logging.getLogger(__name__)


def address_of_head(node: int, name: str, deadline: Deadline) -> IPv4Address | IPv6Address:
    """Wait until the head's ``name`` resolves on this host, ``node``, and return the address.

    Raises:
        HostError: it did not until the deadline.
        OSError, ValueError: it cannot be resolved for a permanent reason, or means all interfaces.
    """
    return _retry(lambda: one_address(name), node, name, deadline)


def address_on_route(node: int, head: str, port: int, deadline: Deadline) -> str:
    """Return this host's address on the route to the head; raise as `address_of_head`."""
    return _retry(lambda: own_address(head, port), node, head, deadline)


def _retry(look: Callable[[], T], node: int, head: str, deadline: Deadline) -> T:
    began, logged = time.monotonic(), -math.inf
    while True:
        try:
            return look()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            if deadline.expired:
                reason = f"there is no way to the head at {head} in {deadline.timeout:g} s: {error}"
                raise HostError(node, reason) from error
            if (now := time.monotonic()) - logged >= _LINE_SECONDS:
                logged = now
                text = "no way to the head at %s, for %.0f s now: %s"
                _log.warning(text, head, now - began, error)
        time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
