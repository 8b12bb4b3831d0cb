"""Find the head of a pool, its port, and a route to it.

The head then listens at any free port, and the store tells it to the other hosts. Whoever alters it
there keeps the hosts from meeting, but learns nothing: the link proves who is at its ends.
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
    """On the head: say at which port it listens, unless all know it.

    Raises:
        GroupTimeoutError: torchrun's store does not answer in time.
        TransportError: it has gone.
    """
    if hosts.master_port == 0:
        _visit(hosts, deadline).broadcast(_WHAT, b"%d" % port)


def discover_port(hosts: Hosts, deadline: Deadline) -> int:
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


def _visit(hosts: Hosts, deadline: Deadline) -> Rendezvous:
    """Keys in torchrun's store that this pool alone has: the n-th on every host is the same."""
    from coordinator import connect_store  # noqa: PLC0415 - loads torch
    from coordinator.rendezvous import Rendezvous  # noqa: PLC0415 - likewise

    launch = Launch.from_environment()
    store = connect_store(launch.master_addr, launch.master_port, deadline)
    where = f"{launch.master_addr}:{launch.master_port}"
    members = Rendezvous(store, hosts.node_rank, hosts.nnodes, "hosts", deadline, where)
    return members.begin_round(f"hosts/{launch.attempt}")


T = TypeVar("T")

_NO_WAY = frozenset(
    {
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH),
        *(socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_NODATA),
    }
)
"""Errors that may pass: this host's interface is down, for example, and no name can be looked up;
or the head was started just now, and its name is not known yet."""
_LINE_SECONDS = 10.0
"""How often to log that there is no way."""
_AGAIN_SECONDS = 0.5
"""How often to look for one."""
_log = logging.getLogger(__name__)


def address_of_head(node: int, name: str, deadline: Deadline) -> IPv4Address | IPv6Address:
    """The address that the head's ``name`` leads to on host ``node``, this one, once it does.

    Raises:
        HostError: it did not until the deadline.
        OSError: it cannot be resolved for another reason.
        ValueError: it means all interfaces.
    """
    return _once_there_is_one(lambda: one_address(name), node, name, deadline)


def address_on_route(node: int, head: str, port: int, deadline: Deadline) -> str:
    """The address of host ``node``, this one, on the way to the head's, once there is a way.

    Raises:
        HostError: there was none by the deadline.
        OSError: it cannot be found for another reason.
    """
    return _once_there_is_one(lambda: own_address(head, port), node, head, deadline)


def _once_there_is_one(look: Callable[[], T], node: int, head: str, deadline: Deadline) -> T:
    began, said = time.monotonic(), -math.inf
    while True:
        try:
            return look()
        except OSError as error:
            if error.errno not in _NO_WAY:
                raise
            if deadline.expired:
                reason = f"there is no way to the head at {head} in {deadline.timeout:g} s: {error}"
                raise HostError(node, reason) from error
            if (now := time.monotonic()) - said >= _LINE_SECONDS:
                said, told = now, "no way to the head at %s, for %.0f s now: %s"
                _log.warning(told, head, now - began, error)
        time.sleep(min(_AGAIN_SECONDS, deadline.remaining()))
