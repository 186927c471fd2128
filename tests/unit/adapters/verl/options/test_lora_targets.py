"""Names of linear layers: what Megatron-Bridge and peft would match is what is matched."""

from __future__ import annotations

import pytest

from adapters.verl.options.lora import Naming, TargetModules
from rl_backend.contracts import ConfigError

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
MODULES = [
    "model.embed_tokens",
    *(f"model.layers.{layer}.{'mlp' if name in DENSE[4:] else 'self_attn'}.{name}" for layer in range(12) for name in DENSE),
    "lm_head",
]
MIXTURE = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.shared_expert.up_proj",
    *(f"model.layers.0.mlp.experts.{expert}.{name}" for expert in range(2) for name in DENSE[4:]),
    *(f"model.layers.1.block_sparse_moe.experts.{expert}.{name}" for expert in range(2) for name in ("w1", "w2", "w3")),
]


def targets(
    include: tuple[str, ...],
    exclude: tuple[str, ...] = (),
    *,
    naming: Naming = "megatron",
    modules: list[str] = MODULES,
    experts: bool = True,
) -> tuple[str, ...]:
    return TargetModules("target_modules", naming, include, naming, exclude, experts).of_model(modules)


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (("linear_qkv",), ("q_proj", "k_proj", "v_proj")),
        (("linear_q", "linear_fc1_up"), ("q_proj", "up_proj")),
        (("linear_proj", "linear_fc1", "linear_fc2"), ("o_proj", "gate_proj", "up_proj", "down_proj")),
        ((), DENSE),
        (("*.layers.1.*.linear_proj",), ("model.layers.1.self_attn.o_proj",)),
        (("*self_attention*",), ATTENTION),
        (("decoder.layers.3.mlp.linear_fc2", "linear_v"), ("v_proj", "model.layers.3.mlp.down_proj")),
    ],
)
def test_megatrons_names_and_wildcards_become_hugging_face_names(
    include: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert sorted(targets(include)) == sorted(expected)


def test_excluded_layers_are_left_out() -> None:
    assert sorted(targets((), ("linear_fc1", "linear_k", "output_layer"))) == ["down_proj", "o_proj", "q_proj", "v_proj"]
    without_first = targets((), ("*.layers.0.*",), modules=MODULES[:15])
    assert without_first == tuple(MODULES[8:15])
    with pytest.raises(ConfigError, match=r"target_modules=\[\]: excluding \['\*'\] leaves no layer to adapt"):
        targets((), ("*",))


def test_layers_of_experts_are_those_of_their_fused_layer() -> None:
    assert sorted(targets(("linear_fc2",), modules=MIXTURE)) == ["down_proj", "w2"]
    assert targets(("*.shared_experts.*",), modules=MIXTURE) == ("model.layers.0.mlp.shared_expert.up_proj",)
    assert targets((), modules=MIXTURE, experts=False, naming="peft") == (
        "q_proj",
        "model.layers.0.mlp.shared_expert.up_proj",
    )


def test_latent_attention_has_names_of_its_own() -> None:
    latent = [
        f"model.layers.0.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ]
    names = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    for name, module in zip(names, latent, strict=True):
        assert targets((name,), modules=latent) == (module.rpartition(".")[2],)
    without = ["model.layers.0.self_attn.q_proj", *latent[2:]]
    assert targets(("linear_q_proj",), modules=without) == ("q_proj",)
    with pytest.raises(ConfigError, match=r"'linear_qkv': no linear layer .*linear_kv_down_proj"):
        targets(("linear_qkv",), modules=without)


def test_routers_and_indexers_are_no_linear_layers_of_a_block() -> None:
    others = ["model.layers.0.mlp.gate", "model.layers.0.mlp.router", "model.layers.0.self_attn.indexer.wq_b", "lm_head"]
    assert targets((), modules=["model.layers.0.mlp.up_proj", *others]) == ("up_proj",)


@pytest.mark.parametrize(
    ("naming", "include", "expected"),
    [
        (
            "peft",
            ("q_proj", "mlp.up_proj", "layers.2.self_attn.o_proj"),
            ("q_proj", "model.layers.2.self_attn.o_proj", "up_proj"),
        ),
        ("peft", ("lm_head",), ("lm_head",)),
        (
            "expression",
            (r".*\.[01]\..*\.(k|v)_proj",),
            tuple(f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "kv"),
        ),
    ],
)
def test_pefts_names_and_expressions_are_taken_as_peft_does(
    naming: Naming, include: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert sorted(targets(include, naming=naming)) == sorted(expected)


@pytest.mark.parametrize(
    ("naming", "name", "there_are"),
    [
        ("megatron", "q_proj", "linear_fc1, .*linear_v"),
        ("peft", "linear_qkv", "down_proj, .*v_proj"),
        ("megatron", "router", "linear_fc1"),
    ],
)
def test_a_name_that_no_layer_has_is_refused(naming: Naming, name: str, there_are: str) -> None:
    with pytest.raises(ConfigError, match=rf"target_modules='{name}': no linear layer of the model.*{there_are}"):
        targets((name,), naming=naming)
