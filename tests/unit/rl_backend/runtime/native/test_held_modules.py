"""Which parts of a model's modules a rank can adapt, in layouts whose other ranks are imagined."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rl_backend.contracts import NativeConfig
from rl_backend.lora.modules import AdaptedModule
from rl_backend.parallel.groups import fake_rank
from rl_backend.runtime.native.adapters import held_modules
from rl_backend.runtime.native.build import build_module
from rl_backend.runtime.native.layout import describe_model
from tests.support.models import write_tiny

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A hidden size of 64, four heads of 32 and two of keys, 128 features and words."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "tied": write_tiny("qwen3", folder / "tied"),
        "untied": write_tiny("qwen3", folder / "untied", tie_word_embeddings=False),
        "mixture": write_tiny("qwen3_moe", folder / "mixture", **EXPERTS),
    }


def held(path: Path, parallel: dict[str, int], rank: int, world: int) -> Mapping[str, AdaptedModule]:
    native = NativeConfig(device="cpu", parallel=parallel)
    model = describe_model(path, native, "log_probs")
    with fake_rank(native.parallel, rank, world) as groups:
        module = build_module(model.family, model.architecture, model.settings, groups, native, True, model.weight_names)
        return held_modules([module], model.weight_names, groups)


def module(name: str, kind: Any, sizes: tuple[int, int], **part: Any) -> AdaptedModule:
    given: dict[str, Any] = {"inputs": (0, sizes[0]), "outputs": (0, sizes[1]), **part}
    return AdaptedModule(name, kind, *sizes, **given)


def of_layer(layer: int, mine: tuple[int, int], keys: dict[str, Any]) -> list[AdaptedModule]:
    attention, dense = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    return [
        module(f"{attention}.q_proj", "attention", (64, 128), outputs=mine),
        *(module(f"{attention}.{each}_proj", "attention", (64, 64), **keys) for each in "kv"),
        module(f"{attention}.o_proj", "attention", (128, 64), inputs=mine),
        *(module(f"{dense}.{each}_proj", "feed_forward", (64, 128), outputs=mine) for each in ("gate", "up")),
        module(f"{dense}.down_proj", "feed_forward", (128, 64), inputs=mine),
    ]


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize(
    ("tp", "rank", "mine", "keys"),
    [
        (1, 0, (0, 128), {}),
        (2, 0, (0, 64), {"outputs": (0, 32)}),
        (2, 1, (64, 128), {"outputs": (32, 64)}),
        # Two ranks share a head of keys, which each has whole with all others.
        (4, 1, (32, 64), {"outputs": (0, 32), "holds_outputs": True}),
        (4, 3, (96, 128), {"outputs": (32, 64), "holds_outputs": True}),
    ],
)
def test_a_rank_adapts_its_part_of_each_layer_and_of_the_words(
    models: Mapping[str, Path], name: str, tp: int, rank: int, mine: tuple[int, int], keys: dict[str, Any]
) -> None:
    found = held(models[name], {"tp": tp}, rank, tp)
    expected = [each for layer in (0, 1) for each in of_layer(layer, mine, keys)]
    expected.append(module("model.embed_tokens", "embedding", (128, 64), inputs=mine))
    # A head that is the embedding has its sides the other way round.
    expected.append(module("lm_head", "head", (64, 128), outputs=mine))
    assert found == {each.name: each for each in expected}


@pytest.mark.parametrize(
    ("parallel", "rank", "numbers", "features"),
    [
        ({}, 2, (0, 1, 2, 3), (0, 32)),
        ({"ep": 2}, 1, (2, 3), (0, 32)),
        ({"ep": 4}, 2, (2,), (0, 32)),
        ({"etp": 2}, 1, (0, 1, 2, 3), (16, 32)),
        ({"ep": 2, "etp": 2}, 1, (0, 1), (16, 32)),
        ({"ep": 2, "etp": 2}, 2, (2, 3), (0, 16)),
        ({"tp": 2, "ep": 2}, 3, (2, 3), (0, 32)),
    ],
    ids=str,
)
def test_a_rank_adapts_its_own_experts_in_the_features_that_it_has(
    models: Mapping[str, Path], parallel: dict[str, int], rank: int, numbers: tuple[int, ...], features: tuple[int, int]
) -> None:
    found = held(models["mixture"], parallel, rank, 4)
    expected: list[AdaptedModule] = []
    for layer in (0, 1):
        for number in numbers:
            name = f"model.layers.{layer}.mlp.experts.{number}"
            for each in ("gate", "up"):
                expected.append(module(f"{name}.{each}_proj", "experts", (64, 32), outputs=features, is_expert=True))
            expected.append(module(f"{name}.down_proj", "experts", (32, 64), inputs=features, is_expert=True))
    assert {name: each for name, each in found.items() if each.kind == "experts"} == {each.name: each for each in expected}
    assert {each.kind for each in found.values()} == {"experts", "attention", "embedding", "head"}
