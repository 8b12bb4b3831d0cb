"""No page shows code that nothing has looked at: commands are checked here, the rest by tests that
ask for it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from tests.pages.blocks import PAGES, ROOT, blocks, read
from tests.pages.commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LANGUAGES = {*COMMANDS, "python", "text", "json", "yaml", "mermaid"}


def asked_for() -> set[tuple[str, str]]:
    """The blocks that tests ask for, as the arguments of `block_of`."""
    return {asked for file in ROOT.glob("tests/**/test_*.py") for asked in _asked_in(file)}


def _asked_in(file: Path) -> Iterator[tuple[str, str]]:
    text = file.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "block_of(" in text else ():
        match node:
            case ast.Call(
                func=ast.Name("block_of"), args=[ast.Constant(str(page)), ast.Constant(str(part))]
            ):
                yield page, part


def test_every_block_is_run_or_looked_at() -> None:
    asked = asked_for()
    alone = [
        str(block)
        for block in blocks()
        if block.language not in COMMANDS
        and not any(block.page == page and part in block.text for page, part in asked)
    ]
    assert alone == []


def test_every_block_says_what_it_is() -> None:
    assert [str(block) for block in blocks() if block.language not in LANGUAGES] == []


def test_what_is_code_is_fenced() -> None:
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)
        assert re.findall(r"\n\n    .*", prose) == [], page
        assert "```" not in prose, page
