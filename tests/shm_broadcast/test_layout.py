"""The layout: both languages agree, words are aligned, nothing overlaps."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import _native, layout

HEADER = Path(layout.__file__).with_name("native") / "layout.h"
IN_C = set(re.findall(r"^#define (\w+) \S", HEADER.read_text(), re.MULTILINE))


def test_the_extension_shows_all_it_shares() -> None:
    shown = {name for name in vars(_native) if name.isupper()}
    assert shown == IN_C


@pytest.mark.parametrize("name", sorted(IN_C))
def test_c_agrees(name: str) -> None:
    assert getattr(_native, name) == getattr(layout, name)


@pytest.mark.parametrize(
    ("offset", "width"),
    [
        (layout.SEGMENT_MAGIC, 4),
        (layout.SEGMENT_VERSION, 4),
        (layout.SEGMENT_SIZE, 8),
        (layout.BOARD_ABORT, 4),
        (layout.BOARD_MEMBERS, 4),
        (layout.member_slot(3) + layout.MEMBER_DOORBELL, 4),
        (layout.member_slot(3) + layout.MEMBER_DOORBELL + layout.DOORBELL_SLEEPERS, 4),
        (layout.member_slot(3) + layout.MEMBER_STATE, 4),
        (layout.member_slot(3) + layout.MEMBER_PID, 4),
        (layout.member_slot(3) + layout.MEMBER_START_TIME, 8),
        (layout.member_slot(3) + layout.MEMBER_JOINING, 4),
        (layout.member_slot(3) + layout.MEMBER_SEQUENCE, 8),
        (layout.member_slot(3) + layout.MEMBER_PROGRESS, 8),
        (layout.failure_slot(2, 5) + layout.FAILURE_CLAIMED, 4),
        (layout.failure_slot(2, 5) + layout.FAILURE_CULPRIT, 4),
        (layout.RING_CAPACITY, 8),
        (layout.RING_READER_COUNT, 4),
        (layout.RING_CLOSED, 4),
        (layout.RING_PUBLISHED, 8),
        (layout.RING_SEQUENCE, 8),
        (layout.RING_GATE, 8),
        (layout.reader_line(3) + layout.READER_CONSUMED, 8),
        (layout.reader_line(3) + layout.READER_SEQUENCE, 8),
        (layout.reader_line(3) + layout.READER_JOINED, 8),
    ],
)
def test_words_are_aligned(offset: int, width: int) -> None:
    assert offset % width == 0


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
    assert line(slot + layout.MEMBER_DOORBELL) != line(slot + layout.MEMBER_PROGRESS)


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


def test_fields_of_one_slot_do_not_overlap() -> None:
    assert layout.MEMBER_START_TIME + 8 <= layout.MEMBER_SEQUENCE
    assert layout.MEMBER_OPERATION + layout.OPERATION_BYTES <= layout.MEMBER_STRIDE
    assert layout.FAILURE_KIND + layout.FAILURE_KIND_BYTES <= layout.FAILURE_MESSAGE
    assert layout.FAILURE_MESSAGE + layout.FAILURE_MESSAGE_BYTES <= layout.FAILURE_STRIDE
    assert layout.SEGMENT_NONCE + layout.SEGMENT_NONCE_BYTES <= layout.BOARD_ABORT


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
