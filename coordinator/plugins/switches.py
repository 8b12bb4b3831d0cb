"""What the environment variable ``GROUP_COORDINATOR`` switches on."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

SWITCH_VARIABLE = "GROUP_COORDINATOR"
PARTS = ("communicator", "queue", "status")
"""What can take the place of something of an engine's; not every engine's plug-in has all."""

_ALL = ("1", "force")


class UntestedVersionError(RuntimeError):
    """The engine is of a version that this has not been tested with."""


@dataclass(frozen=True, slots=True)
class Switches:
    """Which parts are on.

    Attributes:
        parts: their names.
        force: go on with a version of the engine that was not tested.
    """

    parts: frozenset[str]
    force: bool = False

    @classmethod
    def of(cls, text: str) -> Switches:
        """What a value of the variable means.

        Args:
            text: ``""`` or ``"0"``: nothing; ``"1"``: all parts; else names of parts with commas
                between; ``"force"``, alone or among them: also on a version not tested.

        Raises:
            ValueError: one of the names is none of a part.
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
        """What the variable says now.

        Raises:
            ValueError: it names an unknown part.
        """
        return cls.of(os.environ.get(SWITCH_VARIABLE, ""))

    def check_version(self, engine: str, version: str, tested: Collection[str]) -> None:
        """Accept a version that was tested; any, with ``force``.

        Raises:
            UntestedVersionError: it was not.
        """
        if self.parts and not self.force and version.partition("+")[0] not in tested:
            raise UntestedVersionError(
                f"{SWITCH_VARIABLE} is set, but {engine} is {version}, and what takes the place of "
                f"its parts was tested with {', '.join(tested)}: unset {SWITCH_VARIABLE}, or try "
                f"all the same with {SWITCH_VARIABLE}=force"
            )
