"""verl's ``all-linear`` and this project's kinds of blocks take what peft's ``all-linear`` takes, in every family."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from adapters.verl.options.lora import LoRASettings, Naming, TargetModules
from rl_backend.contracts import ConfigError
from rl_backend.contracts.lora import LoRAConfig
from tests.support.deepseek import change_config
from tests.support.matrix import sampled
from tests.support.native import open_runtime
from tests.support.small_models import WRITERS
from tests.support.sparse_models import reference


def all_linear(naming: Naming = "peft", *, experts: bool = False) -> LoRASettings:
    targets = TargetModules("target_modules", naming, experts=experts)
    return LoRASettings(LoRAConfig(rank=4), targets, ("kaiming", "zero"), merge=False, adapter_path=None)


def of_peft(path: Path, name: str) -> set[str]:
    """Of a mixture peft begins with this list, and then takes other parameters in place of ``gate_proj`` and its like."""
    if name in ("deepseek_v32", "glm_moe_dsa"):
        with reference(path) as model:
            # No loss reaches an indexer.
            return {module for module in linear_layers(model) if ".indexer." not in module}
    if name == "kimi_k2":
        change_config(path, model_type="deepseek_v3")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    if hasattr(loaded.config, "num_experts_per_tok"):
        return linear_layers(loaded)
    return set(get_peft_model(loaded, LoraConfig(target_modules="all-linear")).targeted_module_names)


def linear_layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}


def adapted_by(path: Path, *configs: LoRAConfig) -> list[set[str]]:
    """The modules of a tenant of each configuration."""
    with open_runtime(path) as runtime:
        base = runtime.build_model(trainable=False)
        for config in configs:
            runtime.create_lora_adapter(base, config)
        return [set(each.modules) for each in runtime.list_lora_adapters(base)]


@pytest.mark.shows("verl: all-linear, and kinds of blocks, take what peft's all-linear takes in every family")
@pytest.mark.parametrize(
    "name", sampled(WRITERS, "llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe", "glm_moe_dsa")
)
def test_all_linear_is_that_of_peft_and_of_the_kinds_of_blocks(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / "model")
    short = all_linear().for_model(path)
    kinds = LoRAConfig(rank=4)
    if name in ("mixtral", "qwen3_moe", "gpt_oss", "minimax_m2"):
        with pytest.raises(ConfigError, match="targets='feed_forward': the model has none"):
            adapted_by(path, kinds)
        kinds = LoRAConfig(rank=4, targets=("attention",))
    found, of_kinds = adapted_by(path, short, kinds)
    assert found == of_kinds == of_peft(path, name)


@pytest.mark.parametrize("name", sampled(["qwen3_moe", "deepseek_v3", "qwen3_5_moe"], "deepseek_v3"))
def test_an_empty_list_of_megatrons_names_takes_experts_too(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / "model")
    kinds = ("attention", "experts") if name == "qwen3_moe" else ("attention", "feed_forward", "experts")
    found, of_kinds = adapted_by(path, all_linear("megatron", experts=True).for_model(path), LoRAConfig(targets=kinds))
    assert found == of_kinds and any(".experts.3." in module for module in found)


def test_experts_that_cannot_be_adapted_are_refused_by_name(tmp_path: Path) -> None:
    path = WRITERS["gpt_oss"](tmp_path / "model")
    with pytest.raises(ConfigError, match=r"targets='gate_up_proj': no module of this name"):
        adapted_by(path, all_linear("megatron", experts=True).for_model(path))


@pytest.mark.parametrize("target", ["mlp.gate", "indexer.wq_b"])
def test_what_is_left_out_is_refused_by_name(target: str, tmp_path: Path) -> None:
    path = WRITERS["glm_moe_dsa"](tmp_path / "model")
    with pytest.raises(ConfigError, match=f"targets='{target}': no module of this name"):
        adapted_by(path, LoRAConfig(targets=(target,)))
