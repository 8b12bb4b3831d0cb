"""Random histories of a ring against a list: each reader sees every finished message, in order."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm_broadcast import layout
from tests.shm_broadcast.rings import CAPACITY, CODEC, NoRoomError, Ring, ring

SIZES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([CAPACITY // 8 - 32, CAPACITY // 8 - 31, CAPACITY // 4 - 32]),
    st.integers(0, CAPACITY + 100),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("small"), SIZES),
        st.tuples(st.just("write"), SIZES, st.lists(SIZES, max_size=3)),
        st.tuples(st.just("read"), st.integers(0, 1)),
        st.tuples(st.just("respawn"), st.integers(0, 1)),
        st.tuples(st.just("leave"), st.integers(0, 1)),
    ),
    max_size=40,
)


class History:
    """A ring beside what it should hold."""

    def __init__(self, made: Ring) -> None:
        self.ring = made
        self.finished: list[tuple[bytes, list[bytes]]] = []
        self.next = [0, 0]

    def content(self, size: int) -> bytes:
        return bytes([len(self.finished) % 256]) * size

    def small(self, size: int) -> None:
        if self.ring.writer.try_write(CODEC, self.content(size)):
            self.finished.append((self.content(size), []))

    def write(self, size: int, buffers: list[int]) -> None:
        message = self.content(size), [self.content(each) for each in buffers]
        try:
            self.ring.write(message[0], buffers=message[1])
        except NoRoomError:
            return
        self.finished.append(message)

    def read(self, reader: int) -> None:
        if self.ring.writer.has_left(reader):
            return
        message = self.ring.read(reader)
        if message is None:
            assert self.next[reader] == len(self.finished)
        else:
            assert message == self.finished[self.next[reader]]
            self.next[reader] += 1

    def respawn(self, reader: int) -> None:
        if self.ring.writer.has_left(reader):
            self.next[reader] = len(self.finished)
        self.ring.readers[reader] = self.ring.attach_reader(reader)

    def leave(self, reader: int) -> None:
        self.ring.readers[reader].detach()

    def check(self) -> None:
        for reader in range(2):
            if not self.ring.writer.has_left(reader):
                assert 0 <= self.ring.published - self.ring.consumed(reader) <= self.ring.capacity
        assert self.ring.published % layout.RECORD_ALIGN == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, CAPACITY // 64 - 1), STEPS)
def test_history(start: int, steps: list[tuple[str, int]]) -> None:
    with ring(2) as made:
        made.begin_at(64 * start)
        history = History(made)
        for step, *arguments in steps:
            getattr(history, step)(*arguments)
            history.check()
        for reader in range(2):
            while made.readers[reader].readable and not made.writer.has_left(reader):
                history.read(reader)
            if not made.writer.has_left(reader):
                assert history.next[reader] == len(history.finished)
