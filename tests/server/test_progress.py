"""The bar that is shown while workers load."""

from __future__ import annotations

import io

from server.commands.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_all_ranks_in_one_bar() -> None:
    out = Terminal()
    bar = ProgressBar(out)
    bar.begin()
    bar(0, 10, 40, "weights")
    bar(1, 0, 40, "weights")
    bar(0, 40, 40, "weights")
    bar(1, 40, 40, "weights")
    bar.end("ready")
    assert out.getvalue().split("\r\x1b[K") == [
        "",
        "starting the workers",
        "[" + "#" * 7 + "." * 23 + "]  25 % loaded: weights",
        "[" + "#" * 3 + "." * 27 + "]  12 % loaded: weights",
        "[" + "#" * 15 + "." * 15 + "]  50 % loaded: weights",
        "warming up",
        "ready\n",
    ]


def test_a_pipe_gets_nothing() -> None:
    out = io.StringIO()
    bar = ProgressBar(out)
    bar(0, 1, 2, "weights")
    bar.end("ready")
    assert out.getvalue() == ""
