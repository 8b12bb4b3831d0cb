"""Runs `serve` within the limits of a container, by hand: ``python confined.py PLAN``, as root.

It is to be started in a mount and a network namespace of its own (``unshare --mount --net``), with
PYTHONPATH set. Nothing can be written to there but 64 MiB at /dev/shm, and there is no network but
loopback. The server is process 1, as a user with no rights but to read: the interpreter may lie in
root's home.

PLAN is JSON: the arguments of `serve`, the file of its key, and a command that checks its health.
What was seen is printed as JSON: see `look`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.patience import until

ROOT = Path(__file__).parents[2]

USER = 10001
ENTRY = "import sys; from server.cli import main; sys.exit(main())"
URL = "http://127.0.0.1:8000"
KEY = "a-key"
VIRTUAL = {"proc", "sysfs", "devpts", "mqueue", "devtmpfs", "cgroup", "cgroup2"}
_SIOCSIFFLAGS = 0x8914
_UP = 1


def confine(key_file: str) -> None:
    """Set the limits for this process and all that it starts."""
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    key = Path(key_file)
    key.parent.mkdir(parents=True)
    key.write_text(f"{KEY}\n")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind = line.split()[:3]
        if kind not in VIRTUAL:
            mount("-o", "remount,bind,ro", place.replace("\\040", " "))
    mount("-t", "tmpfs", "-o", "size=64m,mode=1777", "tmpfs", "/dev/shm")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP))


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def start(arguments: list[str]) -> subprocess.Popen[bytes]:
    """The server, as process 1 of a namespace of its own."""
    reading = "-all,+dac_read_search"
    rights = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"]
    rights += [f"--inh-caps={reading}", f"--ambient-caps={reading}", f"--bounding-set={reading}"]
    space = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "PYTHONPATH"}}
    return subprocess.Popen(
        [*space, *rights, sys.executable, "-c", ENTRY, *arguments],
        cwd=ROOT,
        env={**kept, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/nonexistent"},
    )


def children(pid: int) -> list[int]:
    """Those of all its threads; none, of a process that has ended meanwhile."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def offspring(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *offspring(child))]


def state(pid: int) -> tuple[str, str]:
    """A process's name and its state; nothing, of one that has ended meanwhile."""
    try:
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return before.partition("(")[2], after.split()[0]


def workers(server: int) -> list[int]:
    return [pid for pid in offspring(server) if state(pid)[0] == "pool-worker"]


def status_of(path: str) -> int:
    try:
        with urllib.request.urlopen(URL + path, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def embed() -> int:
    """How many numbers an embedding has."""
    body = json.dumps({"model": "all-MiniLM-L6-v2", "input": "A boat."}).encode()
    head = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    asked = urllib.request.Request(f"{URL}/v1/embeddings", body, head)
    with urllib.request.urlopen(asked, timeout=30) as got:
        return len(json.load(got)["data"][0]["embedding"])


def write_to(place: str) -> str | None:
    """Why a file cannot be made in ``place``."""
    try:
        (Path(place) / "file").touch()
    except OSError as error:
        return error.strerror
    return None


def look(outer: subprocess.Popen[bytes], health: list[str]) -> dict[str, Any]:
    """What there is to see of the service, from its start to its end."""
    while status_of("/ready") != 200:  # the test that waits for this has a deadline
        assert outer.poll() is None, f"it has ended with status {outer.poll()}"
        time.sleep(0.05)
    (server,) = children(outer.pid)
    said = dict(line.split(":\t", 1) for line in lines(f"/proc/{server}/status") if ":\t" in line)
    seen: dict[str, Any] = {
        "user": said["Uid"].split(),
        "new_rights": said["NoNewPrivs"],
        "process": said["NSpid"].split()[-1],
        "written": [write_to("/"), write_to("/tmp")],
        "embedding": embed(),
        "healthy": subprocess.run(health, check=False).returncode,
    }
    before = workers(server)
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len({*workers(server)} - {*before}) == 1 and status_of("/ready") == 200)
    seen["embedding_after_a_loss"] = embed()
    until(lambda: "Z" not in {state(pid)[1] for pid in offspring(server)}, "a dead one stays")
    room = os.statvfs("/dev/shm")
    seen["shm_used"] = (room.f_blocks - room.f_bfree) * room.f_frsize
    os.kill(server, signal.SIGTERM)
    seen["status"] = outer.wait()
    return seen


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def main() -> None:
    """Do it all."""
    plan = json.loads(sys.argv[1])
    confine(plan["key_file"])
    outer = start(plan["arguments"])
    try:
        seen = look(outer, plan["health"])
    finally:
        outer.kill()
        outer.wait()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
