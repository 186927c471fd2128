"""Directories of peft with ranks and scales of single modules, by patterns that are alike, are read as peft reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from rl_backend.contracts.lora import LoRAConfig
from rl_backend.data.micro_batches import pack
from tests.support.models import write_tiny
from tests.support.native import VOCAB_SIZE, open_runtime
from tests.support.sft_batches import random_token_sequences

LENGTHS = (17, 9)
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    # Of packed experts gate and up are one parameter, whose name ends as that of another module.
    "the end of another name": (
        ("o_proj", "experts"),
        {
            "target_modules": ["o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "alpha_pattern": {"up_proj": 99, "proj": 77, "own_proj": 55, "o_proj": 3},
        },
    ),
    "both of two names": (
        ("experts",),
        {
            "target_modules": [],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "alpha_pattern": {"up_proj": 99, "gate_up_proj": 5, "mlp.experts.down_proj": 2},
            "rank_pattern": {"up_proj": 7, "down_proj": 6},
        },
    ),
    "the first of several that fit": (
        ("q_proj", "k_proj", "v_proj"),
        {
            "target_modules": ["q_proj", "k_proj", "v_proj"],
            "alpha_pattern": {"layers.1.*": 3, "q_proj": 50, r"model\.layers\.0\.self_attn\.k_proj": 1, "k_proj": 30},
            "rank_pattern": {"attn.v_proj": 6, "self_attn.v_proj": 2, r"layers\.\d\.self_attn\.q_proj": 8},
            "use_rslora": True,
        },
    ),
    "magnitudes": (
        ("q_proj", "k_proj"),
        {
            "target_modules": ["q_proj", "k_proj"],
            "alpha_pattern": {"q_proj": 50, "_proj": 9},
            "rank_pattern": {"k_proj": 3},
            "use_dora": True,
        },
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return write_tiny("qwen3_moe", tmp_path_factory.mktemp("models") / "moe", tie_word_embeddings=False, **experts)


@pytest.mark.filterwarnings("ignore:The following .* keys did not match")
@pytest.mark.parametrize("case", CASES)
def test_a_pattern_is_of_the_modules_that_it_is_of_in_peft(model: Path, tmp_path: Path, case: str) -> None:
    targets, options = CASES[case]
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = get_peft_model(plain, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options))
    for name, value in theirs.named_parameters():
        if "lora_" in name:
            value.data.mul_(torch.linspace(0.9, 1.1, value.numel()).view(value.shape))
    theirs.save_pretrained(tmp_path / "adapter")
    # What peft loads: it sorts the patterns that it writes.
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    rows = random_token_sequences(LENGTHS, VOCAB_SIZE, 7)
    with open_runtime(model) as runtime, torch.no_grad():
        base = runtime.build_model(trainable=False)
        config = LoRAConfig(rank=8, alpha=40.0, targets=targets, use_dora=bool(options.get("use_dora")))
        tenant = runtime.create_lora_adapter(base, config)
        runtime.import_lora_adapter(tenant, tmp_path / "adapter")
        found = runtime.forward_backward(tenant, [pack(rows)], None, forward_only=True).output("log_probs")
        for row, log_probs in zip(rows, found, strict=True):
            expected = torch.log_softmax(theirs(row.input_ids[None]).logits[0], -1)[:-1].gather(1, row.input_ids[1:, None])
            torch.testing.assert_close(log_probs[:-1], expected[:, 0], rtol=0, atol=2e-5)
