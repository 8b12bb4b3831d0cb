"""Words of shared memory, and where they lie: both languages agree, nothing overlaps."""

from __future__ import annotations

import itertools
import re
import time
from hashlib import blake2b
from pathlib import Path

import pytest

from device_comm.shm import layout as group_layout
from shm_broadcast import _native, layout
from shm_broadcast._native import Words

pytestmark = pytest.mark.quick

SIZE = 256
HEADER = Path(layout.__file__).with_name("native") / "layout.h"
IN_C = set(re.findall(r"^#define (\w+) \S", HEADER.read_text(), re.MULTILINE))
DIGEST = "e491b515e5e4642a"
"""Of all constants of both layouts, as of `layout.VERSION`."""

WIDTHS = {
    "SEGMENT": {"MAGIC": 4, "VERSION": 4, "SIZE": 8, "NONCE": 16},
    "BOARD": {"KEY": 32, "ABORT": 4, "MEMBERS": 4, "NAME": 48, "HISTORY": 4, "SLOTS": 0},
    "MEMBER": {
        "EVENTCOUNT": 8, "STATE": 4, "PID": 4, "START_TIME": 8, "JOINING": 8, "RANK": 4,
        "SEQUENCE": 8, "PROGRESS": 8, "OPERATION": 48,
    },
    "FAILURE": {"CLAIMED": 4, "CULPRIT": 4, "KIND": 56, "MESSAGE": 448},
    "ENTRY": {
        "BEGIN": 8, "END": 8, "SEQUENCE": 8, "BYTES": 8, "NUMBER": 4, "PEER": 2, "VERB": 1,
        "DTYPE": 1, "OUTCOME": 1, "GROUP": 23,
    },
    "TOTAL": {"ENDED": 8, "FAILED": 8, "NS": 8, "BYTES": 8},
    "LOG": {"COUNT": 8, "ENTRIES": 0},
    "COLLECTIVE": {"WORD": 8, "SIGNATURE": 56},
    "FINGERPRINT": {"GROUP": 8},
    "RING": {
        "CAPACITY": 8, "READER_COUNT": 4, "CLOSED": 4, "BOARD": 16, "WRITER": 4, "PUBLISHED": 8,
        "SEQUENCE": 8, "GATE": 8, "READERS": 0,
    },
    "READER": {"CONSUMED": 8, "SEQUENCE": 8, "MEMBER": 4, "JOINED": 8, "READS": 8},
}  # fmt: skip
"""The bytes of every field, by what it is a field of; 0: all other fields lie before it."""

NO_FIELDS = {"TOTAL_GROUPS", "TOTAL_VERBS", "FINGERPRINT_CLOSED", "FINGERPRINT_ENTRIES"}
"""Numbers that are called like fields."""


@pytest.fixture
def memory() -> bytearray:
    return bytearray(SIZE)


@pytest.fixture
def words(memory: bytearray) -> Words:
    return Words(memory)


# --- the layout ------------------------------------------------------------------------------


def test_c_agrees() -> None:
    shown = {name: value for name, value in vars(_native).items() if name.isupper()}
    assert shown.keys() == IN_C
    assert shown == {name: getattr(layout, name) for name in IN_C}


def test_a_changed_layout_has_a_version_of_its_own() -> None:
    """Once it fails: a higher VERSION, by which processes of two releases know each other, and the
    digest that is shown.
    """
    facts = [
        f"{module.__name__}.{name} = {value!r}"
        for module in (layout, group_layout)
        for name, value in sorted(vars(module).items())
        if name.isupper() and name != "VERSION"
    ]
    digest = blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()
    assert (layout.VERSION, digest) == (8, DIGEST)


@pytest.mark.parametrize("whole", WIDTHS)
def test_fields_are_aligned_and_do_not_overlap(whole: str) -> None:
    fields = WIDTHS[whole]
    named = {
        name.removeprefix(f"{whole}_")
        for name, value in vars(layout).items()
        if name.startswith(f"{whole}_") and isinstance(value, int) and name not in NO_FIELDS
    }
    named = {name for name in named if not name.endswith("STRIDE")}
    assert {name for name in named if name.removesuffix("_BYTES") not in fields} == set()
    spans = sorted((getattr(layout, f"{whole}_{name}"), width) for name, width in fields.items())
    for (offset, width), (following, _) in itertools.pairwise(spans):
        assert offset + width <= following
    for offset, width in spans:
        assert width not in (2, 4, 8) or offset % width == 0
    stride = getattr(layout, f"{whole}_STRIDE", 0)
    assert stride % 8 == 0
    assert not stride or sum(spans[-1]) <= stride


@pytest.mark.parametrize("n", [1, 2, 5])
def test_slots_of_a_board_do_not_overlap(n: int) -> None:
    spans = [(0, layout.BOARD_NAME + layout.BOARD_NAME_BYTES)]
    for place, size in (
        (layout.member_slot, layout.MEMBER_OPERATION + layout.OPERATION_BYTES),
        (
            lambda member: layout.failure_slot(member, n),
            layout.FAILURE_MESSAGE + layout.FAILURE_MESSAGE_BYTES,
        ),
        (lambda member: layout.history_slot(member, n), layout.HISTORY_STRIDE),
        (lambda member: layout.fingerprints_slot(member, n), layout.FINGERPRINT_STRIDE),
    ):
        spans += [(start := place(member), start + size) for member in range(n)]
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start
        assert start % layout.LINE == 0
    assert spans[-1][1] <= layout.board_size(n)


# --- words -----------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [1, 2, 3, 254, SIZE, SIZE + 64, 2**40, -4])
def test_offsets_outside_or_not_aligned_are_refused(words: Words, offset: int) -> None:
    for call in (
        lambda: words.load32(offset),
        lambda: words.load64(offset),
        lambda: words.store32(offset, 1),
        lambda: words.store64(offset, 1),
        lambda: words.add32(offset, 1),
        lambda: words.compare_and_swap32(offset, 0, 1),
        lambda: words.compare_and_swap64(offset, 0, 1),
    ):
        with pytest.raises((ValueError, IndexError, OverflowError)):
            call()


def test_bytes_are_written_within_the_memory(words: Words, memory: bytearray) -> None:
    words.write(3, b"hello")
    assert memory[3:8] == b"hello"
    words.write(64, memoryview(b"abcdef")[1:3])
    assert memory[63:67] == b"\0bc\0"
    before = bytes(memory)
    with pytest.raises(ValueError):  # noqa: PT011
        words.write(SIZE - 2, b"abc")
    with pytest.raises((ValueError, OverflowError)):
        words.store32(0, 2**32)
    assert memory == before
    with pytest.raises(BufferError):
        Words(bytes(64))
    large = bytearray(1 << 20)  # so much that other threads run meanwhile
    content = bytes(range(256)) * (len(large) // 256)
    Words(large).write(0, content)
    assert large == content


def test_stamp_numbers_operations_and_notes_the_time(words: Words, memory: bytearray) -> None:
    before = time.monotonic_ns()
    assert words.stamp(0, layout.STATE_BUSY, "all_reduce") == 1
    assert words.stamp(0, layout.STATE_BUSY, "é" * 40) == 2
    assert words.load32(layout.MEMBER_STATE) == layout.STATE_BUSY
    assert words.load64(layout.MEMBER_SEQUENCE) == 2
    assert before <= words.load64(layout.MEMBER_PROGRESS) <= time.monotonic_ns()
    end = layout.MEMBER_OPERATION + layout.OPERATION_BYTES
    assert memory[layout.MEMBER_OPERATION : end] == ("é" * 24).encode()
    assert memory[end:] == bytes(SIZE - end)
    words.stamp(0, layout.STATE_BUSY, "send")
    assert memory[layout.MEMBER_OPERATION : end] == b"send".ljust(48, b"\0")
