"""Rules of the whole house: who may import whom, what is public, what may be absent."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.call_path import deepest_classes
from tests.commands import run_to_end

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[1]
FLOORS = ("shm_broadcast", "device_comm", "coordinator", "server")
"""The ground floor first. A floor imports those below it, never one above."""

OTHER_ENGINES = ("coordinator.compat.", "coordinator.plugins.")
"""Where names are those of other engines."""

ENGINE_CLASSES = {
    "GroupCoordinator",
    "Handle",
    "MessageQueue",
    "StatelessGroupCoordinator",
}
"""What vLLM and SGLang call theirs as well."""


MIRRORED_NAMES = {
    *("PACKAGES", "add_arguments", "prepare", "run", "main"),  # of commands and programs
    *("encode", "decode"),  # of wires
    "reduce_scatter",  # of graphs, and of autograd
    "STACK_SIGNAL",  # what is forked imports nothing of ours
}
"""What several files have each for itself."""

MIRRORED_FILES = {
    *("__init__.py", "errors.py", "layout.py"),
    *("reader.py", "writer.py"),  # of a ring, of a queue, of a remote one
    *("protocol.py", "rendezvous.py"),  # of a queue, of a pool, of groups
    *("channel.py", "collectives.py"),  # between ranks; verbs and how they run
    *("status.py", "trace.py"),  # state, and the commands that show it
    *("communication_op.py", "parallel_state.py"),  # of engines
    *("shm_broadcast.py", "utils.py"),
    *("communicator.py", "executor.py", "hooks.py"),  # of the plugins
}

MODEL_LIBRARIES = {"transformers", "sentence_transformers"}

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["cupy"] = None
for floor in sys.argv[1:]:
    package = importlib.import_module(floor)
    for module in pkgutil.walk_packages(package.__path__, floor + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            engine = (error.name or "").partition(".")[0]
            if not module.name.startswith(f"coordinator.plugins.{engine}."):
                raise
"""


def tracked() -> list[Path]:
    listed = run_to_end("git", "ls-files", "-z", "*.py")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).exists()]


def modules_imported_by(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, and what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_by(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere in it."""
    return {name.partition(".")[0] for name in modules_imported_by(path)}


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_one_way(floor: str) -> None:
    above = {*FLOORS[FLOORS.index(floor) + 1 :], "tests", "benchmarks"}
    wrong = {
        str(path.relative_to(ROOT)): sorted(upwards)
        for path in (ROOT / floor).rglob("*.py")
        if (upwards := imported_by(path) & above)
    }
    assert wrong == {}


def product() -> dict[str, Path]:
    """The files of the four packages by the modules that they are."""
    files = [path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def needs(module: str, path: Path, modules: Iterable[str]) -> set[str]:
    """The modules of the house that a file imports anywhere in it, for types only too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(), str(path))):
        if isinstance(node, ast.ImportFrom):
            home = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{home}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else home for name in names}
    return found & {*modules} - {module}


def test_no_file_imports_what_imports_it() -> None:
    files = product()
    graph = {module: needs(module, path, files) for module, path in files.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"a circle: {error.args[1]}")


def public_names() -> dict[str, set[str]]:
    """What the product's files define at their top, by name: the modules that it stands in."""
    found: dict[str, set[str]] = {}
    for module, path in product().items():
        body = ast.parse((ROOT / path).read_text(), str(path)).body
        for node in [
            *body,
            *(each for top in body if isinstance(top, ast.If) for each in top.body),
        ]:
            for name in defined_by(node):
                if not name.startswith("_"):
                    found.setdefault(name, set()).add(module)
    return found


def defined_by(node: ast.stmt) -> list[str]:
    """The names that a statement defines, but for type variables."""
    match node:
        case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name):
            return [name]
        case ast.Assign(value=ast.Call(func=ast.Name("TypeVar"))):
            return []
        case ast.Assign(targets):
            return [each.id for each in targets if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(name)):
            return [name]
    return []


def test_a_name_stands_for_one_thing() -> None:
    """But those that other engines' users know: there they are called so."""
    twice = {
        name: modules
        for name, modules in public_names().items()
        if len({each for each in modules if not each.startswith(OTHER_ENGINES)}) > 1
        and name not in MIRRORED_NAMES
    }
    assert twice == {}


def test_classes_are_called_as_other_engines_only_where_users_know_them_so() -> None:
    named = {
        name
        for name, modules in public_names().items()
        if len(modules) > 1 and name[0].isupper() and not name.isupper()
    }
    assert named <= ENGINE_CLASSES


def test_a_file_name_stands_for_one_thing() -> None:
    """But mirrored ones: of two protocols, of two transports, of two engines."""
    counts = Counter(path.name for path in product().values())
    assert {name for name, count in counts.items() if count > 1} <= MIRRORED_FILES


def test_no_class_has_more_than_three_classes_above_it() -> None:
    """Those of other engines stand upon ours, one or two classes deeper."""
    deep = [line for line in deepest_classes() if line.count("<") > 3]
    assert deep == []


def test_nothing_but_compat_and_the_plugins_imports_compat() -> None:
    rooms = {ROOT / "coordinator" / room for room in ("compat", "plugins")}
    wrong = [
        str(path.relative_to(ROOT))
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        if not rooms & {*path.parents}
        and any(name.startswith("coordinator.compat") for name in modules_imported_by(path))
    ]
    assert wrong == []


def test_the_server_imports_itself_by_relative_names() -> None:
    """It is one package in this folder, and another one where it is installed."""
    own = {"server", "group_coordinator"}
    wrong = [path.name for path in (ROOT / "server").rglob("*.py") if imported_by(path) & own]
    assert wrong == []


def test_what_programs_import_first_loads_no_torch() -> None:
    names = "Hosts, MessageQueue, PoolConfig, RayCluster, Replicas, WorkerLostError, WorkerPool"
    code = f"from group_coordinator import {names}; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_types_are_made_known_to_msgspec_where_they_are_imported() -> None:
    """By a `Decoder` of the module: where two threads are the first to decode a type, msgspec
    (0.22) crashes now and then, and ranks may be threads.
    """
    wrong = [
        str(path.relative_to(ROOT))
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        if re.search(r"msgpack\.decode\([^\n]*type=", path.read_text())
    ]
    assert wrong == []


def test_model_libraries_are_imported_by_servers_benchmarks_and_examples_only() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if not {"server", "benchmarks", "examples"} & {*path.relative_to(ROOT).parts}
        and imported_by(path) & MODEL_LIBRARIES
    ]
    assert wrong == []


@pytest.mark.parametrize("floor", FLOORS)
def test_public_names_are_sorted_and_there(floor: str) -> None:
    package = importlib.import_module(floor)
    names: list[str] = package.__all__
    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(package, name)] == []


def test_every_module_imports_without_cupy() -> None:
    run_to_end(sys.executable, "-W", "error", "-c", IMPORT_ALL, *FLOORS)
