"""Recording and replaying routes in a layout of either runtime, as jobs for the ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backend.contracts import NativeConfig, PackedBatch, RuntimeConfig
from rl_backend.runtime import RouterReplay, Runtime, create_runtime
from rl_backend.runtime.bridge.config import BridgeConfig
from tests.support.mixed_megatron import dense_layers
from tests.support.native import deal, micro_batches, token_loss

SPLIT = [[0, 1], [2, 3], [4, 5], [6, 7]]

type Routes = dict[int, Tensor]
"""Sequence -> (L, layers with experts, top_k)."""


class Pass(NamedTuple):
    """Attributes:
    loss: over all ranks.
    gradients: Hugging Face name -> whole gradient.
    """

    loss: float
    gradients: dict[str, Tensor]


class RouteRun(NamedTuple):
    """What one layout did; the same on every rank.

    Attributes:
        recorded: routes of the pass that was replayed.
        same: whether replaying them, in the layout that recorded them, changed no bit of losses and gradients.
        other: routes recorded with the other weights, by a reference model beside the trained one.
        replays: file of routes -> the pass that replayed it.
    """

    recorded: Routes
    same: bool
    other: Routes
    replays: dict[str, Pass]


def with_routes(
    data: Sequence[PackedBatch], split: Sequence[Sequence[int]], routes: Routes, **facts: Any
) -> list[PackedBatch]:
    """Micro-batches that carry the routes of their sequences."""
    return [
        replace(
            batch,
            token_fields={**batch.token_fields, "routed_experts": torch.cat([routes[index] for index in indices])},
            meta={**batch.meta, "routed_experts_layers": "moe", **facts},
        )
        for batch, indices in zip(data, split, strict=True)
    ]


def sorted_routes(routes: Routes) -> Tensor:
    """All routes, whatever the order of the experts of a token: (tokens, layers, top_k)."""
    return torch.cat([routes[index] for index in sorted(routes)]).sort(-1).values


@contextmanager
def opened(backend: str, model: str, layout: Mapping[str, int], settings: Mapping[str, Any]) -> Iterator[Runtime[Any]]:
    options = {"device": "cpu", "parallel": dict(layout), **settings}
    backend_cfg = NativeConfig(**options) if backend == "native" else BridgeConfig(**options)
    runtime = create_runtime(RuntimeConfig(backend=backend, hf_path=model, backend_cfg=backend_cfg))
    try:
        yield runtime
    finally:
        runtime.close()


def routes_job(
    backend: str,
    models: tuple[str, str],
    layout: Mapping[str, int],
    settings: Mapping[str, Any],
    files: Sequence[str],
    save_to: str = "",
    sparse: Sequence[bool] = (),
) -> RouteRun:
    """Records with the weights of the second model, records and replays with those of the first, then replays ``files``.

    Args:
        sparse: as :func:`~tests.support.mixed_megatron.dense_layers` takes them.
    """
    with dense_layers(sparse), opened(backend, models[0], layout, settings) as runtime:
        handle = runtime.build_model()
        reference = runtime.build_model(forward_only=True, hf_path=models[1])
        dp_rank, dp_size = handle.data_parallel_rank, handle.data_parallel_size
        mine = deal(SPLIT, dp_size)[dp_rank]
        data = micro_batches(mine, dp_size=dp_size, temperature=0.7)

        def run(batches: Sequence[PackedBatch], router_replay: RouterReplay) -> tuple[Pass, Routes]:
            runtime.zero_grad(handle)
            result = runtime.forward_backward(handle, batches, token_loss, router_replay=router_replay)
            gradients = {name: tensor.clone() for name, tensor in runtime.export_gradients(handle)}
            source = runtime.is_mp_src_rank_with_outputs(handle)
            loss = torch.tensor(result.loss / dp_size if source else 0.0, dtype=torch.float64)
            dist.all_reduce(loss)
            return Pass(loss.item(), gradients), everywhere(result.outputs.get("routed_experts", ()))

        def everywhere(outputs: Sequence[Tensor]) -> Routes:
            """Routes of the source ranks on every rank."""
            order = [index for indices in mine for index in indices]
            parts: list[Routes] = [{}] * dist.get_world_size()
            dist.all_gather_object(parts, dict(zip(order, outputs, strict=True)) if outputs else {})
            return {index: routes for part in parts for index, routes in part.items()}

        recording = runtime.forward_backward(reference, data, None, forward_only=True, router_replay="record")
        other = everywhere(recording.outputs.get("routed_experts", ()))
        if save_to and dist.get_rank() == 0:
            torch.save(other, save_to)
        first, recorded = run(data, "record")
        again, _ = run(with_routes(data, mine, recorded), "replay")
        same = first.loss == again.loss and all(
            torch.equal(first.gradients[name], gradient) for name, gradient in again.gradients.items()
        )
        replays = {file: run(with_routes(data, mine, torch.load(file)), "replay")[0] for file in files}
        runtime.zero_grad(handle)
        runtime.forward_backward(reference, data, None, forward_only=True)
    return RouteRun(recorded, same, other, replays)
