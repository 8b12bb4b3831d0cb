"""What a process can say about the programs that it takes part in itself."""

from __future__ import annotations

import os

from shm_broadcast.onlooker.blame import Verdict, judge
from shm_broadcast.onlooker.processes import scan
from shm_broadcast.onlooker.programs import of_process, programs


def own_verdicts() -> list[Verdict]:
    """Who waits for whom in the programs of this process.

    Takes some milliseconds: it looks at all processes of this user.

    Raises:
        OSError: /proc cannot be read, say for want of descriptors.
    """
    seen = scan()
    return [judge(each) for each in of_process(os.getpid(), seen, programs(seen))]
