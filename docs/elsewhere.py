"""Give MkDocs the files outside docs/ (the README is the first page), and the full reference.

In the repository, links to such files begin with ``../``; in the site all files lie together. The
reference is a list of signatures in the repository; in the site each part is a directive.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

from docs.signatures import directives

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
    """Make links out of docs/ links within the site, and lists of signatures directives."""
    if "/" in page.file.src_uri:
        return markdown
    if page.file.src_uri == "reference.md":
        return directives(markdown)
    return OUTSIDE.sub(r"](\1", markdown)
