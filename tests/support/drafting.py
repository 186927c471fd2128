"""GLM-4.5, and Qwen3, dense or with experts, with a layer for multi-token prediction as DeepSeek-V3 has it.

Importing it registers Qwen3's two families. Beside them there is the loss of that layer, computed by transformers' modules
from the published formulas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rl_backend.model import register_model
from rl_backend.model.decoder import decoder_family
from rl_backend.model.decoder_spec import DecoderSpec, MTPNames, MTPSpec
from rl_backend.model.families.dense import qwen3
from rl_backend.model.families.mixtures import qwen3_moe
from rl_backend.model.hf_config import HFConfig
from tests.support.models import write_tiny
from tests.support.moe import write_moe

COPIES: Mapping[str, str] = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
"""Name in the layer -> what it is a copy of."""


def _drafting(decoder: DecoderSpec) -> DecoderSpec:
    names = MTPNames.after_layers("model", decoder.num_layers)
    return replace(decoder, mtp=MTPSpec(decoder.layers[-1], names))


def read(config: HFConfig) -> DecoderSpec:
    return _drafting(qwen3(config))


def read_moe(config: HFConfig) -> DecoderSpec:
    return _drafting(qwen3_moe(config))


_PLAIN = {"drafting": "qwen3", "drafting_moe": "qwen3_moe"}
"""Family -> what transformers calls it without the layer."""
DRAFTING = decoder_family("drafting", read)
DRAFTING_MOE = decoder_family("drafting_moe", read_moe)
for family in (DRAFTING, DRAFTING_MOE):
    register_model(family)


def write_drafting(
    path: Path, model_type: str = "drafting", *, tied: bool = False, copies: bool = True, **changes: Any
) -> Path:
    """A tiny directory of one of the families, its copies equal to what they are copies of.

    Args:
        copies: whether it has them. GLM-4.5 has, GLM-4.6 has not.
    """
    if model_type == "glm4_moe":
        write_moe(model_type, path, max_shard_size="10GB", tie_word_embeddings=tied, **changes)
    else:
        write_tiny(_PLAIN[model_type], path, max_shard_size="10GB", tie_word_embeddings=tied, **changes)
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
    for copy, original in COPIES.items() if copies else ():
        tensors[f"{module}.{copy}"] = tensors["model.embed_tokens.weight" if tied else original].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "model_type": model_type, "num_nextn_predict_layers": 1}))
    return path


class PlainDrafting(nn.Module):
    """Section 2.2 of the report: one sequence at a time, trunk and layer of transformers."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        fields = json.loads((path / "config.json").read_text())
        kind, layers = _PLAIN.get(fields["model_type"], fields["model_type"]), fields["num_hidden_layers"]
        self.module = f"model.layers.{layers}."
        # The layer is one more of transformers', which reads its weights by their names.
        one_more = {name: value for name, value in fields.items() if name not in ("model_type", "layer_types")}
        config = AutoConfig.for_model(kind, **{**one_more, "num_hidden_layers": layers + 1})
        self.trunk, report = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not report["missing_keys"]
        self.layer, self.trunk.model.layers = self.trunk.model.layers[-1], self.trunk.model.layers[:-1]
        norm = type(self.trunk.model.norm)
        self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        stored = load_file(path / "model.safetensors")
        with torch.no_grad():
            for name in ("enorm", "hnorm", "norm", "eh_proj"):
                self.get_submodule(name).weight.copy_(stored[self.module + self._stored(f"{name}.weight")])

    def gradients(self) -> dict[str, Tensor]:
        """Of every tensor, by its name in the directory; transformers has those of all experts of a layer in one."""
        found = {}
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None, name
            whole = name.removeprefix("trunk.") if name.startswith("trunk.") else self.module + self._stored(name)
            block, has_experts, projection = whole.partition(".experts.")
            if not has_experts:
                found[whole] = parameter.grad
                continue
            names = projection.replace("gate_up_proj", "gate_proj up_proj").split()
            for expert, gradient in enumerate(parameter.grad):
                for part, value in zip(names, gradient.chunk(len(names)), strict=True):
                    found[f"{block}.experts.{expert}.{part}.weight"] = value
        return found

    @staticmethod
    def _stored(name: str) -> str:
        """What a directory calls a parameter beside the trunk, within the layer."""
        return f"shared_head.{name}" if name == "norm.weight" else name.removeprefix("layer.")

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
