"""What is measured, here or in a child: the driver's side, the same for both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.queue_base import WORKS, payload_for

if TYPE_CHECKING:
    from benchmarks.child import Child
    from benchmarks.queue_base import System


class Local:
    """A system of this interpreter."""

    def __init__(self, system: System, n_readers: int) -> None:
        self.name = system.name
        self.carries_tensors = system.carries_tensors
        self.works = system.works
        self._system = system
        system.start(n_readers)

    def ask(self, work: str, payload: str | None, *arguments: Any) -> list[float]:
        """Samples of a work in seconds."""
        given = () if payload is None else (payload_for(payload),)
        samples: list[float] = getattr(self._system, work)(*given, *arguments)
        return samples

    def stop(self) -> None:
        """End the readers."""
        self._system.stop()


class Remote:
    """A system of a child that is in `benchmarks.queue_base.obey_input`; it may have others.

    Args:
        name: the system's.
        child: it is closed with this.
        n_readers: how many readers to start.
        works: what it can do.
        carries_tensors: whether it takes part where messages are large.
    """

    def __init__(
        self,
        name: str,
        child: Child,
        n_readers: int,
        works: tuple[str, ...] = WORKS,
        *,
        carries_tensors: bool = True,
    ) -> None:
        self.name = name
        self.works = works
        self.carries_tensors = carries_tensors
        self.child = child
        child.tell({"system": name, "do": "start", "readers": n_readers})

    def wait_started(self) -> None:
        """Wait until its readers are there.

        Raises:
            PeerError: it cannot start them.
        """
        self.child.answer()

    def ask(self, work: str, payload: str | None, *arguments: Any) -> list[float]:
        """Samples of a work in seconds.

        Raises:
            PeerError: it has ended, or does not answer.
        """
        request = {"system": self.name, "do": work, "payload": payload, "arguments": arguments}
        samples: list[float] = self.child.ask(request)
        return samples

    def stop(self) -> None:
        """End the child."""
        self.child.close()
