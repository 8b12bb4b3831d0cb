"""A driver that deals in plain values does without torch and numpy: a second and 150 MiB less.

On one host it does without ZeroMQ, asyncio and OpenTelemetry as well: half of the rest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.commands import run_to_end

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys

from group_coordinator import WorkerPool


class Doubler:
    def __init__(self, context):
        self.groups = context.groups

    def double(self, number):
        return 2 * number

    def total(self, number):
        import torch

        return self.groups.tp.all_reduce(torch.tensor([number, -1.5]))


def loaded():
    return sorted({"numpy", "torch"} & sys.modules.keys())


if __name__ == "__main__":
    with WorkerPool(Doubler, tp=2) as pool:
        others = {"asyncio", "opentelemetry", "ssl", "zmq"} & sys.modules.keys()
        print(pool.collective_rpc("double", args=(21,)), loaded(), others)
        total = pool.call("total", 4.0)
        print(type(total).__module__, total.tolist(), loaded())
        print(pool.call("double", total).tolist())
"""


def test_torch_is_loaded_by_the_first_tensor(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_to_end(sys.executable, str(program), status=None)
    assert done.stdout.splitlines() == [
        "[42, 42] [] set()",
        "torch [8.0, -3.0] ['numpy', 'torch']",
        "[16.0, -6.0]",
    ], done.stderr


def test_what_hinders_an_import_is_told(tmp_path: Path) -> None:
    """Such as a file of the user's with the name of a module of Python's."""
    (tmp_path / "select.py").touch()
    (tmp_path / "program.py").write_text("from group_coordinator import WorkerPool\n")
    ended = run_to_end(sys.executable, "program.py", status=1, cwd=tmp_path)
    why = "ImportError: WorkerPool cannot be imported: module 'select' has no attribute "
    assert f"\n{why}" in ended.stderr
