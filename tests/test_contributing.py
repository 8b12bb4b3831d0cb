"""CONTRIBUTING.md: its examples run, its commands print what it shows, its files exist."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.packages import ROOT, kept_files
from tests.pages.blocks import Block, block_of, blocks, read

if TYPE_CHECKING:
    from pathlib import Path

PAGE = "CONTRIBUTING.md"
TEXT = read(PAGE)
SHOWN = [each for each in blocks() if each.page == PAGE and each.language == "console"]


def loaded(code: str, folder: Path) -> Any:
    """Return ``code`` as a module, which forked ranks find."""
    file = folder / "contributed.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_composed_verb_runs_on_four_ranks(tmp_path: Path, store_path: str) -> None:
    loaded(block_of("CONTRIBUTING.md", "def test_norm_of_ones("), tmp_path).test_norm_of_ones(
        store_path
    )


def test_the_test_of_a_metric_passes(tmp_path: Path) -> None:
    module = loaded(
        block_of("CONTRIBUTING.md", "def test_a_request_without_inputs_is_counted("), tmp_path
    )
    asyncio.run(module.test_a_request_without_inputs_is_counted())


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_a_command_prints_what_is_shown(block: Block) -> None:
    command, shown = block.text.removeprefix("$ ").split("\n", 1)
    ran = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=True, text=True)
    assert ran.stdout == shown


def test_every_file_that_it_names_exists() -> None:
    kept = kept_files()
    folders = {f"{name[:at]}/" for name in kept for at, each in enumerate(name) if each == "/"}
    quoted = {*re.findall(r"`([\w.-]+/[\w./-]*)`", TEXT)}
    linked = {link for link in re.findall(r"\]\(([^)#]+)", TEXT) if ":" not in link}
    assert len(quoted) > 60 and linked
    assert (quoted | linked) - kept - folders == set()


def test_its_links_within_the_page_lead_to_titles() -> None:
    titles = re.findall(r"^#+ (.*)$", TEXT, re.M)
    anchors = {re.sub(r"[^\w -]", "", title).replace(" ", "-").lower() for title in titles}
    linked = {*re.findall(r"\]\(#([^)]+)\)", TEXT)}
    assert linked and linked <= anchors
