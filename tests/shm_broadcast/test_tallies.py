"""Tallies on a board: written by their member, read by the others, and never of another group."""

from __future__ import annotations

import struct
from contextlib import ExitStack

import pytest

from shm_broadcast import Board, Deadline, GroupTimeoutError, layout
from shm_broadcast.state.fingerprint import Fingerprint

LAST = b"the last one" + bytes(44)


def log_of(count: int, group: int, *collectives: tuple[int, int]) -> bytes:
    """The bytes of a log: its count, and numbers with digests, all with signature `LAST`."""
    log = bytearray(layout.FINGERPRINT_STRIDE)
    struct.pack_into("<QQ", log, 0, count, group)
    for number, digest in collectives:
        struct.pack_into("<II56s", log, 64 + number % 4 * 64, digest, number, LAST)
    return bytes(log)


def entries_of(board: Board, n: int) -> list[int]:
    return [board.fingerprints.allocate(group) for group in range(1, n + 1)]


def test_what_a_member_tells_the_others_read() -> None:
    group, most = (1 << 63) - 1, 0xFFFFFFFF
    with Board.create(3, 0) as board, Board.attach(board.handle(), 2) as other:
        assert [list(board.fingerprints.of_member(member)) for member in range(3)] == [[], [], []]
        entry = other.fingerprints.allocate(group)
        assert list(board.fingerprints.of_member(2)) == [Fingerprint(group, log_of(0, group))]
        other.fingerprints.publish(entry, 5, most, LAST)
        expected = [Fingerprint(group, log_of(5, group, (5, most)))]
        for each in (board, other):
            assert list(each.fingerprints.of_member(2)) == expected
        for number in range(6, 10):
            other.fingerprints.publish(entry, number, number, LAST)
        last = log_of(9, group, *((number, number) for number in range(6, 10)))
        assert list(board.fingerprints.of_member(2)) == [Fingerprint(group, last)]
        assert list(board.fingerprints.of_member(1)) == []
        assert board.fingerprints.of_group(group, 2) == Fingerprint(group, last)
        assert board.fingerprints.of_group(1, 2) is board.fingerprints.of_group(group, 1) is None
        assert board.fingerprints.local_entry(group, 2) == entry
        assert board.fingerprints.local_entry(1, 2) == board.fingerprints.local_entry(group, 1) == 0
        assert not board.fingerprints.closed(group, 2)
        other.fingerprints.close(entry)
        (closed,) = board.fingerprints.of_member(2)
        assert (closed.group, closed.closed) == (group, True)
        assert board.fingerprints.closed(group, 2)
        assert not board.fingerprints.closed(1, 2)


def test_numbers_have_32_bits_in_an_entry_and_64_before() -> None:
    with Board.create(1, 0) as board:
        number = (1 << 32) + 6
        board.fingerprints.publish(board.fingerprints.allocate(7), number, 0, LAST)
        (only,) = board.fingerprints.of_member(0)
        assert struct.unpack_from("<Q", only.log) == (number,)
        assert struct.unpack_from("<II", only.log, 64 + 2 * 64) == (0, 6)


def test_a_group_without_a_collective_is_closed_as_well() -> None:
    with Board.create(1, 0) as board:
        board.fingerprints.close(board.fingerprints.allocate(7))
        (only,) = board.fingerprints.of_member(0)
        assert (only.group, only.closed) == (7, True)


def test_there_is_room_for_so_many_and_what_is_given_back_is_used_again_last() -> None:
    with Board.create(2, 0) as board:
        entries = entries_of(board, layout.FINGERPRINTS)
        assert len({*entries}) == layout.FINGERPRINTS
        assert board.fingerprints.allocate(99) == 0
        for entry in entries:
            board.fingerprints.publish(entry, 1, 1, LAST)
        for entry in entries[:2]:
            board.fingerprints.close(entry)
        assert board.fingerprints.allocate(98) == entries[0]
        # Nothing is left of the group that had it; that the other one was closed is known still.
        told = sorted((each.group, each.closed) for each in board.fingerprints.of_member(0))
        others = [(group, False) for group in range(3, layout.FINGERPRINTS + 1)]
        assert told == [(2, True), *others, (98, False)]
        assert board.fingerprints.of_group(98, 0) == Fingerprint(98, log_of(0, 98))


def test_the_log_says_once_that_there_is_no_more_room(caplog: pytest.LogCaptureFixture) -> None:
    with Board.create(2, 0) as board, Board.attach(board.handle(), None) as onlooker:
        entries_of(board, layout.FINGERPRINTS)
        assert caplog.messages == []
        for group in (97, 98):
            assert board.fingerprints.allocate(group) == 0
        assert onlooker.fingerprints.allocate(99) == 0
    assert caplog.messages == [
        "calls are compared in 32 open groups at once; in further ones they are not"
    ]


def test_whoever_looks_meanwhile_finds_no_other_count_of_a_closed_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Board.create(1, 0) as board:
        for entry in entries_of(board, layout.FINGERPRINTS):
            board.fingerprints.publish(entry, 5, 1, LAST)
            board.fingerprints.close(entry)
        seen: list[Fingerprint] = []
        words = board.fingerprints._words

        class Watched:
            def write(self, offset: int, data: bytes) -> None:
                words.write(offset, data)

            def fence(self) -> None:
                words.fence()

            def store64(self, offset: int, value: int) -> None:
                words.store64(offset, value)
                monkeypatch.setattr(board.fingerprints, "_words", words)
                seen.extend(board.fingerprints.of_member(0))
                monkeypatch.setattr(board.fingerprints, "_words", self)

        monkeypatch.setattr(board.fingerprints, "_words", Watched())
        board.fingerprints.allocate(99)
        assert {each.log[0] for each in seen if each.closed} == {5}


def test_who_takes_a_slot_over_finds_no_tally_in_it() -> None:
    with ExitStack() as stack:
        board = stack.enter_context(Board.create(2, 0))
        first = Board.attach(board.handle(), 1)
        first.fingerprints.publish(first.fingerprints.allocate(7), 3, 4, LAST)
        assert len(board.fingerprints.of_member(1)) == 1
        first.close()
        stack.enter_context(Board.attach(board.handle(), 1))
        assert list(board.fingerprints.of_member(1)) == []


def test_tallies_lie_behind_the_histories() -> None:
    assert layout.fingerprints_slot(0, 5) == layout.history_slot(4, 5) + layout.HISTORY_STRIDE
    assert layout.fingerprints_slot(5, 5) == layout.board_size(5)
    assert layout.FINGERPRINT_STRIDE == 64 + 4 * 64
    for member in range(5):
        assert layout.fingerprints_slot(member, 5) % layout.LINE == 0


def test_an_onlooker_has_none_to_give() -> None:
    with Board.create(1, None) as board:
        assert board.fingerprints.allocate(1) == 0


def test_there_are_none_where_no_histories_are() -> None:
    with Board.create(2, 0, histories=False) as board:
        assert board.fingerprints.allocate(1) == 0
        assert list(board.fingerprints.of_member(1)) == []


def test_whoever_waits_compares_now_and_then() -> None:
    looks: list[int] = []
    with Board.create(2, 0) as board, Board.attach(board.handle(), 1):
        board.fingerprints.comparing.append(lambda: looks.append(1))
        with pytest.raises(GroupTimeoutError):
            board.wait(lambda: False, Deadline.after(0.35), "a wait", lambda: [1])
    assert len(looks) >= 2
