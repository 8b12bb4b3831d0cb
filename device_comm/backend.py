"""What is under every communicator: who I am, lifecycle, and how an operation is run."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from device_comm.choice import Choice, Explanation
from device_comm.primitives import Call, Capabilities, Primitives
from device_comm.watch import LoneWatch, Watch
from device_comm.work import Work
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupAbortedError, GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from torch import Tensor

    from device_comm.work import Pending


class Backend(Primitives):
    """One rank's end of a group that moves tensors on one device. One thread at a time."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        device: torch.device | str,
        capabilities: Capabilities,
        name: str = "group",
        timeout: float | None = 60.0,
        watch: Watch | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Set up what is common. Collective: no.

        Args:
            rank: this process's rank in the group.
            world_size: how many ranks the group has.
            device: where the tensors are.
            capabilities: what the backend offers.
            name: the group's name, for errors and status.
            timeout: seconds that a call allows unless it says otherwise; None: for ever.
            watch: the board of the group; None: deadlines only, peers are not seen.
            members: the board's member number of each rank; None: the rank itself.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not a rank of a group of {world_size}")
        self.members = tuple(range(world_size)) if members is None else tuple(members)
        if len(self.members) != world_size:
            raise ValueError(f"{len(self.members)} members for a group of {world_size}")
        device = torch.device(device)
        if str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.capabilities = capabilities
        self.name = name
        self.timeout = Deadline.after(timeout).timeout
        self.watch: Watch = LoneWatch(rank) if watch is None else watch
        self.peers = tuple(member for r, member in enumerate(self.members) if r != rank)
        self._closed = False
        self._operations = {verb: f"{name} {verb}" for verb in capabilities.verbs}

    # --- lifecycle -----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Return once all that was sent ahead of its receivers has arrived. Collective: no.

        Args:
            timeout: seconds; None: the communicator's.

        Raises:
            GroupTimeoutError: it has not; it is still on its way.
        """

    def close(self) -> None:
        """Give everything back; again does nothing. The watch stays. Collective: no.

        Calls of this rank raise `GroupClosedError` from then on.
        """
        if not self._closed:
            self._closed = True
            self._close()

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Make every call of every member raise `GroupAbortedError`. Collective: no.

        Without a board only this process notices.

        Args:
            error: why.
            culprit: the rank in the group that it is about; None: this one.
        """
        self.watch.abort(error, None if culprit is None else self.members[culprit])
        self._discard()

    def explain(self) -> Explanation:
        """What carries out each verb, by size, and why. Collective: no."""
        only = self.capabilities.backend
        choices = [Choice(verb, -1, None, only) for verb in sorted(self.capabilities.verbs)]
        return Explanation(self.name, tuple(choices))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor on ``device`` of any content, for something to be received.

        Large ones may lie in memory that was used before, which is faster than fresh pages.
        Collective: no.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Capture CUDA graphs with operations of this communicator in this context.

        Collective: yes, every member.
        """
        yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "aborted" if self.watch.aborted else "open"
        return (
            f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.world_size} "
            f"on {self.device}, {self.capabilities.backend}, {state}>"
        )

    def _close(self) -> None:
        """Backend: give back what it holds. Called once."""

    def _discard(self) -> None:
        """Backend: the group was aborted; what may be stuck is never used again."""

    # --- running an operation ------------------------------------------------------------

    def _run(
        self,
        verb: str,
        primitive: Callable[[Call], Pending | None],
        result: Any,
        finish: Callable[[], Any] | None = None,
        *,
        async_op: bool = False,
        timeout: float | Deadline | None = None,
        keep: object = None,
    ) -> Any:
        """Run ``primitive``; return ``result``, or what ``finish`` makes of it, or a `Work`.

        An operation that fails midway, or is given up at its deadline, leaves the ranks out
        of step: the error is reported, so that every member stops.
        """
        seconds = self.timeout if timeout is None else Deadline.after(timeout)
        operation = self._enter(verb)
        call = Call(verb, operation, seconds, async_op)
        try:
            pending = self._launch(primitive, call)
            if async_op:
                allowed = seconds.timeout if isinstance(seconds, Deadline) else seconds
                return Work(result, pending, finish, allowed, keep, self._fail)
            if pending is not None:
                pending.wait(call.deadline)
        except CoordinatorError as error:
            self._fail(error)
            raise
        finally:
            self.watch.idle()
        return result if finish is None else finish()

    def _fail(self, error: CoordinatorError) -> None:
        if isinstance(error, (GroupAbortedError, GroupClosedError)):
            self._discard()
        else:
            self.abort(error)

    def _skip(self, verb: str, result: Any, async_op: bool) -> Any:
        """Return ``result`` of an operation in which nothing has to move."""
        self._enter(verb)
        self.watch.idle()
        return Work(result) if async_op else result

    def _identity(self, verb: str, x: Tensor, out: Tensor | None, async_op: bool) -> Any:
        """What every verb is in a group of one: ``x`` itself, or its copy in ``out``."""
        if out is not None and out is not x:
            out.detach().copy_(x)
        return self._skip(verb, x if out is None else out, async_op)

    def _enter(self, verb: str) -> str:
        operation = self._operations.get(verb)
        if operation is None:
            raise NotImplementedError(f"{self.name}: {self.capabilities.backend} has no {verb}")
        if self._closed:
            raise GroupClosedError(f"{operation}: this communicator was closed")
        self.watch.check(operation)
        self.watch.stamp(operation)
        return operation

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Backend: a new contiguous tensor of ``shape``, of the dtype of ``like``.

        It holds a result, or what is on its way to one.
        """
        if like.shape == shape:  # this way is twice as fast
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        return like.new_empty(shape)

    def _launch(self, primitive: Callable[[Call], Pending | None], call: Call) -> Pending | None:
        """Backend: start ``primitive(call)``, here and now unless it knows better.

        The one place to put operations in order: behind those still under way, on a
        progress thread, or on a stream of their own.
        """
        return primitive(call)
