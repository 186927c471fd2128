"""LoRA by peft on a model of transformers, one sequence at a time: what tenants are compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rl_backend.contracts.lora import LoRAConfig

_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_SHARED = {"gate_proj": "lora_A", "up_proj": "lora_A", "down_proj": "lora_B"}
_MODULES: Mapping[str, Sequence[str]] = {
    "attention": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
    ),
    # Of a mixture, those of what all tokens go through.
    "feed_forward": (
        *(f"{block}.{name}" for block in ("mlp", "shared_expert") for name in _FEED_FORWARD),
        "shared_expert_gate",
    ),
    "experts": tuple(f"experts.{expert}.{name}" for expert in range(8) for name in _FEED_FORWARD),
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
}


class Steps(NamedTuple):
    """Attributes:
    losses, norms: of each step; norms before clipping.
    """

    losses: list[float]
    norms: list[float]


class Expert(nn.Module):
    """One of transformers' packed experts, as it is in Hugging Face directories."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = map(linear, (*gate_up.chunk(2), down))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Experts(nn.ModuleList):
    """In the place of transformers' packed experts: peft adapts linear layers each by itself."""

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            tokens, choices = torch.where(experts == number)
            found = found.index_add(0, tokens, expert(hidden[tokens]) * weights[tokens, choices, None])
        return found


def linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())
    return layer


def transformers_model(path: Path | str) -> Any:
    """With experts as linear layers."""
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in loaded.model.layers:
        packed = getattr(layer.mlp, "experts", None)
        if packed is not None:
            layer.mlp.experts = Experts(map(Expert, packed.gate_up_proj, packed.down_proj))
            # By this name peft would look for packed experts.
            loaded.config.model_type = "with linear experts"
    return loaded


def peft_model(path: Path | str, config: LoRAConfig) -> Any:
    """The model with an adapter as ``config`` says; experts that share a factor have one parameter for it."""
    targets = [name for target in config.targets for name in _MODULES.get(target, (target,))]
    settings = {"use_rslora": config.use_rslora, "use_dora": config.use_dora}
    adapter = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, **settings)  # type: ignore[arg-type]
    made: Any = get_peft_model(transformers_model(path), adapter)
    for layer in made.base_model.model.model.layers if config.experts_share_factor else ():
        for projection, factor in _SHARED.items():
            first, *others = (getattr(getattr(expert, projection), factor).default for expert in layer.mlp.experts)
            for each in others:
                each.weight = first.weight
    return made


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a tenant exports, with the tensors of experts that share a factor as those of each expert."""
    found = {}
    for name, tensor in tensors.items():
        stack = re.fullmatch(r"(.+\.experts)\.w([123])\.lora_[AB]\.weight", name)
        if stack is None:
            found[name] = tensor
            continue
        both = (re.sub(r"_[AB]\.weight", f"_{part}.weight", name) for part in "AB")
        for expert in range(max(len(tensors[each]) for each in both)):
            of_expert = f"{stack[1]}.{expert}.{('gate_proj', 'down_proj', 'up_proj')[int(stack[2]) - 1]}"
            found[name.replace(f"{stack[1]}.w{stack[2]}", of_expert)] = tensor[min(expert, len(tensor) - 1)]
    return found


def peft_factors(wrapped: Any, *, every: bool = False) -> dict[str, nn.Parameter]:
    """What is trained, by the names in peft's files; one of several names alone, unless ``every``."""
    return {
        name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector"): value
        for name, value in wrapped.named_parameters(remove_duplicate=not every)
        if value.requires_grad
    }


def load_factors(wrapped: Any, start: Mapping[str, Tensor]) -> None:
    factors, given = peft_factors(wrapped, every=True), apart(start)
    assert factors.keys() == given.keys()
    for name, value in factors.items():
        value.data.copy_(given[name])


def train_with_peft(wrapped: Any, batches: Sequence[Sequence[Tensor]], lr: float) -> Steps:
    """A step for each batch: the sum over its tokens' negative log-likelihoods over the number of its tokens.

    Args:
        batches: of each step its sequences, (L,) int64.
    """
    factors = list(peft_factors(wrapped).values())
    of_one_dimension = [value for value in factors if value.dim() == 1]
    others = [value for value in factors if value.dim() > 1]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": of_one_dimension, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    found = Steps([], [])
    for rows in batches:
        total = torch.zeros(())
        for row in rows:
            log_probs = torch.log_softmax(wrapped(row[None]).logits[0].float(), -1)
            total = total - log_probs[:-1].gather(1, row[1:, None]).sum() / sum(map(len, rows))
        total.backward()
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(factors, 1.0)))
        found.losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return found
