"""What the maps in pages name is there."""

from __future__ import annotations

import re

import yaml

from server.commands.options import ServeOptions
from tests.packages import kept_files
from tests.pages.blocks import block_of
from tests.pages.commands import check, is_served


def test_the_readmes_tree() -> None:
    kept = kept_files()
    folder, missing = "", []
    for line in block_of("README.md", "shm_broadcast/   the ground floor").splitlines():
        if not line.startswith(" "):
            folder = line.split("/")[0]
        names = re.findall(r"(?:[\w/]+/|\w+\.py)(?=[\s,;)]|$)", line)
        for name in names:
            inside = name if name.startswith(folder) else f"{folder}/{name}"
            if not any(each.startswith((name, inside)) for each in kept):
                missing.append(name)
    assert missing == []


def test_the_picture_of_the_house() -> None:
    kept = kept_files()
    rooms = re.split(
        r"^  subgraph (\w+)", block_of("docs/architecture.md", "flowchart"), flags=re.M
    )
    assert rooms[1::2] == ["server", "coordinator", "device_comm", "shm_broadcast"]
    named = [
        f"{package}/{name}"
        for package, text in zip(rooms[1::2], rooms[2::2], strict=True)
        for label in re.findall(r'\["(.*?)<br>', text)
        for name in re.findall(r"[\w/]*(?:\w/|\.py)(?=[ ,]|$)", label)
    ]
    assert len(named) > 25
    assert [name for name in named if not any(each.startswith(name) for each in kept)] == []


def test_what_prometheus_is_told() -> None:
    (job,) = yaml.safe_load(block_of("docs/monitoring.md", "scrape_configs:"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    options = ServeOptions()
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert is_served("/metrics")


def test_the_set_of_leader_and_workers() -> None:
    spec = yaml.safe_load(block_of("docs/several-hosts.md", "apiVersion"))["spec"]
    template = spec["leaderWorkerTemplate"]
    found = [
        template[which]["spec"]["containers"] for which in ("leaderTemplate", "workerTemplate")
    ]
    for (container,) in found:
        check("docs/several-hosts.md", container["command"])
        (variable,) = container["env"]
        assert variable["name"] == "GROUP_COORDINATOR_SECRET_FILE"
    probes = [found[0][0][f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")]
    assert probes == ["/health", "/ready"]
    assert all(map(is_served, probes))
