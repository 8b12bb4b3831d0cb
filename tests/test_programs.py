"""Programs that are forked do what started ones do."""

# ruff: noqa: T201 - programs print

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time

import pytest

from tests.programs import Program


class Finalized:
    def __del__(self) -> None:
        os.write(1, b"finalized\n")


KEPT: list[Finalized] = []


def speak() -> None:
    time.sleep(0.1)
    print("thread")


def end(how: str) -> None:
    KEPT.append(Finalized())
    atexit.register(print, "at exit")
    print("pid", os.getpid(), sys.argv[1:], os.getsid(0) == os.getpid())
    print(os.environ.get("A_WORD"), file=sys.stderr)
    threading.Thread(target=speak).start()
    if how == "raises":
        raise ValueError("the program's own")
    if how == "exits":
        sys.exit(3)


@pytest.mark.parametrize(("how", "status"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_it_ends_as_python_does(how: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_WORD", "said")
    program = Program(end, how)
    said, errors = program.communicate()
    assert program.returncode == status
    assert said.splitlines() == [
        f"pid {program.pid} ['{how}'] True",
        *("thread", "at exit", "finalized"),
    ]
    assert errors.splitlines()[0] == "said"
    last = "ValueError: the program's own" if how == "raises" else "said"
    assert errors.splitlines()[-1] == last


def wait() -> None:
    print("waits", flush=True)
    time.sleep(600)


def test_signals_reach_it() -> None:
    program = Program(wait)
    assert program.stdout.readline() == "waits\n"
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    assert program.communicate() == ("", "")
    assert program.returncode == -signal.SIGTERM
    program.kill()
    assert program.communicate() == ("", "")
