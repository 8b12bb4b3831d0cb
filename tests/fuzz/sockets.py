"""What may come over each kind of socket, and what has to become of it."""

from __future__ import annotations

from tests.fuzz import control, frames, http_bodies
from tests.fuzz.search import falsify

SOCKETS = ("to_readers", "to_writers", "control", "http")


def search_socket(kind: str, number: int, seconds: float) -> int:
    """Send random input over one kind of socket for so long; how many examples it were.

    Args:
        kind: of `SOCKETS`.
        number: the seed.
        seconds: for how long.
    """
    if kind == "to_readers":
        return falsify(frames.streams(), frames.check_reader, number, seconds)
    if kind == "to_writers":
        return falsify(frames.frames(), frames.check_writer, number, seconds)
    if kind == "control":
        return falsify(control.channels(), control.check_channel, number, seconds)
    with http_bodies.served() as check:
        return falsify(http_bodies.bodies(), check, number, seconds)
