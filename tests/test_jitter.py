"""The threads that `tests/jitter` holds up."""

from __future__ import annotations

from pathlib import Path

from tests.commands import run_code

ROOT = Path(__file__).parents[1]

SCRIPT = """
import os, sitecustomize, sys, threading
paused = []
sitecustomize.pause = paused.append

def run(file, n=1):
    names = {}
    exec(compile(f"def step(n):\\n    n += {n}\\n    return n", file, "exec"), names)
    before = len(paused)
    for _ in range(10_000):
        names["step"](1)
    return len(paused) - before

elsewhere = run("/elsewhere/step.py")
here = run(os.path.join(sys.argv[1], "server", "step.py"))
found = []
code = os.path.join(sys.argv[1], "tests", "step.py")
thread = threading.Thread(target=lambda: found.append(run(code, 2)))
thread.start()
thread.join()
child = os.fork()
if child == 0:
    os._exit(run(os.path.join(sys.argv[1], "server", "step.py")))
print(elsewhere, here, *found, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(max(paused) <= 0.25, min(paused) >= 0)
"""


def test_threads_are_held_up_in_the_library_and_its_tests() -> None:
    """Twelve times in each function, in each process."""
    done = run_code(
        SCRIPT,
        str(ROOT),
        env={"JITTER": "0.25", "PYTHONPATH": str(ROOT / "tests" / "jitter")},
    )
    assert done.stdout.split() == ["0", "12", "12", "12", "True", "True"]
