"""What a peer on another host may send that has the launcher's secret, and is out of its mind.

A reader is sent messages as its writer sends them, with some frames lost, repeated, changed places,
cut short or made of anything. A writer is sent anything by its reader. Both may hand out what came
whole before, and then have to say that the peer breaks the protocol, or that it has left.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from hypothesis import strategies as st

from shm_broadcast.errors import GroupClosedError, GroupTimeoutError, PeerProtocolError
from shm_broadcast.net import protocol
from shm_broadcast.net.protocol import (
    Closed,
    Credit,
    MessageHeader,
    Probe,
    ReaderHello,
    Refused,
    Welcome,
    cut_part,
    encode,
)
from shm_broadcast.net.reader import RemoteReader
from shm_broadcast.net.writer import RemoteWriter
from tests.shm_broadcast.remote_peers import LIMIT, SECRET
from tests.shm_broadcast.remote_taps import raw_reader, raw_writer

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    Draw = Callable[[SearchStrategy[Any]], Any]

_SHORT_FRAMES = mock.patch.object(protocol, "FRAME_BYTES", 1000)
"""Parts of some kilobytes come in several frames."""

_COUNTS = st.one_of(st.integers(0, 300), st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64 - 1]))
_HEADERS = st.one_of(
    st.builds(ReaderHello, _COUNTS),
    st.builds(Credit, _COUNTS, _COUNTS),
    st.builds(Welcome, _COUNTS),
    st.builds(Refused, st.text(max_size=9)),
    st.builds(MessageHeader),
    st.builds(Probe),
    st.builds(Closed),
)
_ANYTHING = st.lists(_HEADERS.map(encode) | st.binary(max_size=40), min_size=1, max_size=4)
_PARTS = st.lists(st.binary(max_size=40) | st.integers(500, 5000).map(bytes), max_size=4)
_WAYS = ("insert", "lose", "repeat", "later", "cut", "lengthen", "flip")


@dataclass(frozen=True)
class Stream:
    """What a writer sends.

    Attributes:
        sent: lists of frames.
        whole: the messages that a reader gets before anything is wrong.
    """

    sent: list[list[bytes]]
    whole: list[list[bytes]]


@st.composite
def streams(draw: Draw) -> Stream:
    """Messages as a writer sends them, but for a few frames."""
    messages = draw(st.lists(_PARTS, max_size=5))
    with _SHORT_FRAMES:
        sent = [
            [encode(MessageHeader())]
            + [bytes(each) for p in parts for each in cut_part(memoryview(p))]
            for parts in messages
        ]
    first = len(sent)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(sent)))
        first = min(first, at)
        _disturb(draw, sent, at)
    return Stream(sent, messages[:first])


def _disturb(draw: Draw, sent: list[list[bytes]], at: int) -> None:
    """Change what is sent from ``at`` on."""
    way = draw(st.sampled_from(_WAYS)) if at < len(sent) else "insert"
    if way == "insert":
        sent.insert(at, draw(_ANYTHING))
    elif way == "lose":
        del sent[at]
    elif way == "repeat":
        sent.insert(at, sent[at])
    elif way == "later":
        sent.append(sent.pop(at))
    else:
        frames = list(sent[at])
        index = draw(st.integers(0, len(frames) - 1))
        data = bytearray(frames[index])
        place = draw(st.integers(0, len(data)))
        if way == "cut":
            del data[place:]
        elif way == "lengthen":
            data[place:place] = bytes(draw(st.integers(1, 2000)))
        elif place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        frames[index] = bytes(data)
        sent[at] = frames


def check_reader(stream: Stream) -> None:
    """A reader hands out what came whole, and then says what is wrong."""
    with raw_writer() as (raw, handle), RemoteReader(handle, 1, SECRET) as reader:
        identity, _ = raw.recv_multipart()
        for frames in ([encode(Welcome(1))], *stream.sent, [encode(Closed())]):
            raw.send_multipart([identity, *frames])
        found = []
        with _SHORT_FRAMES, suppress(PeerProtocolError, GroupClosedError):
            while True:
                found.append([bytes(part) for part in reader.recv(LIMIT)])
    assert found[: len(stream.whole)] == stream.whole


def frames() -> SearchStrategy[list[list[bytes]]]:
    """Anything that a reader may send."""
    return st.lists(_ANYTHING, max_size=6)


def check_writer(sent: list[list[bytes]]) -> None:
    """A writer goes on, or says that its reader breaks the protocol."""
    with (
        RemoteWriter(0, (1,), "127.0.0.1", SECRET) as writer,
        raw_reader(writer.handle, 1) as raw,
    ):
        raw.send_multipart([encode(ReaderHello(os.getpid()))])
        writer.wait_ready(LIMIT)
        # A second hello is against the protocol: the writer has then heard all before it.
        for frames in (*sent, [encode(ReaderHello(os.getpid()))]):
            raw.send_multipart(frames)
        with suppress(PeerProtocolError, GroupClosedError):
            while not writer.has_no_readers():
                with suppress(GroupTimeoutError):
                    writer.send([b"x"], 0.01)
