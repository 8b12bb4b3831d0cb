"""Layout and signatures of `ShmBackend`: pure functions, and what C has to agree with."""

from __future__ import annotations

import importlib
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from device_comm import ReduceOp, call_number
from device_comm.call_number import VERBS
from device_comm.operation import ROOTED
from device_comm.shm import channel, layout, signature
from device_comm.shm.collectives import Status
from device_comm.shm.layout import GroupLayout
from shm_broadcast import layout as board_layout
from shm_broadcast.ring.buffers import RECYCLED_BYTES

LOGGED = ("WORD", "SIGNATURE", "STRIDE")
HEADER = Path(layout.__file__).parents[1] / "native" / "group_layout.h"


def test_the_verbs_with_a_root_come_last() -> None:
    # C takes every code from that of broadcast on for one of them.
    assert {*VERBS[VERBS.index("broadcast") :]} == {*ROOTED}


def test_the_extension_was_built_and_agrees() -> None:
    native: Any = importlib.import_module("device_comm._native")

    for name in ("RANKS", "INSIDE_BYTES", "WHOLE_BYTES", "STEP_BYTES", "RING_BYTES", "SLOTS"):
        assert getattr(native, f"GROUP_{name}") == getattr(layout, f"GROUP_{name}")
    assert (native.GROUP_RINGS, native.RING_STEPS) == (layout.GROUP_RINGS, layout.RING_STEPS)
    for name in ("RANK_LINES", "RANK_STRIDE", "RANK_DONE", "RANK_READS", "BUFFERS", "SLOT_HEADER"):
        assert getattr(native, name) == getattr(layout, name)
    for name in ("SLOT_ARRIVED", "SLOT_SIGNATURE", "PIECE_ALIGN"):
        assert getattr(native, name) == getattr(layout, name)
    assert signature.SIGNATURE.size == native.SIGNATURE_BYTES
    assert native.SIGNATURE_COMPARED == native.SIGNATURE_CHUNK == signature.COMPARED
    assert native.SIGNATURE_CALL == signature.CALL
    for name in ("LOG_COUNT", "LOG_ENTRIES", *(f"COLLECTIVE_{each}" for each in LOGGED)):
        assert getattr(native, name) == getattr(board_layout, name)
    assert native.CALL_ENTRIES == call_number.CALL_ENTRIES
    assert native.COLLECTIVE_SIGNATURE + signature.SIGNATURE.size == native.COLLECTIVE_STRIDE
    assert (native.SHAPE_DIMS, native.NO_OP) == (signature.SHAPE_DIMS, signature.NO_OP)
    assert (native.STATE_IDLE, native.STATE_BUSY) == (
        board_layout.STATE_IDLE,
        board_layout.STATE_BUSY,
    )
    codes = re.findall(r"\bVERB_(\w+),", HEADER.read_text())
    assert codes == [verb.upper() for verb in VERBS]
    for dtype, code in signature.DTYPE_CODES.items():
        name = str(dtype).removeprefix("torch.").upper()
        if dtype not in (torch.uint64, torch.complex32) and not name.startswith("FLOAT8"):
            assert getattr(native, f"DTYPE_{name}") == code
    for status in Status:
        assert getattr(native, f"STEPS_{status.name}") == status
    assert native.RECYCLED_BYTES == RECYCLED_BYTES
    for name in ("POSTED", "TAKEN", "READS", "RING", "INSIDE"):
        assert getattr(native, f"PIPE_{name}") == getattr(channel, name)
    for name in ("RING", "PIECE", "RESERVED", "SMALL", "HEADER", "AT_ONCE"):
        assert getattr(native, f"PIPE_{name}_BYTES") == getattr(channel, f"{name}_BYTES")


@given(st.integers(1, 300))
def test_nothing_overlaps_and_the_footprint_is_as_documented(n: int) -> None:
    group = GroupLayout.for_ranks(n)
    assert group.rank_line(n) == group.pipe(0, 0)
    assert group.pipe(n - 1, n - 1) + layout.PIPE_STRIDE <= group.slots
    assert group.slots % 4096 == 0
    slot = layout.SLOT_HEADER + group.inside_bytes
    assert group.slot(0, 0) == group.slots
    assert group.slot(1, 0) == group.slot(0, n - 1) + slot
    assert group.slot(1, n - 1) + slot <= group.ring(0)
    assert group.ring(0) % 4096 == group.ring_bytes % 4096 == 0
    assert group.ring_bytes >= layout.RING_STEPS * group.step_bytes
    assert group.step_bytes // n >= layout.PIECE_ALIGN
    assert group.whole_bytes <= group.step_bytes
    documented = n * (group.ring_bytes + 2 * (group.inside_bytes + 64) + 64 * (n + 1))
    assert documented <= group.size <= documented + 128 + 2 * 4096


@given(st.integers(1, 300))
def test_every_slot_is_of_one_rank(n: int) -> None:
    group = GroupLayout.for_ranks(n)
    written = sorted(each for rank in range(n) for each in group.written_by(rank))
    slots, rings = written[: layout.BUFFERS * n], written[layout.BUFFERS * n :]
    assert slots[0][0] == group.slots
    for each in (slots, rings):
        assert all(end == begin for (_, end), (begin, _) in pairwise(each))
    assert slots[-1][1] <= rings[0][0]
    assert all(at % 4096 == 0 for each in written for at in each), "a page would be two ranks'"
    assert {end - begin for begin, end in slots} == {layout.SLOT_HEADER + group.inside_bytes}
    assert {end - begin for begin, end in rings} == {group.ring_bytes}
    assert (len(rings), rings[-1][1]) == (n, group.size)


@pytest.mark.parametrize(("n", "mib"), [(2, 4.1), (4, 8.1), (8, 16.1), (16, 16.2), (32, 16.4)])
def test_groups_are_small(n: int, mib: float) -> None:
    assert GroupLayout.for_ranks(n).size <= mib * (1 << 20)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (signature.sign("barrier"), "barrier"),
        (
            signature.sign("all_reduce", torch.float32, (2, 3), ReduceOp.SUM),
            "all_reduce SUM float32[2, 3]",
        ),
        (
            signature.sign("broadcast", torch.bool, (7,), place=3),
            "broadcast bool[7] from rank 3",
        ),
        (
            signature.sign("all_gather", torch.float8_e5m2, (2, 3, 4, 5, 6, 7, 8), place=1),
            "all_gather float8_e5m2[24, 5, 6, 7, 8] along dim 1",
        ),
        (
            signature.sign("all_gatherv", torch.qint8, (2, -1), place=1),
            "all_gatherv other[2, -1] along dim 1",
        ),
        (
            signature.with_chunk(signature.sign("reduce", torch.int64, (1,), ReduceOp.MAX, 1), 4),
            "reduce MAX int64[1] to rank 1, step 5",
        ),
    ],
)
def test_signatures_say_what_they_are(made: bytes, words: str) -> None:
    assert len(made) == 56
    assert signature.signature_text(made) == words
