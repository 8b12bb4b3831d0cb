"""How far ranks that share a context run ahead."""

from __future__ import annotations

import pytest

from benchmarks.gpu_pace import AHEAD, Pace


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kernels", [1, 25, 1000])
def test_ranks_never_have_more_under_way_together_than_fits(ranks: int, kernels: int) -> None:
    under_way = 0

    def wait() -> None:
        nonlocal under_way
        under_way = 0

    pace = Pace(wait, ranks)
    for _ in range(10 * AHEAD):
        pace.launching(kernels)
        under_way += kernels
        assert under_way * ranks <= AHEAD or under_way == kernels


def test_few_wait_seldom() -> None:
    waits: list[None] = []
    pace = Pace(lambda: waits.append(None), 2)
    for _ in range(AHEAD):
        pace.launching(1)
    assert len(waits) == 1
