"""Running something in a child that a test forks."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

from tests.intruder import become_nobody

if TYPE_CHECKING:
    from collections.abc import Callable


def in_a_child(body: Callable[[], object], *, as_nobody: bool = False) -> None:
    """Run ``body`` in a forked child, which must not raise; ``as_nobody`` takes root."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if as_nobody:
                become_nobody()
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - printed, and told by the exit status
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
