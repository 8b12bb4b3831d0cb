"""The protocol of ring and doorbells holds in its model, and every broken variant is found out."""

from __future__ import annotations

import pytest

from models.check import CASES, Case, check, unavailable

_UNAVAILABLE = unavailable()


@pytest.mark.skipif(_UNAVAILABLE is not None, reason=str(_UNAVAILABLE))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_model(case: Case) -> None:
    outcome = check(case)
    assert outcome.verdict == case.expected
    assert outcome.states > 0
