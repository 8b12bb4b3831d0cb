"""What a command that a page shows has to be: its options, targets and files are there.

What needs another machine is not run. Commands that are not ours are known by name alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import tomllib
from pathlib import PurePath
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from torch.distributed.run import get_args_parser as torchrun_parser

from server.cli import COMMANDS as OURS
from server.commands.options import add_options
from tests.pages.blocks import ROOT, Block, blocks, read

if TYPE_CHECKING:
    from collections.abc import Iterator

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
