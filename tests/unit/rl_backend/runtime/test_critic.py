"""Critics of the native runtime on one rank: values, what is saved and loaded, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rl_backend.checkpoint.hf_writer import critic_config
from rl_backend.contracts import CheckpointError, ConfigError, OptimizerConfig, UnsupportedError
from rl_backend.model import find_model
from rl_backend.primitive.value_head import ValueHead
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.critic import squared_error, transformers_values, write_critic
from tests.support.native import (
    LENGTHS,
    VOCAB_SIZE,
    assert_equal_tensors,
    gradients,
    micro_batches,
    open_runtime,
    train,
    train_with,
    weights,
)
from tests.support.sft_batches import random_token_sequences

SPLIT = [[3, 0], [1, 7, 2], [6], [4, 5]]
ORDER = [index for indices in SPLIT for index in indices]


@pytest.fixture(scope="module")
def runtime(tied_model: Path) -> Iterator[NativeRuntime]:
    with open_runtime(tied_model) as opened:
        yield opened


@pytest.fixture(scope="module", params=["tied_model", "untied_model"])
def critic_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_critic(tmp_path_factory.mktemp("critic") / "model", request.getfixturevalue(request.param))


def values_of(runtime: NativeRuntime, handle: object) -> torch.Tensor:
    result = runtime.forward_backward(handle, micro_batches(SPLIT), None, forward_only=True)
    assert sorted(result.outputs) == ["values"]
    return torch.cat(list(result.output("values")))


def reference_values(path: Path) -> torch.Tensor:
    sequences = random_token_sequences(LENGTHS, VOCAB_SIZE, 0)
    return transformers_values(path, [sequences[index].input_ids for index in ORDER])


@pytest.mark.shows("critic: values equal those of transformers' AutoModelForTokenClassification to 1e-5")
def test_values_equal_transformers_for_every_token(runtime: NativeRuntime, critic_dir: Path) -> None:
    for forward_only in (False, True):
        critic = runtime.build_model(head="values", hf_path=critic_dir, forward_only=forward_only)
        values = values_of(runtime, critic)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, reference_values(critic_dir), atol=1e-5, rtol=0)


def test_gradients_reach_every_parameter_and_training_lowers_the_loss(runtime: NativeRuntime) -> None:
    critic = runtime.build_model(head="values", optimizer=OptimizerConfig(lr=1e-2))
    train_with(squared_error, runtime, critic, 1)
    runtime.forward_backward(critic, micro_batches(SPLIT), squared_error)
    assert all(bool(gradient.abs().max() > 0) for gradient in gradients(critic).values())
    assert gradients(critic).keys() == critic.parameters.keys()
    runtime.zero_grad(critic)
    curve = train_with(squared_error, runtime, critic, 20)
    assert curve[-1][0] < 0.5 * curve[0][0]


def test_a_critic_of_a_language_model_starts_at_0_and_keeps_its_weights(runtime: NativeRuntime, untied_model: Path) -> None:
    policy = runtime.build_model(hf_path=untied_model)
    critic = runtime.build_model(head="values", hf_path=untied_model)
    assert bool((values_of(runtime, critic) == 0).all())
    shared = {name: value for name, value in weights(policy).items() if name != "lm_head.weight"}
    assert_equal_tensors({name: weights(critic)[name] for name in shared}, shared)
    assert set(critic.weight_names.values()) - set(policy.weight_names.values()) == {"score.weight", "score.bias"}


def test_a_reward_model_without_bias_gives_its_scores_to_a_critic(
    runtime: NativeRuntime, tied_model: Path, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    reward = AutoModelForSequenceClassification.from_pretrained(tied_model, num_labels=1, dtype=torch.float32)
    reward.config.pad_token_id = 0
    reward.save_pretrained(tmp_path / "reward")
    critic = runtime.build_model(head="values", hf_path=tmp_path / "reward", forward_only=True)
    found = weights(critic)
    assert torch.equal(found["score.weight"], reward.score.weight) and bool((found["score.bias"] == 0).all())
    data = micro_batches(SPLIT)
    ids = [part[None] for batch in data for part in batch.split(batch.input_ids)]
    result = runtime.forward_backward(critic, data, None, forward_only=True)
    with torch.no_grad():
        for row, values in zip(ids, result.output("values"), strict=True):
            scored = reward(row, attention_mask=torch.ones_like(row)).logits
            if int(row[0, -1]) != 0:
                torch.testing.assert_close(values[-1:], scored[0], atol=1e-5, rtol=0)


@pytest.mark.shows("critic: transformers loads a saved critic with the same values, and so does this package")
@pytest.mark.parametrize("model", ["tied_model", "untied_model"])
def test_a_saved_critic_is_one_of_transformers_with_the_same_values(
    runtime: NativeRuntime, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    critic = runtime.build_model(head="values", hf_path=request.getfixturevalue(model))
    train_with(squared_error, runtime, critic, 2)
    values = values_of(runtime, critic)
    runtime.save_checkpoint(critic, tmp_path / "critic", hf=True)
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    assert "lm_head.weight" not in load_file(tmp_path / "critic" / "model.safetensors")
    torch.testing.assert_close(values, reference_values(tmp_path / "critic"), atol=1e-5, rtol=0)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert loaded.config.num_labels == 1 and loaded.dropout.p == 0.0
    again = runtime.build_model(head="values", hf_path=tmp_path / "critic")
    assert torch.equal(values_of(runtime, again), values)


def test_the_configuration_of_a_critic_says_nothing_of_another_task() -> None:
    source = {"model_type": "qwen3", "num_labels": 2, "problem_type": "single_label_classification", "hidden_size": 8}
    for name, expected in (
        ("Qwen3ForCausalLM", "Qwen3ForTokenClassification"),
        ("Qwen3ForSequenceClassification", "Qwen3ForTokenClassification"),
        ("Qwen3Model", "Qwen3ForTokenClassification"),
        ("GPT2LMHeadModel", "GPT2ForTokenClassification"),
    ):
        config = critic_config({**source, "architectures": [name]})
        assert config["architectures"] == [expected]
        assert not {"num_labels", "problem_type"} & set(config)
    assert "architectures" not in critic_config(source)


def test_a_training_checkpoint_restores_a_critic_and_is_refused_for_a_policy(runtime: NativeRuntime, tmp_path: Path) -> None:
    critic, policy = runtime.build_model(head="values"), runtime.build_model()
    train_with(squared_error, runtime, critic, 2)
    train(runtime, policy, 1)
    runtime.save_checkpoint(critic, tmp_path / "critic")
    runtime.save_checkpoint(policy, tmp_path / "policy")
    other = runtime.build_model(head="values")
    runtime.load_checkpoint(other, tmp_path / "critic")
    assert_equal_tensors(weights(other), weights(critic))
    assert other.weight_version == 2
    assert train_with(squared_error, runtime, other, 2) == train_with(squared_error, runtime, critic, 2)
    before = weights(policy)
    with pytest.raises(CheckpointError, match=r"head='values', this one has head='log_probs'"):
        runtime.load_checkpoint(policy, tmp_path / "critic")
    with pytest.raises(CheckpointError, match=r"head='log_probs', this one has head='values'"):
        runtime.load_checkpoint(critic, tmp_path / "policy")
    assert_equal_tensors(weights(policy), before)
    train(runtime, policy, 1)


def test_actor_and_critic_of_one_runtime_have_their_own_directory_and_learning_rate(
    runtime: NativeRuntime, untied_model: Path, tmp_path: Path
) -> None:
    actor = runtime.build_model()
    critic = runtime.build_model(head="values", hf_path=untied_model, optimizer=OptimizerConfig(lr=5e-2))
    assert actor.hf_config["tie_word_embeddings"] and not critic.hf_config["tie_word_embeddings"]
    assert (runtime.lr_scheduler_step(actor), runtime.lr_scheduler_step(critic)) == (1e-3, 5e-2)
    before = weights(actor)
    train_with(squared_error, runtime, critic, 1)
    assert_equal_tensors(weights(actor), before)
    runtime.save_checkpoint(critic, tmp_path / "saved")
    recorded = json.loads((tmp_path / "saved" / "manifest.json").read_text())["runtime_config"]
    assert recorded["hf_path"] == str(untied_model)
    assert recorded["backend_cfg"]["optimizer"]["lr"] == 5e-2


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_critic_is_exported_offloaded_and_trained_in_either_dtype(untied_model: Path, param_dtype: str) -> None:
    with open_runtime(untied_model, param_dtype=param_dtype) as opened:
        critic = opened.build_model(head="values")
        train_with(squared_error, opened, critic, 2)
        frozen = opened.build_model(head="values", forward_only=True)
        assert all(values.dtype == torch.float32 for values in (values_of(opened, critic), values_of(opened, frozen)))
        before = values_of(opened, critic)
        opened.to(critic, "cpu")
        opened.to(critic, "device")
        assert torch.equal(values_of(opened, critic), before)
        exported = {name: tensor.shape for name, tensor in opened.export_weights(critic)}
        assert (exported["score.weight"], exported["score.bias"]) == ((1, 64), (1,))
        assert {info.name: info.shape for info in opened.weight_infos(critic)} == exported


def test_a_critics_directory_is_refused_for_a_policy(runtime: NativeRuntime, critic_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds a critic or a reward model.*head='values'"):
        runtime.build_model(hf_path=critic_dir)


def test_a_head_with_two_labels_is_refused(runtime: NativeRuntime, tied_model: Path, tmp_path: Path) -> None:
    two = AutoModelForTokenClassification.from_pretrained(tied_model, num_labels=2, dtype=torch.float32)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"score.weight of shape \(2, 64\), not \(1, 64\)"):
        runtime.build_model(head="values", hf_path=tmp_path / "two")


def test_what_a_model_cannot_have_is_refused(runtime: NativeRuntime) -> None:
    with pytest.raises(ConfigError, match="head='value': expected one of 'log_probs', 'values'"):
        runtime.build_model(head="value")
    with pytest.raises(ConfigError, match=r"optimizer=.*a model that is not trained has none"):
        runtime.build_model(forward_only=True, optimizer=OptimizerConfig())


def test_a_family_without_a_value_head_says_so() -> None:
    from tests.support.outside_plugin import BIGRAM

    assert find_model("bigram", {}) is BIGRAM
    with pytest.raises(UnsupportedError, match="head='values': model family 'bigram' has only 'log_probs'"):
        BIGRAM.require_head("values")


def test_bfloat16_values_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    head = ValueHead(256).bfloat16()
    hidden = torch.randn(64, 256, dtype=torch.bfloat16)
    values = head(hidden)
    exact = hidden.double() @ head.weight.double()[0] + head.bias.double()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=1e-5)
