"""Stores for tests: one of torch for all ranks, and one that is written in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import Store

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


class PythonStore(Store):
    """What a store has to have, and nothing else, by another one."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def has_extended_api(self) -> bool:
        return False
