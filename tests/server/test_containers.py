"""The service in a container: image and manifest, and that it runs within their limits."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from server.commands.options import ServeOptions, add_options
from tests.patience import until
from tests.unshared import run_unshared

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
DEPLOYMENT, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def instruction(name: str) -> str:
    return re.findall(rf"^{name}\s+(.*)$", DOCKERFILE, re.MULTILINE)[-1].strip()


HEALTH: list[str] = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
PORT = ServeOptions().port


def parsed(command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, ServeOptions)
    assert command[0] == "serve"
    return parser.parse_args(command[1:])


def key_of(args: argparse.Namespace) -> Path:
    given: str = args.api_key
    assert given.startswith("@")
    return Path(given[1:])


async def answers_without_a_key(*paths: str) -> list[int]:
    from tests.server.fake_service import site  # loads torch, which `main` below does not need

    async with site(api_key="secret") as here:
        return [(await here.client.get(path)).status_code for path in paths]


@pytest.mark.parametrize("command", [json.loads(instruction("CMD")), CONTAINER["args"]])
def test_the_commands_are_accepted_once_their_key_is_there(
    command: list[str], tmp_path: Path
) -> None:
    args = parsed(command)
    with pytest.raises(FileNotFoundError, match=str(key_of(args))):
        ServeOptions(**vars(args))
    key = tmp_path / "key"
    key.write_text("secret\n")
    args.api_key = f"@{key}"
    options = ServeOptions(**vars(args))
    assert (options.host, options.port) == ("0.0.0.0", PORT)
    assert options.api_key == "secret"


async def test_the_image_checks_the_service_where_it_listens() -> None:
    (path,) = re.findall(rf"http://127\.0\.0\.1:{PORT}(/[a-z/]*)", HEALTH[2])
    assert (path, await answers_without_a_key(path)) == ("/health", [200])
    assert instruction("EXPOSE") == str(PORT)
    assert json.loads(instruction("ENTRYPOINT")) == ["group-coordinator"]


def test_the_image_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"EXTRAS=(\S+)", DOCKERFILE)
    assert len(named) == 2
    for extras in named:
        assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    copied = (ROOT / ".dockerignore").read_text().split()
    assert copied == ["*", "!constraints.txt", "!dist/*.whl"]


async def test_the_probes_ask_for_routes_of_the_service() -> None:
    (port,) = CONTAINER["ports"]
    assert port == {"name": "http", "containerPort": PORT}
    probes = {each: CONTAINER[f"{each}Probe"] for each in ("startup", "liveness", "readiness")}
    assert {each: probe["httpGet"]["path"] for each, probe in probes.items()} == {
        "startup": "/ready",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert all(probe["httpGet"]["port"] == "http" for probe in probes.values())
    assert await answers_without_a_key("/ready", "/health", "/status") == [200, 200, 401]
    startup = probes["startup"]
    args = parsed(CONTAINER["args"])
    assert startup["periodSeconds"] * startup["failureThreshold"] >= args.start_timeout
    assert POD["terminationGracePeriodSeconds"] > args.drain_timeout


def test_the_manifest_fits_together() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels == SERVICE["spec"]["selector"]
    assert [port["targetPort"] for port in SERVICE["spec"]["ports"]] == ["http"]
    places = {each["name"]: each["mountPath"] for each in CONTAINER["volumeMounts"]}
    volumes = {each["name"]: each for each in POD["volumes"]}
    assert places.keys() == volumes.keys() == {"key", "shm"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Mi"}
    assert places["shm"] == "/dev/shm"
    assert Path(places["key"]) == key_of(parsed(CONTAINER["args"])).parent
    assert volumes["key"]["secret"]["defaultMode"] == 0o440
    assert CONTAINER["resources"]["requests"].keys() == {"cpu", "memory"}


def test_the_manifest_gives_no_right_that_is_not_needed() -> None:
    user, group = map(int, instruction("USER").split(":"))
    of_pod = POD["securityContext"]
    assert (of_pod["runAsUser"], of_pod["runAsGroup"], of_pod["fsGroup"]) == (user, group, group)
    assert of_pod["runAsNonRoot"] and of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert POD["automountServiceAccountToken"] is False
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


# --- ``python -m tests.server.test_containers PLAN``: as root, with loopback only ----------------


USER = 10001
ENTRY = "import sys; from server.cli import main; sys.exit(main())"
URL = "http://127.0.0.1:8000"
KEY = "a-key"
VIRTUAL = {"proc", "sysfs", "devpts", "mqueue", "devtmpfs", "cgroup", "cgroup2"}
_SIOCSIFFLAGS = 0x8914
_UP = 1


def confine(key_file: str) -> None:
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


def offspring(pid: int) -> list[tuple[int, str, str]]:
    found: list[tuple[int, str, str]] = []
    for each in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found.append((each.pid, each.name(), each.status()))
    return found


def workers(server: int) -> list[int]:
    return [pid for pid, name, _ in offspring(server) if name == "pool-worker"]


def status_of(path: str) -> int:
    try:
        return httpx.get(URL + path, timeout=30).status_code
    except httpx.TransportError:
        return 0


def embed() -> int:
    body = {"model": "all-MiniLM-L6-v2", "input": "A boat."}
    head = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{URL}/v1/embeddings", json=body, headers=head, timeout=30)
    return len(answer.json()["data"][0]["embedding"])


def write_to(place: str) -> str | None:
    try:
        (Path(place) / "file").touch()
    except OSError as error:
        return error.strerror
    return None


def look(outer: subprocess.Popen[bytes], health: list[str]) -> dict[str, Any]:
    while status_of("/ready") != 200:  # the test that waits for this has a deadline
        assert outer.poll() is None, f"it has ended with status {outer.poll()}"
        time.sleep(0.05)
    (server,) = [each.pid for each in psutil.Process(outer.pid).children()]
    lines = Path(f"/proc/{server}/status").read_text().splitlines()
    said = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
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
    until(lambda: psutil.STATUS_ZOMBIE not in {state for *_, state in offspring(server)})
    room = os.statvfs("/dev/shm")
    seen["shm_used"] = (room.f_blocks - room.f_bfree) * room.f_frsize
    os.kill(server, signal.SIGTERM)
    seen["status"] = outer.wait()
    return seen


def main() -> None:
    plan = json.loads(sys.argv[1])
    confine(plan["key_file"])
    outer = start(plan["arguments"])
    try:
        seen = look(outer, plan["health"])
    finally:
        outer.kill()
        outer.wait()
    sys.stdout.write(json.dumps(seen))


@pytest.mark.skipif(os.getuid() != 0, reason="only root may set the limits of a container")
@pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("setpriv")), reason="util-linux is missing"
)
def test_the_service_lives_within_the_limits_of_a_container() -> None:
    args = parsed(CONTAINER["args"])
    plan = {
        "arguments": CONTAINER["args"],
        "key_file": str(key_of(args)),
        "health": [sys.executable, *HEALTH[1:]],
    }
    done = run_unshared(
        ["--mount", "--net"],
        *(sys.executable, "-m", "tests.server.test_containers", json.dumps(plan)),
        timeout=240,
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert done.returncode == 0, done.stderr
    url, _, seen = done.stdout.partition("\n")
    assert url == f"serving all-MiniLM-L6-v2 at http://0.0.0.0:{PORT}"
    user = POD["securityContext"]["runAsUser"]
    assert json.loads(seen) == {
        "user": [str(user)] * 4,
        "new_rights": "1",
        "process": "1",
        "written": ["Read-only file system"] * 2,
        "embedding": 384,
        "healthy": 0,
        "embedding_after_a_loss": 384,
        "shm_used": 0,
        "status": 0,
    }, done.stderr


if __name__ == "__main__":
    main()
