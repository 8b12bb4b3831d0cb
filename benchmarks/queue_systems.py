"""The queues measured in this interpreter: ours, the standard library's, zmq, gloo."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
import torch.distributed as dist
import zmq

from benchmarks.queue_base import BUSY_WORKS, WORKS, System, serve
from shm_broadcast import Board, BoardHandle, MessageQueue, QueueHandle

READERS = mp.get_context("forkserver")
READERS.set_forkserver_preload(["benchmarks.queue_systems"])


SLOWER = 20
"""How many times fewer messages gloo is given, to take as long as the others."""


class Command(msgspec.Struct, array_like=True):
    """A typed message with the fields of the benchmark's dict."""

    command: str
    request_id: str = ""
    step: int = 0
    token_ids: list[int] = []
    temperature: float = 0.0
    top_p: float = 0.0
    finished: bool = False
    stop: list[str] = []
    number: float = 0.0


class Spawned(System):
    """A system whose readers are spawned processes."""

    def start_readers(self, target: Any, arguments: list[tuple[Any, ...]]) -> None:
        self._processes = [READERS.Process(target=target, args=each) for each in arguments]
        for process in self._processes:
            process.start()

    def stop(self) -> None:
        self.send("stop", None)
        for process in self._processes:
            process.join(30)


class Ours(Spawned):
    """Our queue with its default codec."""

    name = "ours"
    options: ClassVar[dict[str, Any]] = {}

    def start(self, n_readers: int) -> None:
        self._board = Board.create(1 + n_readers, member=0, name="benchmark")
        readers = range(1, n_readers + 1)
        self._queue = MessageQueue.on_board(self._board, 0, readers, **self.options)
        self._answers = [
            MessageQueue.on_board(self._board, reader, [0], **self._answer_options())
            for reader in readers
        ]
        handle, board = self._queue.export_handle(), self._board.handle()
        self.start_readers(
            read_ours,
            [
                (type(self), board, handle, answer.export_handle(), reader)
                for reader, answer in zip(readers, self._answers, strict=True)
            ],
        )
        self._queue.wait_until_ready(60)

    def send(self, command: str, payload: Any) -> None:
        self._queue.enqueue((command, payload))

    def replies(self) -> list[Any]:
        return [answer.dequeue(60) for answer in self._answers]

    def stop(self) -> None:
        super().stop()
        for queue in (self._queue, *self._answers):
            queue.shutdown()
        self._board.close()

    @classmethod
    def _answer_options(cls) -> dict[str, Any]:
        return {key: value for key, value in cls.options.items() if key == "type"}

    @classmethod
    def serve(cls, queue: MessageQueue, answer: MessageQueue) -> None:
        serve(queue.dequeue, answer.enqueue)


def read_ours(
    system: type[Ours], board: BoardHandle, queue: QueueHandle, answer: QueueHandle, reader: int
) -> None:
    torch.set_num_threads(1)
    options = system._answer_options()
    with Board.attach(board, reader) as joined:
        system.serve(
            MessageQueue.attach(queue, joined, **options),
            MessageQueue.attach(answer, joined, **options),
        )


class OursZeroCopy(Ours):
    """Our queue whose readers use tensors where they lie."""

    name = "ours (zero copy)"
    works = BUSY_WORKS
    options: ClassVar[dict[str, Any]] = {"zero_copy": True}


class OursTyped(Ours):
    """Our queue with a message type."""

    name = "ours (typed)"
    carries_tensors = False
    options: ClassVar[dict[str, Any]] = {"type": Command}

    def send(self, command: str, payload: Any) -> None:
        fields = payload if isinstance(payload, dict) else {"token_ids": payload or []}
        self._queue.enqueue(Command(command, **fields))

    def replies(self) -> list[Any]:
        return [_plain(answer.dequeue(60)) for answer in self._answers]

    @classmethod
    def serve(cls, queue: MessageQueue, answer: MessageQueue) -> None:
        def receive() -> tuple[str, Any]:
            message = queue.dequeue()
            return message.command, message

        def reply(result: Any) -> None:
            if not isinstance(result, Command):
                result = Command("number", number=result or 0.0)
            answer.enqueue(result)

        serve(receive, reply)


def _plain(message: Command) -> Any:
    if message.command == "number":
        return message.number
    if not message.request_id:
        return message.token_ids
    fields = msgspec.structs.asdict(message)
    return {key: fields[key] for key in fields if key not in ("command", "number")}


class Pipe(Spawned):
    """multiprocessing.Pipe, one for each reader."""

    name = "multiprocessing.Pipe"  # torch teaches it to share tensors instead of sending them

    def start(self, n_readers: int) -> None:
        pairs = [READERS.Pipe() for _ in range(n_readers)]
        self._ends = [ours for ours, _ in pairs]
        self.start_readers(read_pipe, [(theirs,) for _, theirs in pairs])

    def send(self, command: str, payload: Any) -> None:
        for end in self._ends:
            end.send((command, payload))

    def replies(self) -> list[Any]:
        return [end.recv() for end in self._ends]


def read_pipe(end: Any) -> None:
    serve(end.recv, end.send)


class Queue(Spawned):
    """multiprocessing.Queue, two for each reader."""

    name = "multiprocessing.Queue"
    works = BUSY_WORKS
    carries_tensors = False

    def start(self, n_readers: int) -> None:
        self._there = [READERS.Queue() for _ in range(n_readers)]
        self._back = [READERS.Queue() for _ in range(n_readers)]
        self.start_readers(read_queue, list(zip(self._there, self._back, strict=True)))

    def send(self, command: str, payload: Any) -> None:
        for queue in self._there:
            queue.put((command, payload))

    def replies(self) -> list[Any]:
        return [queue.get() for queue in self._back]


def read_queue(there: Any, back: Any) -> None:
    serve(there.get, back.put)


class ZmqPickle(Spawned):
    """zmq over ipc, PUB to the readers and PULL from them, pickled."""

    name = "zmq ipc (pickle)"
    works = BUSY_WORKS
    encode = staticmethod(lambda message: pickle.dumps(message, 5))
    decode = staticmethod(pickle.loads)

    def start(self, n_readers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        there, back = (f"ipc://{self._folder.name}/{way}" for way in ("there", "back"))
        self._context = zmq.Context()
        self._there, self._back = self._context.socket(zmq.XPUB), self._context.socket(zmq.PULL)
        self._there.setsockopt(zmq.XPUB_VERBOSE, 1)
        for socket in (self._there, self._back):
            socket.set_hwm(0)
        self._there.bind(there)
        self._back.bind(back)
        self._n = n_readers
        self.start_readers(read_zmq, [(type(self), there, back)] * n_readers)
        for _ in range(n_readers):
            self._there.recv()  # a subscription

    def send(self, command: str, payload: Any) -> None:
        self._there.send(self.encode((command, payload)))

    def replies(self) -> list[Any]:
        return [self.decode(self._back.recv()) for _ in range(self._n)]

    def stop(self) -> None:
        super().stop()
        self._context.destroy(0)
        self._folder.cleanup()


class ZmqMsgspec(ZmqPickle):
    """The same with msgspec's msgpack."""

    name = "zmq ipc (msgspec)"
    works = WORKS
    carries_tensors = False
    encode = staticmethod(msgspec.msgpack.Encoder().encode)
    decode = staticmethod(msgspec.msgpack.Decoder().decode)


def read_zmq(system: type[ZmqPickle], there: str, back: str) -> None:
    context = zmq.Context()
    commands, answers = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    for socket in (commands, answers):
        socket.set_hwm(0)
    answers.connect(back)
    commands.connect(there)
    commands.subscribe(b"")
    serve(
        lambda: tuple(system.decode(commands.recv())),
        lambda result: answers.send(system.encode(result)),
    )
    context.destroy(1000)


class Gloo(Spawned):
    """torch.distributed's broadcast_object_list over gloo."""

    name = "gloo broadcast_object_list"
    works = BUSY_WORKS

    def echo(self, payload: Any, count: int) -> list[float]:
        return super().echo(payload, max(count // SLOWER, 1))

    def flood(self, payload: Any, count: int) -> list[float]:
        return super().flood(payload, max(count // SLOWER, 1))

    def start(self, n_readers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "store")
        self._n = n_readers
        self.start_readers(read_gloo, [(path, rank, n_readers) for rank in range(1, n_readers + 1)])
        join_gloo(path, 0, n_readers)

    def send(self, command: str, payload: Any) -> None:
        dist.broadcast_object_list([(command, payload)], src=0)

    def replies(self) -> list[Any]:
        boxes: list[list[Any]] = [[None] for _ in range(self._n)]
        for rank, box in enumerate(boxes, start=1):
            dist.broadcast_object_list(box, src=rank)
        return [box[0] for box in boxes]

    def stop(self) -> None:
        super().stop()
        dist.destroy_process_group()
        self._folder.cleanup()


def join_gloo(path: str, rank: int, n_readers: int) -> None:
    store = dist.FileStore(path, n_readers + 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_readers + 1)


def read_gloo(path: str, rank: int, n_readers: int) -> None:
    join_gloo(path, rank, n_readers)

    def receive() -> tuple[str, Any]:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def reply(result: Any) -> None:
        for other in range(1, n_readers + 1):
            dist.broadcast_object_list([result], src=other)

    serve(receive, reply)
    dist.destroy_process_group()


SYSTEMS: tuple[type[System], ...] = (
    Ours,
    OursTyped,
    OursZeroCopy,
    Pipe,
    Queue,
    ZmqPickle,
    ZmqMsgspec,
    Gloo,
)
