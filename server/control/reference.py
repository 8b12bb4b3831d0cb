"""References to a worker's class that another process can import.

A class in the driver's main module works too: the worker runs that module again, under another
name, like multiprocessing. Code under ``if __name__ == "__main__":`` is not run. A pool that is
made while such a module, or a preloaded one, is imported would start workers that start workers,
without end: it is refused.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_MAKES_NO_POOL: ContextVar[bool] = ContextVar("makes_no_pool", default=False)


def worker_name(worker: type | str) -> str:
    """Return the reference ``"package.module:Class"`` of a class; a reference is unchanged.

    Raises:
        ValueError: no other process could import the class, or the reference is malformed.
        TypeError: ``worker`` is neither a class nor a string.
    """
    if isinstance(worker, str):
        module, _, name = worker.partition(":")
        if not module or not name:
            raise ValueError(f"worker must be 'package.module:Class'; got {worker!r}")
        return worker
    if not isinstance(worker, type):
        raise TypeError(f"worker must be a class or 'package.module:Class'; got {worker!r}")
    # multiprocessing and pools load the main module under this second name.
    module = "__main__" if worker.__module__ == "__mp_main__" else worker.__module__
    name = f"{module}:{worker.__qualname__}"
    if "<locals>" in name:
        raise ValueError(f"{name} is defined in a function: its workers could not import it")
    if module == "__main__" and main_of(name) is None:
        raise ValueError(
            f"{worker.__qualname__} is defined where no other process can import it from "
            "(a session, a command line, standard input, a __main__.py, a program that another one "
            "runs): put it into a module"
        )
    return name


def main_of(name: str) -> dict[str, bytes] | None:
    """Return the data for `worker_class` about the driver's main module, if it has ``name``.

    ``None`` for another module, or if no other process can load the main module or find the class
    there: a profiler is the main module of the program that it runs.
    """
    module, _, path = name.partition(":")
    main = sys.modules["__main__"]
    if module != "__main__" or not hasattr(main, path.partition(".")[0]):
        return None
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        unnamed = spec.name.rpartition(".")[2] == "__main__"
        return None if unnamed else {"init_main_from_name": os.fsencode(spec.name)}
    file = getattr(main, "__file__", None)
    is_file = file is not None and Path(file).is_file()  # "<stdin>" is not a file
    return {"init_main_from_path": os.fsencode(Path(file).absolute())} if file and is_file else None


def worker_class(name: str, main: dict[str, bytes] | None) -> type[Any]:
    """Import the class ``name`` in a worker; ``main`` is the result of the driver's `main_of`."""
    if main is not None:
        from multiprocessing import spawn  # noqa: PLC0415 - the driver does without

        spawn.prepare({how: os.fsdecode(which) for how, which in main.items()})
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    if not isinstance(value, type):
        raise TypeError(f"{name} is not a class: {value!r}")
    return value


@contextmanager
def import_guard() -> Iterator[None]:
    """Have `check_may_make_pool` raise in a block that imports users' modules for workers."""
    token = _MAKES_NO_POOL.set(True)
    try:
        yield
    finally:
        _MAKES_NO_POOL.reset(token)


def check_may_make_pool() -> None:
    """Raise RuntimeError if modules of a worker are being imported."""
    if _MAKES_NO_POOL.get():
        raise RuntimeError(
            "a worker imports this module, which would start workers itself: put the code that "
            "makes the pool into a function, or behind if __name__ == '__main__':"
        )
