"""CONTRIBUTING.md runs as shown; docs use plain words; users of ColossalAI find replacements."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coordinator
from coordinator.pipeline import Stage
from tests.commands import run_to_end
from tests.packages import ROOT, kept_files
from tests.pages.blocks import Block, block_of, blocks, read

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

ALLOWED: frozenset[tuple[str, str]] = frozenset()
"""(file, word): where a text is another project's, or a user's."""

QUOTED = (
    re.compile(r"```.*?```", re.DOTALL),  # code in Markdown
    re.compile(r"``[^`]*``|`[^`]*`"),
    re.compile(r'"[^"\n]{1,200}"|“[^”]{1,200}”'),
)


def without_quotes(text: str) -> str:
    """Blank what stands in backticks or double quotes; every character keeps its place."""
    for pattern in QUOTED:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), text)
    return text


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) for each docstring, comment block and string of a Python file."""
    source = path.read_text()
    docs = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if block and line != last + 1:
                yield begin, "\n".join(block)
                block = []
            if not block:
                begin = line
            block.append(token.string.lstrip("#:"))
            last = line
        elif token.type == tokenize.STRING:
            quote = re.match(r"[A-Za-z]*('''|\"\"\"|'|\")", token.string)
            assert quote
            inner = token.string[quote.end() : -len(quote[1])]
            if token.start not in docs and not re.search(r"\s", inner):
                continue
            if "f" in quote[0].lower():
                inner = re.sub(r"\{[^{}]*\}", "\0", inner)
            yield token.start[0], inner
    if block:
        yield begin, "\n".join(block)


def occurrences(root: Path = ROOT) -> list[tuple[str, int, str]]:
    """Return (file, line, word) for every forbidden word in the product, the docs and README."""
    found = []
    texts: list[tuple[Path, int, str]] = []
    for floor in FLOORS:
        for path in sorted((root / floor).rglob("*.py")):
            texts += [(path, line, text) for line, text in prose_of(path)]
        for suffix in ("c", "h", "cu", "cuh"):
            for path in sorted((root / floor).rglob(f"*.{suffix}")):
                source = path.read_text()
                for comment in re.finditer(r"/\*.*?\*/|(?://[^\n]*\n\s*)+", source, re.DOTALL):
                    text = re.sub(r"(?m)^\s*(?:\*|//)", " ", comment[0])
                    texts.append((path, source[: comment.start()].count("\n") + 1, text))
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    texts += [(path, 1, path.read_text()) for path in pages if path.is_file()]
    for path, line, text in texts:
        plain = without_quotes(text)
        for word, pattern in FORBIDDEN.items():
            spaced = pattern.replace(" ", r"\s+")
            for match in re.finditer(spaced, plain, re.IGNORECASE):
                name = str(path.relative_to(root))
                if (name, word) not in ALLOWED:
                    found.append((name, line + plain[: match.start()].count("\n"), word))
    return found


def test_product_and_docs_use_no_forbidden_words() -> None:
    assert [f"{file}:{line}: {word}" for file, line, word in occurrences()] == []


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
