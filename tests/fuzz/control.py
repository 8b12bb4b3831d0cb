"""What a worker may write into its control channel: messages, some of them damaged."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import strategies as st

from server.control.channel import Channel, ChannelClosedError
from server.control.protocol import Failed, FromWorker, Hello, Ready, WorkProgress
from shm_broadcast import Deadline, MessageDecodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    Draw = Callable[[SearchStrategy[Any]], Any]

_NUMBERS = st.integers(0, 2**63 - 1)
_MESSAGES = st.one_of(
    st.builds(Hello, _NUMBERS),
    st.builds(WorkProgress, _NUMBERS, _NUMBERS, st.text(max_size=9)),
    st.builds(Ready),
    st.builds(Failed, _NUMBERS, st.just(()), st.text(max_size=9), st.text(), st.text()),
)


@st.composite
def channels(draw: Draw) -> tuple[bytes, list[FromWorker]]:
    """What is written, and the messages in it that come before anything is wrong."""
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
    """The driver gets what came whole, and hears of what is no message."""
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
