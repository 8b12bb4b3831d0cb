# ruff: noqa: ARG005 - all models get the same tensors
"""Verbs inside `torch.compile`: no graph break, right results; sums that are normed are one op."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import coordinator
from coordinator import GroupCoordinator, ReduceOp, all_reduce_norm_pass, compile_ops
from tests.pages.blocks import block_of
from tests.ranks import run_ranks
from tests.shared_store import SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch.distributed import Store
    from torch.fx import Graph, GraphModule

    Model = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]

# --- verbs ---------------------------------------------------------------------------------


class Layer(nn.Module):
    """All verbs that a graph keeps, with what stands between them in a tensor-parallel layer."""

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__()
        self.group = group
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        normed, kept = self.group.all_reduce_norm(self.linear(x), x, x[0])
        total = self.group.all_reduce(normed + kept).relu()
        gathered = self.group.all_gather(total * 2, dim=-1)
        scattered = self.group.reduce_scatter(gathered.t() + 1, dim=0)
        largest = self.group.all_reduce_(scattered.clone(), op=ReduceOp.MAX)
        return gathered, scattered, largest


def no_gradient(group: GroupCoordinator) -> None:
    """Compiled or not, autograd sees nothing of a verb; a wrong dim is refused alike."""
    linear = nn.Linear(2, 2)
    for verb in (group.all_reduce, group.all_gather, group.reduce_scatter):

        def layer(x: Tensor, verb: Any = verb) -> Tensor:
            found: Tensor = verb(linear(x))
            return found * 2

        x = torch.ones(2, 2)
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
        assert not found.requires_grad
        assert torch.equal(found, layer(x))
    for verb in (group.all_gather, group.reduce_scatter):
        for wrong in (lambda x, verb=verb: verb(x, dim=5), lambda x, verb=verb: verb(x.sum(), 0)):
            for call in (wrong, torch.compile(wrong, backend="aot_eager")):
                with pytest.raises(ValueError, match="is out of range for a tensor of"):
                    call(torch.ones(2, 2))
            torch._dynamo.reset()


def in_place(rank: int, group: GroupCoordinator) -> None:
    """Compiled or not, ``x`` is changed itself, in a view too, and autograd does not notice."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        y = x * weight
        same = group.all_reduce_(y)
        return same + y

    def column(x: Tensor) -> Tensor:
        return group.all_reduce_(x[:, 1], op=ReduceOp.MAX)

    call: Any
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        weight = torch.tensor([2.0], requires_grad=True)
        y = call(torch.tensor([3.0 + rank]), weight)
        y.sum().backward()
        assert y.tolist() == [28.0]  # 2 · (2·3 + 2·4)
        assert weight.grad is not None
        assert weight.grad.tolist() == [2 * (3.0 + rank)]
    for call in (column, torch.compile(column, fullgraph=True, backend="aot_eager")):
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
        assert call(x).tolist() == [12, 14]
        assert x.tolist() == [[1 + 10 * rank, 12], [3 + 10 * rank, 14]]


def compiled(rank: int, n: int, store: Store) -> None:
    torch.manual_seed(0)
    with coordinator.init(tp=n, rank=rank, store=store, timeout=30) as groups, torch.no_grad():
        layer = Layer(groups.tp)
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for rows in (3, 5):
            x = torch.randn(rows, 4) + rank
            for ours, theirs in zip(fast(x), layer(x), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        explained: Any = torch._dynamo.explain(layer)(torch.randn(3, 4))
        assert explained.graph_break_count == 0
        calls = [node.target for node in explained.graphs[0].graph.nodes]
        assert sum("group_coordinator" in str(call) for call in calls) == 5
        name = groups.tp.unique_name
        for op, arguments in (
            (compile_ops.all_reduce, (torch.randn(3, 4).t(), 0, name)),
            (compile_ops.all_reduce_norm, (*torch.randn(3, 4, 3).mT[:2], torch.ones(4), 0.1, name)),
            (compile_ops.all_gather, (torch.randn(3, 4), -1, n, name)),
            (compile_ops.all_gather, (torch.randn(3, 4), 0, n, name)),
            (compile_ops.reduce_scatter, (torch.randn(4, 2 * n), 1, 0, n, name)),
            (compile_ops.reduce_scatter, (torch.randn(n, 3), -2, 2, n, name)),
        ):
            torch.library.opcheck(op, arguments)
        with torch.enable_grad():
            no_gradient(groups.tp)
            in_place(rank, groups.tp)
        groups.tp.barrier()
    with coordinator.init(dp=n, rank=rank, store=store, timeout=30) as groups, torch.no_grad():
        rows_change_in_number(rank, groups.ep)
        groups.world.barrier()


def rows_change_in_number(rank: int, ep: GroupCoordinator) -> None:
    """torch compiles the number of rows for experts as a symbol; rank r has rows of r + 1."""
    warnings.simplefilter("ignore")  # torch's, of calls that it does not trace

    def layer(x: Tensor) -> Tensor:
        return ep.dispatch(x * 2)[0] + 1

    fast = torch.compile(layer, backend="aot_eager")
    for count in (3, 5):
        x = torch.full((count + rank, 2), rank + 1.0)
        assert fast(x).tolist() == [[3, 3]] * count + [[5, 5]] * (count + 1)


def test_compiled_verbs_break_no_graph() -> None:
    run_ranks(2, compiled, SharedStore(), timeout=200)


def test_a_group_of_one_leaves_no_op_behind() -> None:
    with coordinator.init(rank=0) as groups:
        for verb in (groups.tp.all_reduce, groups.tp.all_reduce_):
            seen = torch._dynamo.explain(lambda x, verb=verb: verb(x) + 1)(torch.ones(2))
            assert seen.graph_break_count == 0
            nodes = seen.graphs[0].graph.nodes
            assert not [node for node in nodes if "group_coordinator" in str(node.target)]
            assert not [node for node in nodes if "copy_" in str(node.target)]


def test_groups_are_found_while_they_are_open() -> None:
    with coordinator.init(rank=0) as first, coordinator.init(rank=0) as second:
        assert (first.tp.unique_name, second.tp.unique_name) == ("tp:0", "tp:1")
        assert compile_ops.find("tp:1") is second.tp.device_communicator
    with pytest.raises(ValueError, match="no group 'tp:0' in this process"):
        compile_ops.find("tp:0")


# --- sums that are normed ------------------------------------------------------------------

EPSILON = 1e-5
WIDTH = 16
NARROW = torch.bfloat16
TOLERANCE = {torch.float32: 1e-5, NARROW: 2e-2}


class FakeCommunicator:
    """Of two equal ranks, with a kernel for some dtypes."""

    def __init__(self, *normed: torch.dtype) -> None:
        self.backend = SimpleNamespace(capabilities=SimpleNamespace(normed=frozenset(normed)))

    def all_reduce(self, x: Tensor, op: ReduceOp) -> Tensor:
        return x * 2 if op is ReduceOp.SUM else x * 1

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        kept = (residual.double() + 2 * x.double()).to(x.dtype)
        return rms_norm(kept, weight.shape, weight, epsilon), kept


class FakeGroup:
    """What an op needs of a group."""

    def __init__(self, name: str, *normed: torch.dtype) -> None:
        self.name = name
        self.communicator: Any = FakeCommunicator(*normed)
        self.unique_name = compile_ops.register_ops(name, self.communicator)

    def all_reduce(self, x: Tensor, op: ReduceOp = ReduceOp.SUM) -> Tensor:
        return compile_ops.all_reduce(x, int(op), self.unique_name)


@contextmanager
def fake(name: str, *normed: torch.dtype) -> Iterator[FakeGroup]:
    group = FakeGroup(name, *normed)
    yield group
    compile_ops.unregister(group.unique_name)


@pytest.fixture
def able() -> Iterator[FakeGroup]:
    with fake("able", torch.float32, NARROW) as group:
        yield group


def tensors(dtype: torch.dtype, rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.Generator().manual_seed(rows)
    shapes = ((rows, WIDTH), (rows, WIDTH), (WIDTH,))
    x, residual, weight = (torch.randn(shape, generator=seed).to(dtype) for shape in shapes)
    return x, residual, weight


def rewritten(model: Model, given: tuple[Tensor, ...], **how: Any) -> list[str]:
    """The ops of this project in the graph of ``model`` after the pass, which computes the same."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[Graph] = []

    def compiler(module: GraphModule, _: object) -> Callable[..., Any]:
        all_reduce_norm_pass()(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)
        return module.forward

    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend=backend, **how)(*given)
        for ours, theirs in zip(found, model(*given), strict=True):
            tolerance = TOLERANCE.get(given[0].dtype, 1e-3)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    return ops(graphs[-1])


def ops(graph: Graph) -> list[str]:
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("group_coordinator")]


# --- as models write it ------------------------------------------------------------------


def by_function(kept: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(kept, weight.shape, weight, EPSILON)


def rounded_first(
    kept: Tensor,
    weight: Tensor,
    power: int = 2,
    dims: int | tuple[int, int] = -1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    wide = kept.to(dtype)
    wide = wide * torch.rsqrt(wide.pow(power).mean(dims, keepdim=True) + EPSILON)
    return weight * wide.to(kept.dtype)


def rounded_last(kept: Tensor, weight: Tensor) -> Tensor:
    wide = kept.float()
    scale = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + EPSILON)
    return (scale * wide * weight.float()).to(kept.dtype)


def weight_as_it_is(kept: Tensor, weight: Tensor) -> Tensor:
    wide = kept.float()
    return (weight * (wide * (wide.square().mean(1, True) + EPSILON).rsqrt())).type_as(kept)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize("norm", [by_function, rounded_first, rounded_last, weight_as_it_is])
def test_sums_that_are_normed_are_one_op(
    able: FakeGroup, norm: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    def before(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        kept = residual + able.all_reduce(x.relu())
        return norm(kept, weight), kept

    def after(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        kept = able.all_reduce(x) + residual.relu()
        return (norm(kept, weight) + 1,)

    for model in (before, after):
        assert rewritten(model, tensors(dtype)) == ["all_reduce_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
def test_sums_that_are_added_in_float32_are_one_op(able: FakeGroup, dtype: torch.dtype) -> None:
    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = able.all_reduce(x).float() + residual.float()
        kept = wide.to(dtype)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return wide.to(dtype) * weight, kept

    assert rewritten(model, tensors(dtype)) == ["all_reduce_norm"]


def test_layers_after_each_other_are_one_op_each(able: FakeGroup) -> None:
    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        for _ in range(3):
            residual = residual + able.all_reduce(x)
            x = rounded_first(residual, weight).relu()
        return x, residual

    assert rewritten(model, tensors(NARROW)) == ["all_reduce_norm"] * 3


def test_sums_of_any_number_of_rows_are_one_op(able: FakeGroup) -> None:
    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (by_function(residual + able.all_reduce(x), weight),)

    assert rewritten(model, tensors(NARROW, 5), dynamic=True) == ["all_reduce_norm"]


# --- what does not fit -------------------------------------------------------------------


def plain_norm(kept: Tensor) -> Tensor:
    return rms_norm(kept, kept.shape[-1:], None, EPSILON)


MISFITS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Any]] = {
    "the sum is used again": lambda tp, x, residual, weight: (
        by_function(residual + (total := tp.all_reduce(x)), weight),
        total * 3,
    ),
    "the sum is used again in float32": lambda tp, x, residual, weight: (
        rounded_first((total := tp.all_reduce(x).float()) + residual.float(), weight).to(x.dtype),
        total * 3,
    ),
    "another reduction": lambda tp, x, residual, weight: by_function(
        residual + tp.all_reduce(x, ReduceOp.MAX), weight
    ),
    "a number for a residual": lambda tp, x, residual, weight: by_function(
        tp.all_reduce(x) + 1.0, weight
    ),
    "a row for a residual": lambda tp, x, residual, weight: by_function(
        residual[:1] + tp.all_reduce(x), weight
    ),
    "no weight": lambda tp, x, residual, weight: plain_norm(residual + tp.all_reduce(x)),
    "a weight for each number": lambda tp, x, residual, weight: (
        plain_norm(residual + tp.all_reduce(x)) * residual
    ),
    "a weight that is computed after the sum": lambda tp, x, residual, weight: by_function(
        kept := residual + tp.all_reduce(x), kept[0].relu()
    ),
    "a norm over all": lambda tp, x, residual, weight: rounded_first(
        residual + tp.all_reduce(x), weight, dims=(0, 1)
    ),
    "a norm over columns": lambda tp, x, residual, weight: rounded_first(
        residual + tp.all_reduce(x), weight, dims=0
    ),
    "a fourth power": lambda tp, x, residual, weight: rounded_first(
        residual + tp.all_reduce(x), weight, power=4
    ),
    "a result in float32": lambda tp, x, residual, weight: (
        (wide := (residual + tp.all_reduce(x)).to(torch.float64))
        * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        * weight
    ),
    "a norm in the narrow dtype": lambda tp, x, residual, weight: rounded_first(
        residual + tp.all_reduce(x), weight, dtype=x.dtype
    ),
}
IN_ITS_DTYPE = "a norm in the narrow dtype"


@pytest.mark.parametrize(
    ("misfit", "dtype"),
    [(each, NARROW) for each in MISFITS]
    + [(each, torch.float32) for each in MISFITS if each != IN_ITS_DTYPE],
    ids=str,
)
def test_what_is_something_else_stays(able: FakeGroup, misfit: str, dtype: torch.dtype) -> None:
    def model(*given: Tensor) -> tuple[Tensor, ...]:
        found = MISFITS[misfit](able, *given)
        return found if isinstance(found, tuple) else (found,)

    assert rewritten(model, tensors(dtype)) == ["all_reduce"]


def test_a_weight_of_another_dtype_stays(able: FakeGroup) -> None:
    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (rounded_last(residual + able.all_reduce(x), weight),)

    x, residual, weight = tensors(NARROW)
    assert rewritten(model, (x, residual, weight.float())) == ["all_reduce"]


def test_sums_of_other_groups_and_dtypes_stay(able: FakeGroup) -> None:
    def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        for group in (unable, able):
            residual = residual + group.all_reduce(x)
            x = rounded_first(residual, weight)
        return x, residual

    with fake("unable", torch.float16) as unable:
        assert rewritten(model, tensors(NARROW)) == ["all_reduce", "all_reduce_norm"]
        assert rewritten(model, tensors(torch.float64)) == ["all_reduce", "all_reduce"]


# --- the compiler ------------------------------------------------------------------------


def test_a_torch_without_the_matcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "coordinator.norm_patterns", raising=False)
    monkeypatch.setitem(sys.modules, "torch._inductor.pattern_matcher", None)
    with pytest.raises(NotImplementedError, match=r"torch \S+ has no pattern matcher"):
        all_reduce_norm_pass()


def test_the_compilers_cache_knows_the_groups(able: FakeGroup) -> None:
    made: Any = all_reduce_norm_pass()
    before = made.uuid()
    assert before == made.uuid()
    able.communicator.backend.capabilities.normed = frozenset([torch.float32])
    assert made.uuid() != before


class Written(nn.Module):
    """By the verb, and written out."""

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.linspace(0.5, 2, WIDTH))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.group.all_reduce_norm(x, residual, self.weight, EPSILON)
        residual = residual + self.group.all_reduce(x.relu())
        return by_function(residual, self.weight), residual


def compiled_norms(rank: int, n: int, store: Store, folder: str) -> list[str]:
    """A model by the whole compiler, as if there were a kernel; the ops of its graph."""
    from torch._inductor import config

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")  # its own
    shown: dict[str, Any] = {}
    exec(block_of("docs/from-vllm.md", "all_reduce_norm_pass"), shown)
    found: list[list[str]] = []
    options = {
        "compile_threads": 1,
        "fx_graph_cache": False,
        # To try out vectors, and to prepare headers, takes longer than what is compiled.
        "cpp.vec_isa_ok": False,
        "cpp_cache_precompile_headers": False,
        "post_grad_custom_post_pass": lambda graph: found.append(ops(graph)),
    }
    with (
        coordinator.init(tp=n, rank=rank, store=store, timeout=240) as groups,
        torch.no_grad(),
        config.patch(options),
    ):
        backend = groups.tp.device_communicator.backend
        backend.capabilities = replace(backend.capabilities, normed=frozenset({torch.float32}))
        model = Written(groups.tp)
        fast = shown["decoder"](model)
        for turn in range(3):
            x, residual, _ = tensors(torch.float32, 4)
            given = x * (rank + turn), residual
            for ours, theirs in zip(fast(*given), model(*given), strict=True):
                torch.testing.assert_close(ours, theirs)
        groups.tp.barrier()
    (only,) = found
    return only


def test_a_compiled_model_computes_what_the_eager_one_does(tmp_path: Path) -> None:
    ranks = run_ranks(2, compiled_norms, SharedStore(), str(tmp_path), timeout=300)
    assert ranks == [["all_reduce_norm"] * 2] * 2
