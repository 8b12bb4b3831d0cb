"""Fragments, assembly, credits and keys: no sockets, no processes."""

from __future__ import annotations

import pickle

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from shm_broadcast.errors import PeerLostError, PeerProtocolError
from shm_broadcast.net.keys import reader_key, writer_key
from shm_broadcast.net.protocol import (
    FRAME_COST,
    Assembler,
    Closed,
    Credit,
    CreditAccount,
    CreditWindow,
    Fragment,
    FrameError,
    ReaderHello,
    Refused,
    RemoteHandle,
    RemoteReaderState,
    Welcome,
    cost,
    encode,
    split_message,
)

CREDIT = 1 << 16


def views(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


class TestSplit:
    def test_small_message_is_one_fragment(self) -> None:
        assert split_message(views(b"ab", b"", b"c"), 1000) == [[b"ab", b"c"]]

    def test_empty_message_is_one_fragment_without_chunks(self) -> None:
        assert split_message([], 1000) == [[]]
        assert split_message(views(b"", b""), 1000) == [[]]

    def test_parts_are_cut_where_a_fragment_is_full(self) -> None:
        limit = 2 * FRAME_COST + 4
        assert split_message(views(b"abc", b"defgh"), limit) == [[b"abc", b"d"], [b"efgh"]]

    @given(st.lists(st.binary(max_size=300), max_size=12), st.integers(FRAME_COST + 1, 500))
    def test_what_is_split_is_assembled(self, parts: list[bytes], limit: int) -> None:
        fragments = split_message(views(*parts), limit)
        assembler = Assembler()
        sizes = tuple(len(part) for part in parts)
        for sequence, chunks in enumerate(fragments):
            assert cost(chunks) <= limit
            whole = assembler.add(Fragment(sequence, None if sequence else sizes), chunks)
            assert (whole is not None) == (sequence == len(fragments) - 1)
        assert [bytes(part) for part in whole or []] == parts
        assert not assembler.partial


class TestAssembler:
    def test_gap_in_the_sequence(self) -> None:
        assembler = Assembler()
        assembler.add(Fragment(0, ()), [])
        with pytest.raises(FrameError, match="fragment 2 where 1 was due"):
            assembler.add(Fragment(2, ()), [])

    def test_repeated_fragment(self) -> None:
        assembler = Assembler()
        assembler.add(Fragment(0, (1,)), views(b"a"))
        with pytest.raises(FrameError, match="fragment 0 where 1 was due"):
            assembler.add(Fragment(0, (1,)), views(b"a"))

    def test_continuation_of_nothing(self) -> None:
        with pytest.raises(FrameError, match="does not belong"):
            Assembler().add(Fragment(0), views(b"a"))

    def test_message_inside_a_message(self) -> None:
        assembler = Assembler()
        assert assembler.add(Fragment(0, (2,)), views(b"a")) is None
        with pytest.raises(FrameError, match="does not belong"):
            assembler.add(Fragment(1, (2,)), views(b"a"))

    @pytest.mark.parametrize("chunks", [views(b"abc"), views(b"a", b"bc"), views(b"ab", b"c")])
    def test_more_bytes_than_announced(self, chunks: list[memoryview]) -> None:
        with pytest.raises(FrameError, match="more bytes"):
            Assembler().add(Fragment(0, (2,)), chunks)

    def test_message_after_a_cancelled_one(self) -> None:
        assembler = Assembler()
        assert assembler.add(Fragment(0, (4, 4)), views(b"abcd", b"e")) is None
        assembler.cancel()
        parts = assembler.add(Fragment(1, (2,)), views(b"ok"))
        assert [bytes(part) for part in parts or []] == [b"ok"]

    def test_whole_chunk_is_not_copied(self) -> None:
        chunk = memoryview(b"abc")
        parts = Assembler().add(Fragment(0, (3,)), [chunk])
        assert parts is not None
        assert parts[0] is chunk


class TestCredit:
    def test_window(self) -> None:
        window = CreditWindow(100)
        window.spend(70)
        assert window.available == 30
        window.restore(Credit(50, 2))
        assert (window.available, window.messages) == (80, 2)

    @pytest.mark.parametrize("consumed", [49, 71])
    def test_less_than_before_or_more_than_sent(self, consumed: int) -> None:
        window = CreditWindow(100)
        window.spend(70)
        window.restore(Credit(50, 2))
        with pytest.raises(FrameError, match=f"credit for {consumed} bytes of 70"):
            window.restore(Credit(consumed, 3))

    def test_reader_reports_every_quarter_of_the_window(self) -> None:
        ledger = CreditAccount(100)
        assert ledger.consume(24, completes=False) is None
        assert ledger.consume(1, completes=True) == Credit(25, 1)
        assert ledger.consume(24, completes=True) is None
        assert ledger.consume(60, completes=True) == Credit(109, 3)


class TestLink:
    """A reader's life as its writer sees it."""

    def joined(self) -> RemoteReaderState:
        link = RemoteReaderState(3, CREDIT)
        assert isinstance(link.receive(b"A", [encode(ReaderHello(77))]), Welcome)
        return link

    def test_absent_reader_can_take_nothing(self) -> None:
        link = RemoteReaderState(3, CREDIT)
        assert not link.can_take(0)
        assert str(link.status()) == "rank 3 (never joined)"
        link.require("send")

    def test_hello_opens_the_window(self) -> None:
        link = self.joined()
        assert link.can_take(CREDIT)
        assert not link.can_take(CREDIT + 1)
        status = link.status()
        assert (status.rank, status.pid, status.state) == (3, 77, "busy")

    def test_another_connection_changes_nothing(self) -> None:
        link = self.joined()
        for frame in (ReaderHello(1), Credit(5, 5), Closed()):
            assert isinstance(link.receive(b"B", [encode(frame)]), Refused)
        assert link.can_take(CREDIT)
        assert link.status().pid == 77

    @pytest.mark.parametrize(
        ("frames", "detail"),
        [
            ([b"\xc1"], "MessagePack"),
            ([b""], "truncated"),
            ([encode(Welcome(1))], "Invalid value 'welcome'"),
            ([encode(ReaderHello(2))], "second hello"),
            ([encode(Credit(1, 0))], "credit for 1 bytes of 0 sent"),
            ([encode(("credit", -1, 0))], ">= 0"),
            ([encode(Closed()), b"more"], "2 frames where 1 was due"),
        ],
    )
    def test_nonsense_names_the_reader(self, frames: list[bytes], detail: str) -> None:
        link = self.joined()
        assert isinstance(link.receive(b"A", frames), Refused)
        for _ in range(2):
            with pytest.raises(PeerProtocolError, match=detail) as caught:
                link.require("send")
            assert caught.value.rank == 3
        assert link.receive(b"A", [encode(Credit(0, 0))]) is None

    def test_frames_before_hello(self) -> None:
        link = RemoteReaderState(3, CREDIT)
        link.receive(b"A", [encode(Credit(0, 0))])
        with pytest.raises(PeerProtocolError, match="Credit before hello"):
            link.require("send")

    def test_lost_reader_stays_lost(self) -> None:
        link = self.joined()
        link.mark_lost()
        assert isinstance(link.receive(b"B", [encode(ReaderHello(78))]), Refused)
        with pytest.raises(PeerLostError, match=r"lost rank 3 \(pid 77\)") as caught:
            link.require("send")
        assert caught.value.rank == 3

    def test_reader_that_left_gates_nobody_and_is_not_lost(self) -> None:
        link = self.joined()
        link.receive(b"A", [encode(Closed())])
        link.mark_lost()
        assert link.left
        assert link.can_take(1 << 40)
        link.require("send")


class TestKeys:
    SALT = b"n" * 32

    def test_keys_are_hkdf_sha256(self) -> None:
        # openssl kdf -keylen 32 -kdfopt digest:SHA256 -kdfopt hexkey:… -kdfopt hexsalt:…
        #   -kdfopt info:"group-coordinator remote queue 1: reader 3" HKDF   (and "… writer")
        secret = b"launcher secret."
        reader = "ac97372320b60a049864ea717d9f5a4ff8837640e29f6658deb58075f305b44c"
        writer = "ba6efaf12d8deddd87f1ee155eaf1442e7ae1f0d676e9d6c958d5b027c7ac4ed"
        assert z85.decode(reader_key(secret, self.SALT, 3).secret).hex() == reader
        assert z85.decode(writer_key(secret, self.SALT).secret).hex() == writer

    def test_each_role_rank_nonce_and_secret_has_its_own(self) -> None:
        secret, other = b"s" * 16, b"t" * 16
        keys = [
            writer_key(secret, self.SALT),
            reader_key(secret, self.SALT, 1),
            reader_key(secret, self.SALT, 11),
            writer_key(other, self.SALT),
            writer_key(secret, b"m" * 32),
        ]
        assert len({key.secret for key in keys}) == len(keys)
        assert all(zmq.curve_public(key.secret) == key.public for key in keys)

    def test_secret_key_is_not_printed(self) -> None:
        key = writer_key(b"s" * 16, self.SALT)
        assert key.secret.decode() not in repr(key)

    def test_short_secret(self) -> None:
        with pytest.raises(ValueError, match="16 or more bytes; got 15"):
            writer_key(b"s" * 15, self.SALT)


def test_handle_is_plain_data() -> None:
    handle = RemoteHandle("tcp://[::1]:1", b"n" * 32, 0, (1, 2), CREDIT, 10.0)
    assert pickle.loads(pickle.dumps(handle)) == handle
