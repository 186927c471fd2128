"""Which modules of a model a tenant adapts, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rl_backend.contracts import ConfigError, UnsupportedError
from rl_backend.contracts.lora import LoRAConfig, LoRAKind
from rl_backend.lora.modules import require_trainable, select_modules, stack_of, stack_sizes

MODEL: Mapping[str, LoRAKind] = {
    "model.embed_tokens": "embedding",
    "model.layers.0.self_attn.q_proj": "attention",
    "model.layers.0.mlp.up_proj": "feed_forward",
    "model.layers.1.self_attn.q_proj": "attention",
    "model.layers.1.self_attn.o_proj": "attention",
    "model.layers.1.mlp.up_proj": "feed_forward",
}


@pytest.mark.parametrize(
    ("targets", "numbers"),
    [
        (("attention",), [1, 3, 4]),
        (("up_proj", "o_proj"), [2, 4, 5]),
        (("o_proj", "embedding"), [0, 4]),
        (("attention", "q_proj"), [1, 3, 4]),
    ],
    ids=str,
)
def test_modules_come_in_the_order_of_the_model_and_once(targets: tuple[str, ...], numbers: list[int]) -> None:
    expected = tuple(list(MODEL)[number] for number in numbers)
    assert select_modules(LoRAConfig(targets=targets), MODEL) == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("up_prj", r"no module of this name; kinds that it has: .*attention.*; names: .*o_proj.*up_proj"),
        ("experts", r"the model has none, or none that can be adapted here"),
        ("lm_head", r"no module of this name; kinds that it has: "),
    ],
)
def test_a_target_that_no_module_has_is_refused_wherever_it_stands(wrong: str, message: str) -> None:
    for targets in ((wrong,), (wrong, "attention"), ("attention", wrong), ("attention", "up_proj", wrong)):
        with pytest.raises(ConfigError, match=rf"LoRAConfig\.targets='{wrong}': {message}"):
            select_modules(LoRAConfig(targets=targets), MODEL)


def test_magnitudes_of_an_embedding_or_a_head_are_refused_wherever_they_stand() -> None:
    kinds: Mapping[str, LoRAKind] = {**MODEL, "lm_head": "head"}
    require_trainable(LoRAConfig(), tuple(kinds), kinds)
    require_trainable(LoRAConfig(use_dora=True), list(kinds)[1:-1], kinds)
    for names in (list(kinds)[:-1], list(kinds)[1:], ["lm_head"]):
        with pytest.raises(UnsupportedError, match=r"LoRAConfig\.use_dora=True with (model\.embed_tokens|lm_head): embed"):
            require_trainable(LoRAConfig(use_dora=True), names, kinds)


@pytest.mark.parametrize(
    ("module", "stack", "place"),
    [
        ("model.layers.3.mlp.experts.0.gate_proj", "model.layers.3.mlp.experts.w1", 0),
        ("model.layers.3.mlp.experts.11.down_proj", "model.layers.3.mlp.experts.w2", 11),
        ("model.layers.3.mlp.experts.7.up_proj", "model.layers.3.mlp.experts.w3", 7),
        ("block.experts.2.w3", "block.experts.w3", 2),
    ],
)
def test_an_expert_has_the_place_of_its_number_in_the_stack_of_its_projection(module: str, stack: str, place: int) -> None:
    assert stack_of(module) == (stack, place)


EXPERTS: Mapping[str, LoRAKind] = {
    f"model.layers.{layer}.mlp.experts.{number}.{projection}": "experts"
    for layer in (0, 1)
    for number in range(3)
    for projection in ("up_proj", "down_proj")
}


def test_experts_share_a_factor_where_all_of_a_layer_are_named_or_none() -> None:
    config = LoRAConfig(targets=("experts",), experts_share_factor=True)
    kinds = {**MODEL, **EXPERTS}
    of_layers = {f"model.layers.{layer}.mlp.experts.{stack}" for layer in (0, 1) for stack in ("w2", "w3")}
    assert stack_sizes(kinds) == dict.fromkeys(of_layers, 3)
    for chosen in (list(kinds), [name for name in EXPERTS if "layers.1." in name and "down" in name]):
        require_trainable(config, chosen, kinds)
    for lacking in EXPERTS:
        stack = stack_of(lacking)[0]
        with pytest.raises(ConfigError, match=rf"has some experts of {stack}, which share"):
            require_trainable(config, [name for name in kinds if name != lacking], kinds)
    with pytest.raises(ConfigError, match=r"experts_share_factor=True: no target is an expert"):
        require_trainable(config, list(MODEL), kinds)
    require_trainable(LoRAConfig(targets=("experts",)), list(EXPERTS)[:1], kinds)
