"""Actors of Ray and of Monarch whose method does nothing, called all at once.

Run as a child of `benchmarks.pool`. A system's readers are its actors; what they are sent is left
out, since a call that does nothing has no arguments.
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from benchmarks.queue_base import System, obey_input

if TYPE_CHECKING:
    from collections.abc import Mapping

RAY_MEMORY = 200 << 20
"""Bytes for Ray's objects: without it, Ray takes a third of the machine's."""


class Actors(System):
    """Actors that are called, all of them, and then waited for."""

    works = ("echo", "wake")

    def send(self, command: str, payload: Any) -> None:  # noqa: ARG002 - nothing is carried
        self._pending = self.begin()

    def replies(self) -> list[Any]:
        return self.finish(self._pending)

    @abstractmethod
    def begin(self) -> Any:
        """Call them all."""

    @abstractmethod
    def finish(self, pending: Any) -> list[Any]:
        """Their results."""


class RayActors(Actors):
    """Ray's actors, called remotely one by one."""

    name = "Ray actors"

    def start(self, n_readers: int) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(
                num_cpus=64,  # so many actors may run, whatever the machine has
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=RAY_MEMORY,
                _temp_dir=tempfile.gettempdir(),
            )
        self._ray = ray
        self._actors = [ray.remote(Nothing).remote() for _ in range(n_readers)]
        ray.get([actor.no_op.remote() for actor in self._actors])

    def begin(self) -> Any:
        return [actor.no_op.remote() for actor in self._actors]

    def finish(self, pending: Any) -> list[Any]:
        results: list[Any] = self._ray.get(pending)
        return results

    def stop(self) -> None:
        self._ray.shutdown()


class RayGraph(RayActors):
    """The same actors as a compiled graph: one input to all, an output of each."""

    name = "Ray's compiled graph"

    def resume(self) -> None:
        from ray.dag import DAGContext, InputNode, MultiOutputNode

        # A look for an output that ends without one is never made up for: the graph hangs. They
        # end after 0.1 s by default, which the first outputs, or a busy machine, need.
        context = DAGContext.get_current()
        context.read_iteration_timeout = context.get_timeout = 60.0
        with InputNode() as given:
            graph = MultiOutputNode([actor.no_op.bind(given) for actor in self._actors])
        self._graph = graph.experimental_compile()
        self.finish(self.begin())

    def rest(self) -> None:
        self._graph.teardown()  # its actors spin as long as it is there

    def begin(self) -> Any:
        return self._graph.execute(None)


class Monarch(Actors):
    """Monarch's actors, one in each process of a mesh, called as one."""

    name = "Monarch actors"

    def start(self, n_readers: int) -> None:
        from monarch.actor import Actor, endpoint, shutdown_context, this_host

        class Idle(Actor):  # type: ignore[misc]
            @endpoint  # type: ignore[untyped-decorator]
            def no_op(self) -> None:
                """Do nothing."""

        self._shut_down = shutdown_context
        self._mesh = this_host().spawn_procs({"gpus": n_readers})
        self._actors = self._mesh.spawn("idle", Idle)
        self.finish(self.begin())

    def begin(self) -> Any:
        return self._actors.no_op.call()

    def finish(self, pending: Any) -> list[Any]:
        return list(pending.get().values())

    def stop(self) -> None:
        self._shut_down().get()


class Nothing:
    """An actor with a method that does nothing."""

    def no_op(self, *_: object) -> None:
        """Do nothing."""


SYSTEMS: Mapping[str, type[Actors]] = {each.name: each for each in (RayActors, RayGraph, Monarch)}


def main() -> None:
    """Answer requests until the input ends."""
    obey_input(lambda name: SYSTEMS[name]())


if __name__ == "__main__":
    main()
