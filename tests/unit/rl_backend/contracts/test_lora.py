"""LoRA tenants: scale, parts, which modules are targets, and names in peft's files."""

from __future__ import annotations

import pytest

from rl_backend.contracts import ConfigError, LoRAConfig
from rl_backend.contracts.lora import engine_slots, part_name, peft_name


@pytest.mark.parametrize(("rslora", "scale"), [(False, 24.0 / 9), (True, 8.0)])
def test_the_scale_divides_by_the_rank_or_its_root(rslora: bool, scale: float) -> None:
    assert LoRAConfig(rank=9, alpha=24.0, use_rslora=rslora).scale == pytest.approx(scale)


def test_the_magnitude_is_a_part_with_dora_alone() -> None:
    assert LoRAConfig().parts == ("A", "B")
    assert LoRAConfig(use_dora=True, use_rslora=True).parts == ("A", "B", "magnitude")


@pytest.mark.parametrize(
    ("targets", "module", "kind", "selected"),
    [
        (("attention", "head"), "model.layers.0.self_attn.q_proj", "attention", True),
        (("attention", "head"), "lm_head", "head", True),
        (("attention", "head"), "model.layers.0.mlp.up_proj", "feed_forward", False),
        (("q_proj",), "model.layers.10.self_attn.q_proj", "attention", True),
        (("self_attn.q_proj",), "model.layers.10.self_attn.q_proj", "attention", True),
        (("proj",), "model.layers.10.self_attn.q_proj", "attention", False),
        (("q_proj", "up_proj"), "model.layers.0.mlp.up_proj", "feed_forward", True),
        (("model.layers.0.mlp.up_proj",), "model.layers.0.mlp.up_proj", "feed_forward", True),
        (("layers.0.mlp.up_proj",), "model.layers.10.mlp.up_proj", "feed_forward", False),
        (("mlp",), "model.layers.0.mlp.up_proj", "feed_forward", False),
        (("lm_head",), "lm_head", "head", True),
    ],
)
def test_a_target_is_a_kind_a_whole_name_or_the_end_of_one(
    targets: tuple[str, ...], module: str, kind: str, selected: bool
) -> None:
    assert LoRAConfig(targets=targets).selects(module, kind) is selected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ("q_proj", "")}, r"LoRAConfig.targets=\('q_proj', ''\): has an empty name"),
        ({"targets": (" . ", "q_proj")}, "has an empty name; name modules or kinds of blocks"),
        ({"targets": ()}, "LoRAConfig.targets"),
        ({"use_dora": True, "experts_share_factor": True}, "LoRAConfig.use_dora=True: beside experts_share_factor=True"),
        ({"rank": 0}, "LoRAConfig.rank=0"),
        ({"alpha": 0.0}, "LoRAConfig.alpha"),
        ({"dropout": 1.0}, "LoRAConfig.dropout"),
    ],
)
def test_a_tenant_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoRAConfig(**fields)


def test_an_engine_has_a_slot_more_and_two_on_a_cpu() -> None:
    assert [engine_slots(3, device) for device in ("cuda", "cpu")] == [4, 5]


@pytest.mark.parametrize(
    ("kind", "part", "name"),
    [
        ("attention", "A", "base_model.model.m.q.lora_A.weight"),
        ("attention", "B", "base_model.model.m.q.lora_B.weight"),
        ("head", "B", "base_model.model.m.q.lora_B.weight"),
        ("embedding", "A", "base_model.model.m.q.lora_embedding_A"),
        ("embedding", "B", "base_model.model.m.q.lora_embedding_B"),
        ("attention", "magnitude", "base_model.model.m.q.lora_magnitude_vector"),
        ("embedding", "magnitude", "base_model.model.m.q.lora_magnitude_vector"),
    ],
)
def test_the_parts_of_a_tenant_have_the_names_of_peft(kind: str, part: str, name: str) -> None:
    assert part_name("m.q", kind, part) == name  # type: ignore[arg-type]
    if kind != "embedding" and part != "magnitude":
        assert peft_name("m.q", is_a=part == "A") == name
