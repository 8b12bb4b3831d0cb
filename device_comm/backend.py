"""Define the contract of a backend, and a backend for a group of one.

`Backend.start` may assume
    - There are two ranks or more, the group is open, and the operation is recorded on the watch.
    - Tensors are contiguous, on the backend's device, without autograd history or lazy conjugation.
      Only the order of their elements matters: neither a shape nor the stride of a single element
      has a meaning. Sizes are numbers of elements; entries of explicit sizes may be 0.
    - Arguments are valid, and reductions are defined for the dtype.
    - An operation that moves nothing is started only on backends that detect divergence.

`Backend.start` must
    - Return None if the operation is done (with ``capabilities.stream_ordered``: queued on the
      current stream), else a `Pending`. With ``operation.background`` return a `Pending` without
      blocking, if possible.
    - Not read the source after the operation is done.
    - Wait only by ``self.watch.wait(...)`` or equivalent: until ``operation.deadline``, and raise
      on an abort or a lost peer. Raise only this project's errors.
    - Match operations across ranks in the order in which they start; ``send`` and ``recv`` in the
      order per pair of ranks and direction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor

from device_comm.call_number import OperationCounts
from device_comm.operation import ALL_VERBS, NO_TENSOR, Operation, ReduceOp, Verb
from device_comm.watch import LoneWatch, Recorder, Watch
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import DivergenceError, GroupAbortedError, GroupClosedError
from shm_broadcast.process import ForkSafeExitStack, call_in_forked_children

if TYPE_CHECKING:
    from device_comm.work import Pending


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that runs a verb, for sizes above ``above`` up to ``up_to``.

    Attributes:
        above: bytes of the whole tensor; -1: no lower end.
        up_to: None: no upper end.
        unavailable: each other candidate, and the reason against it.
    """

    verb: str
    above: int
    up_to: int | None
    backend: str
    reason: str = ""
    unavailable: tuple[tuple[str, str], ...] = ()

    @property
    def sizes(self) -> str:
        """Return the range as text."""
        if self.up_to is None:
            return "any size" if self.above < 0 else f"above {in_bytes(self.above)}"
        low = "" if self.above < 0 else f"{in_bytes(self.above)} to "
        return f"{low or 'up to '}{in_bytes(self.up_to)}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """All choices of a group, sorted by verb and size; ``str()`` returns a table.

    Attributes:
        unavailable: unused backends, or unused parts of them, and the reasons.
    """

    group: str
    choices: tuple[Choice, ...]
    unavailable: tuple[tuple[str, str], ...] = ()

    def backend(self, verb: str, size: int) -> str:
        """Return the name of the backend for ``verb`` on a tensor of ``size`` bytes.

        Raises:
            KeyError: no backend offers ``verb``.
        """
        for choice in self.choices:
            if choice.verb == verb and choice.above < size <= (
                size if choice.up_to is None else choice.up_to
            ):
                return choice.backend
        raise KeyError(f"{self.group} has no {verb}")

    def __str__(self) -> str:
        rows = [(each.verb, each.sizes, each.backend, each.reason) for each in self.choices]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [self.group]
        for row, choice in zip(rows, self.choices, strict=True):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append(f"  {'  '.join([*cells, row[3]])}".rstrip())
            lines += [f"      not {name}: {why}" for name, why in choice.unavailable]
        lines += [f"  not used: {name}: {why}" for name, why in self.unavailable]
        return "\n".join(lines)


def in_bytes(size: int) -> str:
    """Return ``size`` as text without rounding, such as ``64 KiB`` or ``1025 B``."""
    for unit, scale in _UNITS:
        if size >= scale and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a backend.

    Attributes:
        backend: its name: ``"gloo"``, ``"shm"``, ``"loopback"``, ...
        verbs: the verbs that it offers; others raise `NotImplementedError`.
        identical: reductions are bitwise identical on all ranks.
        stream_ordered: a call returns when the work is queued on the current CUDA stream; otherwise
            when the result is complete.
        detects_divergence: ranks that call different operations raise `DivergenceError`. Such a
            backend also starts operations that move nothing.
        detects_loss: the exit of a peer is detected before the deadline.
        eager_sends: a send may finish before its recv is called; it copies the tensor, up to a
            limit.
        series: it supports `Operation.following`.
        overlaps: concurrent operations take less time than sequential ones.
        normed: the dtypes whose sums support a `device_comm.operation.Norm`, where `Backend.norms`
            returns True; the same on all ranks.
        reductions: the supported pairs of reduction and dtype; others raise `NotImplementedError`.
            None: all that `check_reduction` accepts.
    """

    backend: str
    verbs: frozenset[Verb]
    identical: bool = True
    stream_ordered: bool = False
    detects_divergence: bool = False
    detects_loss: bool = False
    eager_sends: bool = False
    series: bool = False
    overlaps: bool = True
    normed: frozenset[torch.dtype] = frozenset()
    reductions: frozenset[tuple[ReduceOp, torch.dtype]] | None = None

    def reduces(self, op: ReduceOp, dtype: torch.dtype) -> bool:
        """Return True if ``op`` on ``dtype``, which `check_reduction` accepts, is supported."""
        return self.reductions is None or (op, dtype) in self.reductions


@dataclass(frozen=True)
class Identity:
    """A rank in its group, and the group's common properties. Make it with `of`.

    Attributes:
        name: for errors and status.
        timeout: default time limit of a call in seconds; None: unlimited.
        watch: the group's board, or a `LoneWatch`.
        members: each rank's member number on the watch.
    """

    rank: int
    world_size: int
    device: torch.device
    name: str
    timeout: float | None
    watch: Watch
    members: tuple[int, ...]

    @classmethod
    def of(
        cls,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
        *,
        name: str = "group",
        timeout: float | None = 60.0,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
    ) -> Self:
        """Check the arguments and fill in the defaults; see the attributes.

        The device ``"cuda"`` is the current one. The default ``watch`` is a `LoneWatch`, which does
        not observe the peers; by default a rank's member number is the rank.

        Raises:
            ValueError: the arguments contradict each other.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not a rank of a group of {world_size}")
        members = tuple(range(world_size)) if members is None else tuple(members)
        if len(members) != world_size:
            raise ValueError(f"{len(members)} members for a group of {world_size}")
        device = torch.device(device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        seconds = Deadline.after(timeout).timeout
        watch = LoneWatch(rank) if watch is None else watch
        return cls(rank, world_size, device, name, seconds, watch, members)

    def name_globally(self, error: BaseException | str) -> None:
        """Make a `DivergenceError` name the member by its global rank, as other errors do."""
        if isinstance(error, DivergenceError):
            error.name_globally([self.watch.member_status(each).rank for each in self.members])

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the member numbers of all other ranks."""
        return tuple(member for rank, member in enumerate(self.members) if rank != self.rank)

    def operation(self, verb: str) -> str:
        """Return the name of an operation of the group, for the board and errors."""
        return f"{self.name} {verb}"


class FastPath(Protocol):
    """A fast path for simple calls, without the communicator's checks and `Backend.start`.

    Both methods return NotImplemented, without side effects, for every other call and for wrong
    arguments; the communicator then takes the slow path. ``background`` calls return a `Work`.
    """

    def collective(
        self, verb: Verb, timeout: float | Deadline | None, background: bool, *arguments: Any
    ) -> Any:
        """Return the result of ``verb``; ``arguments`` as in its signature, ``out`` last."""

    def message(
        self, verb: Verb, timeout: float | Deadline | None, background: bool, x: Tensor, peer: int
    ) -> Any:
        """Run ``send`` or ``recv`` of ``x``; return None (``send``) or ``x``."""


class Backend(ABC):
    """One rank's end of a group that moves tensors on one device. One thread at a time.

    Attributes:
        identity: its fields are attributes of the backend as well.
        fast_path: the fast path, if available. A wrapper has none: it would bypass the wrapper's
            `start`.
        begun: the fingerprint of the operations in the current call of a pool.
    """

    fast_path: FastPath | None = None

    def __init__(self, identity: Identity, capabilities: Capabilities) -> None:
        self.identity = identity
        self.capabilities = capabilities
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.device = identity.device
        self.name = identity.name
        self.timeout = identity.timeout
        self.watch = identity.watch
        self.members = identity.members
        self.peers = identity.peers
        self.begun = OperationCounts(identity.world_size)
        self.recorder = Recorder(identity.watch, identity.name, identity.world_size)
        self.closed = False
        self._closing = ForkSafeExitStack()
        self._is_forked_child = False
        call_in_forked_children(self)

    @abstractmethod
    def start(self, operation: Operation) -> Pending | None:
        """Start an operation; the module's docstring has the contract."""

    def flush(self, deadline: Deadline) -> None:  # noqa: B027 - optional
        """Wait until eager sends are received, and peers need no part of this rank.

        Raises:
            GroupTimeoutError, CoordinatorError: some are incomplete at the deadline; one failed.
        """

    def check(self) -> None:
        """Raise the error of the group, or of an operation that failed on the device.

        Reads a few words and never waits for the device.
        """
        self.watch.check(self.identity.operation("check"))

    def norms(self, x: Tensor, weight: Tensor) -> bool:  # noqa: ARG002 - some depend on them
        """Return True if an all-reduce of ``x`` supports a `Norm`; the same on all ranks."""
        return False

    def sends_eagerly(self, peer: int, size: int) -> bool:  # noqa: ARG002 - some depend on them
        """Return True if a send of ``size`` bytes to ``peer`` needs no recv to finish."""
        return self.capabilities.eager_sends or self.capabilities.stream_ordered

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """Return a new contiguous tensor on the device, uninitialised.

        ``like``, a tensor of ``dtype`` on the device, makes the call faster.
        """
        if like is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if like.shape == shape:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        return like.new_empty(shape)

    def explain(self) -> Explanation:
        """Return the backend that runs each verb, by size, and why."""
        only = self.capabilities.backend
        choices = [Choice(verb, -1, None, only) for verb in sorted(self.capabilities.verbs)]
        return Explanation(self.name, tuple(choices))

    def graph_capture(self) -> AbstractContextManager[None]:
        """Return a context in which CUDA graphs may capture operations of this backend.

        Collective: yes, every member.
        """
        return nullcontext()

    def discard(self) -> None:  # noqa: B027 - optional
        """Abandon operations that may be stuck, after an abort; the backend is not used again."""

    def fail(self, error: BaseException) -> None:
        """Abort the group with ``error``, unless it is aborted or closed already."""
        if not self._is_forked_child:
            end_group(self.identity, error)
            self.discard()

    def after_fork_in_child(self) -> None:
        """Disable the backend in a forked child: calls raise, and `close` releases nothing."""
        self.fast_path = None
        self._is_forked_child = True

    def close(self) -> None:
        """Release everything except the watch; idempotent."""
        if not self.closed:
            self.closed = True
            self.fast_path = None
            self._closing.close()


def end_group(identity: Identity, error: BaseException) -> None:
    """Abort a group with ``error``, unless it reports an abort or a close itself."""
    identity.name_globally(error)
    if not isinstance(error, (GroupAbortedError, GroupClosedError)):
        identity.watch.abort(error)


class LoopbackBackend(Backend):
    """A backend for a group with one rank: the output is the input."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        name: str = "loopback",
        watch: Watch | None = None,
        member: int = 0,
    ) -> None:
        """Make a group of one rank, which is ``member`` of ``watch``."""
        identity = Identity.of(0, 1, device, name=name, watch=watch, members=[member])
        super().__init__(identity, Capabilities("loopback", ALL_VERBS))

    def start(self, operation: Operation) -> None:
        """Copy the source to the output. Communicators return the input instead."""
        if operation.output is not NO_TENSOR:
            operation.output.view(-1).copy_(operation.source.view(-1))
