"""All that has to be shown on a GPU, in one command and one report.

    python -m benchmarks.gpu_report --minutes 30 [--out gpu-report] [--only NAME,...]

Carries out the stages of `benchmarks.gpu_stages` one after the other, each within its own time and
whatever becomes of the others, and writes ``OUT.json`` and ``OUT.md`` after each. What no longer
fits into the minutes is skipped. Run once more, it keeps what has passed on such a device, as
``OUT.json`` says, and goes on with the rest; ``--again NAME,...`` repeats.

Ends with 0 if all has passed or is left out for want of a tool, with 1 if not, with 2 if there is
no GPU, or ``OUT.json`` is about other ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_environment import keep_out_of_mps, run_side_by_side
from benchmarks.gpu_stages import stages

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from benchmarks.gpu_stages import Stage

ROOT = Path(__file__).parents[1]
TAIL = 4_000
"""Characters of a stage's output that the report keeps."""

WORK = 0.8
"""The part of a stage's time that it may work: the rest is for its start and its end."""

LOOK_SECONDS = 120.0
"""How long it may take to find out what device there is: in a process of its own, which ends."""

DONE = ("passed", "left out")

KIND = ("device", "devices", "torch")
"""The facts that are the same wherever a report goes on."""


@dataclass
class Outcome:
    """What became of a stage.

    Attributes:
        state: ``"passed"``, ``"failed"``, ``"out of time"``, ``"left out"`` or ``"skipped"``.
        at: when it began.
        found: what it wrote as JSON.
        tail: the end of its output, or why there is none.
        facts: of the machine on which it ran.
    """

    name: str
    shows: str
    command: list[str]
    state: str
    at: str = ""
    seconds: float = 0.0
    found: object = None
    tail: str = field(default="", repr=False)
    facts: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, stage: Stage, state: str, tail: str = "") -> Outcome:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(stage.name, stage.shows, list(stage.command), state, at=now, tail=tail)


def carry_out(stage: Stage, seconds: float) -> Outcome:
    """Run one stage for ``seconds`` at most; nothing of it stays, if this is killed neither."""
    if stage.tool and shutil.which(stage.tool) is None:
        return Outcome.of(stage, "left out", f"{stage.tool} is not installed")
    folder = Path(tempfile.mkdtemp(prefix="gpu-stage-"))
    file = folder / "found.json"
    words = {"{json}": str(file), "{seconds}": str(int(seconds * WORK))}
    outcome = Outcome.of(stage, "failed")
    began = time.monotonic()
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            [words.get(word, word) for word in stage.command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **dict(stage.variables), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        keeper = subprocess.Popen(
            [sys.executable, "-S", "-m", "benchmarks.keeper", str(process.pid), str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            if process.wait(seconds) == 0:
                outcome.state = "passed"
        except subprocess.TimeoutExpired:
            outcome.state = "out of time"
        finally:
            _end(process)
            outcome.seconds = time.monotonic() - began
            output.seek(0)
            outcome.tail = output.read().decode(errors="replace")[-TAIL:]
            outcome.found = _read(file)
            keeper.communicate()  # its input ends, and so it removes the folder
    return outcome


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a stage's session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(file: Path) -> object:
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # not written, or not to the end
        return None


@dataclass
class Report:
    """What is known so far, in two files.

    Attributes:
        facts: of this machine.
        out: the files' name, without a suffix.
        outcomes: by the stage's name.
    """

    facts: dict[str, object]
    out: Path
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def resume(self) -> None:
        """Take over what was found out before, on such a device.

        Raises:
            ValueError: the file is about another device, and stays as it is.
        """
        file = self.out.with_suffix(".json")
        before = _read(file)
        if not isinstance(before, dict):
            return
        there, here = (
            [facts.get(name) for name in KIND] for facts in (before["facts"], self.facts)
        )
        if there != here:
            raise ValueError(f"{file} is about {there}, not {here}: name another one with --out")
        self.outcomes = {entry["name"]: Outcome(**entry) for entry in before["stages"]}

    def has_passed(self, stage: Stage) -> bool:
        """Whether this very command has."""
        outcome = self.outcomes.get(stage.name)
        return (
            outcome is not None
            and outcome.state == "passed"
            and outcome.command == list(stage.command)
        )

    def add(self, outcome: Outcome) -> None:
        """Write it down, at the end: whatever comes next, it is there."""
        outcome.facts = self.facts
        self.outcomes.pop(outcome.name, None)
        self.outcomes[outcome.name] = outcome
        entries = [asdict(each) for each in self.outcomes.values()]
        whole = json.dumps({"facts": self.facts, "stages": entries}, indent=1) + "\n"
        self.out.parent.mkdir(parents=True, exist_ok=True)
        _replace(self.out.with_suffix(".json"), whole)
        _replace(self.out.with_suffix(".md"), markdown(self.facts, [*self.outcomes.values()]))


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text)
    fresh.replace(path)


def markdown(facts: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """The report for people."""
    lines = ["# On a GPU", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| stage | | seconds | at | shows |", "|---|---|---|---|---|"]
    lines += [
        f"| {each.name} | {each.state} | {each.seconds:.1f} | {each.at} | {each.shows} |"
        for each in outcomes
    ]
    for each in outcomes:
        lines += ["", f"## {each.name}: {each.state}", "", f"`{shlex.join(each.command)}`", ""]
        theirs = each.facts.items()
        lines += [f"- {name}: {value}" for name, value in theirs if facts.get(name) != value]
        lines += ["```", each.tail.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def report_on(
    chosen: Sequence[Stage],
    report: Report,
    seconds: float,
    say: Callable[[str], None],
    again: Collection[str] = (),
) -> int:
    """Carry out what has not passed yet, and ``again``, in order, in ``seconds`` altogether."""
    end = time.monotonic() + seconds
    for stage in chosen:
        if report.has_passed(stage) and stage.name not in again:
            say(f"{stage.name}: has passed at {report.outcomes[stage.name].at}")
            continue
        limit = min(stage.seconds, end - time.monotonic())
        if limit < stage.least:
            why = f"{max(limit, 0):.0f} s are left, and it takes {stage.least:.0f} at least"
            report.add(Outcome.of(stage, "skipped", why))
            say(f"{stage.name}: skipped: {why}")
            continue
        say(f"{stage.name}: {stage.shows}, at most {limit:.0f} s")
        report.add(carry_out(stage, limit))
        outcome = report.outcomes[stage.name]
        say(f"{stage.name}: {outcome.state} after {outcome.seconds:.1f} s")
    return 0 if all(report.outcomes[stage.name].state in DONE for stage in chosen) else 1


def named(text: str, every: Sequence[Stage], options: argparse.ArgumentParser) -> set[str]:
    """The names in a list with commas; ends the program if one is unknown."""
    names = set(filter(None, text.split(",")))
    unknown = names - {stage.name for stage in every}
    if unknown:
        options.error(f"no such stage: {', '.join(sorted(unknown))}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--out", type=Path, default=Path("gpu-report"), help="without a suffix")
    options.add_argument("--minutes", type=float, default=60.0, help="for all stages (default 60)")
    options.add_argument("--only", default="", help="names of stages, with commas between them")
    options.add_argument("--again", default="", help="stages to repeat though they have passed")
    options.add_argument("--list", action="store_true", help="name the stages, and end")
    arguments = options.parse_args(argv)
    every = stages(sys.executable)
    if arguments.list:
        for stage in every:
            print(f"{stage.name:16} {stage.seconds:5.0f} s  {stage.shows}")
        return 0
    wanted = named(arguments.only, every, options) or {stage.name for stage in every}
    again = named(arguments.again, every, options)
    end = time.monotonic() + arguments.minutes * 60
    run_side_by_side()
    keep_out_of_mps()
    asked = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_world", "--facts"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=LOOK_SECONDS,
    )
    if asked.returncode:
        print(f"benchmarks.gpu_report: error: {asked.stderr.strip()}", file=sys.stderr)
        return 2
    report = Report(json.loads(asked.stdout), arguments.out)
    try:
        report.resume()
    except ValueError as error:
        print(f"benchmarks.gpu_report: error: {error}", file=sys.stderr)
        return 2
    chosen = [stage for stage in every if stage.name in wanted]

    def say(text: str) -> None:
        print(text, flush=True)

    return report_on(chosen, report, end - time.monotonic(), say, again)


if __name__ == "__main__":
    sys.exit(main())
