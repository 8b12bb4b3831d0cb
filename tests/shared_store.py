"""A store of torch for all ranks of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator import connect_store, host_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import TCPStore


class SharedStore:
    """A store that this process hosts. As an argument of `run_ranks` it arrives connected: each
    rank gets a `torch.distributed.TCPStore` of its own.
    """

    def __init__(self) -> None:
        self._host = host_store()

    def __reduce__(self) -> tuple[Callable[..., TCPStore], tuple[Any, ...]]:
        return connect_store, (self._host.host, self._host.port)
