"""The folder in the user's cache that holds what is made from a model's package, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.workers.decoder.decoder_folder import made_once

if TYPE_CHECKING:
    from pathlib import Path


def fill(folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_text("whole")


def fail(folder: Path) -> None:
    fill(folder)
    raise ValueError("half of it")


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="half of it"):
        made_once("model", fail)
    assert [*(tmp_path / "group-coordinator").iterdir()] == []
    assert (made_once("model", fill) / "weights").read_text() == "whole"
    assert made_once("model", fail) == tmp_path / "group-coordinator" / "model"


def test_another_process_may_have_been_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fill_late(folder: Path) -> None:
        made_once("model", fill)
        fill(folder)

    folder = made_once("model", fill_late)
    assert [*folder.parent.iterdir()] == [folder]


def test_a_cache_that_cannot_be_written_says_what_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotADirectoryError, match=r"XDG_CACHE_HOME names the folder .*/file/group-"):
        made_once("model", fill)
