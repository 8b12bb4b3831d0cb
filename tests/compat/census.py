"""What an engine's own source takes from its copy of this layer: facts, read from its syntax.

    python -m tests.compat.census vllm /path/that/holds/the/package > tests/compat/vllm.json

A site is one imported name in one import statement, ``from vllm.distributed import divide``, in a
file of the engine that is neither part of the layer nor one of its transports. The layer is the
modules listed below. The others under ``distributed`` are transports and kernels of one vendor, or
features that stand upon the layer: those are its users, and their sites count.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = "(module)"
"""Stands for the name where the module itself is imported."""

KINDS = {
    "GroupCoordinator": "group",
    "StatelessGroupCoordinator": "group",
    "MessageQueue": "queue",
}
"""What objects of a class are called in `Census.uses`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Engine:
    """One engine's copy of the layer.

    ``package`` is what `compat` stands for; ``layer`` lists its modules that are the layer (``""``
    is the package itself), ``transports`` the packages within it that only carry the layer out,
    ``classes`` those whose methods users call, by module.
    """

    name: str
    package: str
    compat: str
    layer: tuple[str, ...]
    transports: tuple[str, ...]
    classes: tuple[tuple[str, str], ...]

    def inner(self, module: str) -> str | None:
        """``module`` within the package, if it is of the layer."""
        inner = module.removeprefix(self.package).removeprefix(".")
        inside = module == self.package or module.startswith(f"{self.package}.")
        return inner if inside and inner in self.layer else None

    def is_own(self, module: str) -> bool:
        """Whether a file is the layer's own, or one of its transports."""
        inner = module.removeprefix(f"{self.package}.")
        return self.inner(module) is not None or any(
            inner == each or inner.startswith(f"{each}.") for each in self.transports
        )


ENGINES = {
    "vllm": Engine(
        "vllm",
        "vllm.distributed",
        "coordinator.compat.vllm",
        (
            "",
            "communication_op",
            "parallel_state",
            "utils",
            "stateless_coordinator",
            "device_communicators.base_device_communicator",
            "device_communicators.shm_broadcast",
            "device_communicators.shm_object_storage",
        ),
        ("device_communicators",),
        (
            ("parallel_state", "GroupCoordinator"),
            ("stateless_coordinator", "StatelessGroupCoordinator"),
            ("utils", "StatelessProcessGroup"),
            ("device_communicators.shm_broadcast", "MessageQueue"),
        ),
    ),
    "sglang": Engine(
        "sglang",
        "sglang.srt.distributed",
        "coordinator.compat.sglang",
        (
            "",
            "communication_op",
            "communication_tags",
            "parallel_state",
            "utils",
            "device_communicators.shm_broadcast",
        ),
        ("device_communicators",),
        (
            ("parallel_state", "GroupCoordinator"),
            ("utils", "StatelessProcessGroup"),
            ("device_communicators.shm_broadcast", "MessageQueue"),
        ),
    ),
}


@dataclass(frozen=True)
class Census:
    """How often names are imported and used, and with which parameters.

    ``signatures`` are of every imported function and of every public method of the classes
    (``module:Class.method``): ``name``, ``name=`` with a default, ``*`` before keywords only.
    ``uses`` counts attributes of getters' results, names these are assigned to, and arguments.
    """

    sites: dict[str, dict[str, int]]
    signatures: dict[str, list[str]]
    uses: dict[str, dict[str, int]]


def take(engine: Engine, root: Path) -> Census:
    """The census of an engine whose package lies in ``root``."""
    files = {module: path for module, path in _modules(root, engine.name) if path.suffix == ".py"}
    sites: dict[str, Counter[str]] = {}
    uses: dict[str, Counter[str]] = {}
    for module, path in files.items():
        text = path.read_bytes()
        inside = module.startswith(engine.package)
        if engine.is_own(module) or not (inside or b"distributed" in text):
            continue
        tree = ast.parse(text)
        found = [
            (inner, name)
            for source, name in _imports(tree, module, path, set(files))
            if (inner := engine.inner(source)) is not None
        ]
        for inner, name in found:
            sites.setdefault(inner, Counter())[name] += 1
        for kind, name in _uses(tree, {name for _, name in found}):
            uses.setdefault(kind, Counter())[name] += 1
    wanted = {name for names in sites.values() for name in names}
    signatures: dict[str, list[str]] = {}
    for inner in engine.layer:
        path = files[f"{engine.package}.{inner}".rstrip(".")]
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, Function) and node.name in wanted:
                signatures[f"{inner}:{node.name}"] = _parameters(node, bound=False)
            elif isinstance(node, ast.ClassDef) and (inner, node.name) in engine.classes:
                label = f"{inner}:{node.name}"
                signatures |= {f"{label}.{name}": found for name, found in _methods(node)}
    return Census(
        {module: dict(sorted(names.items())) for module, names in sorted(sites.items())},
        dict(sorted(signatures.items())),
        {kind: dict(sorted(names.items())) for kind, names in sorted(uses.items())},
    )


def read(path: Path) -> Census:
    """A census that was written down."""
    return Census(**json.loads(path.read_text()))


def _modules(root: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _imports(
    tree: ast.Module, module: str, path: Path, modules: set[str]
) -> Iterator[tuple[str, str]]:
    """(module, name) of every name that a file imports."""
    parts = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, MODULE
        elif isinstance(node, ast.ImportFrom):
            start = parts[: len(parts) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield (inner, MODULE) if inner in modules else (source, alias.name)


def _methods(node: ast.ClassDef) -> Iterator[tuple[str, list[str]]]:
    for each in node.body:
        if not isinstance(each, Function) or _decorated(each, "property"):
            continue
        if each.name == "__init__" or not each.name.startswith("_"):
            yield each.name, _parameters(each, bound=not _decorated(each, "staticmethod"))


def _uses(tree: ast.Module, imported: set[str]) -> Iterator[tuple[str, str]]:
    """(kind, attribute) of what a file takes from objects of the layer."""
    kinds: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and (kind := _kind(node.value, imported)):
            kinds |= {ast.unparse(target): kind for target in node.targets}
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            parts = list(ast.walk(node.annotation))
            for each in () if any(isinstance(part, ast.Subscript) for part in parts) else parts:
                if isinstance(each, ast.Name) and each.id in imported & KINDS.keys():
                    kinds[name] = KINDS[each.id]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            kind = _kind(node.value, imported) or kinds.get(ast.unparse(node.value))
            if kind is not None:
                yield kind, node.attr


def _kind(made: ast.expr, imported: set[str]) -> str | None:
    """What a call makes: ``get_tp_group()``, ``MessageQueue(...)`` or one of its class methods."""
    if not isinstance(made, ast.Call):
        return None
    name = ast.unparse(made.func).partition(".")[0]
    if name not in imported:
        return None
    return "group" if re.fullmatch(r"get_\w+_group", name) else KINDS.get(name)


def _parameters(node: Function, *, bound: bool) -> list[str]:
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    without = len(plain) - len(given.defaults)
    found = [each.arg + "=" * (index >= without) for index, each in enumerate(plain)][bound:]
    if given.vararg:
        found.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        found.append("*")
    found += [
        each.arg + "=" * (default is not None)
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return [*found, f"**{given.kwarg.arg}"] if given.kwarg else found


def _decorated(node: Function, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in node.decorator_list)


if __name__ == "__main__":
    json.dump(asdict(take(ENGINES[sys.argv[1]], Path(sys.argv[2]))), sys.stdout, indent=1)
    sys.stdout.write("\n")
