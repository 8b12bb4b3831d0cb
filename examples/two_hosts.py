"""MiniLM served by two hosts at tp=2, pp=2: here both are processes of this machine, over loopback.

    python examples/two_hosts.py

On real hosts the two commands that it prints run on one each, with the head's address.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
from demo import reference
from group_coordinator.workers.minilm import packaged_model

SENTENCES = ["The tide leaves a line of seaweed along the wall.", "Jupiter has dozens of moons."]
LIMIT = 1e-5


def main() -> int:
    """Serve, ask, compare; 0 if the vectors are those of one process."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex())
        os.environ["GROUP_COORDINATOR_SECRET_FILE"] = str(secret)
        hosts = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {free_port()}"
        head = start(f"serve --tp 2 --pp 2 --port 0 {hosts} --node-rank 0")
        other = start(f"serve --headless {hosts} --node-rank 1")
        try:
            vectors = ask(head)
        finally:
            head.send_signal(signal.SIGTERM)
            print("they end with", head.wait(), "and", other.wait())
    expected = reference(packaged_model(), SENTENCES)
    difference = float(np.abs(np.array(vectors) - expected).max())
    print(f"max_abs_diff={difference:.3e} from sentence-transformers in one process")
    return 0 if difference < LIMIT else 1


def start(words: str) -> subprocess.Popen[str]:
    """Start the console script with these words."""
    print(f"$ group-coordinator {words}", flush=True)
    command = [str(Path(sys.executable).with_name("group-coordinator")), *words.split()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def ask(head: subprocess.Popen[str]) -> list[list[float]]:
    """The vectors of the sentences, once the workers are ready."""
    url = (head.stdout.readline() if head.stdout else "").split()[-1]
    while not ready(url):
        time.sleep(0.2)
    with urllib.request.urlopen(f"{url}/status") as answer:
        for worker in json.load(answer)["workers"]:
            print(f"  rank {worker['rank']}, pid {worker['pid']}, host {worker['host'] or 'here'}")
    body = json.dumps({"model": "all-MiniLM-L6-v2", "input": SENTENCES}).encode()
    request = urllib.request.Request(f"{url}/v1/embeddings", body)
    with urllib.request.urlopen(request) as answer:
        return [each["embedding"] for each in json.load(answer)["data"]]


def ready(url: str) -> bool:
    """Whether the workers answer."""
    try:
        urllib.request.urlopen(f"{url}/ready").close()
    except HTTPError:
        return False
    return True


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
