"""The code blocks of the pages that users read: README, CONTRIBUTING and docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")))

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One of them, and where it begins."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks() -> list[Block]:
    """All of them."""
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for page in PAGES
        for text in [read(page)]
        for found in _FENCED.finditer(text)
    ]


def block_of(page: str, part: str) -> str:
    """The one code block of a page that contains ``part``; `test_pages` finds both as literals."""
    (found,) = [each for each in blocks() if each.page == page and part in each.text]
    return found.text


def without_numbers(text: str) -> str:
    """What stays the same from run to run."""
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d+)?", "0", text))
