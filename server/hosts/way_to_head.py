"""Finds the head and the way to it, and waits while there is none."""

from __future__ import annotations

import errno
import logging
import math
import socket
import time
from typing import TYPE_CHECKING, TypeVar

from coordinator.setup.addresses import own_address
from shm_broadcast.remote.end import one_address

from ..errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable
    from ipaddress import IPv4Address, IPv6Address

    from shm_broadcast import Deadline

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


def address_on_the_way(node: int, head: str, port: int, deadline: Deadline) -> str:
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
