"""Exchange trees of tensors with the neighbours in a pipeline, by one operation.

In a ring of two stages the next stage is also the previous stage: activations and gradients come
from one peer, in its order of sending, which may differ from the order of receives. So the tag of a
message is its direction.

Only the result of a receive communicates with other peers (it gathers slices); the caller decides
that order. One thread at a time.

The named exchanges are those of ColossalAI. Forward goes from the first stage to the last, backward
the other way. The first five do nothing and return None at the ends of the pipeline. The last three
go round in a ring, for stages that hold several parts of the model; ``None`` and ``recv_*=False``
leave out a part. All of them:

    - send and receive trees, with the arguments and errors of `Stage.exchange`;
    - accept ranks in ``pp`` instead of the neighbours;
    - check received trees against a given dtype and given shapes (one tensor's, as ``(4, 4)``, or a
      list with one shape per tensor of a tree), and raise `ValueError`;
    - with ``async_op=True`` return a `Work` of the result.

A send without ``async_op`` does not wait for its receive; the sent tensors may change afterwards:
see `GroupVerbs`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload

import torch
from torch import Tensor

from coordinator.messages.incoming import Receive
from coordinator.messages.tensor_dict import WHOLE, Slicing
from coordinator.messages.transport import AnotherThreadError
from coordinator.messages.wire import Kind
from coordinator.tree import by_place, flatten, from_dict, to_dict
from device_comm import AllPending, Work
from device_comm.verbs.checks import Later, Maybe, Now, Timeout, check_rank
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from coordinator.group import GroupCoordinator
    from coordinator.messages.messenger import Packed

NEXT, PREV = 1, 2
"""Directions, as tags: to the next stage (activations), or to the previous one (gradients)."""

Shapes = Sequence[int] | Sequence[Sequence[int]]
"""One tensor's shape, or one shape per tensor of a tree, in order."""


def check(tree: Any, shapes: Shapes | None, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless the tensors of ``tree`` have the given shapes and dtype."""
    if tree is None:
        return
    tensors = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
    if shapes is not None:
        many = any(isinstance(each, Sequence) for each in shapes)
        expected = [tuple(each) for each in shapes] if many else [tuple(shapes)]  # type: ignore[arg-type]
        received = [tuple(tensor.shape) for tensor in tensors]
        if received != expected:
            raise ValueError(f"received tensors of shapes {received}; expected {expected}")
    others = {tensor.dtype for tensor in tensors} - {dtype}
    if dtype is not None and others:
        raise ValueError(f"received tensors of {others}; expected {dtype}")


class Exchanged(NamedTuple):
    """The received trees of an exchange; None where none was requested."""

    from_prev: Any
    from_next: Any


class Stage:
    """One stage of a pipeline: ``Stage(groups.pp, groups.tp)``.

    Attributes:
        pp: the stages, in order, with the same tensor-parallel rank.
        tp: the ranks of this stage, all with the same activations and gradients. They send one
            slice each of a tensor that divides; the next stage's ranks gather the slices. None: no
            slices.
    """

    def __init__(self, pp: GroupCoordinator, tp: GroupCoordinator | None = None) -> None:
        self.pp = pp
        self.tp = tp
        self._messenger = pp._messenger
        self._peers = None if tp is None else tp._messenger

    @property
    def is_first(self) -> bool:
        """Return whether this stage has no previous stage."""
        return self.pp.is_first_rank

    @property
    def is_last(self) -> bool:
        """Return whether this stage has no next stage."""
        return self.pp.is_last_rank

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
        """Send and receive at once, in a ring: the first stage follows the last.

        A tree is a tensor, or dicts, lists and tuples of tensors and picklable values, nested.
        Tensors may have any dtype, shape and memory layout, different in each call. Two stages that
        both send first do not wait for each other.

        Args:
            send_next: the tree for the next stage; None: send none.
            send_prev: the tree for the previous stage; None: send none.
            recv_prev: receive what the previous stage sends to its next one.
            recv_next: receive what the next stage sends to its previous one.
            next_rank: a rank in ``pp`` instead of the next stage.
            prev_rank: a rank in ``pp`` instead of the previous stage.
            scatter_gather_tensors: send tensors that divide in slices; None: if there is a ``tp``.
                The sender alone decides.
            async_op: return a `Work`. Sent tensors must not change until it is done.
            timeout: seconds; None: the timeout of ``pp``.

        Returns:
            `Exchanged`: new tensors, which require a gradient as those sent, where gradients are
            enabled.

        Collective: yes over ``tp`` if slices are received, in ``wait()`` if asynchronous.

        Raises:
            ValueError: a rank is this one or not in ``pp``, or slices are requested without ``tp``:
                nothing was sent. Or a tensor is on another device: as `MessageRefusedError`.
            MessageRefusedError: a leaf cannot be sent, or is not a dense tensor; names its place in
                the tree. No tree of the call is sent; its receivers get the refusal instead, and
                the call's receives are dropped. A `TypeError`. Or a peer's tree cannot be sent.
            GroupTimeoutError: the timeout passed; without ``async_op`` the group is aborted.
        """
        trees, receives = (send_next, send_prev), (recv_prev, recv_next)
        ranks, scatter = (next_rank, prev_rank), scatter_gather_tensors
        pick = Exchanged._make
        return self._exchange(trees, receives, ranks, scatter, pick, async_op, timeout)

    def recv_forward(
        self,
        input_tensor_shape: Shapes | None = None,
        prev_rank: int | None = None,
        dtype: torch.dtype | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Return the previous stage's output; None on the first."""
        return self._named({**locals(), "recv_prev": True})

    def recv_backward(
        self,
        output_grad_shape: Shapes | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Return the gradient of this stage's output; None on the last."""
        return self._named({**locals(), "recv_next": True})

    @overload
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Now],
    ) -> None: ...
    @overload
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Later],
    ) -> Work[None]: ...
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Send an output to the next stage; do nothing on the last."""
        return self._named(locals())

    @overload
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Now],
    ) -> None: ...
    @overload
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Later],
    ) -> Work[None]: ...
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Send the gradient of an input to the previous stage; do nothing on the first."""
        return self._named(locals())

    def send_forward_recv_backward(
        self,
        output_tensor: Any,
        output_grad_shape: Shapes | None = None,
        recv_next: bool = True,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Send an output, return the gradient of one; None on the last."""
        return self._named(locals())

    def send_backward_recv_forward(
        self,
        input_tensor_grad: Any,
        input_tensor_shape: Shapes | None = None,
        recv_prev: bool = True,
        prev_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Send the gradient of an input, return an input; None on the first."""
        return self._named(locals())

    def send_forward_recv_forward(
        self,
        output_tensor: Any,
        input_tensor_shape: Shapes | None = None,
        recv_prev: bool = True,
        prev_rank: int | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Send an output to the next stage, return one from the previous."""
        return self._named(locals(), ring=True)

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Any,
        output_grad_shape: Shapes | None = None,
        recv_next: bool = True,
        prev_rank: int | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Send a gradient to the previous stage, return one from the next."""
        return self._named(locals(), ring=True)

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        input_tensor_shape: Shapes | None = None,
        output_grad_shape: Shapes | None = None,
        recv_prev: bool = True,
        recv_next: bool = True,
        prev_rank: int | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **how: Unpack[Maybe],
    ) -> Any:
        """Send both ways and receive both ways: return (input, gradient)."""
        return self._named(locals(), ring=True)

    def _named(self, given: dict[str, Any], *, ring: bool = False) -> Any:
        """Run the exchange of a method with the arguments ``given``, by name.

        Returns the tree, or both trees of a method that receives both ways.
        """
        first, last, get = self.is_first and not ring, self.is_last and not ring, given.get
        output, grad = get("output_tensor"), get("input_tensor_grad")
        recv_prev = get("recv_prev", False) and not first
        recv_next = get("recv_next", False) and not last
        both = "recv_prev" in given and "recv_next" in given

        def pick(received: list[Any]) -> Any:
            from_prev, from_next = received
            check(from_prev, get("input_tensor_shape"), get("dtype"))
            check(from_next, get("output_grad_shape"), get("dtype"))
            return (from_prev, from_next) if both else from_prev if recv_prev else from_next

        return self._exchange(
            (None if last else output, None if first else grad),
            (recv_prev, recv_next),
            (get("next_rank"), get("prev_rank")),
            get("scatter_gather_tensors"),
            pick,
            **given["how"],
        )

    def _exchange(
        self,
        trees: tuple[Any, Any],
        wanted: tuple[bool, bool],
        ranks: tuple[int | None, int | None],
        scatter: bool | None,
        pick: Callable[[list[Any]], Any],
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Send to (next, previous), receive from (previous, next); ``pick`` makes the result."""
        own, n, messenger = self.pp.rank_in_group, self.pp.world_size, self._messenger
        next_, prev = ranks
        to_next = (own + 1) % n if next_ is None else next_
        to_prev = (own - 1) % n if prev is None else prev
        each_way = ((trees[0], NEXT, to_next), (trees[1], PREV, to_prev))
        sends = [each for each in each_way if each[0] is not None]
        # A message from the previous stage has the direction NEXT.
        receives = [(NEXT, to_prev) if wanted[0] else None, (PREV, to_next) if wanted[1] else None]
        for rank in [each[-1] for each in (*sends, *receives) if each is not None]:
            check_rank("the peer's rank", rank, n)
            if rank == own:
                raise ValueError(f"rank {rank} is this stage")
        slicing = self._slicing(scatter)
        peers = None if self._peers is None else self._peers.routes
        allowed = self.pp._context.device.timeout if timeout is None else timeout
        if not async_op:
            allowed = Deadline.after(allowed)
        packed, refused = self._packed([tree for tree, _, _ in sends], slicing)
        sends_only = not (async_op or refused or any(receives))
        sending: list[Work[None]] = []
        posted: list[Receive | None] = []
        n_sent = 0
        try:
            for (_, way, dst), each in zip(sends, packed, strict=True):
                make = partial(_same, each)
                if refused is not None:
                    messenger.refuse(refused, (dst,), way)
                elif sends_only:
                    messenger.send(Kind.TREE, dst, make, allowed, way)
                else:
                    sending.append(messenger.isend(Kind.TREE, (dst,), make, None, allowed, way))
                n_sent += 1
            posted += (
                each and messenger.post(Kind.TREE, each[1], each[0], peers) for each in receives
            )
            if sends_only:
                return pick(posted)
            work = Work(
                None,
                AllPending([*filter(None, posted), *sending]),
                lambda: pick([each and from_dict(each.result(allowed)) for each in posted]),
                allowed,
            )
            if refused is None:
                return work if async_op else messenger.finish(work)
        except BaseException as error:
            # The messenger handles errors of a single send.
            is_message = len(sends) <= 1 and not any(receives)
            begun = n_sent or any(posted) or not isinstance(error, AnotherThreadError)
            if begun and not is_message:
                self._abort_if_partial(error, posted)
            raise
        return messenger.refused(refused)

    def _abort_if_partial(self, error: BaseException, posted: Sequence[Receive | None]) -> None:
        """Abort the groups if ``error`` leaves trees or slices for the next exchange."""
        receives = [each for each in posted if each is not None]
        if len(posted) == len(Exchanged._fields) and all(each.has_arrived for each in receives):
            for each in receives:
                each.leave(error)
            return
        self._messenger.cpu.abort(error)
        if self._peers is not None:
            self._peers.cpu.abort(error)

    def _packed(
        self, trees: Sequence[Any], slicing: Slicing
    ) -> tuple[list[Packed], Exception | None]:
        """Return the packed trees, and the error if one cannot be sent."""
        pack = self._messenger.payload
        try:
            return [pack(to_dict(tree), slicing) for tree in trees], None
        except Exception as error:  # noqa: BLE001 - `_exchange` raises it
            return [(b"", ())] * len(trees), self._leaf_error(trees, slicing) or error

    def _leaf_error(self, trees: Sequence[Any], slicing: Slicing) -> Exception | None:
        """Return the error of sending the leaves, which names the place; None if there is none."""
        try:
            for tree in trees:
                self._messenger.payload(by_place(tree), slicing)
        except Exception as error:  # noqa: BLE001 - returned
            return error
        return None

    def _slicing(self, scatter_gather: bool | None) -> Slicing:
        if self._peers is None:
            if scatter_gather:
                raise ValueError("scatter_gather_tensors=True requires a stage with a tp group")
            return WHOLE
        return WHOLE if scatter_gather is False else self._peers.slicing(None)


def _same(packed: Packed) -> Packed:
    return packed
