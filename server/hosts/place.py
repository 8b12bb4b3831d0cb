"""The hosts of a pool, and this host's number: from arguments, or from the launcher.

The first complete source counts, in this order:

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
"""Seconds. Queues time out after 7.5 and groups after 10, with errors that name no host."""


class HostProvisioner(Protocol):
    """Starts the processes of the other hosts, in place of a launcher."""

    def start(self, hosts: Hosts, address: str, port: int) -> None:
        """Start the process of one host, replacing an earlier one; does not wait.

        ``hosts`` are its arguments; the head listens at ``address`` and ``port``.
        """

    def problem(self, node: int) -> str:
        """Return the reason why a host's process has ended; ``""`` if none is known."""

    def close(self) -> None:
        """End the processes."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of one pool, and this host's number.

    Attributes:
        nnodes: the number of hosts.
        node_rank: this host's number. 0 is the head: the pool's driver runs there.
        master_addr: the address or name at which this host reaches the head; on the head, one of
            its own addresses that the others can reach.
        master_port: the head's port. 0: the head publishes it in torchrun's store.
        secret: the launcher's secret, 16 bytes or more, the same on all hosts. ``None``: the
            content of the file ``GROUP_COORDINATOR_SECRET_FILE``.
        silence_seconds: seconds without a message after which a host counts as lost, at most 7.
        facts: values by name that must be equal on all hosts that state them; versions are
            always compared.
        told_by: the source of these values, for messages.
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
            limits = f"silence_seconds must be more than 0, and {_LONGEST_SILENCE:g} at most"
            raise ValueError(f"{limits}; got {self.silence_seconds!r}")
        secret = launcher_secret(self.secret)
        if secret is None:
            need = "a pool over hosts needs a secret that all of them have"
            raise SecretError(f"{need}: {ADVICE}, and set {SECRET_FILE}=FILE")
        object.__setattr__(self, "secret", secret)

    def ranks_of(self, node: int, n_workers: int) -> range:
        """Return the ranks of the workers on one host, of ``n_workers`` in all."""
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
        """Return the hosts of the arguments, or of torchrun, Slurm or LeaderWorkerSet.

        Raises:
            ValueError: no source, a part is missing, or a launcher runs several processes on a
                host.
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
                hosts = reader(environ)
                return hosts if master_port is None else replace(hosts, master_port=master_port)
        raise ValueError(
            "the pool's hosts are not given: give nnodes, node_rank and master_addr, or start "
            "one process on each host with torchrun, Slurm or a LeaderWorkerSet"
        )

    @classmethod
    def of_torchrun(cls) -> Hosts:
        """Return the hosts of torchrun's environment; raise as `read`."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ValueError("torchrun did not start this process: TORCHELASTIC_RUN_ID is not set")
        return _by_torchrun(os.environ)

    @property
    def compared(self) -> dict[str, str]:
        """Return the values that must be equal on all hosts, by name, without versions."""
        return {"nnodes": str(self.nnodes), **self.facts}

    @property
    def is_head(self) -> bool:
        """Return whether the pool's driver runs on this host."""
        return self.node_rank == 0


def hosts_of(launcher: str, given: Hosts | None) -> Hosts | None:
    """Return the hosts of this driver's pool; ``None``: this host alone.

    Raises as `Hosts.read`, and ValueError for an unknown launcher, or if this is not the head.
    """
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)}; got {launcher!r}")
    if launcher == "local":
        if given is not None:
            raise ValueError("hosts are given, so launcher must be 'hosts'; got 'local'")
        return None
    hosts = given or (Hosts.of_torchrun() if launcher == "torchrun" else Hosts.read())
    if not hosts.is_head:
        raise ValueError(
            f"the pool's driver is on node 0, and this is node {hosts.node_rank}: "
            "call serve_host here"
        )
    return hosts


def _by_torchrun(environ: Mapping[str, str]) -> Hosts:
    n_local = number_in(environ, "LOCAL_WORLD_SIZE", "1")
    if n_local != 1:
        raise ValueError(
            f"torchrun runs {n_local} processes on this host: start one with --nproc-per-node 1; "
            "it starts the host's workers itself"
        )
    launch = Launch.from_environment(environ)
    return Hosts(
        nnodes=launch.world_size,
        node_rank=launch.rank,
        master_addr=launch.master_addr,
        # torchrun's own store uses the port; the head publishes another one there.
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
"""By launcher: the variable that indicates it, and the reader of its environment."""


def first_of(nodes: str) -> str:
    """Return the first host of Slurm's list, such as ``"gpu003"`` of ``"gpu[003-010,12],big1"``."""
    match = re.match(r"([^\s,\[\]]*)(?:\[(\d+)[^\]]*\])?([^\s,\[\]]*)", nodes)
    name = "".join(part or "" for part in match.groups()) if match else ""
    if not name:
        raise ValueError(f"SLURM_JOB_NODELIST must be a list of hosts; got {nodes!r}")
    return name
