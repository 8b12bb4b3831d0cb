"""Hooks around operations on parameters, and parameters by name."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from coordinator.layout import ParamOpHook, named_parameters, use_param_hooks

pytestmark = pytest.mark.quick

ALL = ["pre_forward", "post_forward", "pre_backward", "post_backward"]


class Log(ParamOpHook):
    def __init__(self, log: list[Any] | None = None, name: str = "") -> None:
        self.log = [] if log is None else log
        self.name = name

    def pre_forward(self, params: Any) -> None:
        self._note("pre_forward", params)

    def post_forward(self, params: Any) -> None:
        self._note("post_forward", params)

    def pre_backward(self, params: Any) -> None:
        self._note("pre_backward", params)

    def post_backward(self, params: Any) -> None:
        self._note("post_backward", params)

    def _note(self, what: str, params: Any) -> None:
        params[0].detach().sum()  # hooks do not see what they do
        self.log.append(f"{self.name}{what}")
        self.params = params


@pytest.mark.parametrize("call", [torch.max, torch.sort, torch.cummax])
def test_hooks_run_in_their_order_where_values_have_indices(call: Any) -> None:
    hook = Log()
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    with use_param_hooks(hook):
        values, _ = call(weight, 0)
        assert hook.log == ALL[:2]
    values.sum().backward()
    assert hook.log == ALL


def test_hooks_of_a_forward_run_in_its_backward_outside_the_with() -> None:
    """The original reads its hooks at backward time, and finds none."""
    hook = Log()
    layer = nn.Linear(3, 2)
    with use_param_hooks(hook):
        loss = layer(torch.ones(4, 3)).sum()
    loss.backward()
    assert hook.log == ALL
    assert hook.params == (layer.weight, layer.bias)
    layer(torch.ones(4, 3)).sum().backward()
    assert hook.log == ALL


def test_results_and_gradients_are_the_same() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(3, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()
        )

    plain, hooked = build(), build()
    x = torch.randn(5, 3)
    expected = plain(x)
    expected.square().sum().backward()
    hook = Log()
    with use_param_hooks(hook):
        found = hooked(x)
        found.square().sum().backward()
    assert torch.equal(found, expected)
    for a, b in zip(hooked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert hook.log == ALL[:2] * 3 + ALL[2:] * 3


def test_frozen_parameters_and_inference_have_hooks() -> None:
    hook = Log()
    layer = nn.Linear(3, 2).requires_grad_(False)
    x = torch.ones(1, 3, requires_grad=True)
    with use_param_hooks(hook):
        layer(x).sum().backward()
        assert hook.log == ALL
        hook.log.clear()
        with torch.no_grad():
            layer(x)
    assert hook.log == ALL[:2]


def test_only_operations_on_parameters_count() -> None:
    hook = Log()
    p = nn.Parameter(torch.ones(2, 2))
    x = torch.ones(2, 2)
    with use_param_hooks(hook):
        x @ x
        assert (p.shape, p.dim(), p.requires_grad, p.numel()) == ((2, 2), 2, True, 4)
        repr(p)
        assert hook.log == []
        torch.cat([x, p])  # in a list
        functional.linear(x, weight=p)  # by keyword
        assert hook.log == ALL[:2] * 2


def test_operations_in_place_count() -> None:
    hook = Log()
    p = nn.Parameter(torch.ones(2))
    out = torch.empty(2)
    with use_param_hooks(hook):
        x = torch.zeros(2).add_(p * 1)
        x.mul_(p)
        with torch.no_grad():
            p.add_(1)
            torch.add(p, 1, out=out)
    assert out.tolist() == [3, 3]
    assert p.tolist() == [2, 2]
    assert hook.log == ALL[:2] * 4


def test_hooks_nest_and_end_with_their_with() -> None:
    log: list[Any] = []
    p = nn.Parameter(torch.ones(2))
    with use_param_hooks(Log(log, "outer ")):
        with use_param_hooks(Log(log, "inner ")):
            p * 2
        assert log == [
            "outer pre_forward", "inner pre_forward", "outer post_forward", "inner post_forward"
        ]  # fmt: skip
        log.clear()
        p * 2
    assert log == ["outer pre_forward", "outer post_forward"]
    with pytest.raises(KeyError), use_param_hooks(Log(log)):
        raise KeyError
    p * 2
    assert len(log) == 2


def test_other_contexts_have_no_hooks() -> None:
    """In the same thread and in another."""
    hook = Log()
    p = nn.Parameter(torch.ones(2))
    empty = contextvars.copy_context()
    with use_param_hooks(hook):
        empty.run(lambda: p * 2)
        thread = threading.Thread(target=lambda: p * 2)
        thread.start()
        thread.join()
    assert hook.log == []


def test_names_are_complete_prefixed_and_not_repeated() -> None:
    """Of a layer whose weight was replaced by a plain attribute, which is there twice."""
    layer = nn.Linear(2, 2)
    weight = layer.weight.detach().requires_grad_()
    del layer.weight
    layer.weight = weight
    layer.cached = torch.ones(1)
    outer = nn.Module()
    outer.first, outer.again = layer, layer
    outer.scale = nn.Parameter(torch.ones(1))
    names = ["scale", "first.bias", "first.weight"]
    assert [name for name, _ in named_parameters(outer)] == names
    prefixed = [f"model.{name}" for name in names]
    assert [name for name, _ in named_parameters(outer, "model")] == prefixed
    assert [name for name, _ in named_parameters(outer, "model", recurse=False)] == prefixed[:1]
    assert dict(named_parameters(outer))["first.weight"] is weight
