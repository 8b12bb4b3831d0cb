"""Programs that use a pool: how their output is labelled, what they import."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest

from server.control.output import LabelledText, label_output
from tests.commands import run_to_end

if TYPE_CHECKING:
    from pathlib import Path


# --- output -------------------------------------------------------------------------------------


def labelled() -> tuple[LabelledText, io.BytesIO]:
    under = io.BytesIO()
    return LabelledText(io.TextIOWrapper(under, "utf-8"), "[rank 3] "), under


def test_every_line_has_the_label_once() -> None:
    text, under = labelled()
    for part in ("one ", "two", "\n", "three\n\nfour\nfi"):
        text.write(part)
    assert under.getvalue() == b"[rank 3] one two\n[rank 3] three\n[rank 3] \n[rank 3] four\n"
    text.write("ve")
    text.flush()
    text.write(" six\n")
    assert under.getvalue().endswith(b"four\n[rank 3] five six\n")


def test_a_line_without_end_is_written_in_pieces() -> None:
    text, under = labelled()
    for _ in range(3 << 16):
        text.write(".")
    assert len(under.getvalue()) >= 2 << 16
    text.write("\nnext\n")
    assert under.getvalue() == b"[rank 3] " + b"." * (3 << 16) + b"\n[rank 3] next\n"


def test_output_that_is_closed_or_missing_takes_lines_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, _ = labelled()
    text.write("kept")
    text.close()
    text.close()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO()))
    label_output("[rank 3] ")
    sys.stdout.write("to nowhere\n")
    sys.stdout.close()


WITHOUT_OUTPUT = """
import os, sys
from pathlib import Path
from group_coordinator import WorkerPool

class Printer:
    def __init__(self, context):
        pass

    def say(self):
        print("said", flush=True)
        return os.write(2, b"complained")

if __name__ == "__main__":
    files = [Path(name).open("w") for name in sys.argv[2:]]
    with WorkerPool(Printer) as pool:
        told = pool.call("say")
    Path(sys.argv[1]).write_text(f"{told} {[file.fileno() for file in files]}")
"""


@pytest.mark.parametrize(("names", "numbers"), [((), []), (("first", "second"), [1, 2])])
def test_what_workers_print_goes_into_no_file_of_the_driver(
    names: tuple[str, ...], numbers: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "driver.py"
    script.write_text(WITHOUT_OUTPUT)
    told, *files = (tmp_path / name for name in ("told", *names))
    shell = '"$@" >&- 2>&-'
    run_to_end("sh", "-c", shell, "sh", sys.executable, str(script), str(told), *map(str, files))
    assert told.read_text() == f"10 {numbers}"
    assert [file.read_text() for file in files] == ["" for _ in names]


def test_a_driver_from_standard_input_cannot_use_its_own_class() -> None:
    done = run_to_end(sys.executable, "-", status=1, input=LEAN)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: Doubler is defined where no other process can import it")
    own = (
        "from group_coordinator import WorkerPool\n"
        "with WorkerPool('tests.server.workers:Worker') as pool:"
    )
    done = run_to_end(sys.executable, "-", input=f"{own}\n    print(pool.call('echo', 7))")
    assert done.stdout == "7\n"


# --- imports ------------------------------------------------------------------------------------


LEAN = """
import sys

from group_coordinator import WorkerPool


class Doubler:
    def __init__(self, context):
        self.groups = context.groups
        print("loading", self.groups.rank)

    def double(self, number):
        print("doubles", number, file=sys.stderr)
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
        print(total.mul(2).tolist())
"""


def test_torch_is_loaded_by_the_first_tensor_and_lines_of_workers_have_their_rank(
    tmp_path: Path,
) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEAN)
    done = run_to_end(sys.executable, str(program), status=None)
    assert sorted(done.stdout.splitlines()) == [
        "[16.0, -6.0]",
        "[42, 42] [] set()",
        "[rank 0] loading 0",
        "[rank 1] loading 1",
        "torch [8.0, -3.0] ['numpy', 'torch']",
    ], done.stderr
    assert sorted(done.stderr.splitlines()) == ["[rank 0] doubles 21", "[rank 1] doubles 21"]


def test_a_failed_import_says_why(tmp_path: Path) -> None:
    (tmp_path / "select.py").touch()
    (tmp_path / "program.py").write_text("from group_coordinator import WorkerPool\n")
    ended = run_to_end(sys.executable, "program.py", status=1, cwd=tmp_path)
    why = "ImportError: WorkerPool cannot be imported: module 'select' has no attribute "
    assert f"\n{why}" in ended.stderr
