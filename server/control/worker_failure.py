"""Carries a worker's exception to the caller: the worker describes it, the driver rebuilds it."""

from __future__ import annotations

import pickle
import traceback
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING

from shm_broadcast import DivergenceError, GroupAbortedError, GroupClosedError, PeerLostError

from ..errors import CallRefusedError, StreamLostError, WorkerError
from .protocol import Failed

if TYPE_CHECKING:
    from coordinator.begun_in_call import BegunInGroup

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
    begun: tuple[BegunInGroup, ...] = (),
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
