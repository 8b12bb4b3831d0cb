"""The model of all-reduces, against numbers worked out by hand; its section of the page."""

from __future__ import annotations

import pytest

from benchmarks.harness import Row
from benchmarks.model import (
    Level,
    Measured,
    all_reduce,
    chunks,
    error,
    fit,
    meetings,
    read,
    reduce_and_broadcast,
    ring,
    taking_turns,
    turn,
)
from benchmarks.model_page import section

KIB, MIB = 1 << 10, 1 << 20
LEVEL = Level(alpha=1e-6, beta=1e-9)


def test_how_often_ranks_meet() -> None:
    assert [meetings(2, size) for size in (64, 128 * KIB, MIB)] == [1, 1, 9]
    assert [meetings(4, size) for size in (16 * KIB, 17 * KIB, MIB)] == [1, 2, 9]
    assert chunks(64, 64 * MIB) == 2048  # slots of 32 KiB: 4 MiB / 2 / 64


def test_what_a_rank_reads() -> None:
    assert read(2, 64 * KIB) == 64 * KIB
    assert read(2, MIB) == MIB
    assert read(4, 16 * KIB) == 48 * KIB
    assert read(4, MIB) == 1.5 * MIB


def test_seconds_by_hand() -> None:
    assert all_reduce(LEVEL, 2, 65_536) == pytest.approx(66.536e-6)
    assert all_reduce(LEVEL, 4, MIB) == pytest.approx(9e-6 + 1.572864e-3)
    # 8 chunks there and back; the root reads three times as much as there is, the others once
    assert reduce_and_broadcast(LEVEL, 4, MIB) == pytest.approx(16e-6 + 4 * 1.048576e-3)
    assert ring(LEVEL, 16, 1_600_000) == pytest.approx(30e-6 + 3e-3)


def test_more_ranks_are_looked_at_one_by_one_and_share_the_memory() -> None:
    many = Level(alpha=1e-6, beta=1e-9, line=1e-7, bandwidth=1e9)
    assert many.meeting(12) == pytest.approx(2e-6)
    assert many.reading(1000, 1) == pytest.approx(1e-6)
    assert many.reading(1000, 4) == pytest.approx(4e-6)


def test_a_fit_finds_what_the_figures_were_made_of() -> None:
    made = [Measured(size, all_reduce(LEVEL, 2, size)) for size in (KIB, 16 * KIB, MIB)]
    found = fit(made)
    assert (found.alpha, found.beta) == (pytest.approx(1e-6), pytest.approx(1e-9))
    assert fit(made[:1], alpha=1e-6).beta == pytest.approx(1e-9)


def test_the_error_is_a_share_of_what_was_measured() -> None:
    assert error(66.536e-6, 2 * 66.536e-6) == pytest.approx(-0.5)


def test_ranks_that_share_cores_take_turns() -> None:
    assert turn({4: 8e-6, 16: 32e-6}) == pytest.approx(2e-6)
    # of 8 ranks 16 KiB are shared out: two meetings
    assert taking_turns(2e-6, 8, 16 * KIB) == pytest.approx(32e-6)


def rows(**microseconds: float) -> dict[str, list[Row]]:
    return {
        "collectives": [
            Row("all_reduce_", f"fp32 {size} 2 ranks", "ours", median, median, 0.0, "us")
            for size, median in microseconds.items()
        ]
    }


def test_the_section_says_what_was_fitted_and_what_was_predicted() -> None:
    # 1 µs and 1 ns through the cache, 2 ns through memory
    seen = {"1KiB": 2.024, "128KiB": 132.072, "64MiB": 513 + 134_217.728, "16KiB": 34.768}
    lines = section(rows(**seen), 2).splitlines()
    assert (
        "alpha 1.00 µs, beta 1000 ps through the shared cache and 2000 ps through memory." in lines
    )
    assert "| 1KiB | fitted | 2.02 µs | 2.02 µs | +0 % |" in lines
    assert "| 16KiB | predicted | 34.8 µs | 17.4 µs | -50 % |" in lines
    # Of 64 ranks: 2 meetings of 1 + 62 * 0.05 µs, 2,016 bytes; on 8 sockets 0.15 µs, 2 ns.
    # To a root and back 64,512 bytes and 1,024; between hosts 30 times 30 µs, and 0.15.
    assert "| 1KiB | 10.2 µs | 24.6 µs | 974 µs | 910 µs |" in lines


def test_ranks_that_share_cores_are_in_the_section() -> None:
    reports = rows(**{"1KiB": 2.024, "128KiB": 132.072, "64MiB": 134_730.728})
    reports["growth"] = [
        Row(f"{verb} of n ranks", n, "ours", median, median, 0.0, "us")
        for verb, n, median in (
            *(("barrier", "2", 900.0), ("barrier", "4", 8.0), ("barrier", "8", 16.0)),
            *(("all_reduce", "2", 900.0), ("all_reduce", "8", 40.0)),
        )
    ]
    lines = section(reports, 2).splitlines()
    assert "| 8 | 40 µs | 32 µs | -20 % |" in lines
    assert not any(line.startswith("| 2 |") for line in lines)


def test_without_its_figures_there_is_no_section() -> None:
    assert section({}, 2) == section(rows(**{"1KiB": 2.0}), 2) == ""
