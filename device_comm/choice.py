"""Which backend carries out what, and why: what `explain` tells."""

from __future__ import annotations

from dataclasses import dataclass

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, slots=True)
class Choice:
    """What carries out one verb, for a range of sizes.

    Attributes:
        verb: one of `device_comm.ALL_VERBS`.
        above: the range begins above so many bytes of the whole tensor; -1: at nothing.
        up_to: its end, included; None: there is none.
        backend: what was chosen.
        reason: why.
        refused: each other candidate, with the reason why it was not.
    """

    verb: str
    above: int
    up_to: int | None
    backend: str
    reason: str = ""
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def sizes(self) -> str:
        """The range, for people."""
        if self.up_to is None:
            return "any size" if self.above < 0 else f"above {in_bytes(self.above)}"
        low = "" if self.above < 0 else f"{in_bytes(self.above)} to "
        return f"{low or 'up to '}{in_bytes(self.up_to)}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """All choices of a group; ``str()`` is a table for people.

    Attributes:
        group: its name.
        choices: by verb, then by size.
        refused: what is used for none of them, or not in full, with the reason.
    """

    group: str
    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...] = ()

    def backend(self, verb: str, size: int) -> str:
        """What carries out ``verb`` on a tensor of ``size`` bytes.

        Raises:
            KeyError: nothing does.
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
    """``size`` for people, exactly: such as ``64 KiB`` or ``1025 B``."""
    for unit, scale in _UNITS:
        if size >= scale and size % scale == 0:
            return f"{size // scale} {unit}"
    return f"{size} B"
