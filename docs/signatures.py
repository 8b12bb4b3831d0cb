"""Write reference.md: `python -m docs.signatures`.

The page lists signatures and first sentences, which every viewer of Markdown renders. In the site
each list is a directive, from which mkdocstrings makes the full reference.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import coordinator
import server
import server.errors
import shm_broadcast
import shm_broadcast.errors

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).with_name("reference.md")
INTRODUCTION: Final = """\
# Reference

Written by `make docs` from the code: each signature with the first sentence of its docstring. The
site that `make docs` builds has the docstrings in full. `from group_coordinator import …` finds
most names. `coordinator` has `all_reduce_norm_pass`, `shm_broadcast` all errors of groups and
queues, `group_coordinator.errors` all errors of pools.
"""
SECTIONS: Final = {
    "Pools": (
        server.WorkerPool,
        server.PoolConfig,
        server.Replicas,
        server.WorkerContext,
        server.Hosts,
    ),
    "Groups": (
        coordinator.init,
        coordinator.ParallelGroups,
        coordinator.GroupCoordinator,
        coordinator.all_reduce_norm_pass,
    ),
    "Queues": (shm_broadcast.MessageQueue,),
    "Errors of groups and queues": (shm_broadcast.errors,),
    "Errors of pools": (server.errors,),
}
HIDDEN: Final = {
    *("disown", "from_context", "exchanging_rows_in"),
    "enqueue_noted",
}
"""Methods that only other packages of this repository call; mkdocs.yml has the same names."""


def reference() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, entries in SECTIONS.items():
        parts.append(f"## {title}\n")
        for entry in entries:
            marker = f"<!-- ::: {path_of(entry)} -->\n"
            if inspect.ismodule(entry):
                parts += [marker, "\n".join(_errors(entry)) + "\n"]
            else:
                parts += [f"### {entry.__name__}\n", marker, f"{_entry(entry)}\n"]
    return "\n".join(parts)


LISTED: Final = re.compile(r"(?:^### \w+\n\n)?^<!-- (::: \S+) -->\n.*?(?=^#|\Z)", re.M | re.S)


def directives(page: str) -> str:
    """Return the page with a directive in the place of each list."""
    return LISTED.sub(r"\1\n\n", page)


def path_of(entry: Any) -> str:
    """Return where a module, class or function is defined."""
    return entry.__name__ if inspect.ismodule(entry) else f"{entry.__module__}.{entry.__name__}"


def _entry(found: Any) -> str:
    if not inspect.isclass(found):
        return f"`{_signature(found, found.__name__)}`\n\n{_sentence(found)}"
    members = "\n".join(_members(found))
    parts = (f"`{_constructor(found)}`", _sentence(found), members)
    return "\n\n".join(part for part in parts if part)


def _constructor(cls: type) -> str:
    if not is_dataclass(cls):
        return _signature(vars(cls)["__init__"], cls.__name__).removesuffix(" -> None")
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    annotated = [each for each in body.body if isinstance(each, ast.AnnAssign)]
    for each in annotated:
        match each.value:
            case ast.Call(func=ast.Name("option"), args=[default, *_]):
                each.value = default
    fields = [ast.unparse(each) for each in annotated]
    public = [field for field in fields if not field.startswith("_")]
    return f"{cls.__name__}({', '.join(public)})"


def _members(cls: type) -> Iterator[str]:
    seen = set(HIDDEN)
    for owner in cls.__mro__:
        for name, value in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(value, property):
                yield f"- `{name}`: {_sentence(value)}"
            elif isinstance(value, FunctionType | classmethod | staticmethod):
                function = getattr(value, "__func__", value)
                documented = getattr(cls, name)
                yield f"- `{_signature(function, name)}`: {_sentence(documented)}"


def _errors(module: Any) -> Iterator[str]:
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_":
            of = f"({value.__bases__[0].__name__})" if issubclass(value, BaseException) else ""
            yield f"- `{name}{of}`: {_sentence(value)}"


def _signature(function: Any, name: str) -> str:
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.FunctionDef | ast.AsyncFunctionDef)
    for arguments in (body.args.posonlyargs, body.args.args):
        if arguments and arguments[0].arg in ("self", "cls"):
            del arguments[0]
            break
    result = f" -> {ast.unparse(body.returns)}" if body.returns else ""
    return f"{name}({ast.unparse(body.args)}){result}"


def _sentence(documented: Any) -> str:
    first = " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
    end = first.find(". ")
    return (first if end < 0 else first[: end + 1]).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
