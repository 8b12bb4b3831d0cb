"""Hosts of a pool that were told different things, and so do not meet: who says what of it."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from server.errors import HostError
from server.hosts import host_supervisor, remote_hosts
from server.hosts.host_supervisor import serve_host
from server.pool import WorkerPool
from tests.coordinator.hosts import NAMES, move_to
from tests.netns import Host, two_hosts
from tests.patience import PATIENCE_SECONDS
from tests.ranks import run_ranks
from tests.server.over_hosts import PORT, living_children, place
from tests.server.workers import Worker
from tests.warm_forks import warm_fork_servers

if TYPE_CHECKING:
    from pathlib import Path

Told = tuple[str, str]

pytestmark = pytest.mark.namespaces

SHORT = 3.0
"""Seconds after which those give up who wait in vain."""
LINES_EVERY = 1.0
"""Seconds between two lines of theirs."""
HEAD, OTHER = "10.93.0.1", "10.93.0.2"


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def comes(
    rank: int, n: int, folder: str, hosts: tuple[Host, Host], told: list[dict[str, Any]]
) -> Told:
    """One process: the error that it raises, and what it has logged.

    Its attributes of `Hosts` are what it was told, beside ``at``, on which host it is, and
    ``seconds``, for which it waits.
    """
    del n
    mine = {"at": min(rank, 1), "seconds": PATIENCE_SECONDS, **told[rank]}
    at, seconds = mine.pop("at"), mine.pop("seconds")
    move_to(folder, hosts, at)
    warm_fork_servers()
    remote_hosts._LINE_SECONDS = host_supervisor._LINE_SECONDS = LINES_EVERY
    lines = Lines()
    logging.getLogger("server").addHandler(lines)
    here = place(at, hosts, **mine)
    error = "met"
    try:
        if here.is_head:
            given: dict[str, Any] = {"launcher": "hosts", "hosts": here}
            WorkerPool(Worker, tp=here.nnodes, start_timeout=seconds, **given)
        else:
            serve_host(here, seconds)
    except (HostError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    assert living_children() == []
    return error, "\n".join(lines.seen)


def come(tmp_path: Path, *told: dict[str, Any]) -> list[Told]:
    """What becomes of processes that are told this; the first is on host a, the others on b."""
    with two_hosts("IPv4") as hosts:
        assert (hosts[0].address, hosts[1].address) == (HEAD, OTHER)
        found: list[Told] = run_ranks(len(told), comes, str(tmp_path), hosts, list(told))
        return found


def test_a_head_at_a_loopback_address_says_so_and_who_connects_in_vain_says_why(
    tmp_path: Path,
) -> None:
    """As where a host's own name leads to 127.0.1.1 in its /etc/hosts."""
    waits = {"seconds": SHORT}
    (head, seen), (other, lines) = come(tmp_path, {"master_addr": "localhost", **waits}, waits)
    where = (
        f"127.0.0.1:{PORT}, a loopback address, to which 'localhost' leads on this host: "
        "other hosts cannot reach it"
    )
    assert head == f"HostError: node 1 did not connect in 3 s; the head listens at {where}"
    assert f"waiting for node 1, for 1 s now; this host, the head, listens at {where}" in seen
    refused = f"nothing answers at tcp://{HEAD}:{PORT}: Connection refused"
    assert other == f"HostError: the head has not answered in 3 s: {refused}"
    assert re.search(rf"waiting for the head, for \d s now: {refused}", lines)


def test_a_head_that_was_given_another_hosts_address_says_so_at_once(tmp_path: Path) -> None:
    (head, _), (other, _) = come(
        *(tmp_path, {"master_addr": OTHER}), {"master_addr": OTHER, "seconds": SHORT}
    )
    assert head.startswith("OSError: ")
    assert f"the head's address '{OTHER}' is none of this host's, which has {HEAD}" in head
    assert head.endswith("is this node 0, the head?")
    mine = "; that is an address of this host itself: is it the head's?"
    assert other.endswith(f"nothing answers at tcp://{OTHER}:{PORT}: Connection refused{mine}")


@pytest.mark.parametrize("at", [0, 1])
def test_a_second_head_is_told_that_it_is_one(at: int, tmp_path: Path) -> None:
    second = {"at": at, "node_rank": 0}
    found = [error for error, _ in come(tmp_path, {"seconds": SHORT}, {**second, "seconds": SHORT})]
    (refused,) = [error for error in found if error.startswith("OSError")]
    (waited,) = [error for error in found if error.startswith("HostError")]
    assert f"did not connect in 3 s; the head listens at {HEAD}:{PORT}" in waited
    told = f"{HEAD}:{PORT}: Address already in use", "is this node 0, the head?"
    assert refused.endswith(told[at])


@pytest.mark.parametrize(("node", "nnodes"), [(1, 3), (2, 3), (5, 6)])
def test_hosts_that_differ_in_how_many_they_are_both_say_so(
    node: int, nnodes: int, tmp_path: Path
) -> None:
    (head, seen), (other, _) = come(tmp_path, {}, {"node_rank": node, "nnodes": nnodes})
    differs = f"nnodes is {nnodes} there, and 2 on the head"
    named = f"host {NAMES[1]} ({OTHER}), node {node}: {differs}"
    assert head == f"HostError: {named}"
    assert f"refused {named}" in seen
    assert other == f"HostError: the head has refused this host: {differs}"


def test_a_number_that_two_hosts_have_is_named_on_both_sides(tmp_path: Path) -> None:
    twice = {"node_rank": 1, "nnodes": 3}
    found = come(tmp_path, {"nnodes": 3, "seconds": 2 * SHORT}, twice, twice)
    head, seen = found[0]
    assert head.startswith("HostError: node 2 did not connect in 6 s; the head listens at ")
    here = rf"node 1 is connected already: host {NAMES[1]} \({OTHER}\), pid \d+"
    assert re.search(rf"refused host {NAMES[1]} \({OTHER}\), pid \d+: {here}", seen)
    others = [error for error, _ in found[1:]]
    (refused,) = [error for error in others if "refused" in error]
    assert re.fullmatch(f"HostError: the head has refused this host: {here}", refused)


def test_a_host_whose_packets_are_lost_on_the_way_says_so(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        hosts[0].unplug()
        told = [{"seconds": SHORT}, {"seconds": SHORT}]
        _, (other, _) = run_ranks(2, comes, str(tmp_path), hosts, told)
    assert other.endswith(f"nothing answers at tcp://{HEAD}:{PORT}: timed out")
