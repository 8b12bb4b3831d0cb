"""The communicator: the verbs of a group of ranks over tensors on one device.

What all verbs share
    - Out of place: the input is never changed, except by the trailing-underscore forms and
      by ``out=`` that is the input. A result never shares memory with an input, except in a
      group of one, where every verb is the identity and returns its input itself.
    - Ranks are ranks in the group, 0 to N - 1, never negative. ``dim`` may be negative.
    - Shapes, dtypes, sizes and ranks are checked first, without communicating: `ValueError`
      or `TypeError`, and the communicator can be used on.
    - Every dtype is moved; reductions are defined by `device_comm.operation`.
    - ``out`` has exactly the shape and dtype of the result and may be non-contiguous.
      Without it, results are new and contiguous, in memory that torch may be unable to resize.
      No autograd history is recorded.
    - ``async_op=True`` returns a `Work` whose ``wait()`` returns what the call would have.
    - ``timeout`` is in seconds; None: the communicator's own.

What they raise beyond that
    - `GroupTimeoutError`, `PeerLostError`, `DivergenceError`: the operation cannot be taken
      back, so the group is aborted with this error: all calls of all members raise
      `GroupAbortedError` from then on. Exception: the deadline of `Work.wait`, after which
      one can wait again.
    - `GroupClosedError` with a ``rank``: that member has closed the group, and is needed. The group
      is aborted with it likewise, except by ``send`` and ``recv`` over shared memory.
    - `GroupAbortedError`, `GroupClosedError`: the group was over before.
    - `NotImplementedError`: a verb that ``capabilities.verbs`` does not name.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Self, final

from device_comm.verbs.collectives import AllToAllVerbs, SymmetricVerbs
from device_comm.verbs.point_to_point import PointToPointVerbs
from device_comm.verbs.rooted import RootedPartVerbs, RootedVerbs
from device_comm.verbs.runner import Runner
from device_comm.verbs.uneven import UnevenVerbs
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError

if TYPE_CHECKING:
    from device_comm.backend import Backend, Explanation


@final
class Communicator(
    SymmetricVerbs, UnevenVerbs, AllToAllVerbs, RootedVerbs, RootedPartVerbs, PointToPointVerbs
):
    """One rank's end of a group: all verbs, over the backend that it is made of.

    Tensors move as `device_comm.backend.Backend` has it; one thread at a time.

    Attributes:
        backend: moves the tensors; it is closed with this.
        rank: this process's rank in the group.
        world_size: how many ranks the group has.
        device: where the tensors are.
        name: the group's name, for errors and status.
        watch: notices lost members and aborts: the board, or a `device_comm.LoneWatch`.
        members: the watch's member number of each rank.
        peers: the member numbers of all other ranks.
        capabilities: what the backend offers.
        begun: counts the operations begun in a pool's call, so that ranks can be compared.
    """

    def __init__(self, backend: Backend) -> None:
        """Offer the verbs of ``backend``. Collective: no."""
        self.runner = Runner(backend)
        self.backend = backend
        self.rank = backend.rank
        self.world_size = backend.world_size
        self.device = backend.device
        self.name = backend.name
        self.watch = backend.watch
        self.members = backend.members
        self.peers = backend.peers
        self.capabilities = backend.capabilities
        self.begun = backend.begun

    @property
    def timeout(self) -> float | None:
        """Seconds that a call allows unless it says otherwise; None: for ever."""
        return self.backend.timeout

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.backend.closed

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Return once this rank may close: all that was sent ahead of its receivers has arrived,
        and the others need it no more for collectives begun with ``async_op``. Collective: no.

        Args:
            timeout: seconds; None: the communicator's.

        Raises:
            GroupTimeoutError: something has not arrived yet, and is still on its way.
            CoordinatorError: one of the collectives failed.
        """
        self.backend.flush(Deadline.after(self.timeout if timeout is None else timeout))

    def check(self) -> None:
        """Raise if the group is over, or an operation failed that the device did meanwhile, such
        as those of a replayed graph: its results must not be used. Collective: no.

        Never waits for the device: call it when the results are there, before they are used. It
        reads a few words.

        Raises:
            CoordinatorError: what has happened; the group is aborted with it.
        """
        if self.closed:
            raise GroupClosedError(f"{self.name} check: this communicator was closed")
        try:
            self.backend.check()
        except CoordinatorError as error:
            self.backend.fail(error)
            raise

    def close(self) -> None:
        """Free memory and connections; the second time does nothing. Collective: no.

        The watch belongs to the caller and stays open.

        Calls of this rank raise `GroupClosedError` from then on.
        """
        self.backend.close()

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Make every call of every member raise `GroupAbortedError`. Collective: no.

        Without a board only this process notices.

        Args:
            error: why.
            culprit: the rank in the group that failed; None: this one.
        """
        self.backend.identity.name_globally(error)
        self.watch.abort(error, None if culprit is None else self.members[culprit])
        self.backend.discard()

    def explain(self) -> Explanation:
        """What carries out each verb, by size, and why. Collective: no."""
        return self.backend.explain()

    def graph_capture(self) -> AbstractContextManager[None]:
        """Capture CUDA graphs with operations of this communicator in this context.

        Collective: yes, every member.
        """
        return self.backend.graph_capture()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "aborted" if self.watch.aborted else "open"
        return (
            f"<Communicator {self.name!r} rank {self.rank} of {self.world_size} "
            f"on {self.device}, {self.capabilities.backend}, {state}>"
        )
