"""A critic's tenant trains as peft does on transformers' token classifier, and goes both ways in peft's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from rl_backend.checkpoint.peft_files import read_peft_directory, write_peft_directory
from rl_backend.contracts import OptimizerConfig, UnsupportedError, WeightCheckError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime
from rl_backend.runtime.native.handle import NativeHandle
from rl_backend.runtime.tenants.handle import TenantHandle
from tests.support.native import VOCAB_SIZE
from tests.support.sft_batches import random_token_sequences
from tests.support.tenants import squared

STEPS = 5
LENGTHS = (17, 40, 9)
CONFIG = LoRAConfig(rank=8, targets=("attention", "up_proj"), seed=4)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]


@pytest.fixture
def base(runtime: NativeRuntime) -> NativeHandle:
    return runtime.build_model(trainable=False)


def classifier(path: Path) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(path, num_labels=1)
    config.classifier_dropout = 0.0
    return AutoModelForTokenClassification.from_pretrained(path, config=config, dtype=torch.float32)


def their_values(model: Any) -> torch.Tensor:
    rows = random_token_sequences(LENGTHS, VOCAB_SIZE, 7)
    with torch.no_grad():
        return torch.cat([model(row.input_ids[None]).logits[0, :, 0] for row in rows])


def our_values(runtime: NativeRuntime, handle: Any) -> torch.Tensor:
    batch = pack(random_token_sequences(LENGTHS, VOCAB_SIZE, 7))
    return torch.cat(list(runtime.forward_backward(handle, [batch], None, forward_only=True).output("values")))


def trained(runtime: NativeRuntime, tenant: TenantHandle, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    found = []
    for step in range(steps):
        rows = random_token_sequences(LENGTHS, VOCAB_SIZE, step)
        result = runtime.forward_backward(tenant, [pack(rows, {"batch_num_tokens": 66.0, "dp_size": 1})], squared)
        found.append((result.loss, runtime.optimizer_step(tenant).grad_norm))
        runtime.zero_grad(tenant)
    return found


@pytest.mark.shows("lora: a critic on the base of its actor trains step by step as peft does on a token classifier")
def test_a_critic_trains_as_peft_does(runtime: NativeRuntime, base: NativeHandle, model: Path) -> None:
    tenant = runtime.create_lora_adapter(base, CONFIG, OptimizerConfig(lr=1e-4), head="values")
    config = LoraConfig(task_type="TOKEN_CLS", r=8, lora_alpha=CONFIG.alpha, target_modules=TARGETS)
    theirs = get_peft_model(classifier(model), config)
    start = dict(runtime.export_lora_adapter(tenant))
    parts = {
        name.replace(".default", "").replace("modules_to_save.", ""): value for name, value in theirs.named_parameters()
    }
    parts = {name: value for name, value in parts.items() if value.requires_grad}
    assert parts.keys() == start.keys()
    for name, value in parts.items():
        value.data.copy_(start[name])
    bias = parts.pop("base_model.model.score.bias")
    groups = [{"params": list(parts.values()), "weight_decay": 0.01}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    expected = []
    for step in range(STEPS):
        total = torch.zeros(())
        for row in random_token_sequences(LENGTHS, VOCAB_SIZE, step):
            values = theirs(row.input_ids[None]).logits[0, :, 0]
            total = total + (values - row.input_ids / VOCAB_SIZE).square().sum() / 66.0
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_([*parts.values(), bias], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((total.item(), norm.item()))
    found = trained(runtime, tenant, STEPS)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-5)


def test_a_critic_goes_both_ways_in_pefts_format(
    runtime: NativeRuntime, base: NativeHandle, model: Path, tmp_path: Path
) -> None:
    tenant = runtime.create_lora_adapter(base, CONFIG, OptimizerConfig(lr=1e-2), head="values")
    trained(runtime, tenant, 3)
    expected = our_values(runtime, tenant)
    write_peft_directory(tmp_path / "critic", runtime.export_lora_adapter(tenant), tenant.lora, str(model))
    assert (
        float((their_values(PeftModel.from_pretrained(classifier(model), tmp_path / "critic")) - expected).abs().max())
        < 1e-5
    )
    runtime.save_checkpoint(tenant, tmp_path / "merged", hf=True)
    assert float((their_values(classifier(tmp_path / "merged").eval()) - expected).abs().max()) < 1e-5
    again = runtime.create_lora_adapter(base, CONFIG.replace(seed=9), head="values")
    runtime.import_lora_adapter(again, tmp_path / "critic")
    assert torch.equal(our_values(runtime, again), expected)
    theirs = PeftModel.from_pretrained(classifier(model), tmp_path / "critic")
    theirs.save_pretrained(tmp_path / "theirs")
    third = runtime.create_lora_adapter(base, CONFIG, head="values")
    runtime.import_lora_adapter(third, tmp_path / "theirs")
    assert torch.equal(our_values(runtime, third), expected)
    actor = runtime.create_lora_adapter(base, CONFIG)
    with pytest.raises(WeightCheckError, match=r"score\.\w+ is no tensor of this adapter"):
        runtime.import_lora_adapter(actor, tmp_path / "critic")


def test_other_whole_modules_are_refused(model: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(plain, config).save_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "adapter_config.json").read_text())["modules_to_save"] == ["lm_head"]
    with pytest.raises(UnsupportedError, match="modules_to_save has 'lm_head'"):
        read_peft_directory(tmp_path / "whole")


def test_weights_of_a_critic_are_exported_with_the_adapter_added(runtime: NativeRuntime, base: NativeHandle) -> None:
    tenant = runtime.create_lora_adapter(base, CONFIG, OptimizerConfig(lr=1e-2), head="values")
    trained(runtime, tenant, 2)  # the first step is the head's alone, which starts at 0
    infos = runtime.weight_infos(tenant)
    exported = {name: tensor.clone() for name, tensor in runtime.export_weights(tenant)}
    assert list(exported) == [info.name for info in infos] and "lm_head.weight" not in exported
    assert {info.name: info.shape for info in infos}["score.weight"] == tuple(exported["score.weight"].shape)
    plain = dict(runtime.export_weights(base, names=["model.layers.0.mlp.up_proj.weight"]))
    for name in ("score.bias", "model.layers.0.mlp.up_proj.weight"):
        ((found, tensor),) = runtime.export_weights(tenant, names=[name])
        assert found == name and torch.equal(tensor, exported[name]) and bool(tensor.any())
    assert not torch.equal(plain["model.layers.0.mlp.up_proj.weight"], exported["model.layers.0.mlp.up_proj.weight"])
