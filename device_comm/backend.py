"""Define what a backend does, what `explain` returns, and the backend of a group of one.

A backend subclasses `Backend` and defines `Backend.start` for the verbs in its capabilities; the
other methods have defaults. A backend that changes how another one works, such as
`device_comm.wrappers`, is a `device_comm.wrappers.Wrapper`.

What `Backend.start` may rely on
    - There are two ranks or more: communicators handle a single rank themselves.
    - Every tensor is contiguous, on the backend's device, without autograd history or lazy
      conjugation. Its shape has no meaning, only the order of its elements, nor has the stride of a
      single element; sizes are numbers of elements. Arguments are valid. Reductions are defined for
      the dtype. Where nothing moves only backends that detect divergence are asked; single entries
      of explicit sizes may be 0.
    - The group is neither closed nor aborted, and the operation was stamped on the watch.

What `Backend.start` must do
    - Return None if the operation is done (with ``capabilities.stream_ordered``: queued on the
      current stream), or else a `Pending`. With ``operation.background`` the caller does not
      wait: return a `Pending` without blocking, if possible.
    - When it is done, the output holds the result and the caller may overwrite the source.
    - Wait only by ``self.watch.wait(...)`` or equivalent: until ``operation.deadline``, and
      raise on an abort or a lost peer. Raise only this project's errors.
    - Match operations across ranks in the order in which they are started; ``send`` and ``recv``
      in the order per pair of ranks and direction.
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
    """The backend that carries out one verb, for a range of sizes.

    Attributes:
        verb: one of `device_comm.ALL_VERBS`.
        above: the range's lower end, exclusive, in bytes of the whole tensor; -1: none.
        up_to: the range's upper end, inclusive; None: none.
        backend: the backend's name.
        reason: why it was chosen.
        unavailable: each other candidate, with the reason why it was not chosen.
    """

    verb: str
    above: int
    up_to: int | None
    backend: str
    reason: str = ""
    unavailable: tuple[tuple[str, str], ...] = ()

    @property
    def sizes(self) -> str:
        """The range as text."""
        if self.up_to is None:
            return "any size" if self.above < 0 else f"above {in_bytes(self.above)}"
        low = "" if self.above < 0 else f"{in_bytes(self.above)} to "
        return f"{low or 'up to '}{in_bytes(self.up_to)}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """All choices of a group; ``str()`` gives a readable table.

    Attributes:
        group: the group's name.
        choices: the choices, by verb, then by size.
        unavailable: backends, or parts of them, that are not used at all, with the reason.
    """

    group: str
    choices: tuple[Choice, ...]
    unavailable: tuple[tuple[str, str], ...] = ()

    def backend(self, verb: str, size: int) -> str:
        """The backend for ``verb`` on a tensor of ``size`` bytes.

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
    """``size`` as text, not rounded: such as ``64 KiB`` or ``1025 B``."""
    for unit, scale in _UNITS:
        if size >= scale and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"


@dataclass(frozen=True)
class Capabilities:
    """What a backend offers.

    Attributes:
        backend: its name: ``"gloo"``, ``"shm"``, ``"loopback"``, ...
        verbs: the verbs that it offers; others raise `NotImplementedError`.
        identical: whether reductions are bitwise identical on all ranks.
        stream_ordered: whether a call returns when the work is queued on the current CUDA stream;
            otherwise it returns when the result is there.
        detects_divergence: whether ranks that call different operations get `DivergenceError`. Then
            it is given those of empty tensors, too, in which ranks only meet.
        detects_loss: whether the end of a peer's process is noticed before the deadline.
        sends_ahead: whether a send can be done before its recv is called: it copies the tensor,
            up to a limit.
        series: whether it receives what `Operation.following` gives.
        overlaps: whether operations that are started together take less time than in sequence.
        normed: the dtypes whose sums can go on with a `device_comm.operation.Norm`, where
            `Backend.norms` says so; alike on all ranks.
        reductions: the pairs of reduction and dtype that it supports; others raise
            `NotImplementedError`. None: all that `check_reduction` accepts.
    """

    backend: str
    verbs: frozenset[Verb] = ALL_VERBS
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
        """Whether it supports ``op`` on ``dtype``, a pair that `check_reduction` accepts."""
        return self.reductions is None or (op, dtype) in self.reductions


@dataclass(frozen=True)
class Identity:
    """This process's rank in its group, and the group's common properties. Make it with `of`.

    Attributes:
        rank: this process's rank in the group.
        world_size: the number of ranks.
        device: the device of the tensors.
        name: the group's name, for errors and status.
        timeout: the default seconds that a call may take; None: for ever.
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
        """Check the arguments and fill in the defaults.

        Args:
            rank: see the attribute.
            world_size: see the attribute.
            device: see the attribute; ``"cuda"`` is the current device.
            name: see the attribute.
            timeout: see the attribute.
            watch: the group's board; None: a `LoneWatch`, which does not see the peers.
            members: see the attribute; None: a rank's member number is the rank.

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
        """Have a `DivergenceError` name the member by its global rank, as other errors do."""
        if isinstance(error, DivergenceError):
            error.name_globally([self.watch.member_status(each).rank for each in self.members])

    @property
    def peers(self) -> tuple[int, ...]:
        """The member numbers of all other ranks."""
        return tuple(member for rank, member in enumerate(self.members) if rank != self.rank)

    def operation(self, verb: str) -> str:
        """The name of an operation of the group, for the board and errors."""
        return f"{self.name} {verb}"


class FastPath(Protocol):
    """A faster path for simple calls, which skips the communicator's checks and `Backend.start`.

    Both methods return NotImplemented, without having done anything, for every call that is not
    simple, and for wrong arguments: the communicator then takes the normal path.
    """

    def collective(self, verb: Verb, timeout: float | Deadline | None, *arguments: Any) -> Any:
        """The result of ``verb``; ``arguments`` in the order of its signature, but ``out`` last."""

    def message(self, verb: Verb, timeout: float | Deadline | None, x: Tensor, peer: int) -> Any:
        """Carry out ``send`` or ``recv`` of ``x``; None when it is done."""


class Backend(ABC):
    """One rank's end of a group that moves tensors on one device. One thread at a time.

    Attributes:
        identity: this rank and its group; its fields are attributes of the backend as well.
        capabilities: what the backend offers.
        fast_path: a faster path for simple calls, while there is one. A wrapper has none, because
            the shortcut would bypass the wrapper's `start`.
        begun: counts the operations begun in a pool's call, for comparing the ranks.
        recorder: writes this rank's operations down.
        closed: whether `close` was called.
    """

    fast_path: FastPath | None = None

    def __init__(self, identity: Identity, capabilities: Capabilities) -> None:
        """Set the common attributes. Collective: no."""
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
        """Start an operation. The module's docstring has the contract."""

    def flush(self, deadline: Deadline) -> None:  # noqa: B027 - most have nothing under way
        """Wait until the receivers have taken all tensors that were sent ahead, and for collectives
        that others could not end without this rank, if it closed now.

        Raises:
            GroupTimeoutError: some are still under way at the deadline.
            CoordinatorError: one of the collectives failed.
        """

    def check(self) -> None:
        """Raise if the group is over, or an operation failed that the device did meanwhile.

        Reads a few words, and never waits for the device.

        Raises:
            CoordinatorError: why.
        """
        self.watch.check(self.identity.operation("check"))

    def norms(self, x: Tensor, weight: Tensor) -> bool:  # noqa: ARG002 - some depend on them
        """Whether an all-reduce of ``x`` may have a `Norm` with this weight; alike on all ranks."""
        return False

    def sends_eagerly(self, peer: int, size: int) -> bool:  # noqa: ARG002 - some depend on them
        """Whether a send of ``size`` bytes to ``peer`` would be done before its recv is called."""
        return self.capabilities.eager_sends or self.capabilities.stream_ordered

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """A new contiguous tensor on the device, with undefined content, for a result.

        Args:
            shape: the tensor's shape.
            dtype: the tensor's dtype.
            like: a tensor of that dtype on the device, if there is one: it makes this faster.
        """
        if like is None:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if like.shape == shape:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        return like.new_empty(shape)

    def explain(self) -> Explanation:
        """Which backend carries out each verb, by size, and why. Collective: no."""
        only = self.capabilities.backend
        choices = [Choice(verb, -1, None, only) for verb in sorted(self.capabilities.verbs)]
        return Explanation(self.name, tuple(choices))

    def graph_capture(self) -> AbstractContextManager[None]:
        """A context in which CUDA graphs with operations of this backend may be captured.

        Collective: yes, every member.
        """
        return nullcontext()

    def discard(self) -> None:  # noqa: B027 - most have nothing that may be stuck
        """Called when the group was aborted: give up what may be stuck, and never use it again."""

    def fail(self, error: BaseException) -> None:
        """Abort the group with ``error``, unless it is aborted or closed already."""
        if not self._is_forked_child:
            end_group(self.identity, error)
            self.discard()

    def after_fork_in_child(self) -> None:
        """In a forked child: its calls are refused by the watch, and closing it closes nothing."""
        self.fast_path = None
        self._is_forked_child = True

    def close(self) -> None:
        """Release everything except the watch; idempotent. Collective: no."""
        if not self.closed:
            self.closed = True
            self.fast_path = None
            self._closing.close()


def end_group(identity: Identity, error: BaseException) -> None:
    """Abort a group with ``error``, unless that says that it is aborted or closed already."""
    identity.name_globally(error)
    if not isinstance(error, (GroupAbortedError, GroupClosedError)):
        identity.watch.abort(error)


class LoopbackBackend(Backend):
    """A group whose only rank is this process: what it gives, it gets."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        name: str = "loopback",
        watch: Watch | None = None,
        member: int = 0,
    ) -> None:
        """Make one. Collective: no.

        Args:
            device: where the tensors are.
            name: the group's name, for errors and status.
            watch: the board that this process is on, if any.
            member: this process's member number there.
        """
        identity = Identity.of(0, 1, device, name=name, watch=watch, members=[member])
        super().__init__(identity, Capabilities("loopback"))

    def start(self, operation: Operation) -> None:
        """Copy. Communicators do not ask for it: in a group of one they return the input itself."""
        if operation.output is not NO_TENSOR:
            operation.output.view(-1).copy_(operation.source.view(-1))
