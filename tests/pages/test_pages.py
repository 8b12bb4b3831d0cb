"""What pages show is there: commands can be typed, maps and signatures are those of the code."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import subprocess
import tomllib
from ast import literal_eval
from pathlib import PurePath
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import pytest
import yaml
from torch.distributed.run import get_args_parser as torchrun_parser

from docs.signatures import SECTIONS, directives, path_of, reference
from server import WorkerPool
from server.cli import COMMANDS as OURS
from server.commands.options import ServeOptions, add_options
from tests.packages import kept_files
from tests.pages.blocks import PAGES, ROOT, Block, block_of, blocks, read

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.quick

# --- commands -----------------------------------------------------------------------------------


COMMANDS: Final = {"sh", "console"}
"""Languages of blocks that consist of commands; of a console what follows a ``$``."""
STANDS_FOR: Final = {"PID": "1", "$RANK": "1"}
OTHERS: Final = {"base64", "chmod", "export", "git", "head", "openssl", "umask", "vllm"}


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command, without what is redirected and which variables are set."""
    text = block.text
    if block.language == "console":
        text = "".join(f"{line}\n" for line in re.findall(r"^\w*\$ +(.*)", text, re.M))
    text = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "), flags=re.M)
    words = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    words.whitespace, words.commenters, words.whitespace_split = " \t", "", True
    command: list[str] = []
    for word in [*words, "\n"]:
        if not set(word) <= set("();|&\n"):
            command.append(word)
        elif command:
            yield _bare(command)
            command = []


def _bare(command: list[str]) -> list[str]:
    end = next((at for at, word in enumerate(command) if word in (">", "<")), len(command))
    begin = next((at for at, word in enumerate(command) if not re.match(r"\w+=", word)), end)
    return [STANDS_FOR.get(word, word) for word in command[begin:end]]


def check(page: str, words: list[str]) -> None:
    """Raise `AssertionError` where a command cannot be what it says."""
    match [PurePath(words[0]).name, *words[1:]]:
        case ["group-coordinator", *options]:
            _ours(options)
        case ["make", *targets]:
            _make(targets)
        case ["pip", "install", *what]:
            _pip(what)
        case ["python", "-m", "pytest", *files]:
            _tests(page, files)
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)
        case ["python", file, *_]:
            assert (ROOT / file).exists()
        case ["torchrun", *options]:
            _torchrun(page, options)
        case ["srun", *command]:
            check(page, command)
        case ["curl", *options]:
            (url,) = [each for each in options if each.startswith("http:")]
            assert urlsplit(url).netloc == "127.0.0.1:8000" and is_served(urlsplit(url).path)
        case ["docker", *options]:
            _docker(options)
        case ["kubectl", *options]:
            _kubectl(options)
        case [program, *_]:
            assert program in OTHERS


def is_served(path: str) -> bool:
    """Whether a service has a route of this path."""
    route = f'Route("{path}"'
    return any(route in each.read_text() for each in ROOT.glob("server/service/*.py"))


def _ours(options: list[str]) -> None:
    if options == ["--version"]:
        return
    name, *rest = options
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, OURS[name].options)
    parser.parse_args(rest)


def _make(words: list[str]) -> None:
    makefile = read("Makefile")
    for word in words:
        name, given, _ = word.partition("=")
        wanted = rf"^{name}\s*[?:]?=" if given else rf"^{name}:"
        assert re.search(wanted, makefile, re.M), word


def _pip(words: list[str]) -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for option, word in zip(["", *words], words, strict=False):
        if option == "-c":
            assert (ROOT / word).exists()
        elif found := re.search(r"\[(.*)\]$", word):
            assert {*found[1].split(",")} <= extras.keys()
        else:
            assert word in ("-c", ".") or f"\n{word}==" in read("constraints.txt"), word


def _tests(page: str, words: list[str]) -> None:
    """A file may be one that the page shows, with its name on the first line."""
    shown = {each.text.partition("\n")[0] for each in blocks() if each.page == page}
    for file, _, test in (word.partition("::") for word in words):
        assert (ROOT / file).exists() or f"# {file}" in shown
        assert not test or f"def {test.partition('[')[0]}(" in read(file)


def _torchrun(page: str, options: list[str]) -> None:
    args = torchrun_parser().parse_args(options)
    assert args.no_python
    check(page, [args.training_script, *args.training_script_args])


def _docker(words: list[str]) -> None:
    if words[0] == "build":
        assert (ROOT / words[words.index("-f") + 1]).exists()
        return
    assert words[0] == "run"
    mounted = words[words.index("-v") + 1].split(":")[1]
    assert f'"@{mounted}"' in read("deploy/Dockerfile")


def _kubectl(words: list[str]) -> None:
    match words:
        case ["apply", "-f", file]:
            assert (ROOT / file).exists()
        case ["create", "secret", "generic", name, option]:
            assert option == "--from-file=api-key"
            assert f"secretName: {name}" in read("deploy/kubernetes.yaml")
        case _:
            raise AssertionError(words)


SHOWN = [block for block in blocks() if block.language in COMMANDS]


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_commands_can_be_typed(block: Block) -> None:
    found = list(commands(block))
    assert found
    for words in found:
        check(block.page, words)
    if block.language == "sh":
        subprocess.run(["bash", "-n"], input=block.text, check=True, text=True)


# --- blocks -------------------------------------------------------------------------------------


LANGUAGES = {*COMMANDS, "python", "text", "json", "yaml", "mermaid"}


ASKED: Final = re.compile(r'block_of\(\s*("[^"]*"),\s*("(?:[^"\\]|\\.)*"|\'[^\']*\'),?\s*\)')


def asked_for() -> set[tuple[str, str]]:
    """The blocks that tests ask for, as the arguments of `block_of`."""
    texts = (file.read_text(encoding="utf-8") for file in ROOT.glob("tests/**/test_*.py"))
    found = [ASKED.findall(text) for text in texts]
    return {(literal_eval(page), literal_eval(part)) for each in found for page, part in each}


def test_every_block_is_used_by_a_test() -> None:
    asked = asked_for()
    alone = [
        str(block)
        for block in blocks()
        if block.language not in COMMANDS
        and not any(block.page == page and part in block.text for page, part in asked)
    ]
    assert alone == []


def test_code_is_fenced_with_its_language() -> None:
    assert [str(block) for block in blocks() if block.language not in LANGUAGES] == []
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)
        assert re.findall(r"\n\n    .*", prose) == [], page
        assert "```" not in prose, page


# --- maps ---------------------------------------------------------------------------------------


def test_the_readmes_tree_names_files_that_exist() -> None:
    kept = kept_files()
    folder, missing = "", []
    for line in block_of("README.md", "shm_broadcast/   the ground floor").splitlines():
        if not line.startswith(" "):
            folder = line.split("/")[0]
        names = re.findall(r"(?:[\w/]+/|\w+\.py)(?=[\s,;)]|$)", line)
        for name in names:
            inside = name if name.startswith(folder) else f"{folder}/{name}"
            if not any(each.startswith((name, inside)) for each in kept):
                missing.append(name)
    assert missing == []


def test_the_picture_of_the_packages_names_files_that_exist() -> None:
    kept = kept_files()
    rooms = re.split(
        r"^  subgraph (\w+)", block_of("docs/architecture.md", "flowchart"), flags=re.M
    )
    assert rooms[1::2] == ["server", "coordinator", "device_comm", "shm_broadcast"]
    named = [
        f"{package}/{name}"
        for package, text in zip(rooms[1::2], rooms[2::2], strict=True)
        for label in re.findall(r'\["(.*?)<br>', text)
        for name in re.findall(r"[\w/]*(?:\w/|\.py)(?=[ ,]|$)", label)
    ]
    assert len(named) > 25
    assert [name for name in named if not any(each.startswith(name) for each in kept)] == []


def test_prometheus_is_pointed_to_the_service() -> None:
    (job,) = yaml.safe_load(block_of("docs/monitoring.md", "scrape_configs:"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    options = ServeOptions()
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert is_served("/metrics")


def test_the_leader_worker_set_fits_the_service() -> None:
    spec = yaml.safe_load(block_of("docs/several-hosts.md", "apiVersion"))["spec"]
    template = spec["leaderWorkerTemplate"]
    found = [
        template[which]["spec"]["containers"] for which in ("leaderTemplate", "workerTemplate")
    ]
    for (container,) in found:
        check("docs/several-hosts.md", container["command"])
        (variable,) = container["env"]
        assert variable["name"] == "GROUP_COORDINATOR_SECRET_FILE"
    probes = [found[0][0][f"{kind}Probe"]["httpGet"]["path"] for kind in ("liveness", "readiness")]
    assert probes == ["/health", "/ready"]
    assert all(map(is_served, probes))


# --- docs/reference.md --------------------------------------------------------------------------


def test_the_reference_is_that_of_the_code() -> None:
    assert read("docs/reference.md") == reference(), "run: python -m docs.signatures"


def test_an_entry_is_a_signature_and_a_first_sentence() -> None:
    lines = read("docs/reference.md").splitlines()
    sentence = (WorkerPool.collective_rpc.__doc__ or "").splitlines()[0].replace("``", "`")
    (line,) = [each for each in lines if each.startswith("- `collective_rpc(")]
    assert line.startswith("- `collective_rpc(method: str, timeout: float | None=None, args:")
    assert line.endswith(f") -> Any`: {sentence}")


def test_the_site_has_directives_for_lists() -> None:
    page = directives(read("docs/reference.md"))
    entries = [entry for part in SECTIONS.values() for entry in part]
    assert re.findall(r"^::: (.*)", page, re.M) == [path_of(entry) for entry in entries]
    assert "- `" not in page
