"""The commands that pages show can be typed."""

from __future__ import annotations

import subprocess

import pytest

from tests.pages.blocks import Block, blocks
from tests.pages.commands import COMMANDS, check, commands

SHOWN = [block for block in blocks() if block.language in COMMANDS]


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_it_can_be_typed(block: Block) -> None:
    found = list(commands(block))
    assert found
    for words in found:
        check(block.page, words)


@pytest.mark.parametrize("block", [each for each in SHOWN if each.language == "sh"], ids=str)
def test_the_shell_understands_it(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, check=True, text=True)
