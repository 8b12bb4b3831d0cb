"""The extension must have been built: without it everything works, and nothing is fast."""

from __future__ import annotations

from shm_broadcast import atomics


def test_the_extension_was_built() -> None:
    assert atomics.native is not None, "shm_broadcast._native is missing: pip install -e . again"


def test_words_are_the_extension_s() -> None:
    assert type(atomics.make_words(bytearray(64))) is not atomics.PythonWords
