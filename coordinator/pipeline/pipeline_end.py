"""`PipelineEnd`: one stage's end of a pipeline, and the one operation that all others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload

from coordinator.messages.tensor_dict import WHOLE, encode
from coordinator.pipeline.inflow import Inflow
from coordinator.pipeline.message import NEXT, PREV, to_dict, way_of
from device_comm import Joined, Work
from device_comm.verbs.checks import check_rank
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from coordinator.group import GroupCoordinator
    from coordinator.messages.tensor_dict import Header, Slicing
    from device_comm import Pending
    from device_comm.verbs.arguments import Later, Maybe, Now, Timeout


class Exchanged(NamedTuple):
    """What an exchange received; None where nothing was asked for."""

    from_prev: Any
    from_next: Any


class _Message(NamedTuple):
    """What goes to one peer; without a header if that is as before."""

    dst: int
    header: Header | None
    parts: list[Tensor]


class PipelineEnd:
    """One stage of a pipeline.

    Attributes:
        pp: the stages, in order; those of one tensor-parallel rank.
        tp: the ranks of this stage that hold the same activations; None: nothing is sliced.
    """

    def __init__(
        self, pp: GroupCoordinator, tp: GroupCoordinator | None = None, *, once: bool = False
    ) -> None:
        """Be a stage. Collective: no.

        Args:
            pp: the stages, in order.
            tp: the ranks of this stage, which all hold the same activations and gradients: of
                each tensor that divides they send a slice each, and the next stage's gather them.
            once: whatever is sent to a peer looks the same every time: nesting, shapes, dtypes,
                values that are not tensors. Only the first message then says so, and the others
                are tensors alone. The sender checks it. All stages choose the same. Not for a
                ring of two stages in which one sends both ways: to each, the next stage is the
                previous one, and tensors alone do not say whether they are activations or
                gradients.
        """
        self.pp = pp
        self.tp = tp
        self._once = once
        self._messenger = pp._messenger
        self._peers = None if tp is None else tp._messenger
        self._inflows: dict[int, Inflow] = {}
        self._promised: dict[int, tuple[bytes, Header]] = {}  # encoded, and as it is

    @overload
    def exchange(
        self,
        send_next: Any = ...,
        send_prev: Any = ...,
        recv_prev: bool = ...,
        recv_next: bool = ...,
        *,
        next_rank: int | None = ...,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Now],
    ) -> Exchanged: ...
    @overload
    def exchange(
        self,
        send_next: Any = ...,
        send_prev: Any = ...,
        recv_prev: bool = ...,
        recv_next: bool = ...,
        *,
        next_rank: int | None = ...,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Later],
    ) -> Work[Exchanged]: ...
    @overload
    def exchange(
        self,
        send_next: Any = ...,
        send_prev: Any = ...,
        recv_prev: bool = ...,
        recv_next: bool = ...,
        *,
        next_rank: int | None = ...,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Maybe],
    ) -> Exchanged | Work[Exchanged]: ...
    def exchange(
        self,
        send_next: Any = None,
        send_prev: Any = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        *,
        next_rank: int | None = None,
        prev_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Send and receive at once, in a ring: after the last stage comes the first.

        Whatever is sent is a tensor, or dicts, lists and tuples of tensors and picklable values,
        nested. Tensors may have any dtype, shape and layout in memory, and need not be the same
        every time. Two stages that send to each other first do not wait for each other.

        Args:
            send_next: goes to the next stage; None: nothing does.
            send_prev: goes to the previous stage; None: nothing does.
            recv_prev: receive what the previous stage sends to its next one.
            recv_next: receive what the next stage sends to its previous one.
            next_rank: instead of the next stage, a rank in ``pp``.
            prev_rank: instead of the previous stage, a rank in ``pp``.
            scatter_gather_tensors: whether tensors that divide are sent in slices; None: if there
                is a ``tp``. The sender alone decides.
            async_op: return a `Work`. Tensors that are sent must not change until it is done.
            timeout: seconds; None: what ``pp`` allows.

        Returns:
            `Exchanged`: new tensors; those that required a gradient do, where gradients are
            enabled.

        Collective: no, with the neighbours; yes over ``tp`` if slices are received, in ``wait()``
        if asynchronous.

        Raises:
            ValueError: a rank is this one or not in ``pp``, a tensor is on another device, slices
                are wanted without ``tp``, or a promise (``once``) is not kept. Nothing was sent.
            TypeError: something cannot be pickled, or is no dense tensor. Nothing was sent.
            GroupTimeoutError: it took too long; without ``async_op`` the group is aborted.
        """
        return self._swap(
            lambda received: Exchanged(*received),
            send_next,
            send_prev,
            recv_prev,
            recv_next,
            next_rank=next_rank,
            prev_rank=prev_rank,
            scatter_gather_tensors=scatter_gather_tensors,
            async_op=async_op,
            timeout=timeout,
        )

    def _swap(
        self,
        pick: Callable[[list[Any]], Any],
        send_next: Any = None,
        send_prev: Any = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        *,
        next_rank: int | None = None,
        prev_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """`exchange`, of which ``pick`` chooses the result: it is given both trees."""
        to_next, to_prev = self._neighbour(next_rank, 1), self._neighbour(prev_rank, -1)
        sends = [(send_next, NEXT, to_next), (send_prev, PREV, to_prev)]
        # what the previous stage sends goes to its next one
        receives = [(NEXT, to_prev) if recv_prev else None, (PREV, to_next) if recv_next else None]
        allowed = self.pp.device_communicator.timeout if timeout is None else timeout
        if not async_op:
            allowed = Deadline.after(allowed)
        inflows = [each and (each[0], self._inflow_of(each[1])) for each in receives]
        messages = self._prepare(sends, scatter_gather_tensors)
        if not async_op and not any(inflows):
            for each in messages:
                self._messenger.send_packed(each.dst, each.header, each.parts, allowed)
            return pick([None for _ in receives])
        sending = [
            self._messenger.isend_packed(each.dst, each.header, each.parts, allowed)
            for each in messages
        ]
        requests = [each and each[1].want(each[0]) for each in inflows]
        under_way: list[Pending] = [request for request in requests if request is not None]
        work = Work(
            None,
            Joined([*under_way, *sending]),
            lambda: pick([request and request.finish(allowed) for request in requests]),
            allowed,
        )
        return work if async_op else self._messenger.finish(work)

    def _prepare(
        self, sends: Sequence[tuple[Any, str, int]], scatter_gather_tensors: bool | None
    ) -> list[_Message]:
        """Everything that is to be sent, checked, before anything is; what is promised with it."""
        slicing = self._slicing(scatter_gather_tensors)
        messages: list[_Message] = []
        promised = dict(self._promised)
        for tree, way, dst in sends:
            if tree is None:
                continue
            self._check_peer(dst)
            header, parts = self._messenger.pack(to_dict(tree, way), slicing)
            if self._once:
                encoded = encode(header)
                promise = promised.setdefault(dst, (encoded, header))
                if promise[0] != encoded:
                    raise _broken_promise(dst, promise[1], header)
            is_first = dst not in self._promised and all(each.dst != dst for each in messages)
            messages.append(_Message(dst, header if not self._once or is_first else None, parts))
        self._promised = promised
        return messages

    def _slicing(self, wanted: bool | None) -> Slicing:
        if self._peers is None:
            if wanted:
                raise ValueError("tensors are sent in slices only where the stage has a tp group")
            return WHOLE
        return WHOLE if wanted is False else self._peers.slicing(None)

    def _inflow_of(self, src: int) -> Inflow:
        self._check_peer(src)
        if src not in self._inflows:
            self._inflows[src] = Inflow(self._messenger, src, self._peers, once=self._once)
        return self._inflows[src]

    def _neighbour(self, rank: int | None, step: int) -> int:
        """``rank`` itself, or the one ``step`` further, in a ring."""
        return (self.pp.rank_in_group + step) % self.pp.world_size if rank is None else rank

    def _check_peer(self, rank: int) -> None:
        check_rank("the peer's rank", rank, self.pp.world_size)
        if rank == self.pp.rank_in_group:
            raise ValueError(f"rank {rank} is this stage itself")


def _broken_promise(dst: int, known: Header, header: Header) -> ValueError:
    if way_of(known) != way_of(header):
        return ValueError(
            f"once=True sends rank {dst} tensors alone, which do not say whether they go to the "
            f"next stage or to the previous one: the first went to the {way_of(known)} one, so "
            "all must; between two stages that send both ways leave once=True out"
        )
    return ValueError(
        f"rank {dst} was promised messages that look like the first (once=True); this one differs"
    )
