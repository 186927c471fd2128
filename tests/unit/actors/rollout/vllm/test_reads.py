"""What loaders of vLLM's models read is recorded, and a worker that is sent that alone has what whole tensors give it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="vLLM is not installed")

from actors.rollout.vllm.reads import HeldElements, StandIn, _Recorded, box_of, record_reads, stand_ins
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import TensorInfo, WeightCheckError
from rl_backend.weights.staging import plan_layout, read_tensor
from rl_backend.weights.tiles import plan_tiles
from tests.support.models import write_tiny
from tests.support.qwen3_5 import write_qwen3_5, write_qwen3_next
from tests.support.released_mixtures import write_mixture
from tests.support.worker_models import update, worker_model

_LATENT = {"attention_backend": "CPU_MLA"}
_STATES = {"mamba_ssm_cache_dtype": "float32"}
_EXPERTS = {"enable_expert_parallel": True}
_FEW = {"num_experts": 4}


def tiny(model_type: str, **fields: Any) -> Callable[[Path], Path]:
    return lambda path: write_tiny(model_type, path, **fields)


def mixture(model_type: str, **fields: Any) -> Callable[[Path], Path]:
    return lambda path: write_mixture(path, model_type, **fields)


FAMILIES: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    # The vocabulary is padded, and both workers have the only key-value head.
    "qwen3": (tiny("qwen3", vocab_size=131, num_key_value_heads=1), {}),
    "qwen3, tied": (tiny("qwen3", tie_word_embeddings=True), {}),
    "phi3": (tiny("phi3"), {}),
    "gemma3_text": (tiny("gemma3_text"), {}),
    "qwen3_moe": (tiny("qwen3_moe", **_FEW), {}),
    "qwen3_moe, experts": (tiny("qwen3_moe", **_FEW), _EXPERTS),
    "deepseek_v3": (mixture("deepseek_v3"), _LATENT),
    "deepseek_v3, experts": (mixture("deepseek_v3"), _LATENT | _EXPERTS),
    "glm4_moe_lite": (mixture("glm4_moe_lite"), _LATENT),
    "glm4_moe": (mixture("glm4_moe"), {}),
    "minimax_m2": (mixture("minimax_m2"), {}),
    "gpt_oss, experts": (mixture("gpt_oss"), _EXPERTS),
    "qwen3_5": (write_qwen3_5, _STATES | {"language_model_only": True}),
    "qwen3_next": (write_qwen3_next, _STATES),
}


@pytest.mark.shows("engines: of every family a worker that is sent what its loaders read has what whole tensors give it")
@pytest.mark.parametrize("family", FAMILIES)
def test_workers_that_are_sent_what_their_loaders_read_have_all_their_weights(family: str, tmp_path: Path) -> None:
    write, engine_args = FAMILIES[family]
    path = write(tmp_path / "model")
    infos = [TensorInfo.of(name, stored.shape, torch.float32) for name, stored in HFReader(str(path)).infos.items()]
    whole = {info.name: torch.randn(info.shape) for info in infos}
    reads, loaded, held = [], [], []
    for worker in (0, 1):
        with worker_model(path, worker, 2, **engine_args) as (model, config):
            before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
            reads.append(record_reads(model, infos))
            for name, tensor in model.named_parameters():
                assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])
            held.append(sum(tensor.nbytes for tensor in model.parameters()))
            loaded.append(update(model, config, whole.items()))
    tiles, nbytes = plan_layout(plan_tiles(infos, reads))
    buffer = torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN where nothing is sent
    for tile in tiles:
        read_tensor(buffer, tile).copy_(whole[tile.tensor][tuple(slice(*edges) for edges in tile.box)])
    for worker in (0, 1):
        received = sum(tile.nbytes for tile in tiles if worker in tile.workers)
        assert received <= 1.05 * held[worker]
        assert received < 0.9 * sum(tensor.nbytes for tensor in whole.values())
        with worker_model(path, worker, 2, **engine_args) as (model, config):
            for name, tensor in update(model, config, stand_ins(tiles, buffer, worker)).items():
                assert torch.equal(tensor, loaded[worker][name]), name


def random_views(draw: random.Random, tensor: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Views one of another, as loaders take them."""
    views: list[Callable[[Tensor], Tensor]] = []
    for _ in range(draw.randrange(1, 5)):
        dims, shape = tensor.dim(), tensor.shape
        dim = draw.randrange(dims) if dims else 0
        first = draw.randrange(shape[dim]) if dims else 0
        size = draw.randrange(1, shape[dim] - first + 1) if dims else 0
        kinds: list[Callable[[Tensor], Tensor]] = [
            lambda t: t.unsqueeze(0),
            lambda t: t.detach(),
            lambda t: t.reshape(-1),
            lambda t: t.contiguous(),
        ]
        if dims:
            kinds += [
                lambda t, a=dim, b=first, c=size: t.narrow(a, b, c),
                lambda t, a=dim, b=first: t.select(a, b),
                lambda t, a=dim: t.transpose(0, a),
                lambda t, a=dim, b=first, c=shape[dim]: t.chunk(c, a)[b],
            ]
        views.append(draw.choice(kinds))
        tensor = views[-1](tensor)
    return views


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_views_of_a_stand_in_are_those_of_the_whole_tensor(seed: int, inference: bool) -> None:
    draw = random.Random(seed)
    shape = draw.choice([(6, 4), (3, 4, 5), (8,), (2, 3, 2, 4)])
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    at = draw.randrange(1, shape[0])
    halves = {
        start: whole[start[0] :][: at if not start[0] else None].clone()
        for start in [(0,) * len(shape), (at, *(0,) * (len(shape) - 1))]
    }
    expected, recorded, held = whole, _Recorded(shape), HeldElements("w", shape, halves)
    # Where workers of vLLM are in this mode, torch does not take such operations apart.
    with torch.inference_mode(inference):
        stand_in: Tensor = StandIn(held, torch.empty(shape, device="meta"))
        read: Tensor = StandIn(recorded, torch.empty(shape, device="meta"))
        for view in random_views(draw, whole):
            stand_in, read, expected = view(stand_in), view(read), view(expected)
            assert stand_in.shape == read.shape == expected.shape
        assert torch.equal(torch.empty(expected.shape).copy_(stand_in), expected)
        assert torch.equal(stand_in * 2 + 1, expected * 2 + 1)
        torch.empty(expected.shape, device="meta").copy_(read)
    # What is recorded has all elements that are read.
    of_boxes = {
        number for box in recorded.boxes for number in whole[tuple(slice(*edges) for edges in box)].flatten().tolist()
    }
    assert of_boxes >= set(expected.flatten().tolist())
    box = box_of(stand_in.place, shape) if isinstance(stand_in, StandIn) else None
    if box is not None:
        assert sorted(whole[tuple(slice(*edges) for edges in box)].flatten().tolist()) == sorted(expected.flatten().tolist())


@pytest.mark.parametrize(
    ("view", "box"),
    [
        (lambda t: t[1:3, 2:], ((1, 3), (2, 4))),
        (lambda t: t[2:4].reshape(-1), ((2, 4), (0, 4))),
        (lambda t: t.t()[1], ((0, 6), (1, 2))),
        # From the middle of a row to the middle of the next one, and every second row.
        (lambda t: t.reshape(-1)[2:7], None),
        (lambda t: t[::2], None),
        (lambda t: t[:, ::3], None),
    ],
)
def test_elements_that_are_no_rectangle_have_none(
    view: Callable[[Tensor], Tensor], box: tuple[tuple[int, int], ...] | None
) -> None:
    assert box_of(view(torch.empty(6, 4, device="meta")), (6, 4)) == box


def test_what_a_worker_was_not_sent_is_refused() -> None:
    stand_in = StandIn(HeldElements("w", (4, 4), {(0, 0): torch.ones(2, 4)}), torch.empty(4, 4, device="meta"))
    assert torch.equal(torch.zeros(2, 2).copy_(stand_in[:2, 1:3]), torch.ones(2, 2))
    with pytest.raises(WeightCheckError, match=r"w: a loader reads .* was not sent 8 elements"):
        torch.zeros(4, 4).copy_(stand_in)


class LooksAtValues(torch.nn.Module):
    """Its loader takes the half of ``b`` that ``a`` names."""

    def load_weights(self, weights: Any) -> None:
        tensors = dict(weights)
        torch.empty(2, device="meta").copy_(tensors["b"][2 * int(tensors["a"][0]) :][:2])


def test_where_loaders_decide_by_values_what_to_read_workers_get_all(caplog: pytest.LogCaptureFixture) -> None:
    infos = [TensorInfo.of("a", (3,), torch.float32), TensorInfo.of("b", (4,), torch.float32)]
    assert record_reads(LooksAtValues(), infos) == {"a": (((0, 3),),), "b": (((0, 4),),)}
    assert "each worker is sent all weights: RuntimeError" in caplog.text
