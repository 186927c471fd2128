"""Adapters of peft that are more than factors beside their base are refused by name; all others are read."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from peft import LoraConfig, get_peft_model, preprocess_loraga
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    KasaConfig,
    LoraGAConfig,
    MontecloraConfig,
    VeloraConfig,
)
from transformers import AutoModelForCausalLM

from rl_backend.checkpoint.peft_files import read_peft_directory
from rl_backend.contracts import UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.micro_batches import pack
from rl_backend.runtime.native.engine import NativeRuntime
from tests.support.native import VOCAB_SIZE
from tests.support.sft_batches import random_token_sequences

LENGTHS = (17, 9)


SAME_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")
CHANGES_BASE = ("olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq", "lora_ga")
VARIANTS: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": ArrowConfig(),
    "bias": "all",
    "ensure_weight_tying": True,
    "fan_in_fan_out": True,
    "kasa_config": KasaConfig(),
    "layer_replication": [(0, 2), (1, 2)],
    "lora_bias": True,
    "monteclora_config": MontecloraConfig(),
    "trainable_token_indices": [3],
    "use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2),
    "use_qalora": True,
    "velora_config": VeloraConfig(),
}
"""Field of peft's configuration -> a value with which factors are not all that an adapter is, or are used in another way."""
READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights"}
READ |= {"modules_to_save", "target_parameters"}
OF_NO_EFFECT: dict[str, Any] = {
    "task_type": "CAUSAL_LM", "auto_mapping": {"a": 1}, "peft_version": "1.0", "base_model_name_or_path": "a",
    "revision": "main", "inference_mode": True, "target_modules": ["q_proj"], "exclude_modules": ["lm_head"],
    "layers_to_transform": [0], "layers_pattern": "layers", "lora_dropout": 0.1, "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0}, "corda_config": {"corda_method": "ipm"}, "lora_ga_config": {"scale": "stable"},
    "runtime_config": {"ephemeral_gpu_offload": True}, "megatron_config": {"a": 1}, "megatron_core": "megatron.core",
    "qalora_group_size": 16,
}  # fmt: skip


def peft_model(model: Path, **options: Any) -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)


def log_probs(theirs: Any) -> torch.Tensor:
    found = []
    for row in random_token_sequences(LENGTHS, VOCAB_SIZE, 7):
        with torch.no_grad():
            logits = torch.log_softmax(theirs(row.input_ids[None]).logits[0], -1)
        found += [logits[:-1].gather(1, row.input_ids[1:, None]).flatten(), torch.zeros(1)]
    return torch.cat(found)


def imported(runtime: NativeRuntime, path: Path) -> torch.Tensor:
    """Log-probs of a tenant with the adapter of a directory."""
    base = runtime.build_model(trainable=False)
    tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=8, alpha=16.0, targets=("q_proj", "down_proj")))
    runtime.import_lora_adapter(tenant, path)
    rows = random_token_sequences(LENGTHS, VOCAB_SIZE, 7)
    return torch.cat(list(runtime.forward_backward(tenant, [pack(rows)], None, forward_only=True).output("log_probs")))


def move(theirs: Any) -> None:
    """As training does."""
    with torch.no_grad():
        for name, factor in theirs.named_parameters():
            if "lora_" in name and factor.requires_grad:
                factor.add_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)


def with_fields(directory: Path, **fields: Any) -> Path:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return directory


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_2", "olora"])
def test_factors_beside_a_changed_base_are_read_once_peft_has_converted_them(
    runtime: NativeRuntime, model: Path, tmp_path: Path, initial: str
) -> None:
    theirs = peft_model(model, init_lora_weights=initial)
    # As peft documents it: what training begins with is saved for the conversion.
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    theirs.peft_config["default"].init_lora_weights = initial
    move(theirs)
    theirs.save_pretrained(tmp_path / "residual")
    with pytest.raises(UnsupportedError, match=f"init_lora_weights='{initial}' is not read, .* let peft convert"):
        read_peft_directory(tmp_path / "residual")

    expected = log_probs(theirs)
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert float((imported(runtime, tmp_path / "converted") - expected).abs().max()) < 1e-5


def test_every_value_of_init_lora_weights_is_known() -> None:
    (options,) = (each for each in get_args(get_type_hints(LoraConfig)["init_lora_weights"]) if each is not bool)
    assert {*SAME_BASE, *CHANGES_BASE} - {"lora_ga"} == {True, False, *get_args(options)}


@pytest.mark.shows("lora: peft's adapters are read where the base is what it was, whatever they started from")
@pytest.mark.parametrize("initial", SAME_BASE)
def test_factors_beside_an_unchanged_base_are_read(
    runtime: NativeRuntime, model: Path, tmp_path: Path, initial: bool | str
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = peft_model(model, init_lora_weights=initial)
    for name in ("q_proj", "down_proj"):
        of_theirs = [each for key, each in theirs.named_parameters() if key.endswith(f"{name}.base_layer.weight")]
        of_plain = [each for key, each in plain.named_parameters() if key.endswith(f"{name}.weight")]
        assert of_theirs
        assert all(map(torch.equal, of_theirs, of_plain))
    move(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    assert float((imported(runtime, tmp_path / "adapter") - log_probs(theirs)).abs().max()) < 1e-5


@pytest.mark.shows("lora: peft's adapters beside a base that it has changed, and kinds not known here, are refused by name")
@pytest.mark.parametrize("initial", [*CHANGES_BASE, "PiSSA", "pissa_niter_16", "of_a_later_peft"])
def test_factors_beside_a_changed_base_or_of_an_unknown_start_are_refused(model: Path, tmp_path: Path, initial: str) -> None:
    peft_model(model).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=rf"init_lora_weights={re.escape(repr(initial))} is not read"):
        read_peft_directory(with_fields(tmp_path / "adapter", init_lora_weights=initial))


def test_what_lora_ga_leaves_is_refused(model: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(
        r=4, target_modules=["q_proj"], init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig(stable_gamma=1)
    )  # type: ignore[arg-type]  # peft's own type lacks it
    ids = random_token_sequences(LENGTHS, VOCAB_SIZE, 7)[0].input_ids[None]
    preprocess_loraga(plain, config, lambda: plain(input_ids=ids, labels=ids).loss.backward())
    get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match="init_lora_weights='lora_ga' is not read"):
        read_peft_directory(tmp_path / "adapter")


@pytest.mark.parametrize("field", [*VARIANTS, "of_a_later_peft"])
def test_a_field_with_which_an_adapter_is_more_than_factors_is_refused_by_name(
    model: Path, tmp_path: Path, field: str
) -> None:
    peft_model(model).save_pretrained(tmp_path / "adapter")
    value = VARIANTS.get(field, 1)
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    with pytest.raises(UnsupportedError, match=rf"{field}={re.escape(json_repr(value))} is not read"):
        read_peft_directory(with_fields(tmp_path / "adapter", **{field: value}))


def json_repr(value: Any) -> str:
    return repr(json.loads(json.dumps(value)))


@pytest.mark.parametrize("field", ["use_bdlora", "kasa_config", "velora_config", "monteclora_config"])
def test_what_peft_itself_saves_of_a_variant_is_refused_by_its_field(model: Path, tmp_path: Path, field: str) -> None:
    peft_model(model, **{field: VARIANTS[field]}).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=f"{field}=.* is not read"):
        read_peft_directory(tmp_path / "adapter")


def test_every_field_of_pefts_configuration_is_known_and_those_of_no_effect_are_read(model: Path, tmp_path: Path) -> None:
    known = READ | VARIANTS.keys() | OF_NO_EFFECT.keys()
    assert {each.name for each in fields(LoraConfig)} == known
    peft_model(model).save_pretrained(tmp_path / "adapter")
    assert read_peft_directory(with_fields(tmp_path / "adapter", **OF_NO_EFFECT)).parts
