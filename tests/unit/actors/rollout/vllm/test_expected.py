"""The weights that an engine waits for, by the names of its checkpoint and those of vLLM, and what a push may leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from actors.rollout.vllm.expected import EngineParameters, expected_weights
from actors.sync.staged_transports import PushPlan
from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import TensorInfo, WeightCheckError, dtype_from_name
from rl_backend.weights.staging import ExpectedWeights, check_manifest, find_mismatches
from tests.support.drafting import write_drafting
from tests.support.kept_family import TRAINED, stored_bytes, write_towered
from tests.support.native import open_runtime

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
NESTED = {
    "model.language_model.embed_tokens.weight": "language_model.model.embed_tokens.weight",
    "model.language_model.layers.0.self_attn.q_proj.weight": "language_model.model.layers.0.self_attn.q_proj.weight",
    "model.language_model.layers.0.self_attn.k_proj.weight": "language_model.model.layers.0.self_attn.k_proj.weight",
    "model.language_model.layers.0.self_attn.v_proj.weight": "language_model.model.layers.0.self_attn.v_proj.weight",
    "model.language_model.layers.1.linear_attn.A_log": "language_model.model.layers.1.linear_attn.A_log",
    "model.visual.patch_embed.weight": "visual.patch_embed.weight",
    "mtp.fc.weight": None,
}
"""As a released Qwen3.5 calls its tensors -> as vLLM does."""


def expected_of(
    path: Path, dtypes: Mapping[str, str], renamed: Mapping[str, str | None] | None, dtype: str
) -> ExpectedWeights:
    def describe(checkpoint: Sequence[str]) -> EngineParameters:
        return EngineParameters(dtypes, PACKED, renamed or {name: name for name in checkpoint})

    return expected_weights(str(path), dtype, describe)


@pytest.mark.shows("weight sync: a push leaves out what is not trained, and nothing else")
@pytest.mark.parametrize("own_names", [True, False])
def test_a_push_may_leave_out_what_its_trainer_keeps_and_nothing_else(tmp_path: Path, own_names: bool) -> None:
    stored = stored_bytes(write_towered(tmp_path / "source"))
    # Whether vLLM calls its parameters as the directory does, or otherwise.
    dtypes = {name if own_names else f"language_{name}": "float32" for name in stored}
    expected = expected_of(tmp_path / "source", dtypes, None, "float32")
    infos = tuple(TensorInfo.of(name, stored[name].shape, dtype_from_name("float32")) for name in TRAINED)
    kept = tuple(name for name in stored if name not in TRAINED)

    def check(infos: tuple[TensorInfo, ...], kept: tuple[str, ...]) -> None:
        plan = PushPlan("key", None, "float32", None, 0, infos, "node", "host", kept=kept)
        check_manifest(plan.manifest, expected, engine="engine 0")

    check(infos, kept)
    with pytest.raises(WeightCheckError, match=f"missing: {TRAINED[0]}$"):
        check(infos[1:], kept)
    with pytest.raises(WeightCheckError, match=f"missing: {kept[0]}$"):
        check(infos, kept[1:])


@pytest.mark.shows(
    "weight sync: a layer for multi-token prediction is pushed where it is trained and left out where it is kept"
)
@pytest.mark.parametrize("copies", [True, False])
def test_a_push_has_a_layer_for_multi_token_prediction_or_leaves_it_out(tmp_path: Path, copies: bool) -> None:
    path = write_drafting(tmp_path / "model", "glm4_moe", copies=copies, num_hidden_layers=2)
    stored = HFReader(str(path)).infos
    own = {name for name in stored if name.startswith("model.layers.2.")}
    fused = {part: whole for whole, parts in PACKED.items() for part in parts}
    # vLLM's model has no such layer: its draft model has.
    served = {".".join(fused.get(part, part) for part in name.split(".")) for name in stored if name not in own}
    expected = expected_of(path, dict.fromkeys(served, "float32"), None, "float32")
    assert expected.optional.keys() == own
    for mtp, pushed in (("keep", set()), ("joint", own)):
        with open_runtime(path, model="glm4_moe", model_cfg={"mtp": mtp}) as runtime:
            policy = runtime.build_model()
            infos = runtime.weight_infos(policy)
            assert not find_mismatches(infos, expected, policy.kept.keys())
            assert own & {info.name for info in infos} == pushed and policy.kept.keys() == own - pushed


def test_layers_that_take_adapters_need_the_weights_that_others_need(tied_model: Path) -> None:
    fused = {part: whole for whole, parts in PACKED.items() for part in parts}
    stored = [name for name in HFReader(str(tied_model)).infos if name != "lm_head.weight"]
    plain = sorted({".".join(fused.get(part, part) for part in name.split(".")) for name in stored})
    wrapped = [name.replace("_proj.weight", "_proj.base_layer.weight") for name in plain]
    assert wrapped != plain
    expected = expected_of(tied_model, dict.fromkeys(plain, "float32"), None, "float32")
    assert expected_of(tied_model, dict.fromkeys(wrapped, "float32"), None, "float32") == expected
    assert expected.required.keys() == set(stored) and len(expected.fused_groups) == 4


def test_what_vllm_renames_is_required_and_what_it_does_not_load_is_not(tmp_path: Path) -> None:
    save_file({name: torch.zeros(2) for name in NESTED}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    dtypes = {
        "language_model.model.embed_tokens.weight": "bfloat16",
        "language_model.model.layers.0.self_attn.qkv_proj.weight": "bfloat16",
        "language_model.model.layers.1.linear_attn.A_log": "float32",
    }
    expected = expected_of(tmp_path, dtypes, NESTED, "bfloat16")
    assert expected.optional.keys() == {"model.visual.patch_embed.weight", "mtp.fc.weight"}
    assert expected.required.keys() == NESTED.keys() - expected.optional.keys()
    assert [len(group) for group in expected.fused_groups] == [3]


@pytest.mark.shows("weight sync: an engine warns of parameters of vLLM's that no tensor of its model leads to")
def test_parameters_that_no_tensor_leads_to_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.0.w1.weight",
    ]
    save_file({name: torch.zeros(2) for name in tensors}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    held = ["model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.experts.w13_weight"]
    made_of_others = [f"model.layers.0.self_attn.mla_attn.mla_attn.{name}" for name in ("W_UK_T", "W_UV")]
    for all_held in (held, [*held, *made_of_others]):
        expected_of(tmp_path, dict.fromkeys(all_held, "bfloat16"), None, "bfloat16")
    assert not caplog.records
    more = [*held, *made_of_others, "lm_head.weight", "model.layers.0.self_attn.qkv_proj.bias"]
    expected = expected_of(tmp_path, dict.fromkeys(more, "bfloat16"), None, "bfloat16")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{tmp_path} leads to by its name: lm_head.weight, model.layers.0.self_attn.qkv_proj.bias. " in record.message
    assert expected.required.keys() == set(tensors)


def test_what_an_engine_keeps_in_float32_may_come_in_float32(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2), "a.A_log": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    expected = expected_of(tmp_path, {"a.weight": "bfloat16", "a.A_log": "float32"}, None, "bfloat16")

    def problems(dtype: torch.dtype, of_decay: torch.dtype) -> list[str]:
        return find_mismatches([TensorInfo.of("a.weight", (2,), dtype), TensorInfo.of("a.A_log", (2,), of_decay)], expected)

    assert not problems(torch.bfloat16, torch.bfloat16) and not problems(torch.bfloat16, torch.float32)
    assert problems(torch.float32, torch.float32) == ["wrong dtype: a.weight is float32, the engine takes bfloat16"]
    assert problems(torch.bfloat16, torch.float16) == ["wrong dtype: a.A_log is float16, the engine takes bfloat16"]
