"""The demo's pool on CUDA, its workers sharing a GPU where there are more of them."""

from __future__ import annotations

import json

import pytest

from server.cli import main

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-5), ("float16", 1e-3)])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_demo(
    tp: int, pp: int, dtype: str, allowed: float, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device=cuda", "--share-gpu", f"--tp={tp}", f"--pp={pp}", f"--dtype={dtype}"]
    status = main(["demo", *arguments, "--json", "--timeout=120"])
    report = json.loads(capfd.readouterr().out)
    assert report["max_abs_diff"] <= allowed
    assert (status, report["device"], report["dtype"]) == (0, "cuda", dtype)
