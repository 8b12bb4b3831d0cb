"""docs/reference.md has the signatures of the code."""

from __future__ import annotations

import re

from docs.signatures import SECTIONS, directives, path_of, reference
from server import WorkerPool
from tests.pages.blocks import read


def test_the_page_is_that_of_the_code() -> None:
    assert read("docs/reference.md") == reference(), "run: python -m docs.signatures"


def test_a_signature_and_its_first_sentence() -> None:
    lines = read("docs/reference.md").splitlines()
    sentence = (WorkerPool.collective_rpc.__doc__ or "").splitlines()[0].replace("``", "`")
    (line,) = [each for each in lines if each.startswith("- `collective_rpc(")]
    assert line.startswith("- `collective_rpc(method: str, timeout: float | None=None, args:")
    assert line.endswith(f") -> Any`: {sentence}")


def test_the_site_has_directives_in_the_place_of_lists() -> None:
    page = directives(read("docs/reference.md"))
    entries = [entry for part in SECTIONS.values() for entry in part]
    assert re.findall(r"^::: (.*)", page, re.M) == [path_of(entry) for entry in entries]
    assert "- `" not in page
