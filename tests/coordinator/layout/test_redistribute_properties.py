"""Any change of layout on any mesh, values and gradients, with threads for ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import ReduceOp
from coordinator.layout import Layout, MeshCosts, Replicate, plan, redistribute
from coordinator.layout.planning.arrangement import Arrangement
from tests.coordinator.layout.by_hand import hold, layouts, of_gradient, shapes, share
from tests.coordinator.layout.thread_groups import ThreadGroup, on_mesh

meshes = st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (1, 4), (2, 1, 2), (2, 2, 2)])
linear = (ReduceOp.SUM, ReduceOp.AVG)
every = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_any_layout_to_any_layout(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes), data.draw(shapes())
    source = data.draw(layouts(shape, mesh, every))
    target = data.draw(layouts(shape, mesh, every))
    x = whole(shape)

    def body(axes: list[Any], flat: ThreadGroup) -> torch.Tensor:
        given_ = hold(x, source, axes)
        before = given_.clone()
        found = redistribute(given_, source, target, axes, shape=shape)
        assert torch.equal(given_, before)
        if not target.has_terms:
            torch.testing.assert_close(found, hold(x, target, axes))
        everywhere = Layout((Replicate(),) * len(mesh))
        back = redistribute(found, target, everywhere, axes, shape=shape)
        torch.testing.assert_close(back, x)
        return found

    on_mesh(mesh, body)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_gradients_of_any_change(data: st.DataObject) -> None:
    """The gradient of the whole is W: every rank's must be what it holds of W."""
    mesh, shape = data.draw(meshes), data.draw(shapes())
    source = data.draw(layouts(shape, mesh, linear))
    target = data.draw(layouts(shape, mesh, linear))
    x, w = whole(shape), whole(shape) * 3 + 1

    def body(axes: list[Any], flat: ThreadGroup) -> None:
        given_ = hold(x, source, axes).requires_grad_()
        found = redistribute(given_, source, target, axes, shape=shape)
        upstream = hold(w, of_gradient(target), axes) * share(target, mesh)
        (grad,) = torch.autograd.grad(found, given_, upstream)
        expected = hold(w, of_gradient(source), axes) * share(source, mesh)
        torch.testing.assert_close(grad, expected)

    on_mesh(mesh, body)


@given(st.data())
def test_a_plan_starts_and_ends_right_and_costs_what_its_steps_cost(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes), data.draw(shapes())
    source = data.draw(layouts(shape, mesh))
    target = data.draw(layouts(shape, mesh))
    found = plan(source, target, shape, MeshCosts.uniform(mesh))
    for before, after in itertools.pairwise(found.steps):
        assert before.after == after.before
    assert found.cost == sum(step.cost for step in found.steps) >= 0
    if found.steps:
        assert found.steps[0].before == Arrangement.of(source, len(shape), mesh)
        assert found.steps[-1].after == Arrangement.of(target, len(shape), mesh)
    assert plan(target, target, shape, MeshCosts.uniform(mesh)).steps == ()
