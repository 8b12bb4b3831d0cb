"""A pool's settings: one frozen object, made by whoever makes the pool."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What can be tuned; the defaults are right for most pools.

    Attributes:
        in_flight: calls that workers may have at once, others queue in order; ``None`` stands for
            one per pipeline stage and one more that waits before the first.
        call_capacity: bytes of shared memory for calls on their way to the workers.
        reply_capacity: bytes of shared memory, per worker, for replies.
        settle_seconds: how long the other ranks have to answer a call that one rank has failed,
            before the pool counts as broken.
        stack_seconds: how long a late worker has to show its stack, after a call's time passed.
        kill_seconds: how long workers have to end when terminated, before they are killed.
    """

    in_flight: int | None = None
    call_capacity: int = 4 * MIB
    reply_capacity: int = 2 * MIB
    settle_seconds: float = 1.0
    stack_seconds: float = 1.0
    kill_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.in_flight is not None and self.in_flight < 1:
            raise ValueError(f"in_flight must be 1 or more; got {self.in_flight}")
        for name in ("settle_seconds", "stack_seconds", "kill_seconds"):
            seconds = getattr(self, name)
            if not seconds >= 0:
                raise ValueError(f"{name} must be 0 or more seconds; got {seconds!r}")
