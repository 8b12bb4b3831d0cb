"""Argument checks: each returns the value as a plain Python type, or names the argument.

Any integer type counts as a whole number, numpy's too. Booleans do not: ``tp=True`` is a mistake.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Real
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
CheckArgument: TypeAlias = Callable[[str, Any], T]
"""Takes an argument's name and value and returns the value.

Raises:
    TypeError: the value has the wrong type.
    ValueError: the value is out of range.
"""


def integer(name: str, given: Any, most: int | None = None, *, least: int = 1) -> int:
    """Return a whole number from ``least`` to ``most``; see `CheckArgument`."""
    try:
        number = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = None
    if number is None:
        raise _mistaken(name, "a whole number", given)
    if number < least or (most is not None and number > most):
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} must be {limits}; got {number}")
    return number


def integers(name: str, given: Any, *, least: int = 1) -> tuple[int, ...]:
    """Return several whole numbers; see `CheckArgument`."""
    return _several(name, "whole numbers", given, partial(integer, least=least))


def seconds(name: str, given: Any, *, some: bool = False) -> float:
    """Return seconds, 0 or more; ``some`` excludes 0; see `CheckArgument`."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise _mistaken(name, "a number of seconds", given)
    number = float(given)
    if not (number > 0 if some else number >= 0):
        limit = "more than 0" if some else "0 or more"
        raise ValueError(f"{name} must be {limit} seconds; got {given!r}")
    return number


def positive_seconds(name: str, given: Any) -> float:
    """Return seconds, more than 0; see `CheckArgument`."""
    return seconds(name, given, some=True)


def flag(name: str, given: Any) -> bool:
    """Return True or False; see `CheckArgument`."""
    if not isinstance(given, bool):
        raise _mistaken(name, "True or False", given)
    return given


def text(name: str, given: Any) -> str:
    """Return a text; see `CheckArgument`."""
    if not isinstance(given, str):
        raise _mistaken(name, "a text", given)
    return str(given)


def printable_text(name: str, given: Any) -> str:
    """Return a text of printable characters, for logs; see `CheckArgument`."""
    if not text(name, given).isprintable():
        raise ValueError(f"{name} must be of printable characters only; got {given!r}")
    return str(given)


def texts(name: str, given: Any) -> tuple[str, ...]:
    """Return several texts; a single ``str`` is refused; see `CheckArgument`."""
    return _several(name, "texts", given, text)


def function(name: str, given: Any) -> Callable[..., Any]:
    """Return a callable; see `CheckArgument`."""
    if not callable(given):
        raise _mistaken(name, "a function", given)
    return given  # type: ignore[no-any-return]


def optional(check: CheckArgument[T]) -> CheckArgument[T | None]:
    """Return a check that accepts ``None`` and every value that ``check`` accepts."""
    return lambda name, given: None if given is None else check(name, given)


def _several(name: str, wanted: str, given: Any, check: CheckArgument[T]) -> tuple[T, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise _mistaken(name, f"a sequence of {wanted}", given)
    return tuple(check(f"{name}[{index}]", each) for index, each in enumerate(given))


def _mistaken(name: str, wanted: str, given: Any) -> TypeError:
    return TypeError(f"{name} must be {wanted}; got {given!r}")
