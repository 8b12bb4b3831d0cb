"""The messages between the driver and its workers, and workers' exceptions for the caller.

Calls and replies go through the shared-memory queues, pickled, as tuples of their fields: they
carry users' objects, and a plain tuple is the fastest to pickle. All other messages (start,
progress, failures) use each worker's control channel, as JSON: they must arrive even when the board
is aborted or does not exist yet.
"""

from __future__ import annotations

import pickle
import traceback
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, TypeAlias

import msgspec

from coordinator.call_counts import GroupOperationCounts
from coordinator.rank_grid import RankGrid
from shm_broadcast import (
    BoardHandle,
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
    QueueHandle,
    SegmentHandle,
)

from ..errors import CallRefusedError, StreamLostError, WorkerError


class Call(msgspec.Struct, frozen=True, gc=False):
    """Driver to all workers: run this method.

    Attributes:
        number: 1, 2, ... in the order of sending, without gaps.
        reply_rank: the only rank that returns its result; -1: all ranks.
        stream: 0: an ordinary call. ``n``: return the next item of stream n. ``-n``: close it.
        begins: whether the method returns the generator of a new stream.
        trace: the caller's trace context; see `spans`.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply_rank: int = -1
    stream: int = 0
    begins: bool = False
    trace: dict[str, str] | None = None


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Worker to driver: the call is done.

    Attributes:
        begun: the group operations that this rank began in the call.
        value: the result; ``None`` if another rank returns it. In a stream: see
            `worker.RunningStreams.step`.
    """

    number: int
    begun: tuple[GroupOperationCounts, ...] = ()
    value: Any = None


class Handles(msgspec.Struct, frozen=True):
    """The handles of the shared memory of a worker and the driver.

    Without ``replies``, the worker, on another host, makes that queue. ``board`` and ``cancelled``
    are of its host.
    """

    calls: QueueHandle
    replies: QueueHandle | None = None
    board: BoardHandle | None = None
    cancelled: SegmentHandle | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to worker, once for each generation: join it.

    Attributes:
        generation: the number of the rendezvous: 1, 2, ...
        first_call: the number of the generation's first call.
        survives: whether the worker stays for the next generation when this one breaks.
        rank: the worker's global rank, and its member number on the board.
        secret: random bytes shared by the ranks of this pool only.
        zero_copy, name: as in `PoolConfig`.
        worker, worker_kwargs, main: as in `PoolPlan`.
        timeout: seconds for the rendezvous of all ranks; ``None``: no limit.
        store: the store of all ranks; see `coordinator.stores.open_sealed_store`.
        handles, address, cores: on another host its supervisor sets its memory, its address and
            the cores to bind to (``()``: no binding).
    """

    generation: int
    first_call: int
    survives: bool
    rank: int
    grid: RankGrid
    dcp: int
    device: str
    secret: bytes
    handles: Handles
    zero_copy: bool
    worker: str
    worker_kwargs: bytes
    main: dict[str, bytes] | None
    timeout: float | None
    store: str
    address: str = ""
    name: str = ""
    cores: tuple[int, ...] = ()

    @property
    def on_one_host(self) -> bool:
        """Return whether all ranks run on one host."""
        return self.store.startswith("/")


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Driver to a worker that failed call ``number``: continue with the next one."""

    number: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: process ``pid`` runs and can show its stack."""

    pid: int


class WorkProgress(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: ``done`` of ``total`` units of the work ``what`` are done."""

    done: int
    total: int
    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: the worker is built; ``replies`` is a queue that it has made."""

    replies: QueueHandle | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: an exception was raised while the worker started, or in a call.

    Attributes:
        number: the call's number; 0 during the start.
        begun: the group operations that this rank began in the call.
        kind: the name of the exception's class, with its module unless it is built in.
        consequence: whether it is a secondary failure: another rank has failed.
        diverged: whether it is a DivergenceError: another rank called a different operation.
        exception: the exception itself, pickled; ``b""`` if it cannot be pickled.
    """

    number: int
    begun: tuple[GroupOperationCounts, ...]
    kind: str
    message: str
    traceback: str
    consequence: bool = False
    diverged: bool = False
    exception: bytes = b""


class Detached(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: it has left all groups and queues, and waits for another `Start`."""


FromWorker: TypeAlias = Hello | WorkProgress | Ready | Failed | Detached

_MOST_BYTES = 1 << 20
"""Limit of a pickled exception."""
_MOST_CHARACTERS = 1 << 16
"""Limit of a text; of a longer one the beginning and the end are sent."""
_ADVICE = {
    GeneratorType: "iterate over pool.stream(...)",
    AsyncGeneratorType: "make it a plain generator, and iterate over pool.astream(...)",
    CoroutineType: "make it a plain method, and await pool.acall(...)",
}
"""Advice for a method that does not return its result, by the returned type."""


def describe(
    error: BaseException,
    number: int = 0,
    begun: tuple[GroupOperationCounts, ...] = (),
    rank: int | None = None,
) -> Failed:
    """Return a worker's message about an exception in call ``number``; 0: during the start.

    ``begun`` are the group operations that this rank began in the call.
    """
    refused = isinstance(error, CallRefusedError)
    shown = (error.__cause__ or error) if refused else error
    kind = type(shown).__qualname__
    if type(shown).__module__ != "builtins":
        kind = f"{type(shown).__module__}.{kind}"
    return Failed(
        number,
        begun,
        kind,
        _text(shown),
        _sendable("".join(traceback.format_exception(error))),
        consequence=is_consequence(error, rank),
        diverged=isinstance(error, DivergenceError),
        exception=_pickled(shown),
    )


def unsendable(value: object, error: TypeError, what: str = "result") -> TypeError:
    """Return a worker's error for a result or item (``what``) that ``error`` made unsendable."""
    kind = type(value)
    advice = _ADVICE.get(kind, str(error.__cause__ or error))
    unsent = TypeError(f"its {what}, of type {kind.__name__}, cannot be sent: {advice}")
    unsent.__cause__ = error
    return unsent


def rebuild(
    failed: Failed, rank: int, method: str, detail: str = ""
) -> WorkerError | StreamLostError:
    """Return the error to raise at the caller, made from a worker's message.

    Its ``__cause__`` is the original exception, if that can be unpickled here. A `StreamLostError`,
    which is the pool's, is returned itself. ``detail`` is added to the message, in parentheses.
    """
    original = _unpickled(failed.exception)
    if isinstance(original, StreamLostError):
        return original
    message = f"{failed.message} ({detail})" if detail else failed.message
    error = WorkerError(rank, method, failed.kind, message, failed.traceback)
    error.__cause__ = original
    return error


def is_consequence(error: BaseException | None, rank: int | None) -> bool:
    """Return whether ``error`` on ``rank`` is a secondary failure: another rank failed first.

    If ``rank``, in any thread, has aborted the group because of itself, the failure is its own.
    """
    if isinstance(error, CallRefusedError):
        return error.rank is not None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, GroupAbortedError):
            return not error.failure.rank == error.failure.culprit == rank
        if isinstance(error, PeerLostError):
            return True
        if isinstance(error, GroupClosedError) and error.rank is not None:
            return True
        seen.add(id(error))  # an error may be its own cause
        error = error.__cause__ or error.__context__
    return False


def _text(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception as inner:  # noqa: BLE001 - an exception's own code runs here
        return f"(no text: its __str__ raised {type(inner).__name__})"


def _sendable(text: str) -> str:
    """Return ``text``, shortened, without lone surrogates, which file names may have."""
    excess, half = len(text) - _MOST_CHARACTERS, _MOST_CHARACTERS // 2
    if excess > 0:
        text = f"{text[:half]}\n... {excess} characters are left out ...\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def _pickled(error: BaseException) -> bytes:
    """Return ``error`` pickled; ``b""`` if it cannot be, is large, or unpickles as another type."""
    try:  # the exception class's own code runs here, and may raise anything
        data = pickle.dumps(error)
        travels = len(data) <= _MOST_BYTES and type(pickle.loads(data)) is type(error)
        return data if travels else b""
    except (Exception, SystemExit):  # noqa: BLE001 - the text and the traceback suffice
        return b""


def _unpickled(data: bytes) -> BaseException | None:
    if not data:
        return None
    try:
        error = pickle.loads(data)
    except (Exception, SystemExit):  # noqa: BLE001 - its class may exist in the worker only
        return None
    return error if isinstance(error, BaseException) else None
