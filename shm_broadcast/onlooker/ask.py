"""Asks observed processes for their stacks, by a signal that they catch; no debugger is needed."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from shm_broadcast.board.stacks import STACK_SIGNAL, StackFile, catches, read_stacks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shm_broadcast.deadline import Deadline
    from shm_broadcast.onlooker.parties import Party


def stacks_of(parties: Iterable[Party], deadline: Deadline) -> dict[str, str]:
    """The Python stacks of parties, by name; of one that has none to show, why.

    Waits until all are written, at most until the deadline. Nobody is sent a signal that it does
    not catch.
    """
    told: dict[str, str] = {}
    with ExitStack() as closing:
        files: dict[int, StackFile] = {}
        pidfds: dict[int, int] = {}
        names: dict[int, str] = {}
        for party in parties:
            pid = party.status.pid
            descriptor = next((m.stacks for m in party.members if m.stacks is not None), None)
            told[party.name] = party.fault or "it catches no signal for that"
            if party.fault or descriptor is None:
                continue
            try:
                pidfds[pid] = os.pidfd_open(pid)
                closing.callback(os.close, pidfds[pid])
                # Looked at after the process is held: it is the same one that gets the signal.
                if catches(pid, STACK_SIGNAL):
                    files[pid] = StackFile.of(pid, descriptor)
                    closing.callback(files[pid].close)
                    names[pid] = party.name
            except OSError as error:
                told[party.name] = f"it cannot be asked: {error.strerror}"

        def ask(pid: int) -> None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfds[pid], STACK_SIGNAL)

        told |= dict.fromkeys(names.values(), "it did not answer in time")
        stacks = read_stacks(files, {pid: pid for pid in files}, ask, deadline)
        told |= {names[pid]: stack.rstrip() for pid, stack in stacks.items()}
    return told
