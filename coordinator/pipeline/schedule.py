"""Running a stage's part of a model on micro-batches, for inference and for training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coordinator.pipeline.order import Action, forward_only, one_f_one_b
from coordinator.tree import flatten, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from coordinator.pipeline.order import Order
    from coordinator.pipeline.stage import Stage
    from device_comm import Work


class Schedule:
    """A stage at work: ``Schedule(Stage(groups.pp, groups.tp), part_of_model)``.

    What the part of a stage returns, the part of the next one is given: a tensor, or nested
    dicts, lists and tuples of tensors and picklable values. Receives and sends overlap with
    computing. An error on one stage aborts the group, so that no stage waits for it.
    """

    def __init__(
        self, stage: Stage, part: Callable[[Any], Any], *, order: Order = one_f_one_b
    ) -> None:
        """Collective: no.

        Args:
            stage: this stage, used by nobody else meanwhile.
            part: this stage's part of the model: takes one tree, returns one.
            order: of training; the same on all stages: `one_f_one_b`, `gpipe`.
        """
        self._stage = stage
        self._part = part
        self._order = order

    def infer(self, inputs: Sequence[Any] | None, micro_batches: int) -> list[Any] | None:
        """The model's outputs, without gradients.

        Args:
            inputs: on the first stage one tree per micro-batch; ignored elsewhere.
            micro_batches: how many; the same on all stages.

        Returns:
            On the last stage one tree per micro-batch, in order; None elsewhere.

        Collective: yes, every stage.

        Raises:
            ValueError: the first stage has not that many inputs.
        """
        run = _Run(self._stage, self._part, micro_batches, self._given(inputs, micro_batches))
        with torch.no_grad():
            run.all(forward_only)
        return run.results() if self._stage.is_last else None

    def train(
        self,
        inputs: Sequence[Any] | None,
        micro_batches: int,
        loss: Callable[[Any, int], Tensor] | None = None,
    ) -> list[Tensor] | None:
        """Add the gradient of the mean loss to the parameters of every stage's part.

        Args:
            inputs: on the first stage one tree per micro-batch; ignored elsewhere.
            micro_batches: how many; the same on all stages.
            loss: on the last stage: of an output and the number of its micro-batch, a tensor
                of one element.

        Returns:
            On the last stage the loss of each micro-batch, detached, in order; None elsewhere.

        Collective: yes, every stage.

        Raises:
            ValueError: the first stage has not that many inputs, or the last one no loss.
        """
        if self._stage.is_last and loss is None:
            raise ValueError("the last stage needs a loss")
        given = self._given(inputs, micro_batches)
        run = _Run(self._stage, self._part, micro_batches, given, loss)
        with torch.enable_grad():
            run.all(self._order)
        return run.results() if self._stage.is_last else None

    def _given(self, inputs: Sequence[Any] | None, micro_batches: int) -> Sequence[Any]:
        if not self._stage.is_first:
            return ()
        found = () if inputs is None else inputs
        if len(found) != micro_batches:
            raise ValueError(f"{len(found)} inputs for {micro_batches} micro-batches")
        return found


@dataclass
class _Run:
    """One call of a schedule."""

    stage: Stage
    part: Callable[[Any], Any]
    micro_batches: int
    inputs: Sequence[Any]
    loss: Callable[[Any, int], Tensor] | None = None
    _receiving: dict[Action, Work[Any]] = field(default_factory=dict)
    _sending: list[Work[Any]] = field(default_factory=list)
    _kept: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _results: dict[int, Any] = field(default_factory=dict)

    def all(self, order: Order) -> None:
        """Take all actions; receive for the next one while working on one."""
        pp = self.stage.pp
        actions = order(pp.rank_in_group, pp.world_size, self.micro_batches)
        try:
            for action, following in zip(actions, [*actions[1:], None], strict=True):
                self._receive(action)
                arrived = self._receiving.pop(action).wait()
                if following is not None:
                    self._receive(following)
                if action.is_backward:
                    self._backward(action.micro_batch, arrived)
                else:
                    self._forward(action.micro_batch, arrived)
                self._sending = [work for work in self._sending if not work.is_completed()]
            for work in self._sending:
                work.wait()
        except BaseException as error:
            pp.abort(error)
            raise

    def results(self) -> list[Any]:
        return [self._results[number] for number in range(self.micro_batches)]

    def _receive(self, action: Action) -> None:
        """Begin to receive what an action needs."""
        if action not in self._receiving:
            receive = self.stage.recv_backward if action.is_backward else self.stage.recv_forward
            self._receiving[action] = receive(async_op=True)

    def _forward(self, number: int, arrived: Any) -> None:
        given = self.inputs[number] if self.stage.is_first else arrived
        output = self.part(given)
        self._sending.append(self.stage.send_forward(output, async_op=True))
        if self.loss is not None and self.stage.is_last:
            output = self.loss(output, number)
        if torch.is_grad_enabled():
            self._kept[number] = given, output
        if self.stage.is_last:
            self._results[number] = output.detach() if self.loss is not None else output

    def _backward(self, number: int, arrived: Any) -> None:
        given, output = self._kept.pop(number)
        if self.stage.is_last:
            (output / self.micro_batches).backward()
        else:
            _pull(output, arrived)
        if not self.stage.is_first:
            leaves, structure = flatten(given)
            grads = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves]
            self._sending.append(
                self.stage.send_backward(unflatten(structure, grads), async_op=True)
            )


def _pull(output: Any, gradient: Any) -> None:
    """Backward from the tensors of an output, for which the next stage found gradients."""
    pairs = [
        (tensor, grad)
        for tensor, grad in zip(flatten(output)[0], flatten(gradient)[0], strict=True)
        if isinstance(grad, Tensor) and tensor.requires_grad
    ]
    torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])
