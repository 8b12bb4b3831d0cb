"""A small encoder with random weights, for pools on machines that have no model and no packages.

All weights are drawn from their names, so every process has the same ones, and every rank takes its
part. One process on the CPU says what comes out.
"""

from __future__ import annotations

import time
import zlib
from itertools import chain
from typing import TYPE_CHECKING

import torch

from server.pool import WorkerPool
from server.workers.minilm.minilm_worker import ModelStage, arrange, pool
from server.workers.minilm.model_config import BertConfig
from server.workers.model_folder import share
from server.workers.parallel import whole_parameters

if TYPE_CHECKING:
    import numpy as np

    from server.worker import WorkerContext
    from server.workers.minilm.minilm_worker import TokenArrangement

CONFIG = BertConfig(
    model_type="bert",
    vocab_size=1000,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
    max_position_embeddings=128,
)
"""As many numbers in an activation as MiniLM has."""


def inputs(count: int) -> list[list[int]]:
    """``count`` lists of 8 to 39 token ids, the longest first."""
    lengths = sorted((8 + row * 7 % 32 for row in range(count)), reverse=True)
    return [
        [(row * 131 + at * 17) % CONFIG.vocab_size for at in range(length)]
        for row, length in enumerate(lengths)
    ]


class TinyWorker:
    """One rank of the encoder. Every method must be called on every rank.

    Args:
        context: who this worker is; from the pool.
        dtype: of weights and activations: ``"float32"`` or ``"float16"``.
    """

    def __init__(self, context: WorkerContext, dtype: str = "float32") -> None:
        self._groups = context.groups
        self._device = context.device
        tp, pp = self._groups.tp, self._groups.pp
        CONFIG.check_parallel(tp.world_size, pp.world_size)
        layers = share(CONFIG.num_hidden_layers, pp.rank_in_group, pp.world_size)
        self._stage = ModelStage(CONFIG, layers, tp)
        tensors = {}
        for name, whole in whole_parameters(self._stage).items():
            cut = whole.layout.extents(whole.shape, [tp])
            part = _drawn(name, whole.shape)[tuple(slice(each.start, each.stop) for each in cut)]
            tensors[name] = part.to(self._device, getattr(torch, dtype))
        self._stage.load_state_dict(tensors, assign=True)
        self._stage.prepare()
        self._stage.eval().requires_grad_(False)

    @torch.inference_mode()
    def embed(self, tokens: list[list[int]]) -> np.ndarray | None:
        """A vector of length 1 for each input, on the first rank of the last stage."""
        arranged = arrange([len(each) for each in tokens], self._device)
        pp = self._groups.pp
        if pp.is_first_rank:
            x = torch.tensor([*chain(*tokens)], device=self._device)
        else:
            x = pp.recv_tensor_dict(all_gather_group=self._groups.tp)["hidden"]
        hidden = self._stage(x, arranged)
        if not pp.is_last_rank:
            pp.send_tensor_dict({"hidden": hidden}, all_gather_group=self._groups.tp)
            return None
        vectors = torch.nn.functional.normalize(pool(hidden.float(), arranged.lengths, "mean"))
        return vectors.cpu().numpy() if self._groups.tp.is_first_rank else None

    @torch.inference_mode()
    def steps(self, tokens: list[list[int]], count: int) -> dict[str, float]:
        """How far replays are from an eager step, and the seconds of each. One stage only."""
        arranged = arrange([len(each) for each in tokens], self._device)
        ids = torch.tensor([*chain(*tokens)], device=self._device)
        eager = self._stage(ids, arranged)
        graph, captured = self._capture(ids, arranged)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / count
        difference = float((captured - eager).abs().max())
        del graph
        return {"difference": difference, "seconds": seconds}

    def _capture(
        self, ids: torch.Tensor, arranged: TokenArrangement
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with (
            self._groups.tp.graph_capture() as context,
            torch.cuda.graph(graph, stream=context.stream),
        ):
            captured = self._stage(ids, arranged)
        return graph, captured

    def explained(self) -> str:
        """What carries out the collectives."""
        return str(self._groups.tp.explain())


def reference(tokens: list[list[int]]) -> np.ndarray:
    """What one process on the CPU makes of them, in float32."""
    with WorkerPool(TinyWorker, tp=1) as pool_of_one:
        vectors: np.ndarray = pool_of_one.call("embed", tokens, timeout=120)
        return vectors


def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    spread = torch.randn(shape, generator=drawn) * (0.3 if len(shape) == 1 else 0.05)
    return spread + 1 if name.endswith("norm.weight") else spread
