"""Readers on other hosts, on two hosts: network namespaces with addresses of one family only."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any, Literal

import pytest

from shm_broadcast.errors import PeerLostError
from tests.netns import Host, two_hosts
from tests.ranks import run_ranks
from tests.shm_broadcast.remote_peers import (
    LIMIT,
    SILENCE,
    assert_after_silence,
    await_readers,
    fill,
    get,
    make_reader,
    make_writer,
    put,
    read_all,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.namespaces

MESSAGES = [[b"head", bytes([size % 256]) * size] for size in (0, 1, 1000, 3_000_000)]


def cross(rank: int, _n: int, folder: str, hosts: tuple[Host, Host]) -> Any:
    hosts[min(rank, 1)].enter()
    if rank == 0:
        with make_writer(folder, [1, 2], hosts[0].address, credit_bytes=1 << 20) as writer:
            writer.wait_ready(LIMIT)
            for message in MESSAGES:
                writer.send(message, LIMIT)
            await_readers(folder, [1, 2])
            return writer.handle.address, other_family_fails(hosts[0])
    with make_reader(folder, rank) as reader:
        return read_all(reader, folder, len(MESSAGES))


def other_family_fails(host: Host) -> bool:
    """Whether the other family has not even a loopback address here."""
    family, loopback = (
        (socket.AF_INET, "127.0.0.1") if ":" in host.address else (socket.AF_INET6, "::1")
    )
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((loopback, 0))
        except OSError:
            return True
    return False


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_messages_cross_hosts(tmp_path: Path, family: Literal["IPv4", "IPv6"]) -> None:
    with two_hosts(family) as hosts:
        (address, alone), first, second = run_ranks(3, cross, str(tmp_path), hosts)
    assert first == second == MESSAGES
    assert hosts[0].address in address
    assert alone


def part(rank: int, _n: int, folder: str, hosts: tuple[Host, Host], silence: float) -> float:
    hosts[rank].enter()
    if rank == 0:
        with make_writer(
            folder, [1], hosts[0].address, credit_bytes=1 << 20, silence=silence
        ) as writer:
            writer.wait_ready(LIMIT)
            writer.send([b"before"], LIMIT)
            get(folder, "read")
            unplugged = time.monotonic()
            for host in hosts:
                host.unplug()
            put(folder, "unplugged", unplugged)
            lost_reader = rf"lost rank 1 \(pid \d+ on {hosts[1].address}\)"
            with pytest.raises(PeerLostError, match=lost_reader):
                fill(writer)
            return time.monotonic() - unplugged
    with make_reader(folder, rank) as reader:
        assert bytes(reader.recv(LIMIT)[0]) == b"before"
        put(folder, "read", True)
        lost_writer = rf"lost rank 0 \(pid \d+ on {hosts[0].address}:\d+\)"
        with pytest.raises(PeerLostError, match=lost_writer):
            reader.recv(LIMIT)
        lost = time.monotonic()
        return lost - float(get(folder, "unplugged"))


def test_silent_partition_is_noticed_on_both_sides(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        for noticed in run_ranks(2, part, str(tmp_path), hosts, SILENCE):
            assert_after_silence(noticed)
