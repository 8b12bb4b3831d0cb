"""The launcher's secret: where it comes from, and which files are refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import coordinator
from coordinator import Launch
from coordinator.secret import SECRET_FILE, SecretError, launcher_secret

if TYPE_CHECKING:
    from pathlib import Path

SECRET = b"correct horse battery staple"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(SECRET + b"\n")
    return path


def test_no_file_is_no_secret() -> None:
    assert launcher_secret(environ={}) is None
    assert launcher_secret(environ={SECRET_FILE: ""}) is None


def test_what_is_given_goes_before_the_file(file: Path) -> None:
    environ = {SECRET_FILE: str(file)}
    assert launcher_secret(environ=environ) == SECRET
    assert launcher_secret(b"x" * 16, environ) == b"x" * 16


@pytest.mark.parametrize("ranks", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}])
def test_a_launch_knows_the_secret_and_does_not_show_it(file: Path, ranks: dict[str, str]) -> None:
    launch = Launch.from_environment(ranks | {SECRET_FILE: str(file)})
    assert launch.secret == SECRET
    assert "staple" not in repr(launch)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(SecretError, match=rf"mode {mode:04o}, wanted 0600.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(file)})


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 65534, -1)
    with pytest.raises(SecretError, match=r"belongs to user 65534.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(file)})


def test_a_short_secret_is_refused(file: Path) -> None:
    file.write_bytes(b"fifteen bytes..\r\n")
    with pytest.raises(SecretError, match=r"16 or more bytes; got 15.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(file)})
    with pytest.raises(SecretError, match="got 5"):
        Launch(secret=b"short")
    with pytest.raises(SecretError, match="got 5"):
        coordinator.init(rank=0, secret=b"short")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match=r"cannot be read: No such file.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(tmp_path / "none")})
    with pytest.raises(SecretError, match="not a regular file"):
        launcher_secret(environ={SECRET_FILE: str(tmp_path)})
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecretError, match="not a regular file"):
        launcher_secret(environ={SECRET_FILE: str(tmp_path / "pipe")})


def test_groups_are_built_with_the_secret(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator.init(rank=0, secret=SECRET) as groups:
        assert groups.world._context.settings.secret == SECRET
    monkeypatch.setenv(SECRET_FILE, str(file))
    for rank in (0, None):
        with coordinator.init(rank=rank) as groups:
            assert groups.world._context.settings.secret == SECRET
