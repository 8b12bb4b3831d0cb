"""iceoryx2's publish-subscribe as a queue of pickled objects: the raw anchor for small messages.

Run as a child of `benchmarks.message_queue`. An object is pickled and copied into a sample of bytes
that iceoryx2 lends out, and unpickled where the sample lies: samples and no other of its patterns,
since requests and responses have one client for one answer, and its blackboard keeps the last value
only. Two ways to wait for a sample, as its examples have them:

    polling   look again and again, and give the core up in between: the least latency it has
    event     its event service beside the samples, which wakes who sleeps: what can be left idle

A publisher waits while a reader's buffer is full, so that nothing is lost, as in every other queue.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import pickle
import time
from typing import Any, Final

import iceoryx2

from benchmarks.queue_base import System, obey_input, serve

READERS = mp.get_context("forkserver")
READERS.set_forkserver_preload(["benchmarks.queue_iceoryx"])
BUFFERED: Final = 1024
"""How many messages may wait for a reader."""
MESSAGE_BYTES: Final = 4096
MOST_READERS: Final = 8
END_SECONDS: Final = 10.0
EVENT: Final = "iceoryx2 (event)"


class Node:
    """A process's part in a service of each pattern, by name; the event is not always used."""

    def __init__(self, name: str, *, wakes: bool) -> None:
        builder = iceoryx2.NodeBuilder.new()
        disabled = iceoryx2.SignalHandlingMode.Disabled
        self._node = builder.signal_handling_mode(disabled).create(iceoryx2.ServiceType.Ipc)
        self.samples = (
            self._service(name)
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(BUFFERED)
            .max_publishers(MOST_READERS)
            .open_or_create()
        )
        self.events = self._service(name).event().open_or_create() if wakes else None

    def _service(self, name: str) -> Any:
        return self._node.service_builder(iceoryx2.ServiceName.new(name))


class Outlet:
    """Sends objects to all readers of a name."""

    def __init__(self, name: str, *, wakes: bool) -> None:
        self._node = Node(name, wakes=wakes)
        self._publisher = (
            self._node.samples.publisher_builder()
            .initial_max_slice_len(MESSAGE_BYTES)
            .backpressure_strategy(iceoryx2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        events = self._node.events
        self._bell = events and events.notifier_builder().create()

    def put(self, message: Any) -> None:
        data = pickle.dumps(message, 5)
        sample = self._publisher.loan_slice_uninit(len(data))
        ctypes.memmove(sample.payload_ptr, data, len(data))
        sample.assume_init().send()
        if self._bell is not None:
            self._bell.notify()

    def wait_for_readers(self, n: int) -> None:
        while self._node.samples.dynamic_config.number_of_subscribers < n:
            time.sleep(0.01)


class Inlet:
    """Receives them, from all senders of a name."""

    def __init__(self, name: str, *, wakes: bool) -> None:
        self._node = Node(name, wakes=wakes)
        self._subscriber = self._node.samples.subscriber_builder().create()
        events = self._node.events
        self._bell = events and events.listener_builder().create()

    def get(self) -> Any:
        while (sample := self._subscriber.receive()) is None:
            if self._bell is None:
                os.sched_yield()
            else:
                self._bell.blocking_wait()
        message = pickle.loads(sample.payload().as_memory_view())
        sample.delete()
        return message

    def wait_for_senders(self, n: int) -> None:
        while self._node.samples.dynamic_config.number_of_publishers < n:
            time.sleep(0.01)


class Iceoryx(System):
    """A service to the readers, and one back."""

    carries_tensors = False

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, n_readers: int) -> None:
        wakes = self.name == EVENT
        forth, back = (f"{way} {os.getpid()} {self.name}" for way in ("forth", "back"))
        self._n = n_readers
        self._outlet, self._inlet = Outlet(forth, wakes=wakes), Inlet(back, wakes=wakes)
        self._processes = [
            READERS.Process(target=read, args=(forth, back, wakes)) for _ in range(n_readers)
        ]
        for process in self._processes:
            process.start()
        self._outlet.wait_for_readers(n_readers)
        self._inlet.wait_for_senders(n_readers)

    def send(self, command: str, payload: Any) -> None:
        self._outlet.put((command, payload))

    def replies(self) -> list[Any]:
        return [self._inlet.get() for _ in range(self._n)]

    def stop(self) -> None:
        self.send("stop", None)
        for process in self._processes:
            process.join(END_SECONDS)


def read(forth: str, back: str, wakes: bool) -> None:
    answers, commands = Outlet(back, wakes=wakes), Inlet(forth, wakes=wakes)
    answers.wait_for_readers(1)
    serve(commands.get, answers.put)


def main() -> None:
    """Answer requests until the input ends."""
    iceoryx2.set_log_level(iceoryx2.LogLevel.Error)
    obey_input(Iceoryx)


if __name__ == "__main__":
    main()
