"""The result of `explain`: which backend carries out which operation, and why."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that carries out one verb, for a range of sizes.

    Attributes:
        verb: one of `device_comm.ALL_VERBS`.
        above: the range's lower end, exclusive, in bytes of the whole tensor; -1: none.
        up_to: the range's upper end, inclusive; None: none.
        backend: the backend's name.
        reason: why it was chosen.
        refused: each other candidate, with the reason why it was not chosen.
    """

    verb: str
    above: int
    up_to: int | None
    backend: str
    reason: str = ""
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def sizes(self) -> str:
        """The range as text."""
        if self.up_to is None:
            return "any size" if self.above < 0 else f"above {in_bytes(self.above)}"
        low = "" if self.above < 0 else f"{in_bytes(self.above)} to "
        return f"{low or 'up to '}{in_bytes(self.up_to)}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """All choices of a group; ``str()`` gives a readable table.

    Attributes:
        group: the group's name.
        choices: the choices, by verb, then by size.
        refused: backends, or parts of them, that are not used at all, with the reason.
    """

    group: str
    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...] = ()

    def backend(self, verb: str, size: int) -> str:
        """The backend for ``verb`` on a tensor of ``size`` bytes.

        Raises:
            KeyError: no backend offers ``verb``.
        """
        for choice in self.choices:
            if choice.verb == verb and choice.above < size <= (
                size if choice.up_to is None else choice.up_to
            ):
                return choice.backend
        raise KeyError(f"{self.group} has no {verb}")

    def __str__(self) -> str:
        rows = [(each.verb, each.sizes, each.backend, each.reason) for each in self.choices]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [self.group]
        for row, choice in zip(rows, self.choices, strict=True):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines.append(f"  {'  '.join([*cells, row[3]])}".rstrip())
            lines += [f"      not {name}: {why}" for name, why in choice.refused]
        lines += [f"  not used: {name}: {why}" for name, why in self.refused]
        return "\n".join(lines)


def in_bytes(size: int) -> str:
    """``size`` as text, not rounded: such as ``64 KiB`` or ``1025 B``."""
    for unit, scale in _UNITS:
        if size >= scale and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"
