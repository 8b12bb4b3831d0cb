"""Rules of the whole project: layers, imports, names, and packages that may be absent."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.commands import run_to_end

ROOT = Path(__file__).parents[1]
FLOORS = ("shm_broadcast", "device_comm", "coordinator", "server")
"""The ground floor first. A floor imports those below it, never one above."""

OTHER_ENGINES = ("coordinator.compat.", "coordinator.plugins.")
"""Where names are those of other engines."""

ENGINE_CLASSES = {"GroupCoordinator", "Handle", "MessageQueue", "StatelessGroupCoordinator"}
"""Classes that vLLM and SGLang call so as well."""

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
import group_coordinator
for floor in sys.argv[1:]:
    package = importlib.import_module(floor)
    for module in pkgutil.walk_packages(package.__path__, floor + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            engine = (error.name or "").partition(".")[0]
            if not module.name.startswith(f"coordinator.plugins.{engine}."):
                raise
from benchmarks.call_path import deepest_classes
print(*deepest_classes(), sep="\\n")
"""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def modules_imported_by(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, and their imported names."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_by(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere in it."""
    return {name.partition(".")[0] for name in modules_imported_by(path)}


def product() -> dict[str, Path]:
    """The files of the four packages by their modules."""
    files = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def product_files(wrong: Callable[[Path], object]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in product().values() if wrong(path)]


# --- imports ------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_one_way(floor: str) -> None:
    above = {*FLOORS[FLOORS.index(floor) + 1 :], "tests", "benchmarks"}
    assert (
        product_files(lambda path: ROOT / floor in path.parents and imported_by(path) & above) == []
    )


def needs(module: str, path: Path, modules: Iterable[str]) -> set[str]:
    """The modules of the project that a file imports anywhere in it, for types only too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
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


def test_only_compat_and_the_plugins_import_compat() -> None:
    rooms = {ROOT / "coordinator" / room for room in ("compat", "plugins")}
    wrong = product_files(
        lambda path: (
            not rooms & {*path.parents}
            and any(name.startswith("coordinator.compat") for name in modules_imported_by(path))
        )
    )
    assert wrong == []


def test_the_server_imports_itself_by_relative_names() -> None:
    """It is one package in this folder, and another one where it is installed."""
    own = {"server", "group_coordinator"}
    assert (
        product_files(lambda path: ROOT / "server" in path.parents and imported_by(path) & own)
        == []
    )


def test_only_servers_benchmarks_and_examples_import_model_libraries() -> None:
    wrong = [
        name
        for name in run_to_end("git", "ls-files", "-z", "*.py").stdout.split("\0")
        if name.endswith(".py")
        and not {"server", "benchmarks", "examples"} & {*name.split("/")}
        and (ROOT / name).exists()
        and any(library in (ROOT / name).read_text() for library in MODEL_LIBRARIES)
        and imported_by(ROOT / name) & MODEL_LIBRARIES
    ]
    assert wrong == []


# --- names --------------------------------------------------------------------------------


def public_names() -> dict[str, set[str]]:
    """The names that the product's files define at their top, and the modules of each."""
    found: dict[str, set[str]] = {}
    for module, path in product().items():
        body = parsed(path).body
        for node in [
            *body,
            *(each for top in body if isinstance(top, ast.If) for each in top.body),
        ]:
            for name in defined_by(node):
                if not name.startswith("_"):
                    found.setdefault(name, set()).add(module)
    return found


def defined_by(node: ast.stmt) -> list[str]:
    """The names that a statement defines, without type variables."""
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
    counts = Counter(path.name for path in product().values())
    assert {name for name, count in counts.items() if count > 1} <= MIRRORED_FILES


def test_what_programs_import_first_loads_no_torch() -> None:
    names = "Hosts, MessageQueue, PoolConfig, RayCluster, Replicas, WorkerLostError, WorkerPool"
    code = f"from group_coordinator import {names}; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_types_are_made_known_to_msgspec_where_they_are_imported() -> None:
    """By a `Decoder` of the module: where two threads are the first to decode a type, msgspec
    (0.22) crashes now and then, and ranks may be threads.
    """
    typed = re.compile(r"msgpack\.decode\([^\n]*type=")
    assert product_files(lambda path: typed.search(path.read_text())) == []


@pytest.mark.parametrize("floor", FLOORS)
def test_public_names_are_sorted_and_there(floor: str) -> None:
    package = importlib.import_module(floor)
    names: list[str] = package.__all__
    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(package, name)] == []
    if floor == "coordinator":
        assert [name for name in names if not getattr(package, name).__doc__] == []


def test_every_module_imports_without_cupy_and_classes_are_flat() -> None:
    """At most three of ours above a class; those of other engines stand on ours."""
    done = run_to_end(sys.executable, "-W", "error", "-c", IMPORT_ALL, *FLOORS)
    assert [line for line in done.stdout.splitlines() if line.count("<") > 3] == []
    assert done.stdout.count("<") >= 2
