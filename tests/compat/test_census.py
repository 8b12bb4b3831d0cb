"""What engines import of this layer is there, and takes the calls that they make."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compat import census
from tests.compat.census import ENGINES, MODULE, Census, Engine

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
SHARE = {"vllm": 0.94, "sglang": 0.98}
"""How many of the sites must resolve. Helpers that need no group are vLLM's alone."""
FOLDERS = {"vllm": "vllm", "sglang": "sgl"}
"""Where below $PEERS an engine is installed."""

engines = pytest.mark.parametrize("name", ENGINES)


def written(name: str) -> Census:
    return census.read(HERE / f"{name}.json")


def ours(engine: Engine, inner: str, name: str) -> Any:
    """What stands for a name; raises as the import would."""
    module = importlib.import_module(f"{engine.compat}.{inner}".rstrip("."))
    found: Any = module
    for part in [] if name == MODULE else name.split("."):
        if not hasattr(found, part):
            raise ImportError(f"{module.__name__} has no {name}")
        found = inspect.getattr_static(found, part)
    return found


def resolves(engine: Engine, inner: str, name: str) -> bool:
    try:
        ours(engine, inner, name)
    except ImportError:
        return False
    return True


def excused(name: str) -> set[str]:
    """The names that the docs list as not there."""
    text = (DOCS / f"from-{name}.md").read_text()
    section = re.split(r"^## ", text.partition("## Names that do not resolve")[2], flags=re.M)[0]
    return set(re.findall(r"`(\w+)`", section))


@engines
def test_the_sites_resolve(name: str) -> None:
    engine, found = ENGINES[name], written(name)
    missing = {
        (inner, each): count
        for inner, names in found.sites.items()
        for each, count in names.items()
        if not resolves(engine, inner, each)
    }
    total = sum(sum(names.values()) for names in found.sites.values())
    share = 1 - sum(missing.values()) / total
    assert share >= SHARE[name], missing
    assert {each for _, each in missing} <= excused(name)
    assert f"{total - sum(missing.values())} of {total}" in (DOCS / f"from-{name}.md").read_text()


@engines
def test_every_signature_takes_their_calls(name: str) -> None:
    engine, found = ENGINES[name], written(name)
    wrong = []
    for label, parameters in found.signatures.items():
        inner, _, each = label.partition(":")
        if not resolves(engine, inner, each):
            assert each.rpartition(".")[2] in excused(name), label
            continue
        signature = signature_of(ours(engine, inner, each), method="." in each)
        for args, kwargs in calls_of(parameters):
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                wrong.append(f"{label}{tuple(args)}{kwargs}: {error}")
    assert wrong == []


def signature_of(found: Any, *, method: bool) -> inspect.Signature:
    """Without ``self`` or ``cls``."""
    if isinstance(found, classmethod | staticmethod):
        method, found = isinstance(found, classmethod), found.__func__
    signature = inspect.signature(found)
    given = list(signature.parameters.values())
    return signature.replace(parameters=given[method:])


def calls_of(parameters: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Calls that bind to these: the shortest, by position, by keyword."""
    star = next((index for index, each in enumerate(parameters) if each.startswith("*")), None)
    plain = [each.rstrip("=") for each in parameters[:star]]
    needed = [each for each in parameters[:star] if not each.endswith("=")]
    named = [] if star is None else [each for each in parameters[star:] if each[0] != "*"]
    keywords = {each.rstrip("="): "" for each in named}
    least = {each: "" for each in named if not each.endswith("=")}
    return [
        (needed, least),
        (plain, keywords),
        ([], dict.fromkeys(needed, "") | least),
        ([], dict.fromkeys(plain, "") | keywords),
    ]


@engines
def test_groups_and_queues_have_what_users_take(name: str, store_path: str) -> None:
    engine, found = ENGINES[name], written(name)
    state: Any = importlib.import_module(f"{engine.compat}.parallel_state")
    over_a_store: Any = None
    if resolves(engine, "stateless_coordinator", "StatelessGroupCoordinator"):
        over_a_store = ours(engine, "stateless_coordinator", "StatelessGroupCoordinator")
    state.init_distributed_environment(1, 0, f"file://{store_path}", 0, "gloo")
    there = {
        "group": state.get_world_group(),
        "queue": ours(engine, "device_communicators.shm_broadcast", "MessageQueue")(1, 1),
    }
    try:
        missing = {
            each
            for kind, names in found.uses.items()
            for each in names
            if not hasattr(there[kind], each) and not hasattr(over_a_store, each)
        }
    finally:
        there["queue"].shutdown()
        state.destroy_distributed_environment()
    assert missing <= excused(name)


@engines
def test_the_census_is_that_of_the_installed_engine(name: str) -> None:
    """``PEERS`` names the folder that peers are installed in; elsewhere the written one holds."""
    root = Path(os.environ.get("PEERS", "")) / FOLDERS[name]
    if not os.environ.get("PEERS") or not (root / name).is_dir():
        pytest.skip("the engine is not installed: set PEERS")
    assert census.take(ENGINES[name], root) == written(name)
