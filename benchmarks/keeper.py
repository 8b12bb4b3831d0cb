"""Ends a group of processes when its benchmark has ended: python -m benchmarks.keeper GROUP FOLDER.

However it ended: the input is a pipe whose other end the benchmark holds. Some peers spin without
end for one that is gone, and some are stopped while others are measured. The folder is removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

GONE_SECONDS = 10.0
"""How long the kernel may take to end what was killed."""


def end(group: int) -> None:
    """Kill all of a group, and wait until it is gone."""
    deadline = time.monotonic() + GONE_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, signal.SIGKILL)
            time.sleep(0.01)


def main() -> None:
    sys.stdin.buffer.read()
    end(int(sys.argv[1]))
    shutil.rmtree(Path(sys.argv[2]), ignore_errors=True)


if __name__ == "__main__":
    main()
