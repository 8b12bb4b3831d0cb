"""The plugins of vLLM and SGLang: what switches them on, what they replace, why an engine ended."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from subprocess import STDOUT
from types import ModuleType

import pytest

from coordinator.compat.sglang.device_communicators.shm_broadcast import MessageQueue
from coordinator.plugins.sglang import hooks as sglang_hooks
from coordinator.plugins.switches import PARTS, Switches, UntestedVersionError
from coordinator.plugins.vllm import hooks
from coordinator.plugins.vllm.hooks import HOOKS, TESTED, Hook
from tests.commands import run_code

# --- switches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts", "force"),
    [
        *((text, [], False) for text in ("", "0", " ", ",")),
        ("1", PARTS, False),
        ("force", PARTS, True),
        ("queue", ["queue"], False),
        ("queue, status", ["queue", "status"], False),
        ("communicator,force", ["communicator"], True),
        ("queue,1", PARTS, False),
    ],
)
def test_parts_are_on_by_name(text: str, parts: list[str], force: bool) -> None:
    assert Switches.of(text) == Switches(frozenset(parts), force)


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no part 'ques'; it is 0, 1, force, or some of commun"):
        Switches.of("queue,ques")


def test_only_tested_versions_are_accepted_without_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_COORDINATOR", "queue")
    with pytest.raises(UntestedVersionError, match=r"vLLM is 0\.99\.1.*GROUP_COORDINATOR=force"):
        hooks.install(lambda: "0.99.1")
    with pytest.raises(UntestedVersionError, match=r"SGLang is 0\.6\.0"):
        sglang_hooks.install(lambda: "0.6.0")
    Switches.of("1").check_version("vLLM", "0.32.0+cpu", ("0.32.0",))
    Switches.of("force").check_version("vLLM", "0.99.1", ("0.32.0",))


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_nothing_but_the_entry_point_is_imported(value: str | None) -> None:
    code = (
        "import sys; from coordinator.plugins.vllm import register; register(); register()\n"
        "from coordinator.plugins.sglang import register; register()\n"
        "ours = {'coordinator', 'device_comm', 'shm_broadcast', 'group_coordinator'}\n"
        "print(*sorted(name for name in sys.modules if name.partition('.')[0] in ours))\n"
        "print('torch' in sys.modules)"
    )
    kept = {name: text for name, text in os.environ.items() if name != "GROUP_COORDINATOR"}
    done = run_code(
        code,
        env=kept if value is None else {**kept, "GROUP_COORDINATOR": value},
    )
    imported, torch = done.stdout.splitlines()
    assert imported.split() == [
        "coordinator",
        "coordinator.plugins",
        "coordinator.plugins.sglang",
        "coordinator.plugins.vllm",
    ]
    assert torch == "False"


# --- vLLM ---------------------------------------------------------------------------------------


PEERS = os.environ.get("PEERS")
MISSING = importlib.util.find_spec("vllm") is None


def file_of(module: str, root: Path) -> Path:
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.skipif(MISSING, reason="vLLM is not installed: make vllm-test")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}.{hook.name}")
def test_the_line_that_is_replaced_is_in_the_installed_version(hook: Hook) -> None:
    import vllm

    assert vllm.__version__ in TESTED
    name, number, text = hook.line.split(":", 2)
    lines = Path(vllm.__file__).parent.joinpath(name).read_text().splitlines()
    assert lines[int(number) - 1].strip().startswith(text.strip())


# --- SGLang -------------------------------------------------------------------------------------


HOME = "sglang.srt.distributed.device_communicators.shm_broadcast"
needs_sglang = pytest.mark.skipif(PEERS is None, reason="PEERS names no folder with SGLang 0.5.23")


def sources() -> Path:
    assert PEERS is not None
    return Path(PEERS, "sgl")


@needs_sglang
def test_sglangs_registry_puts_our_queue_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry alone, beside the names of the queue: SGLang itself imports kernels."""
    name = "sglang.srt.plugins.hook_registry"
    spec = importlib.util.spec_from_file_location(name, file_of(name, sources()))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = HOME.split(".")
    for length in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:length]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", ModuleType("sglang.srt.plugins"))
    monkeypatch.setitem(sys.modules, name, module)
    sys.modules[HOME].MessageQueue = type("MessageQueue", (), {})  # type: ignore[attr-defined]
    monkeypatch.setenv("GROUP_COORDINATOR", "queue")
    assert sglang_hooks.install(lambda: "0.5.23") == {"queue"}
    module.HookRegistry.apply_hooks()
    assert sys.modules[HOME].MessageQueue is MessageQueue


@needs_sglang
def test_sglang_has_the_names_of_the_hooks() -> None:
    assert "class MessageQueue" in file_of(HOME, sources()).read_text()
    framework = file_of("sglang.srt.plugins", sources()).read_text()
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in framework


def test_parts_that_only_vllm_has_need_no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*sglang_hooks.HOOKS} < {each.part for each in hooks.HOOKS} == {*PARTS}
    monkeypatch.setenv("GROUP_COORDINATOR", "communicator,status")
    assert sglang_hooks.install(lambda: "9.9.9") == frozenset()


# --- the page of an engine, with the reason of its end ------------------------------------------


ENGINE = """
import subprocess, sys
from coordinator.plugins.vllm import hooks
hooks.keep_page(); hooks.keep_page()
worker = "from coordinator.plugins.vllm import hooks; hooks.keep_page(); hooks.report_end(end=%r)"
for words in ("worker rank 1 (pid 7) was killed by SIGKILL", "and so on"):
    subprocess.run([sys.executable, "-c", worker % words], check=True)
print("vLLM's own last line")
"""


def test_the_first_reason_is_the_last_line() -> None:
    said = subprocess.check_output([sys.executable, "-c", ENGINE], stderr=STDOUT, text=True)
    assert said.splitlines() == [
        "vLLM's own last line",
        "vLLM's engine has ended: worker rank 1 (pid 7) was killed by SIGKILL",
    ]


def test_without_a_page_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hooks.PAGE_VARIABLE, raising=False)
    hooks.report_end(end="nobody hears it")
    monkeypatch.setenv(hooks.PAGE_VARIABLE, f"/proc/1/fd/{time.monotonic_ns()}")
    hooks.report_end(end="nobody hears it")
