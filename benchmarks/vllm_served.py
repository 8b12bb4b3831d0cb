"""``vllm serve`` as a child process, with our plug-in or as it is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from benchmarks.vllm_models import random_qwen2, smollm2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[1]
SMALL = {
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 256 << 20,
}
"""What keeps an engine of such a model small, and quick to start."""

EAGER = ("--enforce-eager",)
TRACED = ("--compilation-config", '{"mode": 2, "backend": "eager"}')
"""Without compiling anything, as far as vLLM can: on the CPU its stages need the traced model."""

LAYOUTS = {
    "TP=2": (random_qwen2, ("-tp", "2", *EAGER)),
    "TP=3": (smollm2, ("-tp", "3", *EAGER)),
    "PP=2": (smollm2, ("-pp", "2", *TRACED)),
}
"""The model of each layout, and the arguments of ``vllm serve`` for it."""


def keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``vllm serve``, as in `LAYOUTS`, as those of ``vllm.LLM``."""
    size = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size"}[arguments[0]]
    found: dict[str, Any] = {size: int(arguments[1])}
    if "--enforce-eager" in arguments:
        found["enforce_eager"] = True
    else:
        found["compilation_config"] = json.loads(arguments[3])
    return {**found, **SMALL}


def environment(parts: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine of several workers on few cores, offline.

    Args:
        parts: for ``GROUP_COORDINATOR``; ``""`` leaves vLLM as it is.
        more: what else is set.
    """
    kept = {name: value for name, value in os.environ.items() if name != "GROUP_COORDINATOR"}
    return {
        **kept,
        "DO_NOT_TRACK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        **({"GROUP_COORDINATOR": parts} if parts else {}),
        **(more or {}),
    }


class Served:
    """A running ``vllm serve``. Leave its context to end it.

    Attributes:
        url: where it answers.
        log: the file of all that its processes write.
        sockets: the folder of vLLM's own sockets.
        process: the first process.
    """

    def __init__(
        self,
        model: Path,
        arguments: Sequence[str],
        folder: Path,
        parts: str = "",
        more: Mapping[str, str] | None = None,
        timeout: float = 1800.0,
    ) -> None:
        """Start it, and wait until it answers.

        Args:
            model: the model's folder.
            arguments: for ``vllm serve``.
            folder: of the log; made if it is not there.
            parts: for ``GROUP_COORDINATOR``.
            more: of the environment.
            timeout: seconds until it answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of the log.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._closing = ExitStack()
        # Not in the folder: the name of a socket has 107 characters at most.
        sockets = self._closing.enter_context(tempfile.TemporaryDirectory(prefix="vllm-"))
        self.sockets = Path(sockets)
        self.log = folder / "log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # What `vllm serve` runs; that command itself asks for a distribution called "vllm".
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "model"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                cwd=folder,
                env=environment(parts, {"VLLM_RPC_BASE_PATH": str(self.sockets), **(more or {})}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with ExitStack() as undo:
            undo.callback(self._closing.close)
            undo.callback(self.kill)
            self._wait(timeout)
            undo.pop_all()

    def _wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"vllm serve did not start:\n{self.log.read_text()[-8000:]}")

    def client(self) -> Any:
        """The official client of its API."""
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600, http_client=None
        )

    def family(self) -> list[psutil.Process]:
        """All its processes."""
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def workers(self) -> dict[int, int]:
        """Each worker's pid, by its place among the workers' names."""
        named = [each for each in self.family() if "VLLM::Worker" in "".join(each.cmdline())]
        ordered = sorted(named, key=lambda each: "".join(each.cmdline()))
        return {rank: each.pid for rank, each in enumerate(ordered)}

    def end(self, timeout: float = 90.0) -> int:
        """Ask it to end as an operator does; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End all that is left of it."""
        try:
            family = self.family()
        except psutil.NoSuchProcess:
            family = []
        for each in family:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            try:
                self.end()
            except subprocess.TimeoutExpired:
                self.kill()
        self._closing.close()
