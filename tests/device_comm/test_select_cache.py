"""Tables between runs: found again, and nothing else taken for them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from device_comm.measuring import Key, TableCache, cache_folder
from device_comm.selection import Measured, Table

KEY = Key(
    "0.1.0, kernels abc",
    "NVIDIA H100",
    "580.1",
    "torch 2.11, nccl 2.28.9",
    2,
    "2 ranks on 1 device",
    "ipc, nccl",
)
TABLE = Table(KEY.as_dict(), {"all_reduce": [Measured(1024, {"ipc": 4e-6, "nccl": 9e-6})]})


@pytest.fixture
def cache(tmp_path: Path) -> TableCache:
    return TableCache(tmp_path / "cache")


def stored_file(cache: TableCache) -> Path:
    assert cache.folder is not None
    (path,) = cache.folder.rglob("*.json")
    return path


def test_a_table_is_found_again(cache: TableCache) -> None:
    assert cache.load(KEY) is None
    assert cache.store(TABLE, KEY) == ""
    assert cache.load(KEY) == TABLE
    assert [path.name for path in stored_file(cache).parent.iterdir()] == [stored_file(cache).name]


@pytest.mark.parametrize(
    "other",
    [
        {"version": "0.1.0, kernels abd"},
        {"device": "NVIDIA H200"},
        {"driver": "581"},
        {"libraries": "torch 2.13"},
        {"world_size": 4},
        {"topology": "2 ranks on 2 devices"},
        {"candidates": "nccl"},
    ],
    ids=str,
)
def test_another_machine_or_group_has_another_table(
    cache: TableCache, other: dict[str, str]
) -> None:
    cache.store(TABLE, KEY)
    assert cache.load(replace(KEY, **other)) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"key": {}, "verbs": {}}',
        b'{"key": 3}',
        b'{"verbs": {"all_reduce": [{"size": 1024, "seconds": {"ipc": -1}}]}}',
    ],
    ids=repr,
)
def test_a_broken_file_is_as_good_as_none(cache: TableCache, content: bytes) -> None:
    cache.store(TABLE, KEY)
    stored_file(cache).write_bytes(content)
    assert cache.load(KEY) is None
    assert cache.store(TABLE, KEY) == ""
    assert cache.load(KEY) == TABLE


def test_a_table_that_is_not_sound_is_as_good_as_none(cache: TableCache) -> None:
    cache.store(TABLE, KEY)
    path = stored_file(cache)
    path.write_bytes(path.read_bytes().replace(b"0.000004", b"-1").replace(b"4e-6", b"-1"))
    assert b"-1" in path.read_bytes()
    assert cache.load(KEY) is None


def test_a_table_under_another_ones_name_is_as_good_as_none(cache: TableCache) -> None:
    other = replace(KEY, device="NVIDIA H200")
    cache.store(TABLE, KEY)
    foreign = stored_file(cache).read_bytes()
    stored_file(cache).unlink()
    cache.store(Table(other.as_dict(), TABLE.verbs), other)
    stored_file(cache).write_bytes(foreign)
    assert cache.load(other) is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = TableCache(tmp_path / "file")
    assert "Not a directory" in cache.store(TABLE, KEY)
    assert cache.load(KEY) is None
    assert TableCache(None).store(TABLE, KEY) == "there is no cache folder"
    assert TableCache(None).load(KEY) is None


def test_what_cannot_be_put_in_place_is_not_left_behind(cache: TableCache) -> None:
    cache.store(TABLE, KEY)
    path = stored_file(cache)
    path.unlink()
    path.mkdir()
    assert os.strerror(21) in cache.store(TABLE, KEY)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/group-coordinator")),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, Path("/h/.cache/group-coordinator")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, Path("/h/.cache/group-coordinator")),
        ({"HOME": "/h"}, Path("/h/.cache/group-coordinator")),
        ({}, None),
    ],
    ids=str,
)
def test_the_folder_is_the_users(environment: dict[str, str], folder: Path | None) -> None:
    assert cache_folder(environment) == folder
