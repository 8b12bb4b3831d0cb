"""Check the model of ring and doorbells, and that every way to break it is found out.

    python -m models.check

needs spin (Debian package ``spin``) and gcc. Prints a table; exit status 0 if the protocol holds in
every scenario and each broken variant fails in the way that is expected of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MODEL: Final = Path(__file__).with_name("doorbell_ring.pml")

HOLDS: Final = "holds"
ASLEEP: Final = "asleep for ever"
BAD_DATA: Final = "torn or overwritten"

_SECONDS: Final = 120
_DEPTH: Final = 100_000
_MEGABYTES: Final = 2000


@dataclass(frozen=True)
class Case:
    """One variant of the model, and what must come of it.

    Attributes:
        name: what varies.
        defines: the preprocessor's names that select it.
        expected: `HOLDS`, `ASLEEP` or `BAD_DATA`.
    """

    name: str
    defines: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Outcome:
    """What the search found.

    Attributes:
        verdict: `HOLDS`, `ASLEEP`, `BAD_DATA`, or why the search did not end.
        states: how many states it stored.
        depth: the longest run it followed, in steps.
    """

    verdict: str
    states: int
    depth: int


CASES: Final = (
    Case("the protocol", (), HOLDS),
    Case("the protocol, two records in flight", ("CELLS=5", "MESSAGES=4"), HOLDS),
    Case("the protocol, a member aborts", ("ABORT", "MESSAGES=2"), HOLDS),
    Case("the protocol, a member is killed", ("DEATHS", "MESSAGES=2"), HOLDS),
    Case("no fence after publishing", ("NO_FENCE_AFTER_PUBLISH",), ASLEEP),
    Case("no fence after consuming", ("NO_FENCE_AFTER_CONSUME",), ASLEEP),
    Case("doorbell read after the predicate", ("DOORBELL_AFTER_PREDICATE",), ASLEEP),
    Case("sleep announced after the predicate", ("ANNOUNCE_AFTER_PREDICATE",), ASLEEP),
    Case("wake without adding to the doorbell", ("WAKE_WITHOUT_ADD",), ASLEEP),
    Case("published before the bytes", ("PUBLISH_BEFORE_BYTES",), BAD_DATA),
    Case("consumed before copying out", ("CONSUME_BEFORE_COPY",), BAD_DATA),
    Case("capacity off by one", ("CAPACITY_OFF_BY_ONE",), BAD_DATA),
    Case("abort not looked at", ("ABORT", "MESSAGES=2", "IGNORE_ABORT"), ASLEEP),
    Case("liveness not looked at", ("DEATHS", "MESSAGES=2", "IGNORE_DEATHS"), ASLEEP),
)


def unavailable() -> str | None:
    """Why the models cannot be checked here; None if they can."""
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def check(case: Case) -> Outcome:
    """Search all states of one variant, up to its first error.

    Raises:
        subprocess.CalledProcessError: spin or gcc refused the model.
        subprocess.TimeoutExpired: the search took more than two minutes.
    """
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        _run(folder, "spin", *(f"-D{name}" for name in case.defines), "-a", str(MODEL))
        limits = [f"-DMEMLIM={_MEGABYTES}", "-DSAFETY"]
        _run(folder, "gcc", "-w", *limits, "-o", "pan", "pan.c")
        return _outcome(_run(folder, "./pan", f"-m{_DEPTH}"))


def main() -> int:
    """Check all cases; the exit status."""
    missing = unavailable()
    if missing:
        sys.stderr.write(f"{missing}\n")
        return 2
    sys.stdout.write(f"{'':38}{'expected':22}{'found':22}{'states':>10}{'depth':>8}\n")
    wrong = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case, outcome in zip(CASES, pool.map(check, CASES), strict=True):
            bad = outcome.verdict != case.expected
            wrong += bad
            sys.stdout.write(
                f"{case.name:38}{case.expected:22}{outcome.verdict:22}"
                f"{outcome.states:10,}{outcome.depth:8,}{'  WRONG' if bad else ''}\n"
            )
    return 1 if wrong else 0


def _run(folder: str, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=_SECONDS
    )
    return done.stdout


def _outcome(report: str) -> Outcome:
    if "pan:1: invalid end state" in report:
        verdict = ASLEEP
    elif "pan:1: assertion violated" in report:
        verdict = BAD_DATA
    elif "Search not completed" in report or "errors: 0" not in report:
        verdict = "not completed"
    else:
        verdict = HOLDS
    return Outcome(
        verdict,
        _number(r"(\d+) states, stored", report),
        _number(r"depth reached (\d+)", report),
    )


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
