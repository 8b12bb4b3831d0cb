"""What the demo prints, from values made by hand."""

from __future__ import annotations

import numpy as np

from server.commands import demo
from server.workers.minilm import Placed


def test_grid_has_a_row_for_each_stage_and_its_columns_are_aligned() -> None:
    places = [
        Placed(0, 900, 0, 0, (0, 2), 2**20),
        Placed(1, 10001, 1, 0, (0, 2), 2**20),
        Placed(2, 902, 0, 1, (2, 3), 2**19),
        Placed(3, 10003, 1, 1, (2, 3), 2**19),
    ]
    assert demo.grid(places, 1.25).split("\n") == [
        "",
        "                        tp 0                tp 1",
        "  stage 0, layers 0-1   rank 0, pid 900     rank 1, pid 10001",
        "  stage 1, layer 2      rank 2, pid 902     rank 3, pid 10003",
        "ready after 1.2 s, 3.0 MiB of weights in all",
    ]


def test_speed_counts_in_words() -> None:
    one = demo.speed(np.array([7]), 0.5)
    assert one == "embedded 1 sentence (7 tokens) in 0.500 s: 2.0 sentences/s"


def test_verdict() -> None:
    assert demo.verdict(1.5e-7, 1e-5).startswith("max_abs_diff=1.500e-07\nequal to")
    assert "\nNOT equal to" in demo.verdict(1.1e-5, 1e-5)
    assert "\nNOT equal to" in demo.verdict(float("nan"), 1e-5)


def test_neighbours_are_by_cosine_not_by_length() -> None:
    vectors = np.array([[1, 0], [9, 9], [0, 2], [5, 0], [0, 0]], dtype=np.float32)
    found = demo.find_neighbours(vectors, lines=2, nearest=2)
    assert [row for row, _ in found] == [0, 2]
    assert [other for other, _ in found[0][1]] == [3, 1]
    assert found[1][1][0][0] == 1
    np.testing.assert_allclose([c for _, c in found[0][1]], [1.0, 0.5**0.5], rtol=1e-6)


def test_few_lines_have_few_neighbours() -> None:
    one = np.ones((1, 3), dtype=np.float32)
    assert demo.find_neighbours(one, lines=5, nearest=2) == [(0, [])]
    two = demo.find_neighbours(np.ones((2, 3), dtype=np.float32), lines=5, nearest=2)
    assert [(row, [other for other, _ in nearest]) for row, nearest in two] == [
        (0, [1]),
        (1, [0]),
    ]


def test_lines_are_shown_without_control_characters_and_cut() -> None:
    text = demo.nearest_neighbours(["a\x1b[31mred", "x" * 500], [(0, [(1, 0.5)])])
    assert "\x1b" not in text
    assert max(map(len, text.split("\n"))) <= 200
    assert "  a\N{REPLACEMENT CHARACTER}[31mred" in text.split("\n")
    assert text.split("\n")[3].startswith("      0.50  xxx")
