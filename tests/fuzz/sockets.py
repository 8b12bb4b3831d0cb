"""What may come over each kind of socket, some of it damaged, and what has to become of it."""

from __future__ import annotations

import json
import os
import socket
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import msgspec
from hypothesis import strategies as st

from server.control.channel import Channel, ChannelClosedError
from server.control.protocol import Failed, FromWorker, Hello, Ready, WorkProgress
from shm_broadcast import Deadline, MessageDecodeError
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
from tests.fuzz.search import falsify
from tests.server.fake_service import in_a_thread, listening, site
from tests.shm_broadcast.remote_peers import LIMIT, SECRET
from tests.shm_broadcast.remote_taps import raw_reader, raw_writer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from hypothesis.strategies import SearchStrategy

    Draw = Callable[[SearchStrategy[Any]], Any]


# --- Frames between hosts, from a peer that has the launcher's secret ----------------------------

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
    sent: list[list[bytes]]
    whole: list[list[bytes]]


@st.composite
def streams(draw: Draw) -> Stream:
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


# --- Messages of a worker to its driver ----------------------------------------------------------

_NUMBERS = st.integers(0, 2**63 - 1)
_MESSAGES = st.one_of(
    st.builds(Hello, _NUMBERS),
    st.builds(WorkProgress, _NUMBERS, _NUMBERS, st.text(max_size=9)),
    st.builds(Ready),
    st.builds(Failed, _NUMBERS, st.just(()), st.text(max_size=9), st.text(), st.text()),
)


@st.composite
def channels(draw: Draw) -> tuple[bytes, list[FromWorker]]:
    messages = draw(st.lists(_MESSAGES, max_size=4))
    frames = []
    for message in messages:
        body = msgspec.json.encode(message)
        frames.append(len(body).to_bytes(4, "big") + body)
    written = bytearray(b"".join(frames))
    first = len(written)
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(written)))
        first = min(first, place)
        written[place : place + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    ends = [sum(map(len, frames[: count + 1])) for count in range(len(frames))]
    whole = [message for message, end in zip(messages, ends, strict=True) if end <= first]
    return bytes(written), whole


def check_channel(example: tuple[bytes, list[FromWorker]]) -> None:
    written, whole = example
    ours, theirs = socket.socketpair()
    channel, found = Channel(ours, FromWorker), []
    try:
        with theirs:
            theirs.sendall(written)
        with suppress(MessageDecodeError, ChannelClosedError):
            while True:
                found.append(channel.receive(Deadline.after(10)))
    finally:
        channel.close()
    assert found[: len(whole)] == whole


# --- Bodies of requests --------------------------------------------------------------------------

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["m", "float", "base64", "boom", "\ud800", "\0"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)
_INPUTS = st.one_of(
    st.text(max_size=20),
    st.lists(st.text(max_size=20), max_size=5),
    st.lists(st.integers(0, 8), max_size=5),
    st.lists(st.lists(st.integers(-1, 9), max_size=5), max_size=3),
    _VALUES,
)
_FIELDS = ("encoding_format", "dimensions", "user", "truncate", "other")


@st.composite
def bodies(draw: Draw) -> bytes:
    request = {"model": draw(st.just("m") | _VALUES), "input": draw(_INPUTS)}
    for field in draw(st.lists(st.sampled_from(_FIELDS), max_size=2)):
        request[field] = draw(_VALUES)
    text = json.dumps(request, ensure_ascii=draw(st.booleans()))
    data = bytearray(text.encode("utf-8", "replace"))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(data)))
        data[place : place + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@contextmanager
def served() -> Iterator[Callable[[bytes], None]]:
    """A service; the function sends it a body, and raises unless it answers as it should."""
    with in_a_thread(_serving()) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield lambda body: _check_answer(client, body)


@asynccontextmanager
async def _serving() -> AsyncIterator[str]:
    async with site(max_waiting=4096) as service, listening(service) as url:
        yield url


def _check_answer(client: httpx.Client, body: bytes) -> None:
    answer = client.post(
        "/v1/embeddings", content=body, headers={"content-type": "application/json"}
    )
    told = answer.json()
    if answer.status_code == 200:
        given = json.loads(body)["input"]
        several = isinstance(given, list) and not (given and isinstance(given[0], int))
        assert [each["index"] for each in told["data"]] == list(range(len(given) if several else 1))
    elif answer.status_code == 500:
        assert b"boom" in body, told  # which the service's worker fails at
    else:
        assert answer.status_code in (400, 404), (answer.status_code, told)
        assert told["error"]["message"]


# --- Looking for what fails ----------------------------------------------------------------------

SOCKETS = ("to_readers", "to_writers", "control", "http")


def search_socket(kind: str, number: int, seconds: float) -> int:
    if kind == "to_readers":
        return falsify(streams(), check_reader, number, seconds)
    if kind == "to_writers":
        return falsify(frames(), check_writer, number, seconds)
    if kind == "control":
        return falsify(channels(), check_channel, number, seconds)
    with served() as check:
        return falsify(bodies(), check, number, seconds)
