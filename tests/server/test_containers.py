"""The service in a container: what image and manifest say, and that it lives within it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from server.commands.options import ServeOptions, add_options
from tests.server.fake_service import run, site
from tests.unshared import run_unshared

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
DEPLOYMENT, SERVICE = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def instruction(name: str) -> str:
    """What the Dockerfile's last instruction of this name says."""
    return re.findall(rf"^{name}\s+(.*)$", DOCKERFILE, re.MULTILINE)[-1].strip()


def health_check() -> list[str]:
    command: list[str] = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    return command


def parsed(command: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, ServeOptions)
    assert command[0] == "serve"
    return parser.parse_args(command[1:])


def default_port() -> int:
    return ServeOptions().port


def key_of(args: argparse.Namespace) -> Path:
    given: str = args.api_key
    assert given.startswith("@")
    return Path(given[1:])


def answer_to(path: str) -> int:
    """What a service that works answers to whoever shows no key."""

    answers: list[int] = []

    async def ask() -> None:
        async with site(api_key="secret") as here:
            answers.append((await here.client.get(path)).status_code)

    run(ask)
    return answers[0]


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
    assert (options.host, options.port) == ("0.0.0.0", default_port())
    assert options.api_key == "secret"


def test_the_image_checks_the_service_where_it_listens() -> None:
    (path,) = re.findall(rf"http://127\.0\.0\.1:{default_port()}(/[a-z/]*)", health_check()[2])
    assert (path, answer_to(path)) == ("/health", 200)
    assert instruction("EXPOSE") == str(default_port())
    assert json.loads(instruction("ENTRYPOINT")) == ["group-coordinator"]


def test_the_image_installs_extras_that_there_are() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"EXTRAS=(\S+)", DOCKERFILE)
    assert len(named) == 2
    for extras in named:
        assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    copied = (ROOT / ".dockerignore").read_text().split()
    assert copied == ["*", "!constraints.txt", "!dist/*.whl"]


def test_the_probes_ask_for_routes_of_the_service() -> None:
    (port,) = CONTAINER["ports"]
    assert port == {"name": "http", "containerPort": default_port()}
    probes = {each: CONTAINER[f"{each}Probe"] for each in ("startup", "liveness", "readiness")}
    assert {each: probe["httpGet"]["path"] for each, probe in probes.items()} == {
        "startup": "/ready",
        "liveness": "/health",
        "readiness": "/ready",
    }
    assert all(probe["httpGet"]["port"] == "http" for probe in probes.values())
    assert [answer_to(path) for path in ("/ready", "/health", "/status")] == [200, 200, 401]
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root may set the limits of a container")
@pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("setpriv")), reason="util-linux is missing"
)
def test_the_service_lives_within_the_limits_of_a_container() -> None:
    """With the manifest's arguments; a worker is killed meanwhile, and replaced."""
    args = parsed(CONTAINER["args"])
    plan = {
        "arguments": CONTAINER["args"],
        "key_file": str(key_of(args)),
        "health": [sys.executable, *health_check()[1:]],
    }
    done = run_unshared(
        ["--mount", "--net"],
        *(sys.executable, str(Path(__file__).with_name("confined.py")), json.dumps(plan)),
        timeout=240,
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert done.returncode == 0, done.stderr
    url, _, seen = done.stdout.partition("\n")
    assert url == f"serving all-MiniLM-L6-v2 at http://0.0.0.0:{default_port()}"
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
