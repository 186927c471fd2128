"""Qwen3, dense or with experts, with a layer for multi-token prediction as DeepSeek-V3 has it; importing it registers both.

Beside the families there is the loss of that layer, computed by transformers' modules from the published formulas.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from rl_backend.model import register_model
from rl_backend.model.decoder_spec import DecoderSpec
from rl_backend.model.families import decoder_family, qwen3, qwen3_moe
from rl_backend.model.feedforward.moe import MoEOptions
from rl_backend.model.hf_config import HFConfig
from rl_backend.model.multi_token import MTPNames, MTPOptions, MTPSpec
from tests.support.models import write_tiny


class DraftingMoEOptions(MoEOptions, MTPOptions):
    """Of the family with experts."""


def _drafting(decoder: DecoderSpec) -> DecoderSpec:
    names = MTPNames.after_layers("model", decoder.num_layers)
    return replace(decoder, mtp=MTPSpec(decoder.layers[-1], names))


def read(config: HFConfig) -> DecoderSpec:
    return _drafting(qwen3(config))


def read_moe(config: HFConfig) -> DecoderSpec:
    return _drafting(qwen3_moe(config))


DRAFTING = decoder_family("drafting", read, MTPOptions)
DRAFTING_MOE = decoder_family("drafting_moe", read_moe, DraftingMoEOptions)
for family in (DRAFTING, DRAFTING_MOE):
    register_model(family)


def write_drafting(path: Path, model_type: str = "drafting", *, tied: bool = False, **changes: Any) -> Path:
    """A tiny directory of one of the families, its copies equal to what they are copies of."""
    kind = {"drafting": "qwen3", "drafting_moe": "qwen3_moe"}[model_type]
    write_tiny(kind, path, max_shard_size="10GB", tie_word_embeddings=tied, **changes)
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    generator, hidden, layers = torch.Generator().manual_seed(9), config["hidden_size"], config["num_hidden_layers"]
    module, last = f"model.layers.{layers}", f"model.layers.{layers - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        change = torch.randn(tensors[name].shape, generator=generator)
        tensors[f"{module}.{name.removeprefix(last)}"] = tensors[name] + 0.05 * change
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{module}.{norm}.weight"] = 1.0 + 0.2 * torch.randn(hidden, generator=generator)
    tensors[f"{module}.eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
    tensors[f"{module}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    tensors[f"{module}.shared_head.head.weight"] = tensors[head].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    return path


class PlainDrafting(nn.Module):
    """Section 2.2 of the report for the dense family: one sequence at a time, trunk and layer of transformers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        fields = json.loads((path / "config.json").read_text())
        from transformers import Qwen3Config

        config = Qwen3Config(**{**fields, "model_type": "qwen3"}, attn_implementation="eager")
        stored = load_file(path / "model.safetensors")
        module = f"model.layers.{config.num_hidden_layers}."
        self.trunk = AutoModelForCausalLM.from_config(config).float()
        self.trunk.load_state_dict({name: value for name, value in stored.items() if not name.startswith(module)})
        own = {name.removeprefix(module): value for name, value in stored.items() if name.startswith(module)}
        self.enorm, self.hnorm, self.norm = (Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = Qwen3DecoderLayer(config, config.num_hidden_layers - 1)
        with torch.no_grad():
            for norm, name in ((self.enorm, "enorm"), (self.hnorm, "hnorm"), (self.norm, "shared_head.norm")):
                norm.weight.copy_(own.pop(f"{name}.weight"))
            self.eh_proj.weight.copy_(own.pop("eh_proj.weight"))
        for copy in ("embed_tokens.weight", "shared_head.head.weight"):
            del own[copy]
        self.layer.load_state_dict(own)
        self.names = {
            **{f"trunk.{name}": name for name, _ in self.trunk.named_parameters()},
            **{f"layer.{name}": module + name for name in own},
            **{f"{name}.weight": f"{module}{name}.weight" for name in ("enorm", "hnorm", "eh_proj")},
            "norm.weight": f"{module}shared_head.norm.weight",
        }

    def losses(self, sequences: Sequence[Tensor], *, detached: bool) -> tuple[Tensor, Tensor]:
        """Mean negative log-prob of the next token, and of the one after it where there is one."""
        next_sum, second_sum, nexts, seconds = 0.0, 0.0, 0, 0
        for ids in sequences:
            hidden = self.trunk.model(ids[None]).last_hidden_state
            next_sum = next_sum - self._log_probs(hidden[0, :-1], ids[1:], self.trunk.lm_head.weight).sum()
            nexts += len(ids) - 1
            if len(ids) < 3:
                continue
            embedding, head = self.trunk.model.embed_tokens(ids[1:]), self.trunk.lm_head.weight
            hidden = hidden[:, :-1]
            if detached:
                hidden, embedding, head = hidden.detach(), embedding.detach(), head.detach()
            both = self.eh_proj(torch.cat((self.enorm(embedding)[None], self.hnorm(hidden)), dim=-1))
            length = both.shape[1]
            rotation = self.trunk.model.rotary_emb(both, torch.arange(length)[None])
            mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
            out = self.norm(self.layer(both, attention_mask=mask, position_embeddings=rotation))[0, :-1]
            second_sum = second_sum - self._log_probs(out, ids[2:], head).sum()
            seconds += len(ids) - 2
        return next_sum / nexts, second_sum / max(seconds, 1)  # type: ignore[return-value]

    @staticmethod
    def _log_probs(hidden: Tensor, labels: Tensor, head: Tensor) -> Tensor:
        return (hidden @ head.T).log_softmax(-1).gather(1, labels[:, None])
