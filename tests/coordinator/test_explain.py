"""`explain`: what carries out the collectives of a group, and why not what else could."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from coordinator import GroupCoordinator, init
from coordinator.member import explain
from device_comm import ALL_VERBS, Communicator, LoopbackBackend
from device_comm.selection import Candidate, SelectingBackend, Selection
from tests.ranks import init_gloo, run_ranks


def explained(rank: int, n: int, path: str) -> list[Any]:
    init_gloo(rank, n, path)
    found = []
    for use_device_communicator in (True, False):
        with GroupCoordinator([[0, 1]], rank, "gloo", use_device_communicator, False, "tp") as tp:
            found.append(tp.explain())
            tp.barrier()
    return found


def test_groups_on_one_host(store_path: str) -> None:
    first, second = run_ranks(2, explained, store_path)
    assert first == second
    shm, gloo = first
    assert shm.group == "tp: 2 members on cpu"
    assert {choice.verb for choice in shm.choices} == ALL_VERBS
    assert {(each.backend, each.reason) for each in shm.choices} == {
        ("shm", "all members share a host")
    }
    why = "all members share a host: shared memory is faster than sockets"
    assert shm.unavailable[0][0] in ("writing through the caches", "writing past the caches")
    assert shm.unavailable[0][1].startswith("not measured yet; Linux reports ")
    assert shm.unavailable[1:] == (("gloo", why),)
    assert shm.backend("all_reduce", 1 << 30) == "shm"
    assert gloo.backend("all_reduce", 4) == "gloo"
    assert gloo.unavailable == (("shm", "the settings allow torch's process groups only"),)


def test_a_group_of_one() -> None:
    with init(rank=0, backend="gloo") as groups:
        told = groups.tp.explain()
    assert told.group == "tp: 1 member on cpu"
    assert told.backend("broadcast", 8) == "loopback"
    assert "a group of one: every verb is the identity" in str(told)


def link(device: Any, hosts: int) -> Any:
    nodes = SimpleNamespace(all=lambda: [[rank] for rank in range(hosts)])
    settings = SimpleNamespace(torch_only=False)
    return SimpleNamespace(name="tp", ranks=(0, 1), device=device, nodes=nodes, settings=settings)


def test_members_on_several_hosts() -> None:
    told = explain(link(Communicator(LoopbackBackend("cpu")), 2))
    assert told.unavailable == (("shm", "the members are on 2 hosts"),)


def test_devices_tell_what_was_refused() -> None:
    unavailable = Candidate("nccl", None, "2 members share 1 devices")
    able = Candidate("ipc", LoopbackBackend("meta"))
    comm = Communicator(SelectingBackend(Selection([able, unavailable])))
    comm.device = torch.device("cuda", 0)
    told = explain(link(comm, 1))
    assert told.group == "tp: 2 members on cuda"
    assert told.unavailable == (("nccl", "2 members share 1 devices"),)
    assert {choice.reason for choice in told.choices} == {"the only one"}
