"""Which hosts a pool has: by arguments, torchrun, Slurm and LeaderWorkerSet."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.secret import SECRET_FILE, SecretError
from server.config import HEAD_PORT
from server.hosts.link import differing_fact, facts_here
from server.hosts.place import Hosts, first_of, hosts_of

if TYPE_CHECKING:
    from pathlib import Path

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "RANK": "2",
    "MASTER_ADDR": "head.example",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "gpu[007-010]",
}
LWS = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "model-0.model.default",
}


pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def _secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef")
    file.chmod(0o600)
    monkeypatch.setenv(SECRET_FILE, str(file))


def where(hosts: Hosts) -> tuple[int, int, str, int]:
    return hosts.nnodes, hosts.node_rank, hosts.master_addr, hosts.master_port


@pytest.mark.parametrize(
    ("environ", "expected", "by"),
    [
        (TORCHRUN, (3, 2, "head.example", 29400), "torchrun"),
        # torchrun's agent has the port: the head tells its own through torchrun's store.
        (
            {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            (3, 2, "head.example", 0),
            "torchrun",
        ),
        (SLURM, (4, 1, "gpu007", HEAD_PORT), "Slurm"),
        (
            {**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"},
            (4, 1, "10.0.0.7", 4000),
            "Slurm",
        ),
        (LWS, (2, 1, "model-0.model.default", HEAD_PORT), "LeaderWorkerSet"),
        # torchrun inside a Slurm task: the inner one counts.
        ({**SLURM, **TORCHRUN}, (3, 2, "head.example", 29400), "torchrun"),
    ],
)
def test_a_launchers_environment_is_read_and_named(
    environ: dict[str, str], expected: tuple[int, int, str, int], by: str
) -> None:
    hosts = Hosts.read(environ=environ)
    assert where(hosts) == expected
    assert by in hosts.told_by


def test_arguments_come_before_any_environment() -> None:
    hosts = Hosts.read(2, 0, "10.0.0.1", 4001, environ=TORCHRUN)
    assert where(hosts) == (2, 0, "10.0.0.1", 4001)
    assert where(Hosts.read(2, 0, "10.0.0.1", environ=LWS))[3] == HEAD_PORT
    assert where(Hosts.read(master_port=4002, environ=SLURM)) == (4, 1, "gpu007", 4002)


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({}, {}, "the pool's hosts are not given"),
        ({"nnodes": 2}, TORCHRUN, "node_rank, master_addr is missing"),
        ({"node_rank": 1, "master_addr": "a"}, {}, "nnodes is missing"),
        ({}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node 1"),
        ({}, {**SLURM, "SLURM_LOCALID": "3"}, "--ntasks-per-node=1"),
        ({}, {**SLURM, "SLURM_NTASKS": "four"}, "SLURM_NTASKS must be a number"),
        ({}, {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}, "has no LWS_LEADER_ADDRESS"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, {}, "node_rank must be in 0..1"),
        ({"nnodes": 0, "node_rank": 0, "master_addr": "a"}, {}, "nnodes must be 1 or more"),
        ({"nnodes": 1, "node_rank": 0, "master_addr": ""}, {}, "master_addr"),
        (
            {"nnodes": 1, "node_rank": 0, "master_addr": "a", "master_port": 70000},
            {},
            "master_port must be below 65536",
        ),
    ],
)
def test_incomplete_or_contradictory_hosts_are_refused(
    given: dict[str, Any], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Hosts.read(**given, environ=environ)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 7.5, float("nan"), float("inf")])
def test_a_wrong_silence_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="silence_seconds must be more than 0, and 7 at most"):
        Hosts(2, 0, "10.0.0.1", silence_seconds=seconds)


def test_a_secret_is_asked_for_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "0123456789abcdef" not in repr(Hosts(2, 0, "10.0.0.1"))
    monkeypatch.delenv(SECRET_FILE)
    with pytest.raises(SecretError, match=f"head -c 32 /dev/urandom.*{SECRET_FILE}=FILE"):
        Hosts(2, 0, "10.0.0.1")
    with pytest.raises(SecretError, match="16 or more bytes; got 5"):
        Hosts(2, 0, "10.0.0.1", secret=b"short")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[003-010,12],big1", "gpu003"),
        ("a1,a2", "a1"),
        ("rack[1-2]-node", "rack1-node"),
        ("n[5]", "n5"),
        *((nodes, None) for nodes in ("", ",a", "  ")),
    ],
)
def test_the_first_of_slurms_hosts_is_the_head(nodes: str, first: str | None) -> None:
    if first is not None:
        assert first_of(nodes) == first
        return
    with pytest.raises(ValueError, match="SLURM_JOB_NODELIST"):
        first_of(nodes)


def test_the_driver_is_on_the_head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="this is node 2: call serve_host here"):
        hosts_of("torchrun", None)
    monkeypatch.setenv("RANK", "0")
    found = hosts_of("torchrun", None)
    assert found is not None
    assert found.is_head
    assert hosts_of("local", None) is None
    with pytest.raises(ValueError, match="local, hosts, torchrun, ray; got 'k8s'"):
        hosts_of("k8s", None)
    with pytest.raises(ValueError, match="launcher must be 'hosts'; got 'local'"):
        hosts_of("local", found)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(ValueError, match="torchrun did not start this process"):
        hosts_of("torchrun", None)


def test_only_what_both_sides_state_is_compared() -> None:
    here = facts_here({"--tp": "2", "--model": "a"})
    assert differing_fact(here, facts_here({"--tp": "2"})) == ""
    assert differing_fact(here, facts_here({"--tp": "4"})) == "--tp is 4 there, and 2 on the head"
    three = facts_here(Hosts(3, 1, "10.0.0.1").compared)
    assert differing_fact(facts_here(Hosts(2, 0, "10.0.0.1").compared), three) == (
        "nnodes is 3 there, and 2 on the head"
    )
    other = {**here, "torch": "1.0"}
    assert differing_fact(here, other) == f"torch is 1.0 there, and {here['torch']} on the head"
    assert "+" not in here["torch"]
