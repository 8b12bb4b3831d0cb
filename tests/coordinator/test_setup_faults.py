"""Ranks that end, or give up, while groups are set up: the others hear at once who it was."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

import coordinator
from coordinator import StatelessGroupCoordinator, context, hosts, torch_groups
from coordinator.compat.vllm.parallel_state import init_distributed_environment
from coordinator.groups import Topology
from coordinator.messages.wire import MessageCodec
from coordinator.rendezvous import Rendezvous
from shm_broadcast import (
    CoordinatorError,
    GroupAbortedError,
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
    PeerProtocolError,
)
from tests.patience import STALL_SECONDS, until
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import Store

LIMIT = 60.0
SECRET = b"known to all of them"


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(*_: object, **__: object) -> None:
    raise ValueError("no such thing here")


def instead(step: str, other: Callable[..., object]) -> None:
    """Have this rank do something else in the place of a step of set-up."""
    module = torch_groups if step == "_gloo" else context
    assert hasattr(module, step)
    setattr(module, step, other)


def build(rank: int, n: int, store: Store, timeout: float, torch_only: bool = False) -> None:
    coordinator.init(n, rank=rank, store=store, timeout=timeout, torch_only=torch_only).close()


def one_ends(rank: int, n: int, store: Store, dies: bool) -> None:
    """Once all share a board."""
    if rank == 1:
        instead("negotiate_codec", die if dies else give_up)
    began = time.monotonic()
    with pytest.raises(CoordinatorError if rank != 1 else ValueError) as caught:
        build(rank, n, store, LIMIT)
    assert time.monotonic() - began < 5 + STALL_SECONDS
    if rank != 1 and dies:
        assert isinstance(caught.value, PeerLostError)
        assert caught.value.rank == 1
    elif rank != 1:
        assert isinstance(caught.value, GroupAbortedError)
        assert caught.value.failure.culprit == 1
        assert "no such thing here" in str(caught.value)


@pytest.mark.parametrize("dies", [True, False])
def test_one_that_ends_on_the_way_is_named_at_once(dies: bool) -> None:
    run_ranks(3, one_ends, SharedStore(), dies, may_die=[1] if dies else [])


def what_is_said_of_altered(rank: int, n: int, store: Store, key: str, value: bytes) -> str:
    """The error, where a value in the store is altered as soon as rank 0 has put it."""
    put = Rendezvous._put

    def put_altered(self: Rendezvous, at: str, said: bytes) -> None:
        put(self, at, value if at == key else said)

    Rendezvous._put = put_altered if rank == 0 else put
    with pytest.raises(PeerProtocolError if rank == 1 else CoordinatorError) as caught:
        build(rank, n, store, LIMIT if rank == 1 else 5.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rendezvous/0", b"2 \x01", r"of type dict\[str, str\]: Expected `object`, got `int`"),
        ("rendezvous/0", b"2 \xc1", r"of type dict\[str, str\]: MessagePack data is malformed"),
        ("boards/0", b"2 \x01", "of type BoardHandle: Expected `object`, got `int`"),
        ("boards/0", b"\xff\xff", "a number of members, a space and a value"),
        ("segment/0", b"\x01", "of type SegmentHandle: Expected `object`, got `int`"),
        ("segment/0", b"", "of type SegmentHandle: Input data was truncated"),
    ],
)
def test_an_altered_value_in_the_store_is_a_typed_error_with_its_key(
    key: str, value: bytes, expected: str
) -> None:
    said = run_ranks(2, what_is_said_of_altered, SharedStore(), key, value)[1]
    assert re.search(rf"with rank 0: .*'{key}'.* must be {expected}", said), said


def at_swap(what: str, do: Callable[..., object]) -> None:
    """Have this rank do something else where it would take part in a swap of a group's set-up."""
    gather, broadcast = Rendezvous.all_gather, Rendezvous.broadcast

    def all_gather(self: Rendezvous, name: str, *args: Any) -> Any:
        return do() if f"{self.name} {name}" == what else gather(self, name, *args)

    def broadcast_(self: Rendezvous, name: str, *args: Any) -> Any:
        return do() if f"{self.name} {name}" == what else broadcast(self, name, *args)

    Rendezvous.all_gather = all_gather
    Rendezvous.broadcast = broadcast_


def isolate(rank: int, how: str) -> None:
    """Have this rank share memory with no other one: on another host, or in another container."""
    if how == "hosts":
        hosts._boot_id = lambda: b"of rank %d" % rank
    if how == "containers":
        hosts._try_to_attach = lambda *_: None


def one_fails(rank: int, n: int, store: Store, step: str, isolated: str) -> None:
    """And its process ends."""
    isolate(rank, isolated)
    if rank == 2:
        at_swap(step, give_up)
    with pytest.raises(ValueError if rank == 2 else GroupAbortedError) as caught:
        build(rank, n, store, LIMIT)
    assert "no such thing here" in str(caught.value)
    if not isinstance(caught.value, GroupAbortedError):
        die()
    else:
        assert caught.value.failure.culprit == 2


@pytest.mark.parametrize(
    ("step", "isolated"),
    [
        *((f"world {step}", "") for step in ("host", "boards", "decided", "board", "members")),
        *((f"world {step}", "hosts") for step in ("boards", "board", "hosts", "heartbeat")),
        *((f"undecided {step}", "containers") for step in ("host", "boards")),
        ("world members", "hosts"),
    ],
)
def test_one_that_fails_in_any_step_tells_all_others_why(step: str, isolated: str) -> None:
    run_ranks(3, one_fails, SharedStore(), step, isolated, may_die=[2])


def one_has_no_queue(rank: int, n: int, store: Store) -> None:
    """What comes last in a group's set-up: the queue for objects."""
    if rank == 0:
        MessageQueue.on_board = give_up
    with pytest.raises(ValueError if rank == 0 else GroupAbortedError, match="no such thing here"):
        StatelessGroupCoordinator([[0, 1, 2]], rank, "gloo", True, store, True, global_rank=rank)


def test_one_that_cannot_make_the_queue_of_a_group_tells_why() -> None:
    run_ranks(3, one_has_no_queue, SharedStore())


def one_gives_up_by_names_of_vllm(rank: int, n: int, path: str) -> None:
    if rank == 1:
        instead("negotiate_codec", give_up)
    with pytest.raises(GroupAbortedError if rank != 1 else ValueError, match="no such thing here"):
        init_distributed_environment(n, rank, f"file://{path}", rank, "gloo")


def test_one_that_gives_up_tells_why_by_names_of_vllm(store_path: str) -> None:
    run_ranks(3, one_gives_up_by_names_of_vllm, store_path)


def one_gives_up_while_others_connect(rank: int, n: int, path: str) -> None:
    """What gloo says of a connection that is closed on the way tells nothing of the cause."""
    meet: Any = Topology.meet
    met: list[Any] = []

    def remember(*args: Any, **options: Any) -> Topology:
        met.append(meet(*args, **options))
        return met[0]

    def connect(*_: object, **__: object) -> None:
        if rank != 1:
            until(lambda: met[0].nodes.board.aborted is not None)
            raise RuntimeError("Gloo connectFullMesh failed: Connection closed by peer")

    Topology.meet = remember
    dist.init_process_group = connect
    one_gives_up_by_names_of_vllm(rank, n, path)


def test_why_one_gave_up_is_told_to_those_that_still_connect_for_torch(store_path: str) -> None:
    run_ranks(3, one_gives_up_while_others_connect, store_path)


def one_does_not_connect(rank: int, n: int, store: Store) -> None:
    """gloo cannot be told that a rank has ended: it waits out its time, and then it is named."""
    if rank == 1:
        instead("_gloo", die)
    with pytest.raises(PeerLostError, match=r"world:gloo: lost rank 1 ") as caught:
        build(rank, n, store, 2.0, torch_only=True)
    assert caught.value.rank == 1


def test_one_that_ends_while_gloo_connects_is_named() -> None:
    run_ranks(3, one_does_not_connect, SharedStore(), may_die=[1])


def agree_late(*_: object, **__: object) -> MessageCodec:
    time.sleep(4)
    return MessageCodec()


def one_hangs(rank: int, n: int, store: Store) -> None:
    """Whoever is first out of time leaves, and is not taken for the culprit."""
    if rank == 1:
        instead("negotiate_codec", agree_late)
        with pytest.raises(CoordinatorError):
            build(rank, n, store, LIMIT)
        return
    with pytest.raises((GroupTimeoutError, GroupAbortedError), match="rank 1") as caught:
        build(rank, n, store, 1.0 if rank == 0 else LIMIT)
    if isinstance(caught.value, GroupAbortedError):
        assert caught.value.failure.kind == "GroupTimeoutError"


def test_one_that_hangs_is_named_by_all_others() -> None:
    run_ranks(3, one_hangs, SharedStore())
