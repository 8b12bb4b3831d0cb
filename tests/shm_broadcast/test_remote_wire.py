"""Parts, credits and keys: no sockets, no processes."""

from __future__ import annotations

import pickle

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from shm_broadcast.errors import PeerLostError, PeerProtocolError
from shm_broadcast.net import protocol
from shm_broadcast.net.keys import reader_key, writer_key
from shm_broadcast.net.protocol import (
    Closed,
    Credit,
    FrameError,
    ReaderHello,
    Refused,
    RemoteHandle,
    RemoteReaderState,
    Welcome,
    cut_part,
    encode,
    join_parts,
)

CREDIT = 1 << 16


class TestParts:
    @pytest.fixture(autouse=True)
    def short_frames(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(protocol, "FRAME_BYTES", 4)

    @pytest.mark.parametrize(
        ("part", "frames"),
        [
            (b"", [b""]),
            (b"abc", [b"abc"]),
            (b"abcd", [b"abcd", b""]),
            (b"abcdefghi", [b"abcd", b"efgh", b"i"]),
        ],
    )
    def test_part_ends_with_a_short_frame(self, part: bytes, frames: list[bytes]) -> None:
        assert cut_part(memoryview(part)) == frames
        assert join_parts(cut_part(memoryview(part))) == [part]

    @given(st.lists(st.binary(max_size=30), max_size=12))
    def test_cut_parts_are_joined(self, parts: list[bytes]) -> None:
        frames = [frame for part in parts for frame in cut_part(memoryview(part))]
        assert join_parts(frames) == parts

    def test_part_without_an_end(self) -> None:
        with pytest.raises(FrameError, match="a part without an end"):
            join_parts([memoryview(b"abc"), memoryview(b"abcd")])

    def test_part_of_one_frame_is_not_copied(self) -> None:
        frame = memoryview(b"abc")
        assert join_parts([frame])[0] is frame


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
        status = link.status()
        assert (status.rank, status.pid, status.state) == (3, 77, "busy")

    @pytest.mark.parametrize(
        ("under_way", "most"),
        [
            (0, 1 << 40),
            (CREDIT // 4, 1 << 40),  # a reader reports each quarter: it may have consumed all
            (CREDIT // 4 + 1, CREDIT * 3 // 4 - 1),
            (CREDIT - 1, 1),
            (CREDIT, 0),
        ],
    )
    def test_window(self, under_way: int, most: int) -> None:
        link = self.joined()
        link.spent = 100 + under_way
        link.receive(b"A", [encode(Credit(100, 2))])
        assert link.under_way == under_way
        assert link.can_take(most)
        assert most == 1 << 40 or not link.can_take(most + 1)
        assert link.status().sequence == 2

    def test_larger_message_than_the_window_is_received_before_the_next(self) -> None:
        link = self.joined()
        link.spent = CREDIT + 1
        assert not link.can_take(0)
        link.receive(b"A", [encode(Credit(1, 0))])
        assert link.can_take(0)

    @pytest.mark.parametrize("consumed", [49, 71])
    def test_credit_for_less_than_before_or_more_than_sent(self, consumed: int) -> None:
        link = self.joined()
        link.spent = 70
        link.receive(b"A", [encode(Credit(50, 2))])
        link.receive(b"A", [encode(Credit(consumed, 3))])
        with pytest.raises(PeerProtocolError, match=f"credit for {consumed} bytes of 70"):
            link.require("send")

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
        link.state = "lost"
        assert isinstance(link.receive(b"B", [encode(ReaderHello(78))]), Refused)
        with pytest.raises(PeerLostError, match=r"lost rank 3 \(pid 77\)") as caught:
            link.require("send")
        assert caught.value.rank == 3

    def test_reader_that_left_gates_nobody(self) -> None:
        link = self.joined()
        link.receive(b"A", [encode(Closed())])
        assert link.state == "closed"
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
