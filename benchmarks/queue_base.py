"""What every measured queue does: one driver broadcasts, N readers obey and reply.

Only the standard library, so that a peer's interpreter can import it too.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from benchmarks.child import ANSWER

if TYPE_CHECKING:
    from collections.abc import Callable

BUSY_WORKS = ("echo", "flood", "one_way")
WORKS = (*BUSY_WORKS, "idle_cpu", "cost", "wake")


class System(ABC):
    """One message queue under test, seen from the driver."""

    name: str
    carries_tensors = True
    works = WORKS

    @abstractmethod
    def start(self, n_readers: int) -> None:
        """Start the readers, each in `serve`."""

    @abstractmethod
    def send(self, command: str, payload: Any) -> None:
        """Broadcast a command to all readers."""

    @abstractmethod
    def replies(self) -> list[Any]:
        """One reply from each reader."""

    @abstractmethod
    def stop(self) -> None:
        """End the readers."""

    def resume(self) -> None:  # noqa: B027 - most need not
        """Get ready to work; called in a child, before each work."""

    def rest(self) -> None:  # noqa: B027
        """Leave the cores to others; called in a child, after each work."""

    def echo(self, payload: Any, count: int) -> list[float]:
        """Seconds of each round trip of ``payload``."""
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            self.send("echo", payload)
            replies = self.replies()
            samples.append(time.perf_counter() - started)
        require(all(reply == payload for reply in replies), "the echo differs")
        return samples

    def flood(self, payload: Any, count: int) -> list[float]:
        """Seconds for each message of a run of ``count``, acknowledged once at the end."""
        started = time.perf_counter()
        for _ in range(count - 1):
            self.send("drop", payload)
        self.send("ack", payload)
        self.replies()
        return [(time.perf_counter() - started) / count]

    def one_way(self, payload: Any, count: int) -> list[float]:
        """Seconds from sending ``payload`` until each reader has acknowledged its last value."""
        samples = []
        for _ in range(count):
            started = time.perf_counter()
            self.send("last", payload)
            replies = self.replies()
            samples.append(time.perf_counter() - started)
        require(all(reply == float(payload[-1]) for reply in replies), "the last value differs")
        return samples

    def idle_cpu(self, seconds: float) -> list[float]:
        """The largest share of a core that a reader used while nothing came."""
        self.send("cpu", None)
        before = self.replies()
        time.sleep(seconds)
        self.send("cpu", None)
        return [max(b - a for a, b in zip(before, self.replies(), strict=True)) / seconds]

    def cost(self, payload: Any, pause: float, count: int) -> list[float]:
        """CPU seconds of all processes for 1,000 round trips, ``pause`` seconds between two."""

        def spent() -> float:
            self.send("cpu", None)
            return time.process_time() + sum(self.replies())

        before = spent()
        for _ in range(count):
            if pause:
                time.sleep(pause)
            self.echo(payload, 1)
        return [1000 * (spent() - before) / count]

    def wake(self, payload: Any, idle: float, count: int) -> list[float]:
        """Seconds of a round trip after ``idle`` seconds of silence."""
        samples = []
        for _ in range(count):
            time.sleep(idle)
            samples += self.echo(payload, 1)
        return samples


def require(holds: bool, otherwise: str) -> None:
    """Raise if an answer is wrong: a figure for a wrong answer is worth nothing."""
    if not holds:
        raise RuntimeError(otherwise)


def serve(receive: Callable[[], tuple[str, Any]], reply: Callable[[Any], None]) -> None:
    """A reader's loop."""
    while True:
        command, payload = receive()
        if command == "echo":
            reply(payload)
        elif command == "ack":
            reply(None)
        elif command == "last":
            reply(float(payload[-1]))
        elif command == "cpu":
            reply(time.process_time())
        elif command == "stop":
            return
        payload = None  # a tensor is not held while the next message is waited for


def obey_input(make: Callable[[str], System]) -> None:
    """A child's loop: answer the requests of `benchmarks.remote.Remote` until the input ends.

    Args:
        make: a system by its name.
    """
    running: dict[str, System] = {}
    try:
        for line in sys.stdin:
            request = json.loads(line)
            name, work = request["system"], request["do"]
            if work == "start":
                system = make(name)
                system.start(request["readers"])
                running[name] = system
                answer: Any = []
            else:
                given = [payload_for(request["payload"])] if request["payload"] else []
                system = running[name]
                system.resume()
                answer = getattr(system, work)(*given, *request["arguments"])
                system.rest()
            print(ANSWER + json.dumps(answer), flush=True)
    finally:
        for system in running.values():
            system.stop()


def payload_for(name: str) -> Any:
    """The object that ``name`` stands for, the same in every interpreter."""
    if name == "dict":
        return {
            "request_id": "chatcmpl-4f0d2a",
            "step": 1041,
            "token_ids": list(range(100, 140)),
            "temperature": 0.7,
            "top_p": 0.95,
            "finished": False,
            "stop": ["</s>", "<|im_end|>"],
        }
    if name == "ints":
        return list(range(1000, 1256))
    import torch

    mebibytes = int(name.removesuffix("MiB"))
    return torch.arange(mebibytes << 18, dtype=torch.int32).view(torch.float32)
