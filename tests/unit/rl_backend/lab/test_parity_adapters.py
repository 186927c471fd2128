"""peft's adapters in the transformers side of a comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rl_backend.contracts import ConfigError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.lab.parity.config import start_of
from rl_backend.lab.parity.transformers_side import add_peft_adapter
from tests.support.moe import write_moe


def load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
    return model


def test_only_the_factors_of_the_targets_are_trained_and_start_as_on_the_other_side(tied_model: Path) -> None:
    model = load(tied_model)
    adapters = add_peft_adapter(model, LoRAConfig(rank=4, targets=("attention", "up_proj")), seed=3, in_files=str)
    assert len(adapters) == 2 * 2 * 5
    assert {name for name in adapters if ".layers.0.mlp." in name} == {
        f"base_model.model.model.layers.0.mlp.up_proj.lora_{factor}.weight" for factor in "AB"
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == len(adapters)
    for name, parameter in adapters.items():
        assert torch.equal(parameter, start_of(name, parameter.shape, 3)) and bool(parameter.all())
        assert not torch.equal(parameter, start_of(name, parameter.shape, 4))


def test_targets_that_peft_takes_in_another_form_or_not_at_all_are_refused(tied_model: Path, tmp_path: Path) -> None:
    mixture = load(write_moe("qwen3_moe", tmp_path / "mixture"))
    with pytest.raises(ConfigError, match="'experts': no module of transformers' model; compare two runtimes"):
        add_peft_adapter(mixture, LoRAConfig(targets=("experts",)), seed=0, in_files=str)
    with pytest.raises(ConfigError, match=r"LoRAConfig\.targets='feed_forward': no module"):
        add_peft_adapter(mixture, LoRAConfig(targets=("feed_forward",)), seed=0, in_files=str)
    with pytest.raises(ConfigError, match=r"LoRAConfig\.targets='w1': no module"):
        add_peft_adapter(load(tied_model), LoRAConfig(targets=("w1",)), seed=0, in_files=str)
