"""Random input for as long as you like: ``python -m tests.fuzz --seed N --minutes M``.

Prints the seed, a line for each kind, and, if something fails, the shortest example that does; then
ends with 1. ``--what`` chooses: programs of verbs, changes of layout, or what comes over sockets.
Where ranks do it, ``--transport`` and ``--ranks`` choose; otherwise all are run in turn.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time

from tests.fuzz.fleet import TRANSPORTS
from tests.fuzz.generate import KINDS
from tests.fuzz.search import search_layouts, search_programs
from tests.fuzz.sockets import SOCKETS, search_socket


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--seed", type=int, default=None, help="default: a fresh one")
    options.add_argument("--minutes", type=float, default=1.0)
    options.add_argument("--transport", choices=TRANSPORTS, action="append")
    options.add_argument("--ranks", type=int, choices=range(2, 9), action="append")
    options.add_argument(
        "--fault", choices=KINDS, action="append", default=[], help="have it befall a rank"
    )
    options.add_argument("--what", choices=("programs", "layouts", *SOCKETS), default="programs")
    arguments = options.parse_args()
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    sys.stdout.write(f"seed {seed}\n")
    kinds = [
        (transport, n)
        for transport in arguments.transport or TRANSPORTS
        for n in arguments.ranks or range(2, 6)
    ]
    if arguments.what in SOCKETS:
        count = search_socket(arguments.what, seed, arguments.minutes * 60)
        sys.stdout.write(f"{arguments.what}: {count} examples\n")
        return 0
    if arguments.fault and arguments.what != "programs":
        options.error("faults befall the ranks of programs")
    if "slip" in arguments.fault and "torch" in (arguments.transport or TRANSPORTS):
        options.error("torch's process groups are compared too late: no slips over torch")
    seconds = arguments.minutes * 60 / len(kinds)
    for transport, n in kinds:
        began = time.monotonic()
        if arguments.what == "layouts":
            count = search_layouts(n, transport, seed, seconds)
        else:
            count = search_programs(n, transport, seed, seconds, arguments.fault)
        sys.stdout.write(
            f"{transport:<8}{n} ranks{count:8} {arguments.what} in "
            f"{time.monotonic() - began:.0f} s\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
