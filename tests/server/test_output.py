"""What workers print says whose it is."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest

from server.control.output import LabelledText, label_output
from tests.commands import run_to_end

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_line_that_does_not_end_is_written_out_in_pieces() -> None:
    text, under = labelled()
    for _ in range(3 << 16):
        text.write(".")
    assert len(under.getvalue()) >= 2 << 16
    text.write("\nnext\n")
    assert under.getvalue() == b"[rank 3] " + b"." * (3 << 16) + b"\n[rank 3] next\n"


def test_output_that_a_process_was_not_given_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO()))
    label_output("[rank 3] ")
    sys.stdout.write("to nowhere\n")
    sys.stdout.close()


def test_a_closed_output_is_closed_once() -> None:
    text, _ = labelled()
    text.write("kept")
    text.close()
    text.close()


DRIVER = """
import sys
from group_coordinator import WorkerPool

class Printer:
    def __init__(self, context):
        self.rank = context.groups.world.rank
        print("loading", self.rank)

    def say(self):
        print("said", self.rank)
        print("complained", self.rank, file=sys.stderr)

if __name__ == "__main__":
    with WorkerPool(Printer, tp=2) as pool:
        pool.call("say")
"""


def test_lines_of_workers_say_their_rank(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    done = run_to_end(sys.executable, str(script))
    assert sorted(done.stdout.splitlines()) == [
        f"[rank {rank}] {what} {rank}" for rank in range(2) for what in ("loading", "said")
    ]
    assert sorted(done.stderr.splitlines()) == [f"[rank {r}] complained {r}" for r in range(2)]


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
def test_what_workers_print_goes_into_nothing_that_the_driver_has_opened(
    names: tuple[str, ...], numbers: list[int], tmp_path: Path
) -> None:
    """Its files and sockets get the numbers of the standard output and error that it lacks."""
    script = tmp_path / "driver.py"
    script.write_text(WITHOUT_OUTPUT)
    told, *files = (tmp_path / name for name in ("told", *names))
    shell = '"$@" >&- 2>&-'
    run_to_end("sh", "-c", shell, "sh", sys.executable, str(script), str(told), *map(str, files))
    assert told.read_text() == f"10 {numbers}"
    assert [file.read_text() for file in files] == ["" for _ in names]


def test_a_driver_from_standard_input_is_told_what_it_cannot_do() -> None:
    """Its class cannot be imported by others; a class of a module can be used."""
    done = run_to_end(sys.executable, "-", status=1, input=DRIVER)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: Printer is defined where no other process can import it")
    own = (
        "from group_coordinator import WorkerPool\n"
        "with WorkerPool('tests.server.workers:Worker') as pool:"
    )
    done = run_to_end(sys.executable, "-", input=f"{own}\n    print(pool.call('echo', 7))")
    assert done.stdout == "7\n"
