"""The layout: both languages agree, words are aligned, nothing overlaps."""

from __future__ import annotations

import itertools
import re
import struct
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_comm.shm import layout as group_layout
from shm_broadcast import _native, layout

HEADER = Path(layout.__file__).with_name("native") / "layout.h"
IN_C = set(re.findall(r"^#define (\w+) \S", HEADER.read_text(), re.MULTILINE))


def test_the_extension_shows_all_it_shares() -> None:
    shown = {name for name in vars(_native) if name.isupper()}
    assert shown == IN_C


@pytest.mark.parametrize("name", sorted(IN_C))
def test_c_agrees(name: str) -> None:
    assert getattr(_native, name) == getattr(layout, name)


DIGEST = "e491b515e5e4642a"
"""Of all constants of both layouts, as of `layout.VERSION`."""


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


def test_what_different_processes_write_lies_on_different_lines() -> None:
    def line(offset: int) -> int:
        return offset // layout.LINE

    writer = {
        line(offset) for offset in (layout.RING_PUBLISHED, layout.RING_SEQUENCE, layout.RING_GATE)
    }
    readers = {
        line(layout.reader_line(reader) + field)
        for reader in range(3)
        for field in (layout.READER_CONSUMED, layout.READER_SEQUENCE)
    }
    assert len(writer) == 1
    assert len(readers) == 3
    assert not writer & readers
    assert line(layout.RING_CAPACITY) not in writer | readers
    assert line(layout.data_offset(3)) not in writer | readers
    assert layout.data_offset(3) % layout.RECORD_ALIGN == 0
    # Whoever rings writes the first line of a slot, its member alone the second.
    slot = layout.member_slot(1)
    assert line(slot + layout.MEMBER_EVENTCOUNT) != line(slot + layout.MEMBER_PROGRESS)


def test_the_header_of_a_record_is_where_its_format_puts_it() -> None:
    assert struct.calcsize(layout.RECORD_FORMAT) == layout.RECORD_HEADER
    fields = [
        layout.RECORD_SIZE,
        layout.RECORD_KIND,
        layout.RECORD_CODEC,
        layout.RECORD_BUFFERS,
        layout.RECORD_TOTAL,
        layout.RECORD_SEQUENCE,
        layout.RECORD_OFFSET,
    ]
    codes = layout.RECORD_FORMAT[1:]
    for index, offset in enumerate(fields):
        assert struct.calcsize("<" + codes[:index]) == offset


@pytest.mark.parametrize("n_members", [1, 2, 7])
def test_slots_of_a_board_do_not_overlap(n_members: int) -> None:
    spans = [(0, layout.BOARD_NAME + layout.BOARD_NAME_BYTES)]
    spans += [
        (
            slot := layout.member_slot(member),
            slot + layout.MEMBER_OPERATION + layout.OPERATION_BYTES,
        )
        for member in range(n_members)
    ]
    spans += [
        (
            slot := layout.failure_slot(member, n_members),
            slot + layout.FAILURE_MESSAGE + layout.FAILURE_MESSAGE_BYTES,
        )
        for member in range(n_members)
    ]
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start
    assert spans[-1][1] <= layout.board_size(n_members)


@given(st.integers(0, 1 << 60), st.sampled_from([1, 8, 64, 4096, 65536]))
def test_align(size: int, alignment: int) -> None:
    aligned = layout.align(size, alignment)
    assert aligned % alignment == 0
    assert 0 <= aligned - size < alignment


@given(st.integers(0, 1 << 31))
def test_a_record_holds_its_header_and_payload(size: int) -> None:
    assert layout.record_stride(size) >= layout.RECORD_HEADER + size
    assert layout.record_stride(size) % layout.RECORD_ALIGN == 0


def test_the_footprint_of_a_ring_is_what_is_documented() -> None:
    # MessageQueue.on_board: capacity bytes plus 64 per reader and 192.
    assert layout.ring_size(3, 1 << 20) == (1 << 20) + 3 * 64 + 192


def test_a_placed_size_cannot_be_taken_for_a_real_one() -> None:
    assert layout.PLACED == 1 << 63
