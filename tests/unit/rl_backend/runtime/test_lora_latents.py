"""Adapters of latent attention and shared experts in peft's format."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from rl_backend.checkpoint.peft_files import write_peft_directory
from rl_backend.contracts.lora import LoRAConfig
from tests.support.deepseek import write_latent
from tests.support.native import open_runtime
from tests.support.peft_reference import transformers_model
from tests.unit.rl_backend.runtime.test_lora_peft import log_probs, trained, transformers_log_probs


@pytest.mark.shows("lora: an adapter of all projections of latent attention is read by peft and merged, with DoRA too")
@pytest.mark.parametrize("use_dora", [False, True])
def test_peft_loads_what_a_tenant_of_latent_attention_exports(tmp_path: Path, use_dora: bool) -> None:
    model = write_latent("deepseek_v3", tmp_path / "model")
    with open_runtime(model) as runtime:
        base = runtime.build_model(trainable=False)
        config = LoRAConfig(rank=4, alpha=8.0, targets=("attention", "down_proj"), use_dora=use_dora)
        tenant = trained(runtime, base, config)
        adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name, _ in runtime.export_lora_adapter(tenant)}
        attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
        assert attention | {"down_proj"} <= adapted
        write_peft_directory(tmp_path / "adapter", runtime.export_lora_adapter(tenant), tenant.lora, str(model))
        expected = log_probs(runtime, tenant)
        loaded = PeftModel.from_pretrained(transformers_model(model), tmp_path / "adapter")
        assert float((transformers_log_probs(loaded) - expected).abs().max()) < 1e-5
        assert float((log_probs(runtime, base) - expected).abs().max()) > 1e-3
        runtime.save_checkpoint(tenant, tmp_path / "merged", hf=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    assert float((transformers_log_probs(merged) - expected).abs().max()) < 1e-5
