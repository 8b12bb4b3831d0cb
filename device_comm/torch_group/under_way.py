"""Keeps what gloo's threads work on, lest one of them lets go of it last.

Whoever drops the last reference to a collective drops its tensors, and torch takes Python's lock
for that. A thread that asks for it while Python comes to its end is ended by Python (before 3.14),
in the middle of a destructor, which ends the process: "terminate called without an active
exception". It happened where a collective was given up, as its peers were late, and the program
ended soon after.

So a collective is kept, and its tensors with it, until it was waited for or, if that failed or
nobody does it, until another one begins after it has ended. What is left at the end of the process
stays. Of one that was waited for torch's thread lets go within microseconds.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


def _never_dropped() -> set[dist.Work]:
    """A set that the end of Python leaves as it is."""
    made: set[dist.Work] = set()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


_kept = _never_dropped()


def keep_until_done(work: dist.Work) -> None:
    """Keep ``work``, which has begun, and those before it no more that have ended."""
    for each in [*_kept]:
        if each.is_completed():
            _kept.discard(each)
    _kept.add(work)


def let_go(work: dist.Work) -> None:
    """Keep ``work`` no more: it was waited for."""
    _kept.discard(work)


def _disown() -> None:
    """In a forked child: what the parent works on is neither looked at here nor dropped."""
    global _kept
    _kept = _never_dropped()


os.register_at_fork(after_in_child=_disown)
