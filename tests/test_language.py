"""The language of product and docs: words that send a reader back to another sentence."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
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
