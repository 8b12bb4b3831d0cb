"""The base of backends that change how another backend starts operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.backend import Backend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from device_comm.backend import Capabilities, Identity
    from device_comm.choice import Explanation
    from shm_broadcast.deadline import Deadline


class Wrapper(Backend):
    """Passes everything on to ``inner``, except `start`, which a subclass defines."""

    def __init__(
        self,
        inner: Backend,
        identity: Identity | None = None,
        capabilities: Capabilities | None = None,
        *,
        closes: bool = True,
    ) -> None:
        """Wrap ``inner``.

        Args:
            inner: the backend that does the work.
            identity: this backend's; None: that of ``inner``.
            capabilities: this backend's; None: those of ``inner``.
            closes: whether ``inner`` is closed with this backend; False: its maker closes it.
        """
        super().__init__(identity or inner.identity, capabilities or inner.capabilities)
        self._inner = inner
        if closes:
            self._closing.callback(inner.close)

    def flush(self, deadline: Deadline) -> None:
        """As ``inner``."""
        self._inner.flush(deadline)

    def check(self) -> None:
        """As ``inner``."""
        self._inner.check()

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """As ``inner``."""
        return self._inner.norms(x, weight)

    def goes_ahead(self, peer: int, size: int) -> bool:
        """As ``inner``."""
        return self._inner.goes_ahead(peer, size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """As ``inner``."""
        return self._inner.empty(shape, dtype, like)

    def explain(self) -> Explanation:
        """As ``inner``."""
        return self._inner.explain()

    def graph_capture(self) -> AbstractContextManager[None]:
        """As ``inner``. Collective: yes, every member."""
        return self._inner.graph_capture()

    def discard(self) -> None:
        """As ``inner``."""
        self._inner.discard()
