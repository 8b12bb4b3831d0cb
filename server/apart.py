"""Runs a function in a thread that the interpreter does not wait for when it ends."""

from __future__ import annotations

import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def begin_apart(do: Callable[[], T], thread: str) -> Future[T]:
    """Call ``do`` in a new thread.

    Args:
        do: what to call.
        thread: the thread's name.

    Returns:
        The future of what it returns or raises; if that is cancelled, ``do`` goes on.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = do()
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
            with suppress(InvalidStateError):
                future.set_exception(error)
        else:
            with suppress(InvalidStateError):
                future.set_result(result)

    threading.Thread(target=run, name=thread, daemon=True).start()
    return future
