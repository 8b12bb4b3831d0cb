"""The messages between the driver and its workers.

Calls and replies go through the shared-memory queues, pickled, as tuples of their fields: they
carry the user's objects, and a plain tuple is the fastest to pickle. Everything else (start,
progress, failures) goes over each worker's control channel, as JSON: it must arrive even when the
queues cannot be used, because the board is aborted or does not exist yet.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec

from coordinator.begun_in_call import BegunInGroup  # noqa: TC001 - decoded by these types
from coordinator.rank_grid import RankGrid  # noqa: TC001
from coordinator.stores.store_address import StoreAddress  # noqa: TC001
from shm_broadcast import BoardHandle, QueueHandle, SegmentHandle  # noqa: TC001

VOID: Final = "_"
"""The method of an empty call, answered at once. Users cannot call a method of this name."""


class Call(msgspec.Struct, frozen=True, gc=False):
    """Driver to all workers: call this method.

    Attributes:
        number: 1, 2, ... in the order of sending. If a number is left out, because its call was not
            sent, a `VOID` call is next.
        method: the name of the worker's method.
        args: its positional arguments.
        kwargs: its keyword arguments.
        reply_rank: the only rank whose result is wanted; -1: all ranks'.
        stream: 0: an ordinary call. ``n``: give the next item of stream n. ``-n``: close stream n.
        begins: whether the call begins its stream: the method returns the generator.
        trace: the caller's trace context; see `spans`.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply_rank: int = -1
    stream: int = 0
    begins: bool = False
    trace: dict[str, str] | None = None


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Worker to driver: the call is done.

    Attributes:
        number: the call's number.
        begun: the group operations that this rank began in the call.
        value: the result; ``None`` if this rank's is not wanted. Of a stream: see
            `running_streams.RunningStreams.step`.
    """

    number: int
    begun: tuple[BegunInGroup, ...] = ()
    value: Any = None


class Handles(msgspec.Struct, frozen=True):
    """What a worker shares with the driver.

    Attributes:
        calls: the queue that it reads.
        replies: the queue that it writes. ``None``: it makes one, since it is on another host.
        board: the board of its host.
        cancelled: the marks of cancelled calls.
    """

    calls: QueueHandle
    replies: QueueHandle | None = None
    board: BoardHandle | None = None
    cancelled: SegmentHandle | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to worker, once for each generation: everything that the worker needs to take part.

    Attributes:
        generation: 1, 2, ...: how often the workers have met.
        first_call: the number of the generation's first call.
        survives: whether the worker goes on to the next generation when this one breaks.
        rank: the worker's global rank, which is also its member number on the board.
        grid: the grid of ranks.
        dcp: how many ranks share contexts.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``.
        secret: random bytes that only the ranks of this pool know.
        handles: what it shares with the driver; for a worker on another host its host fills the
            memory there in.
        zero_copy: whether large buffers of results stay in shared memory.
        worker: the worker's class as ``"package.module:Class"``.
        worker_kwargs: its keyword arguments, pickled.
        main: how to load the driver's main module, if the class is defined there; see `reference`.
        timeout: seconds for all ranks to meet; ``None``: for ever.
        store: where the ranks of several hosts meet; ``None``: at the driver's meeting.
        address: the worker's host's address, if the driver is on another host; its host fills it
            in.
        spans: where it records its spans, see `spans.record`; ``None``: nowhere.
        name: the pool's; see `PoolConfig.name`.
        cores: those that it is to be bound to; ``()``: none. Its host fills it in.
    """

    generation: int
    first_call: int
    survives: bool
    rank: int
    grid: RankGrid
    dcp: int
    device: str
    secret: bytes
    handles: Handles
    zero_copy: bool
    worker: str
    worker_kwargs: bytes
    main: dict[str, bytes] | None
    timeout: float | None
    store: StoreAddress | None = None
    address: str = ""
    spans: str | None = None
    name: str = ""
    cores: tuple[int, ...] = ()


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Driver to a worker that failed a call: go on with the next one.

    Attributes:
        number: the failed call's number.
    """

    number: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: the process runs and can show its stack.

    Attributes:
        pid: its process id.
    """

    pid: int


class WorkProgress(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: how far a long piece of work has come.

    Attributes:
        done: units of work that are done.
        total: units of work in all.
        what: what the work is, as text.
    """

    done: int
    total: int
    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: the worker is built and takes calls.

    Attributes:
        replies: the queue that it writes, if it has made it.
    """

    replies: QueueHandle | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: an exception was raised while the worker started, or in a call.

    Attributes:
        number: the call's number; 0 during the start.
        begun: the group operations that this rank began in the call.
        kind: the name of the exception's class, with its module unless it is built in.
        message: its text.
        traceback: its traceback.
        consequence: whether it was raised only because another rank has failed.
        diverged: whether it is a DivergenceError: another rank called a different operation.
        exception: the exception itself, pickled; ``b""`` if it cannot be pickled.
    """

    number: int
    begun: tuple[BegunInGroup, ...]
    kind: str
    message: str
    traceback: str
    consequence: bool = False
    diverged: bool = False
    exception: bytes = b""


class Left(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: it has left all groups and queues, and waits for another `Start`."""


FromWorker: TypeAlias = Hello | WorkProgress | Ready | Failed | Left
