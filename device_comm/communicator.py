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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, Unpack, final, overload

import torch
from torch import Tensor

from device_comm.operation import NO_TENSOR, Operation
from device_comm.verbs.checks import (
    Later,
    Now,
    Out,
    Shape,
    Timeout,
    check_out,
    check_peer,
    check_shape,
    check_tensor,
    materialized,
    output_buffer,
)
from device_comm.verbs.collectives import Collectives
from device_comm.verbs.rooted import RootedCollectives
from device_comm.verbs.runner import Runner
from device_comm.work import Work
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError

if TYPE_CHECKING:
    from device_comm.backend import Backend, Explanation


@final
class Communicator(Collectives, RootedCollectives):
    """One rank's end of a group: all verbs, over one backend. One thread at a time.

    Messages of one rank to another arrive in the order of their sends. Sender and receiver pass the
    same shape and dtype.

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

    # --- messages and the barrier ----------------------------------------------------------

    def send(self, x: Tensor, dst: int | None = None, *, timeout: Timeout = None) -> None:
        """Send ``x`` to rank ``dst``. Collective: no, the two ranks only.

        Returns when ``x`` may be changed, which may be before it is received. ``dst`` is another
        rank in the group; None: the next rank, modulo N.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            peer = (run.rank + 1) % run.world_size if dst is None else dst
            if shortcut.message("send", timeout, False, x, peer) is not NotImplemented:
                return
        self._start_send(x, dst, async_op=False, timeout=timeout)

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Return a new contiguous tensor on the device, uninitialised, for a receive.

        A large one may reuse memory, which is faster than fresh pages.
        """
        return self.runner.empty(shape, dtype)

    def sends_eagerly(self, dst: int, size: int) -> bool:
        """Return True if a `send` of ``size`` bytes to ``dst`` returns without its `recv`."""
        return self.runner.backend.sends_eagerly(dst, size)

    def isend(self, x: Tensor, dst: int | None = None, *, timeout: Timeout = None) -> Work[None]:
        """Start a `send`; never block.

        Returns:
            A `Work` with time limit ``timeout``; ``x`` must not change until it is done. That may
                be before the receive. Closing a group then waits some seconds for the receive
                (`GroupCoordinator.close`); closing a communicator does not: see `flush`.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            peer = (run.rank + 1) % run.world_size if dst is None else dst
            work = shortcut.message("send", timeout, True, x, peer)
            if work is not NotImplemented:
                return work  # type: ignore[no-any-return]
        return self._start_send(x, dst, async_op=True, timeout=timeout)  # type: ignore[no-any-return]

    def recv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Out = None,
        timeout: Timeout = None,
    ) -> Tensor:
        """Receive the next message from rank ``src``. Collective: no, the two ranks only.

        ``size`` is a shape, an int for one dimension; ``size`` and ``dtype`` are optional with
        ``out``. ``src`` is another rank in the group; None: the previous rank, modulo N.

        Returns:
            ``out``, or a new contiguous tensor.
        """
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            peer = (run.rank - 1) % run.world_size if src is None else src
            if out is None and size is not None and dtype is not None:
                out, size, dtype = run.empty(size, dtype), None, None
            if out is not None and size is None and dtype is None:
                done = shortcut.message("recv", timeout, False, out, peer)
                if done is not NotImplemented:
                    return done  # type: ignore[no-any-return]
        return self._start_recv(  # type: ignore[no-any-return]
            size, dtype, src, out, async_op=False, timeout=timeout
        )

    def irecv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Out = None,
        timeout: Timeout = None,
    ) -> Work[Tensor]:
        """Start a `recv`; return a `Work` of the tensor with time limit ``timeout``."""
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            peer = (run.rank - 1) % run.world_size if src is None else src
            if out is None and size is not None and dtype is not None:
                out, size, dtype = run.empty(size, dtype), None, None
            if out is not None and size is None and dtype is None:
                done = shortcut.message("recv", timeout, True, out, peer)
                if done is not NotImplemented:
                    return done  # type: ignore[no-any-return]
        return self._start_recv(  # type: ignore[no-any-return]
            size, dtype, src, out, async_op=True, timeout=timeout
        )

    def irecv_series(self, following: Callable[[], Sequence[Tensor]], src: int) -> Work[None]:
        """Start to receive tensors from ``src`` whose number depends on earlier ones.

        Collective: no, the two ranks only. ``following`` returns the next contiguous tensors to
        fill, in the order of their sends, after the previous ones are filled; none: the end. Any
        thread may call it. Raises `NotImplementedError` if not supported.
        """
        src = self._check_peer("src", src, -1)
        offered = self.runner.backend.capabilities
        if not offered.series:
            raise NotImplementedError(f"{offered.backend} has no irecv_series")
        operation = Operation("recv", background=True, timeout=None, peer=src, following=following)
        return self.runner.run(operation, None)  # type: ignore[no-any-return]

    @overload
    def barrier(self, **how: Unpack[Now]) -> None: ...
    @overload
    def barrier(self, **how: Unpack[Later]) -> Work[None]: ...
    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work[None] | None:
        """Return after every rank has called. Collective: yes, every member."""
        run = self.runner
        if (shortcut := run.backend.fast_path) is not None:
            done = shortcut.collective("barrier", timeout, async_op)
            if done is not NotImplemented:
                return done  # type: ignore[no-any-return]
        if run.world_size == 1:
            return run.skip("barrier", None, async_op)  # type: ignore[no-any-return]
        operation = Operation("barrier", NO_TENSOR, NO_TENSOR, async_op, timeout)
        return run.run(operation, None)  # type: ignore[no-any-return]

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

    def _start_send(self, x: Tensor, dst: int | None, *, async_op: bool, timeout: Timeout) -> Any:
        run = self.runner
        check_tensor("x", x, run.device)
        peer = self._check_peer("dst", dst, 1)
        source = materialized(x)
        operation = Operation("send", source, NO_TENSOR, async_op, timeout, peer=peer)
        return run.run(operation, None)

    def _start_recv(
        self,
        size: Shape | None,
        dtype: torch.dtype | None,
        src: int | None,
        out: Out,
        *,
        async_op: bool,
        timeout: Timeout,
    ) -> Any:
        run = self.runner
        peer = self._check_peer("src", src, -1)
        if out is None:
            if size is None or dtype is None:
                raise ValueError("recv needs size and dtype, or out")
            buffer, finish = run.empty(size, dtype), None
        else:
            shape = out.shape if size is None else check_shape("size", size)
            check_out(out, shape, out.dtype if dtype is None else dtype, run.device)
            buffer, finish = output_buffer(run.new, out, out.shape, out, None)
        operation = Operation("recv", NO_TENSOR, buffer, async_op, timeout, peer=peer)
        return run.run(operation, buffer, finish)

    def _check_peer(self, label: str, peer: int | None, step: int) -> int:
        run = self.runner
        rank = (run.rank + step) % run.world_size if peer is None else peer
        return check_peer(label, rank, run.rank, run.world_size)
