"""What the command line of ``serve`` accepts, and how it says no."""

from __future__ import annotations

import argparse
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from server.cli import main
from server.commands import read_options, serve
from server.commands.options import serve_options
from server.commands.read_options import WorkerOptions
from server.config import RAY_SILENCE_SECONDS
from server.service.listener import listen
from tests.server.tiny_llama import make_llama

if TYPE_CHECKING:
    from pathlib import Path


def arguments(**given: Any) -> Any:
    parser = argparse.ArgumentParser()
    serve_options.add_arguments(parser)
    return SimpleNamespace(**{**vars(parser.parse_args([])), **given})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"http": "8000"}, "HOST:PORT"),
        ({"http": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"http": "0.0.0.0:8000"}, "beyond loopback: give --api-key"),
        ({"http": "[::]:8000"}, "beyond loopback"),
        ({"http": "example.org:8000"}, "beyond loopback"),
        ({"http": "localhost.example.org:8000"}, "beyond loopback"),
        ({"http": "0.0.0.0:8000", "api_key": ""}, "printable ASCII"),
        ({"api_key": "two words"}, "printable ASCII"),
        ({"api_key": "schlüssel"}, "printable ASCII"),
        ({"api_key": "k" * 4097}, "1 to 4096 printable ASCII"),
        ({"api_key": "@/dev/zero"}, "printable ASCII"),
        ({"tp": 5}, "tp=5 does not divide"),
        ({"bind": "half"}, "bind must be none, auto, numa, or"),
        ({"bind": "0|1", "tp": 3}, "is for 2 workers, and this host has 3"),
        ({"dp": 0}, "--dp must be at least 1"),
        ({"max_restarts": 0}, "--max-restarts must be at least 1"),
        ({"max_restarts": 3}, "--max-restarts is for a service that restarts workers: give --rest"),
        ({"master_port": 4000}, "--master-port is for several hosts, and no other option names"),
        ({"silence_timeout": 9.0}, "--silence-timeout is for several hosts, and no other option"),
        ({"launcher": "torchrun", "nnodes": 2}, "--launcher torchrun defines the hosts itself"),
        ({"launcher": "ray", "master_port": 4000}, "--launcher ray defines the hosts itself"),
        ({"launcher": "ray", "headless": True}, "Ray starts the others, so none is --headless"),
        ({"silence_timeout": float("inf")}, "--silence-timeout must be a finite number"),
        ({"stuck_after": 0.0}, "--stuck-after must be a finite number"),
        ({"max_batch_tokens": 0}, "--max-batch-tokens must be at least 1"),
        ({"max_connections": 0}, "--max-connections must be at least 1"),
        ({"max_waiting": 0}, "--max-waiting must be at least 1"),
        ({"start_timeout": 0.0}, "--start-timeout must be a finite number"),
        (
            {"request_timeout": -1.0},
            "--request-timeout must be a finite number",
        ),
        (
            {"stall_timeout": float("nan")},
            "--stall-timeout must be a finite number",
        ),
        ({"drain_timeout": float("inf")}, "--drain-timeout must be a finite number"),
    ],
)
def test_wrong_options_are_refused(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        serve.prepare(arguments(**given))


def test_hosts_share_the_workers_evenly() -> None:
    with pytest.raises(ValueError, match="2 hosts cannot share 3 workers evenly"):
        WorkerOptions.read(arguments(tp=3), nnodes=2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tp": 4}, "tp must be 1 to 3"),
        ({"pp": 4}, "pp must be 1 to 3"),
        ({"dp": 2}, "--dp must be 1 with a model that completes"),
        ({"truncate": True}, "--truncate is for models that embed"),
        ({"slots": 0}, "--slots must be at least 1"),
        ({"context": 0}, "--context must be at least 1"),
        ({"max_batch_tokens": 8}, "--max-batch-tokens must be at least 16, the slots"),
        ({"slots": 300}, "--max-batch-tokens must be at least 300, the slots"),
        ({"context": 1}, "--context must be at least 2: a token of the prompt, one of the answer"),
    ],
)
def test_options_that_are_wrong_for_completions(tmp_path: Path, given: Any, text: str) -> None:
    folder = make_llama(tmp_path / "model")
    with pytest.raises(ValueError, match=text):
        serve.prepare(arguments(model=folder, **given))


def test_a_model_that_completes(tmp_path: Path) -> None:
    plan: Any = serve.prepare(arguments(model=make_llama(tmp_path / "tiny"), context=1000))
    assert (plan.name, plan.limits.max_tokens) == ("tiny", 256)
    assert (plan.model.slots, plan.model.context) == (16, 128)
    with pytest.raises(ValueError, match="--slots and --context are for models that complete"):
        serve.prepare(arguments(slots=4))


def test_ray_is_asked_for_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_options, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="--launcher ray: install the extra 'ray'"):
        serve.prepare(arguments(launcher="ray"))


def test_hosts_that_ray_finds_may_be_silent_for_as_long_as_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_options, "find_spec", str)
    for given, expected in ({}, RAY_SILENCE_SECONDS), ({"silence_timeout": 6.5}, 6.5):
        plan: Any = serve.prepare(arguments(launcher="ray", **given))
        assert plan.pool["hosts"].silence_seconds == expected


@pytest.mark.parametrize("where", ["[::1]:0", "localhost:1", "127.0.0.1:0", "127.8.9.10:0"])
def test_loopback_needs_no_key(where: str) -> None:
    assert serve.prepare(arguments(http=where)).api_key is None


def test_beyond_loopback_with_a_key() -> None:
    assert serve.prepare(arguments(http="0.0.0.0:80", api_key="k")).host == "0.0.0.0"


def test_a_key_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    assert serve.prepare(arguments(api_key=f"@{file}")).api_key == "from-a-file"
    with pytest.raises(FileNotFoundError):
        serve.prepare(arguments(api_key=f"@{tmp_path / 'none'}"))
    file.write_text("k" * 4096 + "\n")
    assert serve.prepare(arguments(api_key=f"@{file}")).api_key == "k" * 4096
    for wrong in (
        "\n\n\n" + "k" * 4096,
        "k" * 4096 + " \nsecond",
        "k\n" * 2,
        "k" + "\n" * 4096 + "x",
    ):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="1 to 4096 printable ASCII"):
            serve.prepare(arguments(api_key=f"@{file}"))


def test_a_port_that_is_taken_is_told_before_workers_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--http", f"127.0.0.1:{port}"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"cannot listen at 127.0.0.1, port {port}: " in told.err
    assert told.err.count("\n") == 1


def test_a_name_that_no_host_can_have_is_told_as_an_address_that_cannot_be_listened_at() -> None:
    with pytest.raises(OSError, match=r"cannot listen at a{64}, port 0: no host has such a name"):
        listen("a" * 64, 0)
