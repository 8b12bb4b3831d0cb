"""Tensor dicts of which every rank sends a slice, and the receivers gather the whole."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from shm_broadcast import (
    DivergenceError,
    GroupAbortedError,
    GroupTimeoutError,
    MessageRefusedError,
)
from tests.coordinator.sent import agree, counting
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from torch.distributed import Store


def sliced(rank: int, n: int, store: Store) -> None:
    """Two stages of two: [0, 1] send to [2, 3]."""
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, timeout=30) as groups:
        pp, tp = groups.pp, groups.tp
        sent: list[int] = []
        if pp.is_first_rank:
            comm: Any = pp.device_communicator
            comm.send, comm.isend = counting(comm.send, sent), counting(comm.isend, sent)
        x = torch.arange(800).reshape(2, 400)  # a slice of less would travel with the header
        many = {
            "x": x,
            "odd": torch.arange(601.0),
            "empty": torch.empty(0),
            "t": x.t(),
            "bf16": torch.ones(2, 800, dtype=torch.bfloat16),
        }
        residual = torch.full((400,), float(tp.rank_in_group))
        for blocking in (True, False):
            if pp.is_first_rank:
                sent.clear()
                values = {**many, "residual": residual}
                if blocking:
                    pp.send_tensor_dict(values, 1, tp, {"residual": False, "absent": True})
                else:
                    pp.isend_tensor_dict(values, 1, tp, {"residual": False}).wait()
                assert sent == [400, 601, 400, 800, 400]
                pp.send_tensor_dict({"x": x}, 1, tp, {"x": False})
                assert sent[-1] == 800
                pp.send_tensor_dict({"x": x}, 1, tp)
            else:
                found = (
                    pp.recv_tensor_dict(0, tp) if blocking else pp.irecv_tensor_dict(0, tp).wait()
                )
                agree(found, {**many, "residual": residual})
                for mismatched in (True, False):
                    agree(pp.recv_tensor_dict(0, tp, {"x": mismatched}), {"x": x})
        if pp.is_first_rank:
            with pytest.raises(ValueError, match="'odd' has 3 elements, not divisible by 2"):
                pp.send_tensor_dict({"x": x, "odd": torch.ones(3)}, 1, tp, {"odd": True})
            pp.send_tensor_dict({"x": x}, 1, tp)
            pp.send_tensor_dict({"after": x}, 1)
        else:
            with pytest.raises(MessageRefusedError, match="'odd' has 3 elements"):
                pp.recv_tensor_dict(0, tp)
            with pytest.raises(ValueError, match=r"'x' arrived as slice \d of 2: receive it with"):
                pp.recv_tensor_dict(0)
            agree(pp.recv_tensor_dict(0), {"after": x})
        groups.world.barrier()


def a_peer_that_does_not_gather(rank: int, n: int, store: Store) -> None:
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, timeout=60) as groups:
        pp, tp = groups.pp, groups.tp
        if pp.is_first_rank:
            pp.send_tensor_dict({"x": torch.arange(800)}, 1, tp)
        elif tp.is_first_rank:
            with pytest.raises(GroupTimeoutError):
                pp.recv_tensor_dict(0, tp, timeout=2)
        with pytest.raises(GroupAbortedError, match="GroupTimeoutError: tp all_gather"):
            groups.world.barrier(timeout=30)


def waiting_in_another_order(rank: int, n: int, store: Store) -> None:
    """Of the two receivers, one waits for the second dict first."""
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, timeout=30) as groups:
        pp, tp = groups.pp, groups.tp
        if pp.is_first_rank:
            for value in range(2):
                pp.isend_tensor_dict({"x": torch.full((800,), value), "odd": torch.ones(3)}, 1, tp)
                pp.isend_tensor_dict({"odd": torch.ones(tp.rank_in_group * 2 + 1)}, 1, tp)
        else:
            works = [pp.irecv_tensor_dict(0, tp) for _ in range(4)]
            for work in works[1::2]:
                work.wait()
            own, other = (1, 2) if tp.is_first_rank else (2, 1)
            told = r"rank {} issued .* sliced dict {}.* this rank issued .* sliced dict {}"
            with pytest.raises(
                (DivergenceError, GroupAbortedError), match=told.format(r"\d", r"\d", r"\d")
            ) as raised:
                works[2 * own - 2].wait()
            if isinstance(raised.value, DivergenceError):
                assert re.search(told.format(5 - rank, other, own), str(raised.value))


def test_who_waits_for_slices_in_another_order_gets_no_others() -> None:
    run_ranks(4, waiting_in_another_order, SharedStore())


def refused_once(rank: int, n: int, store: Store) -> None:
    """One of the two senders is refused a dict, of which nothing moves, and sends it again."""
    with coordinator.init(tp=2, pp=2, rank=rank, store=store, timeout=30) as groups:
        pp, tp = groups.pp, groups.tp
        for value in range(3):
            values = {"x": torch.full((800,), value)}
            if not pp.is_first_rank:
                assert pp.recv_tensor_dict(0, tp)["x"].eq(value).all()
                continue
            if tp.is_first_rank:
                entered, leave = threading.Event(), threading.Event()

                def occupy(entered: threading.Event, leave: threading.Event) -> None:
                    with pp._messenger._outgoing._turn:
                        entered.set()
                        leave.wait(30)

                thread = threading.Thread(target=occupy, args=(entered, leave))
                thread.start()
                entered.wait(30)
                with pytest.raises(RuntimeError, match="another thread is sending"):
                    pp.isend_tensor_dict(values, 1, tp)
                leave.set()
                thread.join()
            pp.send_tensor_dict(values, 1, tp)


def test_a_dict_that_was_not_sent_does_not_count() -> None:
    run_ranks(4, refused_once, SharedStore())


def test_slices_are_gathered_in_the_time_of_the_call() -> None:
    run_ranks(4, a_peer_that_does_not_gather, SharedStore())


def test_slices_of_replicated_tensors() -> None:
    """arange(800) over two: 400 elements per link; the sender alone decides what is cut."""
    run_ranks(4, sliced, SharedStore())
