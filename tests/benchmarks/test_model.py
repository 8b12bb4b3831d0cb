"""The model of all-reduces, against numbers worked out by hand; its section of the page."""

from __future__ import annotations

import pytest

from benchmarks.harness import Row
from benchmarks.model import (
    Level,
    Link,
    Measured,
    all_reduce,
    chunks,
    error,
    fit,
    fit_ring,
    flat,
    hierarchical,
    many_rings,
    meetings,
    over,
    read,
    reduce_and_broadcast,
    ring,
    shared_out,
    sockets_first,
    taking_turns,
    turn,
)
from benchmarks.model_page import section

KIB, MIB = 1 << 10, 1 << 20
LEVEL = Level(alpha=1e-6, beta=1e-9)
TRANSPORT = Level(alpha=100e-6, beta=1e-9)
LINK = Link("8 Gbit/s", latency=10e-6, bandwidth=1e9 / 2)
"""Half as quick as the transport."""


def test_how_often_ranks_meet() -> None:
    assert [meetings(2, size) for size in (64, 128 * KIB, MIB)] == [1, 1, 9]
    assert [meetings(4, size) for size in (16 * KIB, 17 * KIB, MIB)] == [1, 2, 9]
    assert chunks(64, 64 * MIB) == 1024  # steps of 64 KiB: of 16 MiB / 64, a quarter


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


def test_sharing_out_by_hand() -> None:
    # 2 chunks of 128 KiB and one meeting more; 3 quarters of 256 KiB there and back
    assert shared_out(LEVEL, 4, 256 * KIB) == pytest.approx(3e-6 + 393.216e-6)
    far = Level(alpha=2e-6, beta=1e-9, bandwidth=4e9)
    # On 2 sockets of 4 ranks: 64 KiB within, 2 meetings and 98,304 bytes; then with one of the
    # other socket a quarter of it, 2 meetings and 16,384 bytes of which 8 ranks read at 4 GB/s.
    found = sockets_first(LEVEL, far, 2, 8, 64 * KIB)
    assert found == pytest.approx(2e-6 + 98.304e-6 + 4e-6 + 32.768e-6)


def test_a_link_adds_its_latency_and_the_lower_rate_counts() -> None:
    assert over(TRANSPORT, LINK) == Level(pytest.approx(110e-6), pytest.approx(2e-9))
    quick = Link("80 Gbit/s", 10e-6, 10e9)
    assert over(TRANSPORT, quick).beta == pytest.approx(1e-9)
    assert over(TRANSPORT, quick, rings=4).beta == pytest.approx(0.25e-9)
    assert over(TRANSPORT, quick, rings=64).beta == pytest.approx(0.1e-9)


def test_hosts_by_hand() -> None:
    # 4 hosts of 2 ranks, 16 KiB: a ring of 8 sends 14 times, 28,672 bytes in all
    assert flat(TRANSPORT, LINK, 4, 2, 16 * KIB) == pytest.approx(14 * 110e-6 + 57.344e-6)
    # within a host 2 meetings and 16 KiB twice; a ring of 4 sends 6 times, 24,576 bytes
    found = hierarchical(LEVEL, TRANSPORT, LINK, 4, 2, 16 * KIB)
    assert found == pytest.approx(2e-6 + 32.768e-6 + 6 * 110e-6 + 49.152e-6)
    # 2 meetings and 16 KiB within; the same ring, whose bytes the link carries, not the transport
    found = many_rings(LEVEL, TRANSPORT, LINK, 4, 2, 16 * KIB)
    assert found == pytest.approx(2e-6 + 16.384e-6 + 6 * 110e-6 + 49.152e-6)


def test_a_fit_of_two_hosts() -> None:
    made = [Measured(size, ring(TRANSPORT, 2, size)) for size in (KIB, 16 * MIB)]
    found = fit_ring(made)
    assert (found.alpha, found.beta) == (pytest.approx(100e-6), pytest.approx(1e-9))


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
    # Sockets first: 2 of 1.3 µs and 1,792 bytes, then 2 of 1.9 and 224.
    assert "| 1KiB | 10.2 µs | 24.6 µs | 8.64 µs |" in lines
    assert not any("hosts of 64" in line for line in lines)


def test_hosts_are_in_the_section() -> None:
    reports = rows(**{"1KiB": 2.024, "128KiB": 132.072, "64MiB": 134_730.728})
    # 100 µs and 1 ns for the transport
    seen = {"1KiB": 201.024, "64MiB": 67_308.864, "64KiB": 531.072}
    reports["between_hosts"] = [
        Row("all_reduce_ over two hosts", f"{size} {n} ranks", way, median, median, 0.0, "us")
        for size, median in seen.items()
        for n, way in ((2, "ours"), (4, "ours"), (4, "ours, hierarchical"))
    ]
    lines = section(reports, 2).splitlines()
    assert any("alpha 100 µs, beta 1000 ps, which is 8.0 Gbit/s" in line for line in lines)
    assert "| one, 64MiB | fitted | 67.3 ms | 67.3 ms | +0 % |" in lines
    assert "| one, 64KiB | predicted | 531 µs | 266 µs | -50 % |" in lines
    # a ring of 4 sends 6 times, and one and a half of the tensor
    assert "| two, 64KiB | one ring | 531 µs | 698 µs | +31 % |" in lines
    # two meetings, and twice the tensor within the host; a ring of 2
    assert "| two, 64KiB | `hierarchical=True` | 531 µs | 399 µs | -25 % |" in lines
    # 2,046 times 110 µs; to a root and back 73.7 µs, and 30 times 110; 10.2 and 30 times 110
    assert "| 1KiB | 16 | 225 ms | 3.38 ms | 3.31 ms |" in lines
    # 30 times 120, 110 and 102 µs
    assert "| 1KiB | `hierarchical=True` | 3.68 ms | 3.38 ms | 3.14 ms |" in lines


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
