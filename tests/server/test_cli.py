"""What the command line says of itself: at once, so without torch; and one version everywhere."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from server.cli import COMMANDS
from server.hosts.link import facts_here
from tests.commands import run_to_end

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from server.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def python(*arguments: str) -> str:
    return run_to_end(sys.executable, *arguments).stdout


def said(*arguments: str) -> str:
    """What the console script prints, which must not have loaded torch by then."""
    return python("-c", CODE, *arguments)


def test_a_folder_that_was_deleted_is_said_to_be_before_torch_is_loaded(tmp_path: Path) -> None:
    go = 'cd "$0" && rmdir "$0" && exec "$@"'
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}){CODE}"
    here = (sys.executable, "-c", code, "serve")
    done = run_to_end("sh", "-c", go, tmp_path, *here, status=2)
    tmp_path.mkdir()
    told = "error: the current folder was deleted: go to another one"
    assert done.stderr == f"group-coordinator serve: {told}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    text = said(command, "--help")
    assert f"usage: group-coordinator {command}" in text
    assert len(text.splitlines()) > 5


def test_unknown_options_are_told_with_where_the_known_ones_are() -> None:
    done = run_to_end(sys.executable, "-c", CODE, "serve", "--ports", "8000", status=2)
    told = "unrecognized arguments: --ports 8000; see group-coordinator serve --help"
    assert done.stderr == f"group-coordinator serve: error: {told}\n"


def test_a_program_without_standard_output_says_nothing() -> None:
    """As a service is started whose output somebody has closed."""
    code = "import sys; from server.cli import main; sys.exit(main(['status']))"
    shell = ["sh", "-c", '"$0" -c "$1" >&-', sys.executable, code]
    done = subprocess.run(shell, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.stderr == ""


def test_a_full_disk_is_told_in_a_line() -> None:
    code = "import sys; from server.cli import main; sys.exit(main())"
    shell = '"$0" -c "$1" status >/dev/full'
    done = run_to_end("sh", "-c", shell, sys.executable, code, status=1, cwd=ROOT)
    told = "OSError: [Errno 28] No space left on device"
    assert done.stderr == f"group-coordinator status: {told}\n"


def test_help_names_every_command_and_loads_no_torch() -> None:
    text = said("--help")
    for name, command in COMMANDS.items():
        assert name in text and " ".join(command.summary.split()[:4]) in text


def test_the_version_is_said_without_torch_and_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project and project["dynamic"] == ["version"]
    built = python("-W", "ignore", "setup.py", "--version").strip()
    assert said("--version") == python("-m", "server", "--version")
    assert said("--version") == f"group-coordinator {built}\n"
    assert facts_here({})["group-coordinator"] == built
    for package in ("coordinator", "device_comm", "group_coordinator", "server", "shm_broadcast"):
        assert importlib.import_module(package).__version__ == built


def test_what_a_command_has_loaded_is_no_garbage_to_look_for_and_the_rest_is() -> None:
    code = """
import gc
from server.cli import main
main()
assert gc.isenabled() and gc.get_freeze_count() > 1000
"""
    python("-c", code, "status")
