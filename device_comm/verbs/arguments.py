"""The types of what all verbs take besides their own: ``async_op`` decides what a verb returns.

A verb has three overloads, since Python cannot add a keyword to a signature that another has
(PEP 612), and a checker takes ``bool`` for neither of its two values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Required, TypeAlias, TypedDict

from torch import Tensor

from shm_broadcast.deadline import Deadline

Timeout: TypeAlias = float | Deadline | None
"""Seconds that a call may take, or until when; None: what the group allows."""

Sizes: TypeAlias = Sequence[int] | None
"""Rows of each rank; None: all have as many."""

Out: TypeAlias = Tensor | None
"""Where the result goes; None: into a new tensor."""


class Now(TypedDict, total=False):
    """Of a call that returns its result."""

    async_op: Literal[False]
    timeout: Timeout


class Later(TypedDict, total=False):
    """Of a call that returns a `Work` of its result."""

    async_op: Required[Literal[True]]
    timeout: Timeout


class Maybe(TypedDict, total=False):
    """Of a call that returns the one or the other."""

    async_op: bool
    timeout: Timeout
