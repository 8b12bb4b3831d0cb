"""Parse the environment variable ``GROUP_COORDINATOR``."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

SWITCH_VARIABLE = "GROUP_COORDINATOR"
PARTS = ("communicator", "queue", "status")
"""The replaceable parts of an engine; a plug-in may have fewer."""

_ALL = ("1", "force")


class UntestedVersionError(RuntimeError):
    """The plug-in is not tested with this version of the engine."""


@dataclass(frozen=True, slots=True)
class Switches:
    """The names of the enabled parts; ``force`` accepts untested versions of the engine."""

    parts: frozenset[str]
    force: bool = False

    @classmethod
    def of(cls, text: str) -> Switches:
        """Return the switches of a value of the variable.

        Args:
            text: ``""`` or ``"0"``: none; ``"1"``: all parts; else names of parts, separated by
                commas; ``"force"``, alone or among them: also on an untested version.

        Raises:
            ValueError: a name is not a part.
        """
        words = [word for each in text.split(",") if (word := each.strip())]
        if not words or words == ["0"]:
            return cls(frozenset())
        unknown = [word for word in words if word not in PARTS and word not in _ALL]
        if unknown:
            raise ValueError(
                f"{SWITCH_VARIABLE}={text!r}: there is no part {unknown[0]!r}; "
                f"it is 0, 1, force, or some of {','.join(PARTS)}"
            )
        named = frozenset(words) - {*_ALL}
        return cls(named if named and "1" not in words else frozenset(PARTS), "force" in words)

    @classmethod
    def from_environment(cls) -> Switches:
        """Return the switches of the variable's value; raise ValueError for an unknown part."""
        return cls.of(os.environ.get(SWITCH_VARIABLE, ""))

    def check_version(self, engine: str, version: str, tested: Collection[str]) -> None:
        """Raise UntestedVersionError for an untested version, unless forced."""
        if self.parts and not self.force and version.partition("+")[0] not in tested:
            raise UntestedVersionError(
                f"{SWITCH_VARIABLE} is set, but {engine} is {version}; its replacement parts are "
                f"tested with {', '.join(tested)}: unset {SWITCH_VARIABLE}, or try with "
                f"{SWITCH_VARIABLE}=force"
            )
