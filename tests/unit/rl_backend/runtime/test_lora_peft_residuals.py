"""Adapters that peft made beside a changed base are refused until peft has converted them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from rl_backend.checkpoint.peft_files import read_peft_directory
from rl_backend.contracts import UnsupportedError
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.packing import pack
from rl_backend.runtime.native import NativeRuntime
from tests.support.native import VOCAB_SIZE
from tests.support.sft_batches import random_token_sequences

LENGTHS = (17, 9)


def peft_model(model: Path, **options: Any) -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], **options)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)


@pytest.mark.parametrize("initial", ["pissa", "pissa_niter_2", "olora"])
def test_factors_beside_a_changed_base_are_read_once_peft_has_converted_them(
    runtime: NativeRuntime, model: Path, tmp_path: Path, initial: str
) -> None:
    theirs = peft_model(model, init_lora_weights=initial)
    # As peft documents it: what training begins with is saved for the conversion.
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    theirs.peft_config["default"].init_lora_weights = initial
    with torch.no_grad():
        for name, factor in theirs.named_parameters():
            if "lora_" in name:
                factor.add_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    theirs.save_pretrained(tmp_path / "residual")
    with pytest.raises(UnsupportedError, match=f"init_lora_weights='{initial}' is not read: .* let peft convert"):
        read_peft_directory(tmp_path / "residual")

    rows = random_token_sequences(LENGTHS, VOCAB_SIZE, 7)
    expected = []
    for row in rows:
        with torch.no_grad():
            logits = torch.log_softmax(theirs(row.input_ids[None]).logits[0], -1)
        expected += [logits[:-1].gather(1, row.input_ids[1:, None]).flatten(), torch.zeros(1)]
    theirs.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    base = runtime.build_model(trainable=False)
    tenant = runtime.create_lora_adapter(base, LoRAConfig(rank=8, alpha=16.0, targets=("q_proj", "down_proj")))
    runtime.import_lora_adapter(tenant, tmp_path / "converted")
    ours = torch.cat(list(runtime.forward_backward(tenant, [pack(rows)], None, forward_only=True).output("log_probs")))
    assert float((ours - torch.cat(expected)).abs().max()) < 1e-5


def test_an_adapter_that_waits_for_certain_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    peft_model(model, alora_invocation_tokens=[1, 2]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=r"alora_invocation_tokens=\[1, 2\] is not read"):
        read_peft_directory(tmp_path / "adapter")
