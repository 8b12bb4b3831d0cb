"""What a process can say about the programs that it takes part in itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shm_broadcast.onlooker.blame import Verdict, judge
from shm_broadcast.onlooker.other_hosts import joined
from shm_broadcast.onlooker.processes import scan
from shm_broadcast.onlooker.programs import of_process, programs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shm_broadcast.onlooker.other_hosts import HostSeen
    from shm_broadcast.onlooker.programs import Program


def own_programs() -> list[Program]:
    """The programs of this process, as far as they run on this host.

    Takes some milliseconds: it looks at all processes of this user.

    Raises:
        OSError: /proc cannot be read, say for want of descriptors.
    """
    seen = scan()
    return of_process(os.getpid(), seen, programs(seen))


def own_verdicts(elsewhere: Sequence[HostSeen] = ()) -> list[Verdict]:
    """Who waits for whom in the programs of this process.

    Args:
        elsewhere: what other hosts see of them.

    Raises:
        OSError: as `own_programs`, and it takes as long.
    """
    return [judge(joined(each, elsewhere)) for each in own_programs()]
