"""Gives MkDocs what lies outside docs/: the README, which is the first page, and all that pages
link to.

Where the repository is read, such links begin with ``../``; in the site all lies together.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "benchmarks/results/README.md": "benchmarks/results/README.md",
    "benchmarks/results/bench.md": "benchmarks/results/bench.md",
}
OUTSIDE = re.compile(r"\]\((?:\.\./)+([^)#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies elsewhere."""
    linked: set[Path] = set()
    for source in [*DOCS.glob("*.md"), *(ROOT / source for source in PAGES)]:
        targets = re.findall(r"\]\(([^)#:]+)", source.read_text())
        linked.update((source.parent / target).resolve() for target in targets)
    for source, place in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, place, content=text))
    placed = {ROOT / source for source in PAGES}
    for path in sorted(linked - placed):
        if path.is_file() and DOCS not in path.parents:
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make links out of docs/ links within the site."""
    if "/" in page.file.src_uri:
        return markdown
    return OUTSIDE.sub(r"](\1", markdown)
