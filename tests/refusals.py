"""Has the kernel refuse system calls to a process for good, as the filters of containers do."""

from __future__ import annotations

import ctypes
import platform
import struct
from typing import Final

_NUMBERS: Final = {
    "x86_64": {
        "memfd_create": 319,
        "pidfd_open": 434,
        "eventfd2": 290,
        "fallocate": 285,
        "clone": 56,
        "fork": 57,
        "vfork": 58,
        "clone3": 435,
    },
    "aarch64": {
        "memfd_create": 279,
        "pidfd_open": 434,
        "eventfd2": 19,
        "fallocate": 47,
        "clone": 220,
        "clone3": 435,
    },
}
NEW_PROCESSES: Final = ("clone", "fork", "vfork", "clone3")
"""What makes processes and threads."""

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_FILTER = 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(number: int, *names: str) -> None:
    """Make these system calls of this thread, and those that it starts, fail with ``number``."""
    known = _NUMBERS[platform.machine()]
    steps = [(_LOAD, 0, 0, 0)]
    for name in names:
        if name in known:
            steps += [(_JUMP_IF_EQUAL, 0, 1, known[name]), (_RETURN, 0, 0, _ERRNO | number)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0),
    ):
        if library.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
