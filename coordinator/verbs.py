"""Offer a group's verbs: collectives over tensors, messages, objects, tensor dicts, and experts.

    dispatch    every member gets the rows of all: all_gatherv
    combine     the experts' results are summed, each member gets its own rows: reduce_scatterv

The rows that members hold may differ in number. ``sizes`` says how many each has; without it the
members tell each other, which costs one small exchange per `dispatch`, and `combine` takes the
sizes of the `dispatch` with the same total number of rows. If two with the same total but different
sizes are under way at once, their `combine` has to be told the sizes. A `dispatch` that is not
combined while `UNDER_WAY` others are dispatched counts as abandoned.

Tensor-parallel members hold the same rows, unless they split them (sequence-parallel). The rows
are therefore exchanged within `token_group`, if the group has one, and with
``is_sequence_parallel`` within the whole group. Within `token_group`, `combine` sums what the
experts of its members have made: the tensor-parallel group has to sum what the others have.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack, overload

import torch
from torch import Tensor

from coordinator.compile_ops import OpsOfGraph
from coordinator.member import Hierarchy, Member
from coordinator.messages.tensor_dict import WHOLE
from coordinator.messages.wire import Kind
from device_comm import ReduceOp, Work
from device_comm.verbs.checks import Later, Maybe, Now, Out, Shape, Timeout, check_shape
from device_comm.verbs.collectives import AllToAllVerbs, SymmetricVerbs
from device_comm.verbs.rooted import RootedPartVerbs, RootedVerbs
from device_comm.verbs.uneven import UnevenVerbs
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from coordinator.context import GroupContext
    from coordinator.messages.transport import Make


class TensorVerbs(Member, SymmetricVerbs, UnevenVerbs, AllToAllVerbs, RootedVerbs, RootedPartVerbs):
    """Collectives over tensors on the group's device.

    ``async_op=True`` returns a `device_comm.Work`; ``await`` it, or call its ``wait()``, for
    what the call would have returned. A group of one returns its input itself, from every verb:
    whoever changes the result in place there changes the input. `device_comm.communicator` says
    what is raised, and that a deadline that passes ends the group.
    """

    @property
    @abstractmethod
    def hierarchy(self) -> Hierarchy[TensorVerbs]:
        """The group seen as its nodes. Collective: no."""

    def _init_from(self, link: GroupContext) -> None:
        super()._init_from(link)
        self.runner = link.device.runner
        self._traced = OpsOfGraph(self.unique_name, self.world_size)

    def _reduce_by_nodes(
        self, x: Tensor, op: ReduceOp, out: Out, async_op: bool, timeout: Timeout
    ) -> Tensor | Work[Tensor]:
        result = self.hierarchy.all_reduce(x, op=op, out=out, timeout=timeout)
        return Work(result) if async_op else result


T = TypeVar("T")


class MessageVerbs(Member):
    """Sending and receiving. Ranks are ranks in the group; the default is the ring neighbour.

    What one member sends to another arrives in the order sent, whatever its kind; the
    receiver asks for the same kinds in the same order. Blocking sends do not wait for their
    receives, until 64 MiB to one member are under way; when their time is up then, the group ends.
    But what goes over NCCL waits, on the device, so members that send to each other have to call
    `irecv` at once behind `isend`. Members trust each other: objects are pickled, unless they
    travel where nothing proves who sent them (`coordinator.messages.wire`).
    One thread at a time: a second one that sends meanwhile, or receives from the same member, gets
    `RuntimeError`, and nothing moves.

    What is begun asynchronously goes on while the caller computes, or waits for anything else; of
    tensors on a GPU only once it is waited for. An asynchronous send

        of objects, or of tensors on the CPU of 1 MiB or less in all    is done at once
        of larger ones, through shared memory                           is done without its receive,
                                                                        up to 64 MiB in all
        of larger ones, over sockets                                    is done with its receive

    A group of one hands back what it is given, the same object, neither copied nor pickled.
    """

    # --- tensors -------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int | None = None, *, timeout: float | None = None) -> None:
        """Send a tensor; it may be changed afterwards. Collective: no, the two members.

        Args:
            x: any shape and dtype.
            dst: None: the next rank.
            timeout: seconds; None: what the group allows.
        """
        self._messenger.send_tensor(x, self._next(dst), timeout)

    def isend(
        self, x: Tensor, dst: int | None = None, *, timeout: float | None = None
    ) -> Work[None]:
        """As `send`, at once; ``x`` must not change until the work is done. Collective: no.

        Up to 1 MiB it is done without its receive; above, see `MessageVerbs`.
        """
        return self._messenger.isend_tensor(x, self._next(dst), timeout)

    def recv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Receive a tensor. Collective: no, the two members.

        Args:
            size: its shape, an int for one dimension; not needed with ``out``.
            dtype: its dtype; not needed with ``out``.
            src: None: the previous rank.
            out: where to put it.
            timeout: seconds; None: what the group allows.

        Returns:
            ``out``, or a new tensor on the group's device.
        """
        return self._messenger.recv_tensor(size, dtype, self._previous(src), out, timeout)

    def irecv(
        self,
        size: Shape | None = None,
        dtype: torch.dtype | None = None,
        src: int | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
    ) -> Work[Tensor]:
        """As `recv`, at once. Collective: no."""
        src = self._previous(src)
        return self._messenger.irecv_tensor(size, dtype, src, out, timeout)

    # --- objects -------------------------------------------------------------------------

    def send_object(self, obj: Any, dst: int, *, timeout: float | None = None) -> None:
        """Send a picklable object of any size. Collective: no, the two members."""
        messenger = self._messenger
        messenger.send(Kind.OBJECT, dst, partial(messenger.dump, obj), timeout)

    def isend_object(self, obj: Any, dst: int, *, timeout: float | None = None) -> Work[None]:
        """As `send_object`; done at once, for the object is pickled at once. Collective: no."""
        messenger = self._messenger
        return messenger.isend(Kind.OBJECT, (dst,), partial(messenger.dump, obj), None, timeout)

    def recv_object(self, src: int, *, timeout: float | None = None) -> Any:
        """Receive an object. Collective: no, the two members."""
        return self._messenger.receive(self._messenger.object_of(src), src, timeout)

    def irecv_object(self, src: int, *, timeout: float | None = None) -> Work[Any]:
        """As `recv_object`, at once. Collective: no."""
        return self._messenger.ireceive(self._messenger.object_of(src), src, timeout)

    @overload
    def broadcast_object(self, obj: Any = ..., src: int = ..., **how: Unpack[Now]) -> Any: ...
    @overload
    def broadcast_object(
        self, obj: Any = ..., src: int = ..., **how: Unpack[Later]
    ) -> Work[Any]: ...
    @overload
    def broadcast_object(
        self, obj: Any = ..., src: int = ..., **how: Unpack[Maybe]
    ) -> Any | Work[Any]: ...
    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """The object of ``src``; that of rank 0 goes through the group's queue, if it has one.

        Collective: yes, every member; ``src`` gets ``obj`` itself back, uncopied, as does a group
        of one. ``async_op`` is the same on all members, and goes round the queue: a `Work`, in
        order with the messages of ``src``. Every member has to wait for it: a large object is sent
        then.
        """
        queue = self.mq_broadcaster
        if queue is not None and src == 0 and not async_op:
            return self._messenger.broadcast_through(queue, obj, timeout)
        return self._messenger.broadcast_object(obj, src, timeout, async_op=async_op)

    @overload
    def broadcast_object_list(
        self, obj_list: list[Any], src: int = ..., **how: Unpack[Now]
    ) -> list[Any]: ...
    @overload
    def broadcast_object_list(
        self, obj_list: list[Any], src: int = ..., **how: Unpack[Later]
    ) -> Work[list[Any]]: ...
    @overload
    def broadcast_object_list(
        self, obj_list: list[Any], src: int = ..., **how: Unpack[Maybe]
    ) -> list[Any] | Work[list[Any]]: ...
    def broadcast_object_list(
        self, obj_list: list[Any], src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Fill every member's list with the objects of ``src``'s. Collective: yes, every member.

        Args:
            obj_list: as long on all members; changed in place.
            src: a rank in the group.
            async_op: as `broadcast_object`.
            timeout: seconds; None: what the group allows.

        Returns:
            ``obj_list``.

        Raises:
            ValueError: ``src``'s list has another length.
        """

        def fill(found: list[Any]) -> list[Any]:
            if len(found) != len(obj_list):
                raise ValueError(f"rank {src} has {len(found)} objects, this one {len(obj_list)}")
            obj_list[:] = found
            return obj_list

        if async_op:
            return self._messenger.broadcast_object(obj_list, src, timeout, async_op=True).then(
                fill
            )
        return fill(self._messenger.broadcast_object(obj_list, src, timeout))

    @overload
    def all_gather_object(self, obj: T, **how: Unpack[Now]) -> list[T]: ...
    @overload
    def all_gather_object(self, obj: T, **how: Unpack[Later]) -> Work[list[T]]: ...
    @overload
    def all_gather_object(self, obj: T, **how: Unpack[Maybe]) -> list[T] | Work[list[T]]: ...
    def all_gather_object(
        self, obj: Any, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Every member's object, by rank in the group. Collective: yes, every member.

        ``async_op``: as `broadcast_object`. In a group of one the list holds ``obj`` itself.
        """
        if async_op:
            return self._messenger.iall_gather_object(obj, timeout)
        return self._messenger.all_gather_object(obj, timeout)

    # --- dicts of tensors ----------------------------------------------------------------

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,
        *,
        timeout: float | None = None,
    ) -> Mapping[Any, Any] | None:
        """Send tensors and other values by key. Collective: no, the two members.

        Args:
            tensor_dict: tensors on the group's device or on the CPU, of any dtype and layout
                in memory, and other values (see `coordinator.messages.wire` for which). Keys are
                text, bytes, numbers, bools, None, or tuples of these. It may be changed afterwards.
            dst: None: the next rank.
            all_gather_group: members that all hold the same tensors, of which each sends a
                slice; the receivers' group of that size gathers them. Usually the tensor-
                parallel group.
            all_gather_tensors: by name: slice this tensor, or do not. By default those are
                sliced whose elements divide. The sender alone decides.
            timeout: seconds; None: what the group allows.

        Returns:
            None; in a group of one, where nothing is sent, ``tensor_dict`` itself, as in vLLM.

        Raises:
            ValueError: a tensor is to be sliced and does not divide, or is elsewhere; the
                receiver's call raises `MessageRefusedError` with the same words.
            MessageRefusedError: a key or a value cannot be sent, or a tensor is not dense;
                likewise. It is a `TypeError`.
        """
        if self.world_size == 1:
            return self._messenger.broadcast_dict(tensor_dict, 0, timeout)  # type: ignore[no-any-return]
        make = self._packing(tensor_dict, all_gather_group, all_gather_tensors)
        self._messenger.send(Kind.TENSOR_DICT, self._next(dst), make, timeout)
        return None

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any],
        dst: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,
        *,
        timeout: float | None = None,
    ) -> Work[None]:
        """As `send_tensor_dict`; tensors must not change until it is done.

        Up to 1 MiB in all it is done without its receive; larger tensors are not copied, and may
        have to wait for it: see `MessageVerbs`. In a group of one nothing is sent, and the work is
        done. Collective: no.
        """
        if self.world_size == 1:
            self._messenger.broadcast_dict(tensor_dict, 0, timeout)
            return Work(None)
        make = self._packing(tensor_dict, all_gather_group, all_gather_tensors)
        return self._messenger.isend(Kind.TENSOR_DICT, (self._next(dst),), make, None, timeout)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,  # noqa: ARG002 - the header says it
        *,
        timeout: float | None = None,
    ) -> dict[Any, Any]:
        """Receive a dict of tensors.

        Collective: no, the two members; yes over ``all_gather_group``, if anything is sliced.

        Args:
            src: None: the previous rank.
            all_gather_group: the group of this member that receives the other slices.
            all_gather_tensors: for vLLM's callers; what was sliced stands in the header.
            timeout: seconds; None: what the group allows.

        Returns:
            New tensors and values, in the sender's order; in a group of one, where nobody sends,
            None, as in vLLM.

        Raises:
            ValueError: a slice came and ``all_gather_group`` is not of the sender's size.
            DivergenceError: the members of ``all_gather_group`` gather slices of different dicts,
                since they wait for them in different orders; it is aborted.
            MessageRefusedError: the sender cannot send what it was given; says why.
            MessageDecodeError: a value cannot be restored here; or there is no room for a tensor,
                or no such device, and the group is aborted.
            MessageSealError: the message is not the sender's next; the group is aborted.
        """
        if self.world_size == 1:
            return self._messenger.broadcast_object(None, 0, timeout)  # type: ignore[no-any-return]
        src, peers = self._previous(src), all_gather_group._messenger if all_gather_group else None
        return self._messenger.receive(self._messenger.incoming_dict(src, peers), src, timeout)

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: MessageVerbs | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,  # noqa: ARG002 - the header says it
        *,
        timeout: float | None = None,
    ) -> Work[dict[Any, Any]]:
        """As `recv_tensor_dict`, at once. Slices are gathered by the work's ``wait()``.

        Collective: no; ``wait()`` as `recv_tensor_dict`.
        """
        if self.world_size == 1:
            return Work(self._messenger.broadcast_object(None, 0, timeout))
        src, peers = self._previous(src), all_gather_group._messenger if all_gather_group else None
        return self._messenger.ireceive(self._messenger.incoming_dict(src, peers), src, timeout)

    @overload
    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[Any, Any] | None = ..., src: int = ..., **how: Unpack[Now]
    ) -> dict[Any, Any]: ...
    @overload
    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[Any, Any] | None = ..., src: int = ..., **how: Unpack[Later]
    ) -> Work[dict[Any, Any]]: ...
    @overload
    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[Any, Any] | None = ..., src: int = ..., **how: Unpack[Maybe]
    ) -> dict[Any, Any] | Work[dict[Any, Any]]: ...
    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[Any, Any] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """The dict of ``src``, on all members. Collective: yes, every member.

        Args:
            tensor_dict: as for `send_tensor_dict`; only that of ``src`` matters.
            src: a rank in the group.
            async_op: as `broadcast_object`; tensors must not change until the work is done.
            timeout: seconds; None: what the group allows.

        Returns:
            New tensors and values in the order of ``src``; there, its own, in a new dict. In a
            group of one ``tensor_dict`` itself.
        """
        return self._messenger.broadcast_dict(tensor_dict, src, timeout, async_op=async_op)

    def _packing(
        self,
        tensor_dict: Mapping[Any, Any],
        all_gather_group: MessageVerbs | None,
        all_gather_tensors: Mapping[Any, bool] | None,
    ) -> Make:
        slicing = (
            all_gather_group._messenger.slicing(all_gather_tensors) if all_gather_group else WHOLE
        )
        return partial(self._messenger.payload, tensor_dict, slicing)

    def _next(self, dst: int | None) -> int:
        return (self.rank_in_group + 1) % self.world_size if dst is None else dst

    def _previous(self, src: int | None) -> int:
        return (self.rank_in_group - 1) % self.world_size if src is None else src


UNDER_WAY: Final = 8
"""How many dispatches may be under way at once whose sizes `combine` is not told."""


class DispatchSizes:
    """The sizes of what one member has dispatched and not combined. Pure logic."""

    def __init__(self) -> None:
        self._count = 0
        self._under_way: deque[tuple[int, tuple[int, ...]]] = deque()
        self._combined: tuple[int, ...] = ()

    def add(self, sizes: Sequence[int]) -> None:
        """Rows were dispatched, so many of each member."""
        self._count += 1
        self._under_way.append((self._count, tuple(sizes)))
        while self._under_way[0][0] <= self._count - UNDER_WAY:
            self._under_way.popleft()

    def combined(self, sizes: Sequence[int]) -> None:
        """The first of these sizes are no longer under way."""
        self._combined = tuple(sizes)
        found = next((each for each in self._under_way if each[1] == self._combined), None)
        if found is not None:
            self._under_way.remove(found)

    def sizes_of(self, rows: int) -> tuple[int, ...]:
        """The sizes with which ``rows`` rows in all were dispatched; those combined last, if none
        are under way.

        Raises:
            ValueError: there are none, or several.
        """
        under_way = [sizes for _, sizes in self._under_way if sum(sizes) == rows]
        alike = list(dict.fromkeys(under_way))
        if not alike and self._combined and sum(self._combined) == rows:
            return self._combined
        if not alike:
            raise ValueError(f"combine needs sizes: no {rows} rows were dispatched before")
        if len(alike) > 1:
            several = " and as ".join(str(list(sizes)) for sizes in alike)
            raise ValueError(
                f"combine needs sizes: {rows} rows were dispatched as {several}, before the first "
                "of these was combined"
            )
        return alike[0]


class ExpertVerbs(Member, UnevenVerbs):
    """Dispatching rows to experts and combining their results.

    Attributes:
        token_group: the members whose rows differ where rows are not sequence-parallel,
            usually those of the data-parallel and the prefill-context-parallel group; None: this
            group.
    """

    token_group: ExpertVerbs | None = None
    _dispatch_sizes: DispatchSizes

    def _init_from(self, link: GroupContext) -> None:
        super()._init_from(link)
        self._dispatch_sizes = DispatchSizes()

    def exchanging_rows_in(self, token_group: ExpertVerbs) -> Self:
        """This group under a second name, with another `token_group`; they are closed together.

        Collective: no.
        """
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), token_group=token_group)
        return other

    @overload
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> tuple[Tensor, ...]: ...
    @overload
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[tuple[Tensor, ...]]: ...
    @overload
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Maybe],
    ) -> tuple[Tensor, ...] | Work[tuple[Tensor, ...]]: ...
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = False,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """The rows of all members, in rank order. Collective: yes, every member.

        Args:
            rows: one or more tensors (rows, ...), such as hidden states, weights and ids.
            is_sequence_parallel: members of a replica hold different rows.
            sizes: rows of each member, the same on all; None: ask them, and wait for that.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            As many tensors, each with the rows of all members.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        if timeout is not None:
            timeout = Deadline.after(timeout)
        if not rows:
            raise TypeError("dispatch needs one tensor or more")
        if sizes is None:
            count = torch.tensor([len(rows[0])], device="cpu")
            sizes = group._context.cpu.all_gather(count, timeout=timeout).tolist()
        found = group.all_gatherv(rows, 0, sizes, async_op=async_op, timeout=timeout)
        group._dispatch_sizes.add(sizes)
        return found.then(tuple) if isinstance(found, Work) else tuple(found)

    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Maybe],
    ) -> Tensor | Work[Tensor]: ...
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = False,
        *,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """The sum of what the members that exchange rows have made of this member's rows.

        Collective: yes, every member.

        Args:
            hidden_states: (all rows, ...), as `dispatch` gave them.
            is_sequence_parallel: as for `dispatch`.
            sizes: rows of each member; None: those of the `dispatch` of as many rows in all.
            out: (this member's rows, ...).
            options: ``async_op`` and ``timeout``, as every verb takes them.

        Returns:
            (this member's rows, ...).

        Raises:
            ValueError: ``sizes`` is not given, and no `dispatch` had as many rows, or several of
                other sizes had.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        if sizes is None:
            sizes = group._dispatch_sizes.sizes_of(len(hidden_states))
        found = group.reduce_scatterv(hidden_states, 0, sizes, out=out, **options)
        group._dispatch_sizes.combined(sizes)
        return found

    def allocate_combine_input(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | None = None,
        is_sequence_parallel: bool = False,
    ) -> Tensor:
        """Memory for what goes into `combine`, not initialised. Collective: no.

        Args:
            shape: (all rows, ...), the same on all members.
            dtype: the same on all members.
            device: None: the group's.
            is_sequence_parallel: as for `dispatch`.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        return torch.empty(check_shape("shape", shape), dtype=dtype, device=device or group.device)

    def _rows_differ_in(self, is_sequence_parallel: bool) -> ExpertVerbs:
        return self if is_sequence_parallel or self.token_group is None else self.token_group
