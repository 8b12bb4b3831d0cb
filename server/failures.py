"""A worker's exception on its way to the caller: told by the worker, rebuilt by the driver."""

from __future__ import annotations

import pickle
import traceback

from server.errors import CallRefusedError, WorkerError
from server.messages import Failed
from shm_broadcast import GroupAbortedError, PeerLostError


def describe(error: BaseException, number: int, operations: int) -> Failed:
    """What a worker tells of ``error``.

    Args:
        error: as it was caught.
        number: the call's; 0 in the start.
        operations: how many group operations this rank began in the call.
    """
    orderly = isinstance(error, CallRefusedError)
    shown = (error.__cause__ or error) if orderly else error
    kind = type(shown).__qualname__
    if type(shown).__module__ != "builtins":
        kind = f"{type(shown).__module__}.{kind}"
    return Failed(
        number,
        operations,
        kind,
        _text(shown),
        _sendable("".join(traceback.format_exception(error))),
        consequence=_is_consequence(error),
        orderly=orderly,
        exception=_pickled(shown),
    )


def rebuild(failed: Failed, rank: int, method: str) -> WorkerError:
    """The error to raise at the caller, with the original as its cause where that can be had.

    Args:
        failed: what the worker told.
        rank: the worker's.
        method: what was called.
    """
    error = WorkerError(rank, method, failed.kind, failed.message, failed.traceback)
    error.__cause__ = _unpickled(failed.exception)
    return error


def _is_consequence(error: BaseException | None) -> bool:
    """Whether ``error`` arose, however indirectly, because another rank failed."""
    if isinstance(error, CallRefusedError):
        return error.rank is not None
    while error is not None:
        if isinstance(error, (GroupAbortedError, PeerLostError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _text(error: BaseException) -> str:
    try:
        return _sendable(str(error))
    except Exception as inner:  # noqa: BLE001 - an exception's own code runs here
        return f"(no text: its __str__ raised {type(inner).__name__})"


def _sendable(text: str) -> str:
    """``text`` without lone surrogates, as names of files may have them."""
    return text.encode(errors="backslashreplace").decode()


def _pickled(error: BaseException) -> bytes:
    """``error`` as bytes that give the same type again, or ``b""``.

    An exception's own code runs here, and may raise anything.
    """
    try:
        data = pickle.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else b""
    except Exception:  # noqa: BLE001 - the text and the traceback travel without it
        return b""


def _unpickled(data: bytes) -> BaseException | None:
    if not data:
        return None
    try:
        error = pickle.loads(data)
    except Exception:  # noqa: BLE001 - its class may exist in the worker only
        return None
    return error if isinstance(error, BaseException) else None
