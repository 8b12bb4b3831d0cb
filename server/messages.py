"""What the driver and its workers say to each other.

Calls and replies travel through shared memory, pickled, as tuples of their fields: they carry the
user's objects, and a plain tuple is the quickest to pickle. All else
(how to start, progress, failures) travels over each worker's control channel, as JSON: it must get
through when the queues cannot be used, because the board is aborted or not there yet.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class Call(msgspec.Struct, frozen=True, gc=False):
    """Driver to all workers: call this method.

    Attributes:
        number: 1, 2, … in the order of the queue.
        method: the worker's method.
        args: its positional arguments.
        kwargs: its keyword arguments.
        reply_rank: the only rank whose result is wanted; -1: all are.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply_rank: int = -1


class Reply(msgspec.Struct, frozen=True, gc=False):
    """Worker to driver: the call is done.

    Attributes:
        number: the call's.
        operations: how many group operations this rank began in it.
        value: the result; ``None`` where it is not wanted.
    """

    number: int
    operations: int
    value: Any = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Driver to worker, once: who you are and what to be.

    Attributes:
        rank: its global rank; it is this member of the board.
        tp, pp, dp: the grid of ranks.
        device: ``"cpu"`` or one such as ``"cuda:0"``.
        store_host, store_port: where the ranks meet.
        handles: of the pool's board, the queue to read and the queue to write; pickled.
        worker: the worker's class as ``"package.module:Class"``.
        worker_kwargs: its keyword arguments, pickled.
        main: how to load the driver's main module, where the class is defined in that.
        timeout: seconds for all ranks to meet.
    """

    rank: int
    tp: int
    pp: int
    dp: int
    device: str
    store_host: str
    store_port: int
    handles: bytes
    worker: str
    worker_kwargs: bytes
    main: dict[str, str] | None
    timeout: float | None


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Driver to a worker that failed a call: go on with the next one.

    Attributes:
        number: the failed call's.
    """

    number: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: the process runs and can show its stack."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: how far a long piece of work has come.

    Attributes:
        done: how much is done.
        total: of how much.
        what: what it is.
    """

    done: int
    total: int
    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: the worker is built and takes calls."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Worker to driver: an exception, in the start or in a call.

    Attributes:
        number: the call's; 0 in the start.
        operations: how many group operations this rank began in the call.
        kind: the name of the exception's class, with its module unless it is built in.
        message: its text.
        traceback: its traceback.
        consequence: it only says that another rank failed.
        orderly: the rank has refused the call, and no other one waits for it.
        exception: the exception itself, pickled; ``b""`` where it cannot be.
    """

    number: int
    operations: int
    kind: str
    message: str
    traceback: str
    consequence: bool = False
    orderly: bool = False
    exception: bytes = b""


FromWorker: TypeAlias = Hello | Progress | Ready | Failed
