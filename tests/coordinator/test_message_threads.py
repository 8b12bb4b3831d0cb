"""Threads of a rank that send and receive at once: each message is one thread's, or refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator.messages.transport import OUTSTANDING_BYTES, AnotherThreadError
from device_comm.shm.channel import EAGER_BYTES
from tests.coordinator.sent import agree
from tests.patience import until
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


def second_sender(rank: int, n: int, store: Store, secret: bytes | None) -> None:
    """While a thread waits in a send, another one is refused; what was sent is all there."""
    part = {"part": torch.zeros((OUTSTANDING_BYTES + EAGER_BYTES) // 5, dtype=torch.uint8)}
    large = {"large": torch.ones(OUTSTANDING_BYTES + EAGER_BYTES, dtype=torch.uint8)}
    torch_only = secret is not None  # so that messages are numbered, and sealed
    parts = 1 if torch_only else 4  # which do not wait by themselves
    with coordinator.init(
        tp=n, rank=rank, store=store, timeout=30, secret=secret, torch_only=torch_only
    ) as groups:
        group = groups.tp
        if rank == 0:
            for _ in range(parts):
                group.send_tensor_dict(part)
            with ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(group.send_tensor_dict, large)
                under_way = group._messenger._outgoing._under_way
                # The first that is too large is kept by the thread, which has the turn then.
                until(lambda: any(each[0] > OUTSTANDING_BYTES for each in [*under_way.get(1, ())]))
                for send in (group.send_object, group.isend_object):
                    with pytest.raises(RuntimeError, match="another thread is sending over tp"):
                        send("lost", 1)
                store.set("tried", "")
                waiting.result()
            group.send_object("after", 1)
        else:
            store.get("tried")
            for expected in (*[part] * parts, large):
                agree(group.recv_tensor_dict(), expected)
            assert group.recv_object(0) == "after"
        groups.world.barrier()


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_a_second_thread_that_sends_is_refused(secret: bytes | None) -> None:
    run_ranks(2, second_sender, SharedStore(), secret)


TWO_RECEIVE = {
    "objects": (
        lambda group, number: group.send_object((number, "x" * (number % 5000)), 1),
        lambda group: group.recv_object(0)[0],
    ),
    "dicts": (
        lambda group, number: group.send_tensor_dict({"is": number, "x": torch.ones(9999)}, 1),
        lambda group: group.recv_tensor_dict(0)["is"],
    ),
    "tensors": (
        lambda group, number: group.send(torch.full((5,), float(number)), 1),
        lambda group: int(group.recv((5,), torch.float32, 0)[0]),
    ),
    "objects, later": (
        lambda group, number: group.send_object(number, 1),
        lambda group: group.irecv_object(0).wait(),
    ),
}
MANY = 200


def two_receive(rank: int, n: int, store: Store, kind: str, torch_only: bool) -> None:
    """Two threads of rank 1 receive from rank 0 at once: each message is one thread's, whole."""
    send, receive = TWO_RECEIVE[kind]
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30, torch_only=torch_only) as found:
        group = found.tp
        got: list[int] = []
        if rank == 0:
            for number in range(MANY):
                send(group, number)

        def take(_: int) -> None:
            while len(got) < MANY - 1:  # the other one may wait for the last
                try:
                    got.append(receive(group))
                except AnotherThreadError:
                    time.sleep(0)

        if rank == 1:
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(take, range(2)))
            if len(got) < MANY:
                got.append(receive(group))
            assert sorted(got) == list(range(MANY))
        found.world.barrier()


@pytest.mark.parametrize("torch_only", [False, True])
@pytest.mark.parametrize("kind", TWO_RECEIVE)
def test_a_second_thread_that_receives_from_a_rank_is_refused(kind: str, torch_only: bool) -> None:
    run_ranks(2, two_receive, SharedStore(), kind, torch_only)


def receive_apart(rank: int, n: int, store: Store) -> Any:
    """Threads that receive from one member each do not disturb each other, nor one that sends."""
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups:
        group = groups.tp
        others = [other for other in range(n) if other != rank]

        def take(src: int) -> list[Any]:
            return [group.recv_object(src) for _ in range(MANY)]

        with ThreadPoolExecutor(n) as threads:
            found = {src: threads.submit(take, src) for src in others}
            for number in range(MANY):
                for dst in others:
                    group.send_object((rank, number), dst)
            for src, taken in found.items():
                assert taken.result() == [(src, number) for number in range(MANY)]
        groups.world.barrier()


def test_threads_may_receive_from_different_ranks() -> None:
    run_ranks(3, receive_apart, SharedStore())


def second_broadcaster(rank: int, n: int, store: Store) -> None:
    """A broadcast to several that is refused before it has begun leaves the group as it was."""
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups:
        group = groups.tp
        if rank == 0:
            turn = group._messenger._outgoing._turn
            with ThreadPoolExecutor(1) as threads:
                assert threads.submit(turn.__enter__).result()
                with pytest.raises(RuntimeError, match="another thread is sending over tp"):
                    group.broadcast_object("lost", async_op=True)
                threads.submit(turn.__exit__).result()
        work = group.broadcast_object("after" if rank == 0 else None, async_op=True)
        assert work.wait() == "after"
        groups.world.barrier()


def test_a_second_thread_that_broadcasts_is_refused() -> None:
    run_ranks(3, second_broadcaster, SharedStore())
