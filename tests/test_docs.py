"""CONTRIBUTING.md runs as shown; docs use plain words; users of ColossalAI find replacements."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import coordinator
from coordinator.pipeline import Stage
from tests.commands import ROOT, run_to_end
from tests.packages import kept_files
from tests.pages.blocks import PAGES, Block, block_of, blocks, read

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


def test_its_examples_run(tmp_path: Path, store_path: str) -> None:
    """A composed verb on four ranks, and the test of a metric."""
    norm = block_of("CONTRIBUTING.md", "def test_norm_of_ones(")
    loaded(norm, tmp_path).test_norm_of_ones(store_path)
    metric = block_of("CONTRIBUTING.md", "def test_a_request_without_inputs_is_counted(")
    asyncio.run(loaded(metric, tmp_path).test_a_request_without_inputs_is_counted())


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_a_command_prints_what_is_shown(block: Block) -> None:
    command, shown = block.text.removeprefix("$ ").split("\n", 1)
    assert run_to_end("sh", "-c", command).stdout == shown


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


# --- words that send a reader back to another sentence --------------------------------------

FLOORS = ("shm_broadcast", "device_comm", "coordinator", "server")

FORBIDDEN = {
    "whoever": r"\bwho(?:m|se)?ever\b",
    "nobody": r"\bnobody(?:'s)?\b",
    "of which": r"\bof (?:which|whom)\b",
    "the one that": r"\bthe ones? that\b",
    "but for": r"\bbut for\b",
    "lest": r"\blest\b",
    # As a relative clause: "what is read"; a question has a question mark: "what is 2 + 2?"
    "what is": r"\bwhat (?:is|was|are|were)\b(?![^.;:]*\?)",
}
"""Each with the pattern that finds it; case does not matter, line ends are spaces."""

QUOTED = {
    ".md": re.compile(r'```.*?```|`[^`]*`|"[^"\n]{1,200}"|“[^”]{1,200}”', re.DOTALL),
    "": re.compile(r"`[^`]*`"),
}
BETWEEN_LINES = re.compile(r"^ *(?:#:?|//|\*)", re.M)
"""How a line begins that goes on with a comment."""


def prose_of(file: Path) -> str:
    """A file's text with blanks for what it quotes; every line keeps its place."""
    text = file.read_text()
    if file.suffix != ".md":
        text = BETWEEN_LINES.sub("", text)
    quoted = QUOTED.get(file.suffix, QUOTED[""])
    return quoted.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)


def test_product_and_docs_use_no_forbidden_words() -> None:
    files = [file for floor in FLOORS for file in (ROOT / floor).rglob("*.*") if file.is_file()]
    files = [file for file in files if file.suffix in {".py", ".c", ".h", ".cu", ".cuh"}]
    assert len(files) > 200
    found = []
    for file in (*files, *(ROOT / page for page in PAGES)):
        prose = prose_of(file)
        for word, pattern in FORBIDDEN.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), prose, re.IGNORECASE):
                line = prose.count("\n", 0, match.start()) + 1
                found.append(f"{file.relative_to(ROOT)}:{line}: {word}")
    assert found == []


def test_the_glossary_is_short_and_names_existing_files() -> None:
    rows = re.findall(
        r"(?m)^\| (?!word)[^-|][^|]*\|.*\| (`[^|]*) \|$", (ROOT / "docs/glossary.md").read_text()
    )
    assert 0 < len(rows) <= 30
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


# --- docs/from-colossalai-bagua.md ----------------------------------------------------------

ROWS = [
    cells
    for line in read("docs/from-colossalai-bagua.md").splitlines()
    if line.startswith("| ") and not line.startswith("| there")
    for cells in [line.strip("| ").split(" | ")]
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([\w.]+\.\w+)`", row[1])})
HOMES = {"GroupCoordinator": coordinator.GroupCoordinator, "Stage": Stage}


def test_every_row_names_a_replacement() -> None:
    assert ROWS
    assert [row for row in ROWS if "`" not in row[1] and not row[1].startswith("the same")] == []


@pytest.mark.parametrize("name", NAMED)
def test_a_named_replacement_exists(name: str) -> None:
    home, _, last = name.rpartition(".")
    if home.startswith("group."):
        with coordinator.init(rank=0) as groups:
            assert hasattr(groups.tp.hierarchy, last)
    else:
        assert callable(getattr(HOMES.get(home) or importlib.import_module(home), last))
