"""A model family from outside the package, as a user's plugin module would be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import nn

from rl_backend.contracts import Head, ModelOptions, ModelOutput, NativeConfig
from rl_backend.model import BuildSettings, ModelFamily, ModelInput, register_model
from rl_backend.parallel.fsdp import apply_fsdp
from rl_backend.primitive.log_prob import next_token_log_probs


class BigramOptions(ModelOptions):
    scale: float = Field(default=1.0, gt=0.0)


class Bigram(nn.Module):
    """Each token's embedding against the same table; ``scale`` multiplies it."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, chunk_tokens: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, hidden_size)
        self.scale = scale
        self.chunk_tokens = chunk_tokens

    def forward(self, inputs: ModelInput) -> ModelOutput:
        hidden = self.scale * self.table(inputs.input_ids)
        found = next_token_log_probs(
            hidden,
            self.table.weight,
            inputs.labels,
            temperature=inputs.temperature,
            chunk_tokens=self.chunk_tokens,
            calculate_entropy=inputs.calculate_entropy,
        )
        return found.as_output()


def _parse(hf_config: Mapping[str, Any]) -> tuple[int, int]:
    return hf_config["vocab_size"], hf_config["hidden_size"]


def _build(architecture: tuple[int, int], settings: BuildSettings) -> nn.Module:
    assert isinstance(settings.options, BigramOptions)
    return Bigram(*architecture, settings.options.scale, settings.log_prob_chunk_tokens)


def _parallelize(module: nn.Module, groups: Any, config: NativeConfig) -> None:
    apply_fsdp(module, [], groups, config)


def _weight_names(architecture: tuple[int, int], head: Head) -> dict[str, str]:
    return {"table.weight": "tied_bigram.table"}


BIGRAM = ModelFamily(
    name="tied_bigram",
    hf_model_types=("tied_bigram",),
    options_type=BigramOptions,
    parse_config=_parse,
    build=_build,
    parallelize=_parallelize,
    weight_names=_weight_names,
)
register_model(BIGRAM)


def write_bigram(path: Any, vocab_size: int = 11, hidden_size: int = 6) -> torch.Tensor:
    """Writes a directory of the family and returns its table."""

    table = torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(0))
    config = {"model_type": "tied_bigram", "vocab_size": vocab_size, "hidden_size": hidden_size}
    (path / "config.json").write_text(json.dumps(config))
    save_file({"tied_bigram.table": table}, path / "model.safetensors")
    return table
