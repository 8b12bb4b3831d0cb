"""Parts, credits and keys of readers on other hosts: no sockets, no processes."""

from __future__ import annotations

import pytest
import zmq
from zmq.utils import z85

from shm_broadcast import PeerLostError, PeerProtocolError
from shm_broadcast.net import protocol
from shm_broadcast.net.keys import reader_key, writer_key
from shm_broadcast.net.protocol import (
    Closed,
    Credit,
    FrameError,
    ReaderHello,
    Refused,
    RemoteReaderState,
    Welcome,
    cut_part,
    encode,
    join_parts,
)

pytestmark = pytest.mark.quick

CREDIT = 1 << 16
SALT = b"n" * 32


# --- parts -----------------------------------------------------------------------------------


@pytest.fixture
def short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_part_ends_with_a_short_frame(
    part: bytes, frames: list[bytes], short_frames: None
) -> None:
    assert cut_part(memoryview(part)) == frames
    assert join_parts(cut_part(memoryview(part))) == [part]


def test_a_part_without_an_end_is_an_error_and_one_of_one_frame_is_not_copied(
    short_frames: None,
) -> None:
    frame = memoryview(b"abc")
    assert join_parts([frame])[0] is frame
    with pytest.raises(FrameError, match="a part without an end"):
        join_parts([frame, memoryview(b"abcd")])


# --- a reader's states at its writer ---------------------------------------------------------


@pytest.fixture
def link() -> RemoteReaderState:
    """A reader that has joined."""
    made = RemoteReaderState(3, CREDIT)
    assert isinstance(made.receive(b"A", [encode(ReaderHello(77))]), Welcome)
    return made


def test_a_hello_opens_the_window() -> None:
    link = RemoteReaderState(3, CREDIT)
    assert not link.can_take(0)
    assert str(link.status()) == "rank 3 (never joined)"
    link.require("send")
    link.receive(b"A", [encode(ReaderHello(77))])
    assert link.can_take(CREDIT)
    status = link.status()
    assert (status.rank, status.pid, status.state) == (3, 77, "busy")
    early = RemoteReaderState(3, CREDIT)
    early.receive(b"A", [encode(Credit(0, 0))])
    with pytest.raises(PeerProtocolError, match="Credit before hello"):
        early.require("send")


@pytest.mark.parametrize(
    ("under_way", "most"),
    [
        (0, 1 << 40),
        (CREDIT // 4, 1 << 40),  # a reader reports each quarter: it may have consumed all
        (CREDIT // 4 + 1, CREDIT * 3 // 4 - 1),
        (CREDIT - 1, 1),
        (CREDIT, 0),
        (CREDIT + 1, -1),  # a message larger than the window is received before the next
    ],
)
def test_the_window(link: RemoteReaderState, under_way: int, most: int) -> None:
    link.spent = 100 + under_way
    link.receive(b"A", [encode(Credit(100, 2))])
    assert link.under_way == under_way
    assert link.can_take(max(most, 0)) == (most >= 0)
    assert most == 1 << 40 or not link.can_take(most + 1)
    assert link.status().sequence == 2


def test_another_connection_changes_nothing(link: RemoteReaderState) -> None:
    for frame in (ReaderHello(1), Credit(5, 5), Closed()):
        assert isinstance(link.receive(b"B", [encode(frame)]), Refused)
    assert link.can_take(CREDIT)
    assert link.status().pid == 77
    link.state = "lost"  # for good
    assert isinstance(link.receive(b"B", [encode(ReaderHello(78))]), Refused)
    with pytest.raises(PeerLostError, match=r"lost rank 3 \(pid 77\)") as caught:
        link.require("send")
    assert caught.value.rank == 3


# --- keys ------------------------------------------------------------------------------------


def test_keys_are_hkdf_sha256() -> None:
    # openssl kdf -keylen 32 -kdfopt digest:SHA256 -kdfopt hexkey:… -kdfopt hexsalt:…
    #   -kdfopt info:"group-coordinator remote queue 1: reader 3" HKDF   (and "… writer")
    secret = b"launcher secret."
    reader = "ac97372320b60a049864ea717d9f5a4ff8837640e29f6658deb58075f305b44c"
    writer = "ba6efaf12d8deddd87f1ee155eaf1442e7ae1f0d676e9d6c958d5b027c7ac4ed"
    assert z85.decode(reader_key(secret, SALT, 3).secret).hex() == reader
    assert z85.decode(writer_key(secret, SALT).secret).hex() == writer


def test_each_role_rank_nonce_and_secret_has_its_own_key() -> None:
    secret, other = b"s" * 16, b"t" * 16
    keys = [
        writer_key(secret, SALT),
        reader_key(secret, SALT, 1),
        reader_key(secret, SALT, 11),
        writer_key(other, SALT),
        writer_key(secret, b"m" * 32),
    ]
    assert len({key.secret for key in keys}) == len(keys)
    for key in keys:
        assert zmq.curve_public(key.secret) == key.public
        assert key.secret.decode() not in repr(key)
    with pytest.raises(ValueError, match="16 or more bytes; got 15"):
        writer_key(b"s" * 15, SALT)
