"""The service in a process that is forked, not started: see `tests.programs`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import httpx

from benchmarks.http_served import Served
from server import cli
from server.config import PACKAGED_NAME
from tests.programs import Program

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence


class ForkedServed(Served):
    """As `Served`, which starts the command as users do."""

    def _begin(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        return cast("subprocess.Popen[str]", Program(command, *arguments))


def embed(served: Served, given: Any) -> httpx.Response:
    body = {"model": PACKAGED_NAME, "input": given}
    return httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=120, verify=False)


def command(*_: str) -> None:
    """Be ``group-coordinator`` with this process's arguments."""
    sys.exit(cli.main())
