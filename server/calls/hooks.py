"""What a ledger asks its owner to do, as actions that are run in order, and all of them.

Actions are collected under the ledger's lock, and run after it was released.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast import CoordinatorError

    from .pending_call import PendingCall

    Actions: TypeAlias = "list[Callable[[], None]]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LedgerHooks:
    """What a ledger asks its owner to do. Called by any thread, without the ledger's lock.

    Attributes:
        resume: ``(rank, number)``: tell the rank, which has failed call ``number``, to go on.
        wake: wake the thread that listens for replies: a call ended without a reply.
        clock: call `Ledger.tick` now: it has to look earlier than it said last, or to break the
            pool.
        broke: ``(error)``: the pool broke; called once in each generation.
        late: ``(calls)``: these calls are late: call `Ledger.expire`. Each call once.
        stuck: ``(call)``: this call has been the oldest one for too long. Each call once.
    """

    resume: Callable[[int, int], None]
    wake: Callable[[], None]
    clock: Callable[[], None]
    broke: Callable[[CoordinatorError], None]
    late: Callable[[list[PendingCall]], None]
    stuck: Callable[[PendingCall], None]


def run_all(actions: Actions) -> None:
    """Run the actions in order.

    Raises:
        BaseException: in the main thread, what a signal handler, or an action, raises; the rest is
            not done then. In other threads that is logged.
    """
    for action in actions:
        try:
            action()
        except BaseException:
            if in_main_thread():  # maybe a signal handler's
                raise
            _log.exception("what a user of the pool wants to be called has raised")


def in_main_thread() -> bool:
    """Whether this is the thread that signal handlers interrupt."""
    return threading.current_thread() is threading.main_thread()


def ignore(*_: object) -> None:
    """Do nothing."""
