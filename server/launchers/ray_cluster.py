"""Hosts of a pool as tasks of a Ray cluster, one in each bundle of a placement group.

A task runs `serve_host`, which starts its workers, so that they share memory. Ray retries no task:
the pool's ``restart=`` starts new ones. Needs the extra ``ray``.

The pool's secret is an argument of the tasks: any reader of the cluster's objects, which Ray does
not protect, can read it.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shm_broadcast import Deadline

from ..config import RAY_SILENCE_SECONDS
from ..errors import HostError
from ..hosts.place import Hosts

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The Ray cluster of a pool's workers.

    Attributes:
        address: the cluster's address, as for ``ray.init``; ``None``: this process's cluster, that
            of its environment, or a new one.
        placement_group: bundles for equal numbers of workers, in rank order. ``None``: a new group
            with a bundle for each pipeline stage of each replica, spread over nodes, with a CPU
            and, for ``device="cuda"``, a GPU for each worker.
        silence_seconds: as for `Hosts`.
    """

    address: str | None = None
    placement_group: PlacementGroup | None = field(default=None, repr=False)
    silence_seconds: float = RAY_SILENCE_SECONDS

    def reserve(self, n_stages: int, n_workers: int, *, gpus: bool, timeout: float | None) -> Hosts:
        """Connect to the cluster, and reserve ``n_stages`` bundles, or the given placement group.

        Returns the pool's hosts: a head that runs no workers, and one host for each bundle.

        Raises:
            ImportError: Ray is not installed.
            HostError: the cluster has no room in time.
            ValueError: the number of workers is not a multiple of that of bundles.
            ConnectionError: there is no cluster at the address.
        """
        import ray  # noqa: PLC0415 - an extra, which takes a second to import
        from ray.util.placement_group import placement_group  # noqa: PLC0415

        if not ray.is_initialized():
            ray.init(address=self.address, log_to_driver=False)
        group = self.placement_group
        n_bundles = n_stages if group is None else group.bundle_count
        if n_workers % n_bundles:
            raise ValueError(f"{n_bundles} bundles cannot share {n_workers} workers evenly")
        per_bundle = n_workers // n_bundles
        resources = {"CPU": float(per_bundle), **({"GPU": float(per_bundle)} if gpus else {})}
        if group is None:
            group = placement_group([resources] * n_bundles, strategy="SPREAD")
        tasks = _HostTasks(group, resources, owned=self.placement_group is None)
        if not group.wait(Deadline.after(timeout).remaining(at_most=1e6)):
            tasks.close()
            room = f"{n_bundles} x {resources}"
            raise HostError(1, f"the Ray cluster had no room for {room} in {timeout:g} s")
        return Hosts(
            nnodes=n_bundles + 1,
            node_rank=0,
            master_addr=ray.util.get_node_ip_address(),
            master_port=0,
            secret=secrets.token_bytes(),
            silence_seconds=self.silence_seconds,
            head_works=False,
            provisioner=tasks,
            told_by="Ray's placement group",
        )


class _HostTasks:
    """The tasks of one pool; see `hosts.place.HostProvisioner`."""

    def __init__(self, group: PlacementGroup, resources: dict[str, float], *, owned: bool) -> None:
        self._group = group
        self._resources = resources
        self._owned = owned
        self._running: dict[int, Any] = {}

    def start(self, hosts: Hosts, address: str, port: int) -> None:
        """Start the task of host ``hosts.node_rank``, in place of an earlier one."""
        import ray  # noqa: PLC0415
        from ray.util.scheduling_strategies import (  # noqa: PLC0415
            PlacementGroupSchedulingStrategy,
        )

        from ..hosts.host_supervisor import serve_host  # noqa: PLC0415 - loads ZeroMQ

        self._end(hosts.node_rank)
        task = ray.remote(
            num_cpus=self._resources["CPU"],
            num_gpus=self._resources.get("GPU", 0.0),
            max_calls=1,  # in a process of its own
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, hosts.node_rank - 1),
        )(serve_host)
        here = replace(hosts, master_addr=address, master_port=port)
        self._running[hosts.node_rank] = task.remote(here)

    def problem(self, node: int) -> str:
        """Return the reason why a host's task has ended; ``""`` if it runs."""
        import ray  # noqa: PLC0415

        task = self._running.get(node)
        if task is None or not ray.wait([task], timeout=0)[0]:
            return ""
        try:
            ray.get(task)
        except Exception as error:  # noqa: BLE001 - any error of Ray or the task
            return str(error).strip().rpartition("\n")[2]
        return "its task has ended"

    def close(self) -> None:
        """End all tasks, and release the bundles that were reserved here."""
        from ray.util.placement_group import remove_placement_group  # noqa: PLC0415

        for node in tuple(self._running):
            self._end(node)
        if self._owned:
            remove_placement_group(self._group)

    def _end(self, node: int) -> None:
        import ray  # noqa: PLC0415

        if node in self._running:
            ray.cancel(self._running.pop(node), force=True)
