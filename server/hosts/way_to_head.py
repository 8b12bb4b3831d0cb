"""Finds the address at which this host reaches the head, and waits while there is no way there."""

from __future__ import annotations

import errno
import logging
import time
from typing import TYPE_CHECKING

from coordinator.setup.addresses import own_address

from ..errors import HostError

if TYPE_CHECKING:
    from shm_broadcast import Deadline

_NO_WAY = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH)
"""Errors that may pass: this host's interface is down, for example."""
_LINE_SECONDS = 10.0
"""How often to log that there is no way."""
_AGAIN_SECONDS = 0.5
"""How often to look for one."""
_log = logging.getLogger(__name__)


def address_on_the_way(node: int, head: str, port: int, deadline: Deadline) -> str:
    """The address of host ``node``, this one, on the way to the head, once there is a way.

    Raises:
        HostError: there was none by the deadline.
        OSError: the name cannot be resolved.
    """
    began = said = time.monotonic()
    while True:
        try:
            return own_address(head, port)
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
