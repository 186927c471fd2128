"""The tables of docs/reference/verl_fields.md: field -> what becomes of it."""

from __future__ import annotations

import re

from adapters.verl.options.decisions import ADAM, CHECKPOINT, DDP, ENGINE, LORA, MODEL, OPTIMIZER, TRANSFORMER
from tests.support.claims import ROOT

PAGE = ROOT / "docs" / "reference" / "verl_fields.md"
TITLES = {
    ENGINE: "Engine: `McoreEngineConfig`",
    f"{ENGINE}.router_replay": "Router replay: `McoreEngineConfig.router_replay`",
    f"{ENGINE}.qat": "Quantization: `McoreEngineConfig.qat`",
    OPTIMIZER: "Optimizer: `McoreOptimizerConfig`",
    MODEL: "Model: `HFModelConfig`",
    LORA: "LoRA: `HFModelConfig.lora`",
    f"{MODEL}.mtp": "Multi-token prediction: `HFModelConfig.mtp`",
    CHECKPOINT: "Checkpoint: `CheckpointConfig`, `McoreCheckpointConfig`",
    TRANSFORMER: "Megatron's fields in `override_transformer_config`",
    DDP: "Megatron's fields in `override_ddp_config`",
    ADAM: "Megatron's fields in `override_optimizer_config`",
}
"""Configuration or dictionary of ``DECISIONS`` -> headline."""


def field_table(where: str) -> dict[str, tuple[str, ...]]:
    """Field -> the other cells of its row."""
    section = PAGE.read_text().split(f"## {TITLES[where]}\n")[1].split("\n\n")[0]
    rows = [re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |")) for line in section.splitlines()[2:]]
    return {name: tuple(cells) for fields, *cells in rows for name in re.findall("`(.*?)`", fields)}
