"""Workers for the pool's tests; every pool's processes import this module."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from server.errors import CallRefusedError
from shm_broadcast import DivergenceError, GroupAbortedError, GroupTimeoutError
from tests.patience import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from coordinator import GroupCoordinator
    from server.pool import WorkerPool
    from server.worker import WorkerContext
    from shm_broadcast import MemberStatus


class BadInputError(ValueError):
    pass


class UnpicklableError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Unpicklable:
    def __reduce__(self) -> NoReturn:
        raise TypeError("this cannot be pickled")


class Undecodable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


class Leaving:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, ("left when unpickled",)


async def promised() -> Any:
    yield 1


async def promise() -> int:
    return 1


def yielded() -> Iterator[int]:
    yield 1


MADE: dict[str, Callable[[], Any]] = {
    "unpicklable": Unpicklable,
    "undecodable": Undecodable,
    "leaving": Leaving,
    "lambda": lambda: lambda: 1,
    "generator": yielded,
    "coroutine": promise,
    "asynchronous generator": promised,
}
"""What a worker's method may return that cannot be sent, or not be restored."""


def pids_of(pool: WorkerPool) -> list[int]:
    return [pid for _, pid in pool.collective_rpc("where")]


def others_of(group: GroupCoordinator) -> list[MemberStatus]:
    """What the other members of a group were last seen doing."""
    return [each for each in group.status() if each.pid != os.getpid()]


@dataclass(frozen=True)
class Gate:
    """Holds workers until a test lets them go; a folder of its own, for it goes with calls."""

    folder: Path

    def reached(self, rank: int) -> bool:
        return (self.folder / str(rank)).exists()

    def open(self) -> None:
        (self.folder / "open").touch()

    def pass_through(self, rank: int) -> None:
        (self.folder / str(rank)).touch()
        until((self.folder / "open").exists)


class Worker:
    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        self.context = context
        self.groups = context.groups
        self.rank = context.groups.world.rank
        self.kwargs = kwargs
        self.seen: list[int] = []

    def echo(self, value: Any = None) -> Any:
        return value

    def given(self) -> dict[str, Any]:
        return self.kwargs

    def by_name(self, **values: Any) -> dict[str, Any]:
        return values

    def by_name_in_turn(self, **values: Any) -> Iterator[tuple[str, Any]]:
        yield from values.items()

    def where(self) -> tuple[int, int]:
        return self.rank, os.getpid()

    def environment(self) -> dict[str, Any]:
        return {
            "path": sys.path,
            "folder": str(Path.cwd()),
            "device": self.context.device,
            "threads": torch.get_num_threads(),
            "collects": gc.isenabled(),
            "waiting": (os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT")),
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "session": os.getsid(0),
        }

    def python_options(self) -> tuple[int, bool, bool]:
        return sys.flags.optimize, sys.flags.dev_mode, "error::FutureWarning" in sys.warnoptions

    def inherited(self) -> dict[str, Any]:
        return {
            "variables": dict(os.environ),
            "cores": os.sched_getaffinity(0),
            "mask": re.findall(r"Umask:\s*(\d+)", Path("/proc/self/status").read_text()),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
            "read": sys.stdin.read(),
            "argument": len(sys.argv),
        }

    def numbers(self) -> dict[str, float]:
        return {
            "random": random.random(),
            "numpy": float(np.random.random()),
            "torch": float(torch.rand(1)),
        }

    def say_at_the_end(self) -> None:
        """A thread that is not waited for says something, then an exit function, a finalizer."""

        def late() -> None:
            threading.main_thread().join()
            self.progress(1)  # nobody listens any more
            self.say("thread")

        weakref.finalize(Worker, self.say, "finalizer")
        atexit.register(self.say, "exit")
        threading.Thread(target=late).start()

    def finalizers(self) -> list[str]:
        all_of_them: Any = weakref.finalize._registry  # type: ignore[attr-defined]
        return [each.peek()[1].__module__ for each in all_of_them if each.atexit]

    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")

    def scribble(self, data: bytes) -> None:
        serving: Any = self.context.report_progress
        os.write(serving.__self__._channel.fileno(), data)
        time.sleep(600)

    def note(self, number: int, seconds: float = 0.0) -> list[int]:
        time.sleep(seconds)
        self.seen.append(number)
        return list(self.seen)

    def fail(self, ranks: list[int], text: str = "bad input") -> str:
        if self.rank in ranks:
            raise BadInputError(text)
        return "fine"

    def fail_of_itself(self) -> None:
        error = BadInputError("of itself")
        raise error from error

    def fail_oddly(self) -> None:
        raise UnpicklableError(1, 2)

    def fail_in_group(self, ranks: list[int]) -> float:
        if self.rank in ranks:
            raise BadInputError("not me")
        return self.total(1.0)

    def fail_after_reduce(self, ranks: list[int]) -> float:
        total = self.total(1.0)
        if self.rank in ranks:
            raise BadInputError("after all took part")
        return total

    def abort_board(self, ranks: list[int], wait: bool) -> float:
        """Some ranks find the group divided and abort it, while the others wait or are done."""
        if self.rank in ranks:
            error = DivergenceError(0, "all_reduce", "all_gather")
            self.groups.world.abort(error)
            raise error
        return self.total(1.0) if wait else 0.0

    def tell_last(self, rank: int, error: Exception, apart: bool = False) -> float:
        """One rank aborts the group in which the others wait, and says why when they have ended.

        If it does so ``apart``, it only meets the abort itself then, as any other rank does.
        """
        world = self.groups.world
        if self.rank == rank:
            until(lambda: all("all_reduce" in each.operation for each in others_of(world)))
            world.abort(error)
            until(lambda: all(each.state == "lost" for each in others_of(world)))
            if not apart:
                raise error
        return self.total(1.0)

    def abort_and_stay(self, rank: int) -> float:
        if self.rank == rank:
            self.groups.world.abort("nobody says why")
            time.sleep(600)
        return self.total(1.0)

    def abort_and_note(self, rank: int, folder: Path) -> None:
        world, aborted = self.groups.world, folder / f"aborted-{self.rank}"
        if self.rank == rank:
            until(lambda: "all_reduce" in world.status()[1 - rank].operation)
            aborted.write_text(repr(time.monotonic()))
            world.abort("one says so")
        try:
            self.total(1.0)
        except GroupAbortedError:
            if self.rank != rank:
                aborted.write_text(repr(time.monotonic()))
            raise

    def send_then_fail(self) -> None:
        if self.rank == 0:
            self.groups.world.send_object("stale", 1)
            return
        raise BadInputError("before it received")

    def relay(self, refuse: bool, seconds: float = 0.0) -> str:
        """Stage by stage; the first may refuse, and tells the next instead of its result."""
        pp = self.groups.pp
        first = pp.is_first_rank
        word: Any = ("refused" if refuse else "done") if first else pp.recv_object(pp.rank - 1)
        if not pp.is_last_rank:
            pp.send_object(word, pp.rank + 1)
        if word == "refused":
            raise CallRefusedError(None if first else 0) from (
                BadInputError("no") if first else None
            )
        if not first:
            time.sleep(seconds)
        return str(word)

    def total(self, value: float) -> float:
        return float(self.groups.world.all_reduce(torch.tensor([value])).item())

    def hold(self, gate: Gate, ranks: list[int] | None = None) -> int:
        if ranks is None or self.rank in ranks:
            gate.pass_through(self.rank)
        return self.rank

    def hold_before_group(self, gate: Gate, rank: int) -> float:
        self.hold(gate, [rank])
        return self.total(1.0)

    def abort_and_hold(self, gate: Gate) -> float:
        """Rank 1 aborts the groups, does not say why, and waits at a gate; the others notice."""
        if self.rank == 1:
            with suppress(GroupTimeoutError):
                self.groups.world.barrier(timeout=0.0)
            gate.pass_through(1)
        until(lambda: gate.reached(1))
        return self.total(1.0)

    def hang_in_group(self, but: int, seconds: float = 600.0) -> float:
        if self.rank == but:
            time.sleep(seconds)
        return self.total(1.0)

    def skip_group(self, but: int) -> float:
        return 0.0 if self.rank == but else self.total(1.0)

    def cross(self) -> torch.Tensor:
        return self.groups.world.recv((1,), torch.float32, 1 - self.rank)

    def sleep(self, seconds: float, ranks: list[int] | None = None) -> int:
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)
        return self.rank

    def swell(self, rank: int) -> None:
        if self.rank == rank:
            self.kwargs["held"] = [np.ones(1 << 20) for _ in range(512)]

    def hold_python(self, ranks: list[int]) -> None:
        """Some ranks wait for ever in a C call that keeps Python's lock, and takes no core."""
        empty, _ = os.pipe()
        while self.rank in ranks:
            ctypes.PyDLL(None).read(empty, ctypes.create_string_buffer(1), 1)

    def exit_once(self, flag: Path, rank: int) -> str:
        if self.rank == rank and not flag.exists():
            flag.touch()
            os._exit(3)
        return "fine"

    def diverge(self) -> torch.Tensor:
        given = torch.ones(4)
        world = self.groups.world
        return world.all_reduce(given) if self.rank == 0 else world.all_gather(given)

    def count(self, most: int) -> Iterator[int]:
        yield from range(most)

    def exit(self, ranks: list[int], status: int) -> None:
        if self.rank in ranks:
            os._exit(status)

    def become(self, rank: int, program: list[str]) -> float:
        if self.rank == rank:
            os.execv(program[0], program)
        return self.total(1.0)

    def close_all(self, rank: int) -> float:
        if self.rank == rank:
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            time.sleep(600.0)
        return self.total(1.0)

    def leave(self) -> NoReturn:
        sys.exit(3)

    def crash(self, ranks: list[int]) -> None:
        if self.rank in ranks:
            os.abort()

    def start(self, kind: str, seconds: float) -> None:
        """Start a thread, or a process of `multiprocessing`, that is no daemon."""
        process = multiprocessing.get_context("fork").Process
        make = threading.Thread if kind == "threads" else process
        make(target=time.sleep, args=(seconds,), name="writes a snapshot").start()

    def start_child(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    def fork(self, how: str) -> int:
        """A child that leaves this method as well, in its own way; its exit status, here."""
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if how == "raise":
            raise BadInputError("the child's own")
        if how == "leave":
            sys.exit(4)
        return 0

    def status_of(self, command: list[str]) -> int:
        return subprocess.call(command)

    def start_daemon(self) -> int:
        """As a daemon does: in a session of its own, by a process that has ended."""
        daemon = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
        return int(subprocess.check_output(["sh", "-c", daemon]))

    def make(self, kind: str) -> Any:
        return MADE[kind]()

    def progress(self, steps: int) -> None:
        for step in range(steps):
            self.context.report_progress(step + 1, steps, "later")

    def report(self, *progress: Any) -> None:
        self.context.report_progress(*progress)

    def break_its_loop(self) -> None:
        """Soon, outside of a call; a thread of the worker's own goes on."""

        def break_out(*_: object) -> None:
            raise RuntimeError("out of the blue")

        threading.Thread(target=time.sleep, args=(600,)).start()
        signal.signal(signal.SIGALRM, break_out)
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    def loaded_in(self, module: str) -> int:
        found: int = importlib.import_module(module).LOADED_IN
        return found

    def ones(self, n: int) -> torch.Tensor:
        return torch.full((n,), float(self.rank))


class Failing(Worker):
    def __init__(self, context: WorkerContext, rank: int, how: str) -> None:
        super().__init__(context)
        context.report_progress(1, 2, "loading")
        if self.rank != rank:
            time.sleep(600)
        if how == "raise":
            raise BadInputError("no such model")
        if how == "exit":
            os._exit(7)
        time.sleep(600)


class FailingLast(Worker):
    """Does not start: one rank says why, when the others have ended because of it."""

    def __init__(self, context: WorkerContext, rank: int) -> None:
        super().__init__(context)
        self.tell_last(rank, BadInputError("no such model"))


class Restored(Worker):
    """Keeps what it holds when the pool is restarted around it."""

    def __init__(self, context: WorkerContext, **kwargs: Any) -> None:
        super().__init__(context, **kwargs)
        self.held = [f"made in {context.generation}"]

    def restore(self, context: WorkerContext) -> None:
        self.context, self.groups = context, context.groups
        self.held.append(f"restored in {context.generation}")

    def holds(self) -> list[str]:
        return self.held

    def append(self, number: int, gate: Gate | None = None) -> list[int]:
        """Add to the state of every rank, then meet; rank 1 comes to the gate before, if any."""
        self.seen.append(number)
        if gate is not None:
            self.hold(gate, [1])
        self.total(1.0)
        return list(self.seen)


class Rebuilt(Restored):
    def restore(self, context: WorkerContext) -> None:
        super().restore(context)
        self.seen = []


class OneIsLate(Worker):
    """Of two pools that are restarted, one waits for the first gate and one for the second."""

    def __init__(self, context: WorkerContext, gates: list[Gate]) -> None:
        super().__init__(context)
        if context.generation > 1:
            first, second = gates
            try:
                (first.folder / "one").mkdir()
            except FileExistsError:
                first = second
            first.pass_through(self.rank)


class Unlucky(Worker):
    """Cannot be made in some generations on the last rank: it raises, or says so and hangs."""

    def __init__(self, context: WorkerContext, raises: list[int], hangs: list[int]) -> None:
        super().__init__(context)
        last = self.rank == self.groups.world.world_size - 1
        if last and context.generation in raises:
            raise BadInputError(f"no luck in {context.generation}")
        if last and context.generation in hangs:
            context.report_progress(0, 1, "hangs")
            time.sleep(600)


class Unrestorable(Worker):
    def restore(self, context: WorkerContext) -> None:
        self.context, self.groups = context, context.groups
        if self.rank == 0 and self.kwargs["how"] == "raises":
            raise BadInputError("cannot be restored")
        if self.rank == 0:
            time.sleep(600)
