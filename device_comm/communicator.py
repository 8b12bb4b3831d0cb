"""The communicator: the verbs of a group of ranks over tensors on one device.

Common to all verbs
    - Inputs are unchanged, except in the trailing-underscore forms and with ``out=`` that is the
      input. A result never shares memory with an input, except in a group of one, where every verb
      returns its input itself.
    - Ranks are ranks in the group, 0 to N - 1, never negative. ``dim`` may be negative.
    - Invalid shapes, dtypes, sizes and ranks raise `ValueError` or `TypeError` before any
      communication; the communicator stays usable.
    - Every dtype is moved; `device_comm.operation` defines the reductions.
    - ``out`` has exactly the shape and dtype of the result and may be non-contiguous. Without it,
      results are new and contiguous, in memory that torch may be unable to resize. No autograd
      history is recorded.
    - ``async_op=True`` returns a `Work` whose ``wait()`` returns the call's result.
    - ``timeout`` is in seconds; None: the communicator's default.

Further errors
    - `GroupTimeoutError`, `PeerLostError`, `DivergenceError`: the group is aborted with this error;
      all later calls of all members raise `GroupAbortedError`. Exception: the deadline of
      `Work.wait`, which may be called again.
    - `GroupClosedError` with a ``rank``: that member closed the group before its part. The group is
      aborted with it, except by ``send`` and ``recv`` over shared memory.
    - `GroupAbortedError`, `GroupClosedError`: the group was aborted or closed before the call.
    - `NotImplementedError`: ``capabilities.verbs`` lacks the verb.
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
    """One rank's end of a group: all verbs, over one backend. One thread at a time.

    Attributes:
        backend: moves the tensors; `close` closes it.
        watch: the board, or a `device_comm.LoneWatch`.
        members, peers: the watch's member number of each rank; of each other rank.
        begun: the fingerprint of the operations in the current call of a pool.
    """

    def __init__(self, backend: Backend) -> None:
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
        """Return the default time limit of a call in seconds; None: unlimited."""
        return self.backend.timeout

    @property
    def closed(self) -> bool:
        """Return True after `close`."""
        return self.backend.closed

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Wait until eager sends are received, and peers need no part of this rank.

        Afterwards this rank may close. Raises `GroupTimeoutError` if an operation is incomplete
        after ``timeout`` seconds, and continues; or the error of a failed collective.
        """
        self.backend.flush(Deadline.after(self.timeout if timeout is None else timeout))

    def check(self) -> None:
        """Raise the error of the group, or of an operation that failed on the device.

        The group is aborted with it. Never waits for the device and reads a few words. Call it when
        results are complete, before using them: if it raises, those of a replayed graph are
        invalid.
        """
        if self.closed:
            raise GroupClosedError(f"{self.name} check: this communicator was closed")
        try:
            self.backend.check()
        except CoordinatorError as error:
            self.backend.fail(error)
            raise

    def close(self) -> None:
        """Release memory and connections; idempotent.

        The watch belongs to the caller and stays open. Later calls of this rank raise
        `GroupClosedError`.
        """
        self.backend.close()

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Make every call of every member raise `GroupAbortedError`.

        Without a board only this process is affected. ``culprit`` is the rank in the group that
        failed; None: this one.
        """
        self.backend.identity.name_globally(error)
        self.watch.abort(error, None if culprit is None else self.members[culprit])
        self.backend.discard()

    def explain(self) -> Explanation:
        """Return the backend that runs each verb, by size, and why."""
        return self.backend.explain()

    def graph_capture(self) -> AbstractContextManager[None]:
        """Return a context in which CUDA graphs may capture operations of this communicator.

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
