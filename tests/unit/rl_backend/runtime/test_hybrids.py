"""The native runtime on one rank with Qwen3.5: critics, reward models, and parts in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts import OptimizerConfig
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from tests.support.critic import squared_error, transformers_values, write_critic
from tests.support.matrix import sampled
from tests.support.native import VOCAB_SIZE, gradients, micro_batches, open_runtime, train, train_with, weights
from tests.support.qwen3_5 import write_qwen3_5

SPLIT = [[3, 0], [1, 7, 2], [6], [4, 5]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tokens of images beyond those of the data, which transformers looks for."""
    return write_qwen3_5(tmp_path_factory.mktemp("released") / "dense", released=True, vocab_size=2 * VOCAB_SIZE)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_5(tmp_path_factory.mktemp("released") / "mixture", moe=True, released=True)


def values_of(runtime: NativeRuntime, critic: NativeHandle) -> Tensor:
    return torch.cat(list(runtime.forward_backward(critic, micro_batches(SPLIT), None, forward_only=True).output("values")))


def sequences_of() -> list[Tensor]:
    return [part for batch in micro_batches(SPLIT) for part in batch.split(batch.input_ids)]


@pytest.mark.shows("critic: a critic of a released Qwen3.5 has transformers' values to 1e-5, and saves what it started from")
def test_a_critic_of_a_released_directory_has_transformers_values(dense: Path, tmp_path: Path) -> None:
    written = write_critic(tmp_path / "theirs", dense)
    with open_runtime(dense) as runtime:
        for path in (written, tmp_path / "ours"):
            critic = runtime.build_model(head="values", hf_path=written if path == written else dense)
            if path != written:
                train_with(squared_error, runtime, critic, 2)
                runtime.save_checkpoint(critic, path, hf=True)
            # Values of 4.5, of which either side is 9e-6 from float64.
            torch.testing.assert_close(
                values_of(runtime, critic), transformers_values(path, sequences_of()), atol=1e-5, rtol=1e-5
            )


def test_a_critic_of_a_mixture_trains_and_is_loaded_as_it_was_saved(mixture: Path, tmp_path: Path) -> None:
    with open_runtime(mixture) as runtime:
        critic = runtime.build_model(head="values", optimizer=OptimizerConfig(lr=1e-2))
        train_with(squared_error, runtime, critic, 1)
        runtime.forward_backward(critic, micro_batches(SPLIT), squared_error)
        found = gradients(critic)
        assert found.keys() == critic.parameters.keys()
        assert all(bool(gradient.any()) for gradient in found.values())
        curve = train_with(squared_error, runtime, critic, 20)
        assert curve[-1][0] < 0.7 * curve[0][0]
        runtime.save_checkpoint(critic, tmp_path / "critic", hf=True)
        again = runtime.build_model(head="values", hf_path=tmp_path / "critic", forward_only=True)
        assert torch.equal(values_of(runtime, again), values_of(runtime, critic))


def test_a_reward_model_gives_its_scores_to_a_critic(tmp_path: Path) -> None:
    text = write_qwen3_5(tmp_path / "text")
    torch.manual_seed(2)
    reward = AutoModelForSequenceClassification.from_pretrained(text, num_labels=1, dtype=torch.float32)
    reward.config.pad_token_id = 0
    reward.save_pretrained(tmp_path / "reward")
    with open_runtime(text) as runtime:
        critic = runtime.build_model(head="values", hf_path=tmp_path / "reward", forward_only=True)
        assert torch.equal(weights(critic)["score.weight"], reward.score.weight)
        found = runtime.forward_backward(critic, micro_batches(SPLIT), None, forward_only=True).output("values")
        for row, values in zip(sequences_of(), found, strict=True):
            if int(row[-1]) != 0:
                with torch.no_grad():
                    scored = reward(row[None], attention_mask=torch.ones_like(row)[None]).logits
                torch.testing.assert_close(values[-1:], scored[0], atol=1e-5, rtol=0)


@pytest.mark.shows("lora: an adapter of a released Qwen3.5 is read by peft beside transformers' whole model, and merged too")
def test_an_adapter_of_a_released_directory_is_one_of_the_whole_model(dense: Path, tmp_path: Path) -> None:
    config = LoRAConfig(rank=4, targets=("attention", "feed_forward"))
    with open_runtime(dense) as runtime:
        tenant = runtime.create_lora_adapter(runtime.build_model(trainable=False), config)
        drawn = {name: 0.1 * torch.randn_like(factor) for name, factor in runtime.export_lora_adapter(tenant)}
        runtime.import_lora_adapter(tenant, drawn)
        write_peft_directory(tmp_path / "adapter", runtime.export_lora_adapter(tenant), config, str(dense))
        runtime.save_checkpoint(tenant, tmp_path / "merged", hf=True)
        result = runtime.forward_backward(tenant, micro_batches(SPLIT), None, forward_only=True)
        expected = torch.cat(list(result.output("log_probs")))
    whole = AutoModelForImageTextToText.from_pretrained(dense, dtype=torch.float32)
    for model in (
        PeftModel.from_pretrained(whole, tmp_path / "adapter"),
        AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32),
    ):
        found = []
        for row in sequences_of():
            with torch.no_grad():
                distribution = torch.log_softmax(model(row[None]).logits[0], -1)
            found += [distribution[:-1].gather(1, row[1:, None]).flatten(), torch.zeros(1)]
        torch.testing.assert_close(expected, torch.cat(found), atol=1e-5, rtol=0)


@pytest.mark.parametrize("param_dtype", sampled(["float32", "bfloat16"], "bfloat16"))
def test_training_goes_on_with_the_same_bits_after_its_parts_were_in_host_memory(mixture: Path, param_dtype: str) -> None:
    curves = []
    with open_runtime(mixture, param_dtype=param_dtype) as runtime:
        for offload in (False, True):
            handle = runtime.build_model()
            curve = train(runtime, handle, 2)
            if offload:
                runtime.to(handle, "cpu")
                left = {tensor.untyped_storage().nbytes() for part in handle.part_tensors().values() for tensor in part}
                assert left == {0}
                runtime.to(handle, "device")
            curves.append([*curve, *train(runtime, handle, 2, first_seed=2)])
    assert curves[0] == curves[1]
