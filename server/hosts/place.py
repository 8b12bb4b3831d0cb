"""Which hosts a pool has, and which of them this one is: from arguments, or from the launcher.

Read in this order, and the first that is there counts:

    arguments               nnodes, node_rank, master_addr, master_port
    torchrun                WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT
    Slurm                   SLURM_NTASKS, SLURM_PROCID, SLURM_LOCALID, SLURM_JOB_NODELIST
    LeaderWorkerSet         LWS_GROUP_SIZE, LWS_WORKER_INDEX, LWS_LEADER_ADDRESS

One process runs on each host; it starts the host's workers itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from coordinator.launcher import Launch, number_in, text_in
from coordinator.secret import ADVICE, SECRET_FILE, SecretError, launcher_secret

from ..config import HEAD_PORT, HOST_SILENCE_SECONDS, LAUNCHERS

_LONGEST_SILENCE = 7.0
"""Seconds. The pool's queues give up after 7.5, its groups after 10, and do not say which host."""


class HostProvisioner(Protocol):
    """Starts the processes of the other hosts, if no launcher has."""

    def start(self, hosts: Hosts, address: str, port: int) -> None:
        """Start the process of one host, replacing an earlier one; does not wait.

        Args:
            hosts: as that host is to see them.
            address, port: where the head listens.
        """

    def problem(self, node: int) -> str:
        """Why the process of a host has ended; ``""`` if it runs, as far as is known."""

    def close(self) -> None:
        """End the processes that are left."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of one pool, and which of them this one is.

    Attributes:
        nnodes: how many hosts there are.
        node_rank: this host's number. 0 is the head: the pool's driver runs there.
        master_addr: the address or name at which this host reaches the head; on the head, one of
            its own addresses that the others can reach.
        master_port: the head's port. 0: the head tells it to the others through torchrun's store.
        secret: the launcher's secret, 16 bytes or more, the same on all hosts. ``None``: what is in
            the file that ``GROUP_COORDINATOR_SECRET_FILE`` names.
        silence_seconds: a host counts as lost when nothing was heard from it for this long, at
            most 7 seconds.
        facts: values by name that must be the same on all hosts that state them; versions are
            always compared.
        told_by: where these values come from, for messages.
        head_works: whether the head runs workers, too.
        provisioner: starts the other hosts' processes; ``None``: a launcher has.

    Raises:
        ValueError: a value is out of range.
        SecretError: there is no secret, it is too short, or other users may read its file.
    """

    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int = HEAD_PORT
    secret: bytes | None = field(default=None, repr=False)
    silence_seconds: float = HOST_SILENCE_SECONDS
    facts: Mapping[str, str] = field(default_factory=dict)
    told_by: str = "the arguments"
    head_works: bool = True
    provisioner: HostProvisioner | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the values, and read the secret."""
        if self.nnodes < 1:
            raise ValueError(f"nnodes must be 1 or more; got {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(f"node_rank must be in 0..{self.nnodes - 1}; got {self.node_rank}")
        if not self.master_addr:
            raise ValueError("master_addr must be the head's address; got ''")
        if not 0 <= self.master_port < 1 << 16:
            raise ValueError(f"master_port must be below 65536; got {self.master_port}")
        if not 0 < self.silence_seconds <= _LONGEST_SILENCE:
            wanted = f"silence_seconds must be more than 0, and {_LONGEST_SILENCE:g} at most"
            raise ValueError(f"{wanted}; got {self.silence_seconds!r}")
        secret = launcher_secret(self.secret)
        if secret is None:
            needed = "a pool over hosts needs a secret that all of them have"
            raise SecretError(f"{needed}: {ADVICE}, and set {SECRET_FILE}=FILE")
        object.__setattr__(self, "secret", secret)

    def ranks_of(self, node: int, n_workers: int) -> range:
        """The ranks of the workers on one host, of ``n_workers`` in all."""
        idle = 0 if self.head_works else 1
        size = n_workers // (self.nnodes - idle)
        return range((node - idle) * size, (node - idle + 1) * size) if node >= idle else range(0)

    @classmethod
    def read(
        cls,
        nnodes: int | None = None,
        node_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> Hosts:
        """Take the arguments, or what torchrun, Slurm or LeaderWorkerSet say.

        Raises:
            ValueError: nobody says it, a part is missing, or the launcher runs several processes on
                a host.
            SecretError: as for the class.
        """
        given = {"nnodes": nnodes, "node_rank": node_rank, "master_addr": master_addr}
        if nnodes is not None and node_rank is not None and master_addr is not None:
            port = HEAD_PORT if master_port is None else master_port
            return cls(nnodes, node_rank, master_addr, port)
        if any(value is not None for value in given.values()):
            missing = ", ".join(name for name, value in given.items() if value is None)
            raise ValueError(f"the hosts are not complete: {missing} is missing as well")
        for name, reader in _ENVIRONMENTS:
            if name in environ:
                found = reader(environ)
                return found if master_port is None else replace(found, master_port=master_port)
        raise ValueError(
            "nobody says which hosts there are: give nnodes, node_rank and master_addr, or start "
            "one process on each host with torchrun, Slurm or a LeaderWorkerSet"
        )

    @classmethod
    def of_torchrun(cls) -> Hosts:
        """What torchrun says.

        Raises:
            ValueError: it did not start this process, or runs several on a host.
            SecretError: as for the class.
        """
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ValueError("torchrun did not start this process: TORCHELASTIC_RUN_ID is not set")
        return _by_torchrun(os.environ)

    @property
    def compared(self) -> dict[str, str]:
        """What has to be the same on all hosts, by name, beside versions."""
        return {"nnodes": str(self.nnodes), **self.facts}

    @property
    def is_head(self) -> bool:
        """Whether this is the host where the pool's driver runs."""
        return self.node_rank == 0


def hosts_of(launcher: str, given: Hosts | None) -> Hosts | None:
    """The hosts of the pool whose driver this process is; ``None``: this one alone.

    Args:
        launcher, given: as for `pool.WorkerPool`.

    Raises:
        ValueError: there is no such launcher, it does not say who is who, or this is not the head.
        SecretError: as for `Hosts`.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}; got {launcher!r}")
    if launcher == "local":
        if given is not None:
            raise ValueError("hosts are given, so launcher must be 'hosts'; got 'local'")
        return None
    found = given or (Hosts.of_torchrun() if launcher == "torchrun" else Hosts.read())
    if not found.is_head:
        raise ValueError(
            f"the pool's driver is on node 0, and this is node {found.node_rank}: "
            "call serve_host here"
        )
    return found


def _by_torchrun(environ: Mapping[str, str]) -> Hosts:
    here = number_in(environ, "LOCAL_WORLD_SIZE", "1")
    if here != 1:
        raise ValueError(
            f"torchrun runs {here} processes on this host: start one with --nproc-per-node 1; "
            "it starts the host's workers itself"
        )
    launch = Launch.from_environment(environ)
    return Hosts(
        nnodes=launch.world_size,
        node_rank=launch.rank,
        master_addr=launch.master_addr,
        # Its own store has the port already, and tells the hosts the head's.
        master_port=0 if launch.hosted else launch.master_port,
        secret=launch.secret,
        told_by="torchrun's environment (WORLD_SIZE, RANK, MASTER_ADDR)",
    )


def _by_slurm(environ: Mapping[str, str]) -> Hosts:
    if number_in(environ, "SLURM_LOCALID", "0") != 0:
        raise ValueError(
            "Slurm runs several tasks on this host: use --ntasks-per-node=1; "
            "the task starts the host's workers itself"
        )
    return Hosts(
        nnodes=number_in(environ, "SLURM_NTASKS"),
        node_rank=number_in(environ, "SLURM_PROCID"),
        master_addr=environ.get("MASTER_ADDR") or first_of(text_in(environ, "SLURM_JOB_NODELIST")),
        master_port=number_in(environ, "MASTER_PORT", str(HEAD_PORT)),
        told_by="Slurm's environment (SLURM_NTASKS, SLURM_PROCID, SLURM_JOB_NODELIST)",
    )


def _by_leader_worker_set(environ: Mapping[str, str]) -> Hosts:
    return Hosts(
        nnodes=number_in(environ, "LWS_GROUP_SIZE"),
        node_rank=number_in(environ, "LWS_WORKER_INDEX"),
        master_addr=text_in(environ, "LWS_LEADER_ADDRESS"),
        master_port=number_in(environ, "MASTER_PORT", str(HEAD_PORT)),
        told_by="the LeaderWorkerSet's environment (LWS_GROUP_SIZE, LWS_WORKER_INDEX)",
    )


_ENVIRONMENTS: Final = (
    ("TORCHELASTIC_RUN_ID", _by_torchrun),
    ("SLURM_PROCID", _by_slurm),
    ("LWS_GROUP_SIZE", _by_leader_worker_set),
)
"""The variable by which each launcher shows, and what reads its environment."""


def first_of(nodes: str) -> str:
    """The first host of a list in Slurm's form, such as ``"gpu[003-010,12],big1"``: ``"gpu003"``.

    Raises:
        ValueError: it begins with no name.
    """
    found = re.match(r"([^\s,\[\]]*)(?:\[(\d+)[^\]]*\])?([^\s,\[\]]*)", nodes)
    name = "".join(part or "" for part in found.groups()) if found else ""
    if not name:
        raise ValueError(f"SLURM_JOB_NODELIST must be a list of hosts; got {nodes!r}")
    return name
