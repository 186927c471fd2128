"""DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash against transformers'; what their directories say and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_backend.contracts import ConfigError, ParallelConfig, UnsupportedError
from rl_backend.model import find_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.feedforward.moe import MoESpec
from rl_backend.model.mixers.mla import MLASpec
from tests.support.deepseek import MODELS, change_config, write_latent
from tests.support.families import (
    assert_equal_packed_and_alone,
    load_native,
    load_transformers,
    random_sequences,
    run_native,
    run_transformers,
)
from tests.support.matrix import sampled
from tests.support.native import open_runtime, train
from tests.support.released_deepseek import DEEPSEEK_V3

LENGTHS = (7, 1, 100, 64, 65, 33, 1, 150)


def reference_path(path: Path) -> Path:
    """For transformers: of Kimi-K2 with the model type of DeepSeek-V3, whose class its own directories name."""
    if json.loads((path / "config.json").read_text())["model_type"] != "kimi_k2":
        return path
    copy = path.with_name(f"{path.name}-as-deepseek")
    shutil.copytree(path, copy, dirs_exist_ok=True)
    change_config(copy, model_type="deepseek_v3")
    return copy


@pytest.mark.shows("model: DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash equal transformers' log-probs and gradients to 1e-5")
@pytest.mark.parametrize(
    "model",
    sampled(MODELS, "deepseek_v3", "deepseek_v3, YaRN, one latent, values wider than keys", "glm4_moe_lite"),
)
def test_log_probs_and_gradients_equal_transformers_packed_and_alone(tmp_path: Path, model: str) -> None:
    path = write_latent(model, tmp_path / "model")
    assert_equal_packed_and_alone(path, LENGTHS, reference_path(path))


@pytest.mark.parametrize("model", sampled(["deepseek_v3", "glm4_moe_lite"], "deepseek_v3"))
def test_a_trained_model_is_saved_for_transformers_with_the_same_log_probs(tmp_path: Path, model: str) -> None:
    path = write_latent(model, tmp_path / "model")
    change_config(path, scoring_func="sigmoid", topk_method="noaux_tc")
    with open_runtime(path) as runtime:
        handle = runtime.build_model()
        losses = [loss for loss, _ in train(runtime, handle, 3)]
        assert len(set(losses)) == 3
        runtime.save_checkpoint(handle, tmp_path / "saved", hf=True)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["scoring_func"], saved["topk_method"]) == ("sigmoid", "noaux_tc")
    sequences = random_sequences((60, 9))
    with torch.no_grad():
        native = run_native(load_native(tmp_path / "saved"), sequences)
        reference = run_transformers(load_transformers(tmp_path / "saved"), sequences)
    torch.testing.assert_close(native.log_probs, reference.log_probs, atol=1e-5, rtol=0)


PUBLISHED: dict[str, dict[str, Any]] = {"DeepSeek-V3": DEEPSEEK_V3}
PUBLISHED["Kimi-K2"] = {
    **PUBLISHED["DeepSeek-V3"],
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**PUBLISHED["DeepSeek-V3"]["rope_scaling"], "factor": 32},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}


def parse(name: str, **changes: Any) -> DecoderSpec:
    config = {**PUBLISHED[name], **changes}
    decoder = find_model("auto", config).parse_config(config)
    assert isinstance(decoder, DecoderSpec)
    return decoder


def test_a_published_deepseek_v3_is_read_with_its_groups_and_its_softmax_scale() -> None:
    decoder = parse("DeepSeek-V3")
    mixer, mixture = decoder.layers[3]
    assert isinstance(mixer, MLASpec)
    assert isinstance(mixture, MoESpec)
    assert sum(decoder.sparse) == 58 and not any(decoder.sparse[:3])
    assert (mixture.router.groups, mixture.router.chosen_groups, mixture.shared_intermediate_size) == (8, 4, 2048)
    # (0.1 ln 40 + 1)^2 / sqrt(192); cosines and sines are as they are.
    assert mixer.scale == pytest.approx(1.8738542 / 192**0.5, rel=1e-6)
    assert mixer.rotary.scaling is not None and mixer.rotary.scaling.attention_factor == 1.0
    assert decoder.max_length == 163840
    assert decoder.cache_bytes(1000, 2) == (61 * 1000 * 576 * 2, 0)
    kimi = parse("Kimi-K2")
    assert isinstance(kimi.layers[1].feed_forward, MoESpec)
    assert kimi.layers[1].feed_forward.router.scaling_factor == 2.827 and kimi.sparse[:2] == (False, True)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("scoring_func", "softmax", "only 'sigmoid' is implemented"),
        ("topk_method", "group_limited_greedy", "only 'noaux_tc' is implemented"),
        ("moe_layer_freq", 2, "only 1 is implemented"),
        ("num_key_value_heads", 8, "all num_attention_heads=128 have keys of their own"),
        ("head_dim", 128, "stands for what is rotated here; leave it out, or make it 64"),
        ("qk_head_dim", 128, "only 192 is implemented"),
        ("n_group", 7, "does not divide n_routed_experts=256"),
        ("n_group", 256, "n_routed_experts=256 leave 1 in a group, whose two best are added up"),
        ("topk_group", 9, "there are n_group=8"),
        ("num_experts_per_tok", 129, "topk_group=4 groups have 128 experts"),
        ("first_k_dense_replace", -1, "expected a number of layers"),
        ("num_nextn_predict_layers", 2, "only 0 or 1 is implemented"),
        ("mlp_bias", True, "only False is implemented"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(field: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        parse("DeepSeek-V3", **{field: value})
    assert f"config.json: {field}={value!r}: {reason} in the native deepseek_v3 family" in str(refused.value)


def test_dense_layers_that_two_fields_contradict_are_refused() -> None:
    kinds = ["dense"] * 2 + ["sparse"] * 59
    with pytest.raises(UnsupportedError, match="first_k_dense_replace=3: mlp_layer_types says"):
        parse("DeepSeek-V3", mlp_layer_types=kinds)
    assert parse("DeepSeek-V3", mlp_layer_types=kinds, first_k_dense_replace=None).sparse[:3] == (False, False, True)


def test_ranks_that_do_not_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=3: does not divide num_attention_heads=128"):
        parse("DeepSeek-V3").check_layout(ParallelConfig(tp=3))


@pytest.mark.shows("model: norms of latents have the epsilon that transformers gives them, not rms_norm_eps")
@pytest.mark.parametrize("model", ["deepseek_v3", "glm4_moe_lite"])
def test_norms_of_latents_have_the_epsilon_that_transformers_gives_them(tmp_path: Path, model: str) -> None:
    path, sequences = write_latent(model, tmp_path / "model", rms_norm_eps=0.1), random_sequences((30, 7))
    found, expected = run_native(load_native(path), sequences), run_transformers(load_transformers(path), sequences)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-5, rtol=0)
