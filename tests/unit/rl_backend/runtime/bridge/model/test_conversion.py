"""Hugging Face names of what Megatron holds, and its conversion."""

from __future__ import annotations

import rl_backend.runtime.bridge.engine  # noqa: F401 - imports Megatron in the order that it needs

# isort: split

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    QKVMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from torch import Tensor, nn

from rl_backend.contracts import VALUE_HEAD_WEIGHTS, UnsupportedError
from rl_backend.runtime.bridge.model.conversion import (
    Conversion,
    WeightConverter,
    _in_shape,
    _replaced,
    hf_names,
    is_stacked,
    parameter_key,
    unconverted,
)
from rl_backend.runtime.bridge.model.loading import _may_be_unread, set_mappings, text_model_config

QKV, AUTO = QKVMapping("qkv.weight", "q", "k", "v"), AutoMapping("fc2.weight", "down")


def task(name: str, mapping: Any, weight: Tensor | None = None, stage: int = 0) -> Any:
    return SimpleNamespace(global_param_name=name, param_name=name, mapping=mapping, param_weight=weight, vp_stage=stage)


def converter(models: Any = (), stream: Any = None, **fields: Any) -> WeightConverter:
    made = object.__new__(WeightConverter)
    made.models, made.pretrained, made.head, made.hf_path = models, "pretrained", "log_probs", "model"
    made.model_bridge = SimpleNamespace(stream_weights_megatron_to_hf=stream)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_a_conversion_gives_each_of_its_tensors_once_in_the_directorys_shape() -> None:
    given: dict[str, Any] = {}
    parts = [("q", torch.arange(12.0).view(6, 2)), ("lm_head", torch.zeros(1)), ("k", torch.arange(4.0))]

    def stream(models: Any, pretrained: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        given.update(options, models=models, pretrained=pretrained)
        yield from parts

    own = task("qkv.weight", QKV, torch.ones(2))
    one = Conversion((own,), {"q": (5, 2), "k": (1, 4)}, torch.bfloat16, True)
    made = converter(["model"], stream)
    found = dict(made.convert(one))
    assert found.keys() == {"q", "k"} and torch.equal(found["q"], parts[0][1][:5]) and found["k"].shape == (1, 4)
    assert given["conversion_tasks"] == [own] and given["models"] == ["model"] and given["pretrained"] == "pretrained"
    assert not (given["cpu"] or given["show_progress"] or given["merge_adapter_weights"])
    parts.pop()
    with pytest.raises(UnsupportedError, match=r"^Megatron-Bridge converted qkv\.weight without giving k$") as failure:
        list(made.convert(one))
    assert failure.value.details == {"names": ["k"]}
    assert one.nbytes == (10 + 4) * 2 and str(one) == "q (gathered with k)" and not one.in_float32
    alone = Conversion((task("layer.0.mixer.A_log", AUTO),), {"a": (3,)}, torch.float32, False)
    assert str(alone) == "a" and alone.nbytes == 12 and alone.in_float32
    assert Conversion((task("mlp.router.expert_bias", AUTO),), {"a": (3,)}, torch.float32, False).in_float32
    made.conversions = (one, alone)
    assert made.names == ["q", "k", "a"]
    assert made.select("export", None) == [one, alone] and made.select("export", {"k"}) == [one]
    assert made.select("export", ["a", "q"]) == [one, alone] and made.select("export", ()) == []
    made.release()
    assert made.models == () and made.conversions == ()


@pytest.mark.parametrize(
    ("shape", "expected", "result"),
    [
        ((8, 3), (6, 3), (6, 3)),
        ((6, 3), (6, 3), (6, 3)),
        ((6, 3), (1, 6, 3), (1, 6, 3)),
        ((8, 3), (24,), (24,)),
        ((8, 4), (6, 3), None),
        ((5, 3), (6, 3), None),
    ],
)
def test_padding_is_cut_off_and_other_shapes_refused(
    shape: tuple[int, ...], expected: tuple[int, ...], result: tuple[int, ...] | None
) -> None:
    given = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    if result is None:
        with pytest.raises(UnsupportedError, match=r"^head: Megatron-Bridge gave the shape \(.*, the directory stores \("):
            _in_shape("head", given, expected)
        return
    found = _in_shape("head", given, expected)
    assert found.shape == result and torch.equal(found.flatten(), given.flatten()[: found.numel()])


def test_an_expert_has_a_name_on_every_expert_parallel_rank() -> None:
    made = converter(pg=SimpleNamespace(ep=SimpleNamespace(size=lambda: 3)), _config=SimpleNamespace(num_moe_experts=12))
    # The third rank has the experts 8 to 11; its second is converted with the second of the others.
    assert made._of_every_rank("layers.7.experts.9.down") == [f"layers.7.experts.{number}.down" for number in (1, 5, 9)]
    assert made._of_every_rank("layers.7.shared.down") == ["layers.7.shared.down"]
    expert = task(
        "experts.linear_fc1", GatedMLPMapping("layers.0.mlp.experts.linear_fc1.weight4", "experts.4.gate", "experts.4.up")
    )
    names = [f"experts.{number}.{part}" for part in ("gate", "up") for number in (0, 4, 8)]
    shapes = {name: (number, 2) for number, name in enumerate(names)}
    assert made._named_shapes([expert], shapes) == shapes
    alone = converter(pg=SimpleNamespace(ep=SimpleNamespace(size=lambda: 1)))
    assert alone._of_every_rank("experts.9.down") == ["experts.9.down"]


def test_a_critics_head_has_tasks_on_the_stage_that_has_it() -> None:
    head = nn.Linear(4, 1)
    last = nn.Module()
    last.output_layer = nn.Module()
    last.output_layer.value_head = head
    found = converter([nn.Linear(2, 2), last])._value_head_tasks()
    assert [each.mapping.hf_param for each in found] == list(VALUE_HEAD_WEIGHTS)
    assert [each.param_name for each in found] == ["output_layer.value_head.weight", "output_layer.value_head.bias"]
    assert found[0].param_weight is head.weight and found[1].param_weight is head.bias
    assert {each.vp_stage for each in found} == {1} and {each.megatron_module for each in found} == {head}
    elsewhere = converter([nn.Linear(2, 2)])._value_head_tasks()
    assert [(each.vp_stage, each.megatron_module, each.param_weight) for each in elsewhere] == [(None, None, None)] * 2


def test_what_no_task_converts_is_told_apart_from_copies_of_tied_embeddings() -> None:
    models: list[Any] = [nn.Linear(2, 2), nn.Module()]
    models[1].output_layer = nn.Linear(2, 3, bias=False)
    converted = [task("weight", AUTO, models[0].weight), task("bias", AUTO), task("output_layer.weight", AUTO, None, 1)]
    assert unconverted(models, converted) == ["bias", "output_layer.weight"]
    models[1].share_embeddings_and_output_weights = True
    assert unconverted(models, converted) == ["bias"]
    assert unconverted(models, [*converted, task("bias", AUTO, models[0].bias)]) == []
    assert parameter_key(task("a.b", AUTO, None, 3)) == "3.a.b"
    assert hf_names(task("", AUTO)) == ("down",) and hf_names(task("", QKV)) == ("q", "k", "v")
    assert not is_stacked(task("", AUTO)) and is_stacked(task("", SimpleNamespace(is_grouped_export=True)))


def test_mappings_of_a_nested_text_model_replace_those_of_the_text_model_alone() -> None:
    norm = RMSNorm2ZeroCenteredRMSNormMapping("out_norm.weight", "norm")
    grouped = AutoMapping("mlp.experts.linear_fc2.weight*", "experts.*.down")

    def names(model_type: str, *, local_layers: bool) -> list[Any]:
        bridge = SimpleNamespace(mapping_registry=lambda: MegatronMappingRegistry(norm, grouped))
        set_mappings(bridge, model_type, local_layers=local_layers)
        return list(bridge.mapping_registry().mappings)

    kept = names("qwen3", local_layers=False)
    assert [type(each) for each in kept] == [RMSNorm2ZeroCenteredRMSNormMapping, AutoMapping]
    local = names("qwen3", local_layers=True)
    assert [(type(each), each.megatron_param, each.hf_param) for each in local] == [
        (AutoMapping, "out_norm.weight", "norm"),
        (AutoMapping, "mlp.experts.linear_fc2.weight*", "experts.*.down"),
        (AutoMapping, "mlp.experts.local_experts.*.linear_fc2.weight", "experts.*.down"),
    ]
    for model_type in ("qwen3_5", "qwen3_5_moe"):
        stored = [each.hf_param for each in names(model_type, local_layers=True)]
        flat = [name for each in stored for name in ([each] if isinstance(each, str) else each.values())]
        assert "norm" not in flat and any(name.startswith("model.language_model.layers.") for name in flat)
        assert any("experts" in name for name in flat) is (model_type == "qwen3_5_moe")


def test_weights_may_be_unread_where_the_model_has_no_use_for_them() -> None:
    tied, untied = SimpleNamespace(tie_word_embeddings=True), SimpleNamespace()
    assert _may_be_unread("model.layers.3.self_attn.rotary_emb.inv_freq", "log_probs", untied)
    for name, head, config, expected in (
        ("lm_head.weight", "log_probs", tied, True),
        ("lm_head.weight", "log_probs", untied, False),
        ("lm_head.weight", "values", untied, True),
        ("lm_head.bias", "values", tied, False),
        ("score.weight", "log_probs", tied, False),
        ("model.norm.weight", "values", tied, False),
    ):
        assert _may_be_unread(name, head, config) is expected, name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text_config": {}}, False),
        ({"tie_word_embeddings": True, "text_config": {}}, True),
        ({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}}, False),
        ({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}, None),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, None),
    ],
)
def test_a_nested_text_model_is_tied_as_its_directory_says(fields: dict[str, Any], expected: bool | None) -> None:
    inside = SimpleNamespace(tie_word_embeddings="unset")
    for model_type in ("qwen3_5", "qwen3_5_moe"):
        outside = SimpleNamespace(model_type=model_type, text_config=inside)
        if expected is None:
            with pytest.raises(UnsupportedError, match=r"its text_config differ in tie_word_embeddings; make") as failure:
                text_model_config(outside, fields)
            assert failure.value.details == {"field": "tie_word_embeddings"}
        else:
            assert text_model_config(outside, fields) is inside
            assert inside.tie_word_embeddings is expected
    other = SimpleNamespace(model_type="qwen3", text_config=inside)
    assert text_model_config(other, fields) is other


def test_what_replaces_a_parameter_is_converted_without_the_constant_of_norms() -> None:
    weight, other = torch.ones(2), torch.zeros(2)
    from megatron.bridge.models.conversion.model_bridge import WeightConversionTask

    def made(mapping: Any, held: Tensor | None) -> Any:
        return WeightConversionTask(
            param_name="w", global_param_name="w", mapping=mapping, vp_stage=2, megatron_module=None, param_weight=held
        )

    replacements = {"2.w": other, "1.w": weight}
    norm = _replaced(made(RMSNorm2ZeroCenteredRMSNormMapping("w", "norm"), weight), replacements)
    assert type(norm.mapping) is AutoMapping and norm.param_weight is other
    assert (norm.mapping.megatron_param, norm.mapping.hf_param) == ("w", "norm")
    mapping = AutoMapping("w", "stored")
    plain = _replaced(made(mapping, None), replacements)
    assert plain.param_weight is None and plain.mapping is not mapping and plain.mapping.hf_param == "stored"
