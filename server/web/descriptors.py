"""How many files and sockets this process may have open, and how many of them clients may use."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from ..driver.limits import open_files
from ..errors import DescriptorLimitError

_OWN = 32
"""Descriptors kept for the process itself: for the event loop, and files that are read."""
SPARE_CONNECTIONS = 16
"""Connections accepted beyond the others, for those who ask how the service is."""
_PER_WORKER = 16
"""Descriptors kept for each worker: queues, channels, process descriptors."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How many descriptors clients may use.

    Attributes:
        connections: how many may be open at once, beside `SPARE_CONNECTIONS`.
        accepts: how many the event loop may accept before it looks at the first of them.
    """

    connections: int
    accepts: int


def raise_limit() -> int:
    """Raise the limit of open files as far as this user may; returns the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connection_shares(limit: int, wanted: int, n_workers: int) -> Shares:
    """How many of ``limit`` descriptors clients may take, while workers have not started.

    Args:
        limit: how many descriptors this process may have.
        wanted: how many connections were asked for.
        n_workers: how many will be started.

    Raises:
        DescriptorLimitError: none is left for a connection.
    """
    reserve = _OWN + _PER_WORKER * n_workers
    accepts = reserve // 4
    taken = open_files() + reserve + accepts + SPARE_CONNECTIONS
    if limit <= taken:
        raise DescriptorLimitError(limit, taken + 1)
    return Shares(min(wanted, limit - taken), accepts)
