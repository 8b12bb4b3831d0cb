"""Explains which backends carry out a group's collectives, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shm_broadcast.errors import counted

if TYPE_CHECKING:
    from coordinator.setup.link import Link
    from device_comm.choice import Explanation

_QUICKER = "all members share a host: shared memory is quicker than sockets"


def explain(link: Link) -> Explanation:
    """The backends that a group uses, with reasons, and those it does not. Collective: no."""
    told = link.device.explain()
    refused = dict(told.refused)
    if len(link.ranks) == 1:
        why = "a group of one: every verb is the identity"
    elif link.settings.torch_only:
        why = "told to use torch's process groups"
        refused["ipc" if link.device.device.type == "cuda" else "shm"] = why
    elif link.device.device.type == "cuda":
        why = ""
    elif link.device.capabilities.backend == "shm":
        why, refused["gloo"] = "all members share a host", _QUICKER
    else:
        hosts = 0 if link.nodes is None else len(link.nodes.all())
        why = refused["shm"] = f"the members are on {hosts} hosts"
    choices = tuple(replace(each, reason=each.reason or why) for each in told.choices)
    members = counted(len(link.ranks), "member")
    title = f"{link.name}: {members} on {link.device.device.type}"
    return replace(told, group=title, choices=choices, refused=tuple(refused.items()))
