"""`PipelineEnd`: one stage's end of a pipeline, and the one operation that all others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload

from coordinator.messages.framing import Kind
from coordinator.messages.outgoing import AnotherThreadError
from coordinator.messages.tensor_dict import WHOLE
from coordinator.pipeline.inflow import Inflow
from coordinator.pipeline.message import NEXT, PREV, by_place, refused_tree, to_dict
from device_comm import Joined, Work
from device_comm.verbs.checks import check_rank
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.group import GroupCoordinator
    from coordinator.messages.tensor_dict import Slicing
    from coordinator.messages.transport import Make, Packed
    from coordinator.pipeline.inflow import Request
    from device_comm import Pending
    from device_comm.verbs.arguments import Later, Maybe, Now, Timeout

    Send = tuple[Any, str, int]
    """A tree, the way that it goes, and the rank that gets it."""


class Exchanged(NamedTuple):
    """What an exchange received; None where nothing was asked for."""

    from_prev: Any
    from_next: Any


class PipelineEnd:
    """One stage of a pipeline.

    Attributes:
        pp: the stages, in order; those of one tensor-parallel rank.
        tp: the ranks of this stage that hold the same activations; None: nothing is sliced.
    """

    def __init__(self, pp: GroupCoordinator, tp: GroupCoordinator | None = None) -> None:
        """Be a stage. Collective: no.

        Args:
            pp: the stages, in order.
            tp: the ranks of this stage, which all hold the same activations and gradients: of
                each tensor that divides they send a slice each, and the next stage's gather them.
        """
        self.pp = pp
        self.tp = tp
        self._messenger = pp._messenger
        self._peers = None if tp is None else tp._messenger
        self._inflows: dict[int, Inflow] = {}

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
            ValueError: a rank is this one or not in ``pp``, or slices are wanted without ``tp``:
                nothing was sent. Or a tensor is on another device: as `MessageRefusedError`.
            MessageRefusedError: something cannot be sent, or is no dense tensor; names its place in
                the tree. Nothing of the call is sent, and who was to receive it is told so in its
                place; what the call was to receive is dropped. It is a `TypeError`. Or a peer
                cannot send what it was given.
            GroupTimeoutError: it took too long; without ``async_op`` the group is aborted.
        """
        return self._swap(
            Exchanged._make,
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
        **how: Unpack[Maybe],
    ) -> Any:
        """`exchange`, of which ``pick`` chooses the result: it is given both trees."""
        to_next, to_prev = self._neighbour(next_rank, 1), self._neighbour(prev_rank, -1)
        trees = ((send_next, NEXT, to_next), (send_prev, PREV, to_prev))
        sends = [each for each in trees if each[0] is not None]
        # what the previous stage sends goes to its next one
        inflows = [
            (NEXT, self._inflow_of(to_prev)) if recv_prev else None,
            (PREV, self._inflow_of(to_next)) if recv_next else None,
        ]
        return self._carry_out(pick, sends, inflows, self._slicing(scatter_gather_tensors), **how)

    def _carry_out(
        self,
        pick: Callable[[list[Any]], Any],
        sends: Sequence[Send],
        inflows: Sequence[tuple[str, Inflow] | None],
        slicing: Slicing,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        allowed = self.pp.device_communicator.timeout if timeout is None else timeout
        if not async_op:
            allowed = Deadline.after(allowed)
        packed, refused = self._packed(sends, slicing)
        sends_only = not (async_op or refused or any(inflows))
        sending: list[Work[None]] = []
        requests: list[Request | None] = []
        n_sent = 0
        try:
            for (_, _, dst), each in zip(sends, packed, strict=True):
                kind, make = Kind.TENSOR_DICT, _giving(each)
                if sends_only:
                    self._messenger.send(kind, dst, make, allowed)
                else:
                    sending.append(self._messenger.isend(kind, (dst,), make, None, allowed))
                n_sent += 1
            requests += (each and each[1].want(each[0]) for each in inflows)
            if sends_only:
                return pick(requests)
            under_way: list[Pending] = [request for request in requests if request is not None]
            work = Work(
                None,
                Joined([*under_way, *sending]),
                lambda: pick([request and request.finish(allowed) for request in requests]),
                allowed,
            )
            if refused is None:
                return work if async_op else self._messenger.finish(work)
        except BaseException as error:
            is_message = len(sends) <= 1 and not any(inflows)  # whole, or the messenger's affair
            begun = n_sent or any(requests) or not isinstance(error, AnotherThreadError)
            if begun and not is_message:
                self._ends_halfway(error, requests)
            raise
        return self._messenger.refused(refused)

    def _ends_halfway(self, error: BaseException, requests: Sequence[Request | None]) -> None:
        """End the groups if ``error``, maybe a signal handler's, leaves an exchange half done: the
        next one would get its trees, or gather their slices.
        """
        asked = [request for request in requests if request is not None]
        if len(requests) == len(Exchanged._fields) and all(each.message for each in asked):
            for each in asked:
                each.leave(error)
            return
        self._messenger.cpu.abort(error)
        if self._peers is not None:
            self._peers.cpu.abort(error)

    def _packed(
        self, sends: Sequence[Send], slicing: Slicing
    ) -> tuple[list[Packed], Exception | None]:
        """What is sent; if a tree cannot be, refusals in the place of all, and why."""
        pack = self._messenger.payload
        for _, _, dst in sends:
            self._check_peer(dst)
        try:
            return [pack(to_dict(tree, way), slicing) for tree, way, _ in sends], None
        except Exception as error:  # noqa: BLE001 - `_carry_out` raises it
            refused = self._naming_the_leaf([tree for tree, _, _ in sends], slicing) or error
            return [pack(refused_tree(refused, way), WHOLE) for _, way, _ in sends], refused

    def _naming_the_leaf(self, trees: Sequence[Any], slicing: Slicing) -> Exception | None:
        """What sending the leaves raises, which names the first one's place; None: nothing."""
        try:
            for tree in trees:
                self._messenger.payload(by_place(tree), slicing)
        except Exception as error:  # noqa: BLE001 - it is what was asked for
            return error
        return None

    def _slicing(self, wanted: bool | None) -> Slicing:
        if self._peers is None:
            if wanted:
                raise ValueError("tensors are sent in slices only where the stage has a tp group")
            return WHOLE
        return WHOLE if wanted is False else self._peers.slicing(None)

    def _inflow_of(self, src: int) -> Inflow:
        self._check_peer(src)
        if src not in self._inflows:
            self._inflows[src] = Inflow(self._messenger, src, self._peers)
        return self._inflows[src]

    def _neighbour(self, rank: int | None, step: int) -> int:
        """``rank`` itself, or the one ``step`` further, in a ring."""
        return (self.pp.rank_in_group + step) % self.pp.world_size if rank is None else rank

    def _check_peer(self, rank: int) -> None:
        check_rank("the peer's rank", rank, self.pp.world_size)
        if rank == self.pp.rank_in_group:
            raise ValueError(f"rank {rank} is this stage itself")


def _giving(packed: Packed) -> Make:
    return lambda: packed
