"""Define the messages between the driver and its workers, and carry a worker's exception to the
caller.

Calls and replies go through the shared-memory queues, pickled, as tuples of their fields: they
carry the user's objects, and a plain tuple is the fastest to pickle. Everything else (start,
progress, failures) goes over each worker's control channel, as JSON: it must arrive even when the
queues cannot be used, because the board is aborted or does not exist yet.
"""

from __future__ import annotations

import pickle
import traceback
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Final, TypeAlias

import msgspec

from coordinator.call_counts import GroupOperationCounts
from coordinator.key_values import StoreAddress
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

VOID: Final = "_"
"""The method of an empty call, answered at once. Users cannot call a method of this name."""


class Call(msgspec.Struct, frozen=True, gc=False):
    """Driver to all workers: call this method.

    Attributes:
        number: 1, 2, ... in the order of sending. If a number is left out, because its call was not
            sent, a `VOID` call is next.
        method: the name of the worker's method.
        args: its positional arguments.
        kwargs: its keyword arguments.
        reply_rank: the only rank whose result is wanted; -1: all ranks'.
        stream: 0: an ordinary call. ``n``: give the next item of stream n. ``-n``: close stream n.
        begins: whether the call begins its stream: the method returns the generator.
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
        number: the call's number.
        begun: the group operations that this rank began in the call.
        value: the result; ``None`` if this rank's is not wanted. Of a stream: see
            `worker.RunningStreams.step`.
    """

    number: int
    begun: tuple[GroupOperationCounts, ...] = ()
    value: Any = None


class Handles(msgspec.Struct, frozen=True):
    """What a worker shares with the driver.

    Attributes:
        calls: the queue that it reads.
        replies: the queue that it writes. ``None``: it makes one, since it is on another host.
        board: the board of its host.
        cancelled: the marks of cancelled calls.
    """

    calls: QueueHandle
    replies: QueueHandle | None = None
    board: BoardHandle | None = None
    cancelled: SegmentHandle | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to worker, once for each generation: everything that the worker needs to take part.

    Attributes:
        generation: 1, 2, ...: how often the workers have met.
        first_call: the number of the generation's first call.
        survives: whether the worker goes on to the next generation when this one breaks.
        rank: the worker's global rank, which is also its member number on the board.
        grid: the grid of ranks.
        dcp: how many ranks share contexts.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``.
        secret: random bytes that only the ranks of this pool know.
        handles: what it shares with the driver; for a worker on another host its host fills the
            memory there in.
        zero_copy: whether large buffers of results stay in shared memory.
        worker: the worker's class as ``"package.module:Class"``.
        worker_kwargs: its keyword arguments, pickled.
        main: how to load the driver's main module, if the class is defined there; see `reference`.
        timeout: seconds for all ranks to meet; ``None``: for ever.
        store: where the ranks of several hosts meet; ``None``: at the driver's meeting.
        address: the worker's host's address, if the driver is on another host; its host fills it
            in.
        spans: where it records its spans, see `spans.record`; ``None``: nowhere.
        name: the pool's; see `PoolConfig.name`.
        cores: those that it is to be bound to; ``()``: none. Its host fills it in.
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
    store: StoreAddress | None = None
    address: str = ""
    spans: str | None = None
    name: str = ""
    cores: tuple[int, ...] = ()


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Driver to a worker that failed a call: go on with the next one.

    Attributes:
        number: the failed call's number.
    """

    number: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: the process runs and can show its stack.

    Attributes:
        pid: its process id.
    """

    pid: int


class WorkProgress(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: how far a long piece of work has come.

    Attributes:
        done: units of work that are done.
        total: units of work in all.
        what: what the work is, as text.
    """

    done: int
    total: int
    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: the worker is built and takes calls.

    Attributes:
        replies: the queue that it writes, if it has made it.
    """

    replies: QueueHandle | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: an exception was raised while the worker started, or in a call.

    Attributes:
        number: the call's number; 0 during the start.
        begun: the group operations that this rank began in the call.
        kind: the name of the exception's class, with its module unless it is built in.
        message: its text.
        traceback: its traceback.
        consequence: whether it was raised only because another rank has failed.
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
"""Of an exception that travels as it is, with all that it holds."""
_MOST_CHARACTERS = 1 << 16
"""Of a text that travels; of a longer one its beginning and its end."""
_INSTEAD = {
    GeneratorType: "iterate over pool.stream(...)",
    AsyncGeneratorType: "make it a plain generator, and iterate over pool.astream(...)",
    CoroutineType: "make it a plain method, and await pool.acall(...)",
}
"""What to do where a method does not return its result, by what it returns."""


def describe(
    error: BaseException,
    number: int = 0,
    begun: tuple[GroupOperationCounts, ...] = (),
    rank: int | None = None,
) -> Failed:
    """In a worker: the message about an exception.

    Args:
        error: the exception as it was caught.
        number: the call's number; 0 during the start.
        begun: the group operations that this rank began in the call.
        rank: as for `is_consequence`.
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
    """In a worker: what to report of a result that ``error`` has kept from being sent.

    Args:
        value: the result.
        error: why not.
        what: it may be the item of a stream.
    """
    kind = type(value)
    instead = _INSTEAD.get(kind, str(error.__cause__ or error))
    told = TypeError(f"its {what}, of type {kind.__name__}, cannot be sent: {instead}")
    told.__cause__ = error
    return told


def rebuild(
    failed: Failed, rank: int, method: str, detail: str = ""
) -> WorkerError | StreamLostError:
    """In the driver: the error to raise at the caller.

    Its ``__cause__`` is the original exception, if that can be unpickled here. That a stream is
    lost is not the worker's error, but the pool's.

    Args:
        failed: the worker's message.
        rank: the worker's rank.
        method: the method that was called.
        detail: added to the message, in parentheses.
    """
    original = _unpickled(failed.exception)
    if isinstance(original, StreamLostError):
        return original
    message = f"{failed.message} ({detail})" if detail else failed.message
    error = WorkerError(rank, method, failed.kind, message, failed.traceback)
    error.__cause__ = original
    return error


def is_consequence(error: BaseException | None, rank: int | None) -> bool:
    """Whether ``error`` was raised, directly or not, because another rank failed.

    Args:
        error: the exception.
        rank: the rank that it was raised on. If that itself has aborted the group, maybe in
            another thread, because of itself, this is its own failure.
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
    """``text``, not too long, and without lone surrogates, which file names may have."""
    left_out, half = len(text) - _MOST_CHARACTERS, _MOST_CHARACTERS // 2
    if left_out > 0:
        text = f"{text[:half]}\n... {left_out} characters are left out ...\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


def _pickled(error: BaseException) -> bytes:
    """``error`` pickled; ``b""`` if it cannot be, is large, or unpickles as another type."""
    try:  # the exception class's own code runs here, and may raise anything
        data = pickle.dumps(error)
        travels = len(data) <= _MOST_BYTES and type(pickle.loads(data)) is type(error)
        return data if travels else b""
    except (Exception, SystemExit):  # noqa: BLE001 - the text and the traceback travel without it
        return b""


def _unpickled(data: bytes) -> BaseException | None:
    if not data:
        return None
    try:
        error = pickle.loads(data)
    except (Exception, SystemExit):  # noqa: BLE001 - its class may exist in the worker only
        return None
    return error if isinstance(error, BaseException) else None
