"""A trainer that is a transformers model, to compare rollout engines with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from actors.rollout.messages import Sample
from actors.sync.source import WeightSource


def write_tiny_qwen3_moe(path: Path) -> Path:
    """A random Qwen3-MoE with 8 experts and tied embeddings in float32."""
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(4.0)
    model.save_pretrained(path)
    return path


class ReferenceTrainer:
    """A float32 transformers model, changed at will, and its weights under the names of its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.source = WeightSource(self.named_weights)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor); a tied lm_head has no entry, fused experts are one tensor each."""
        tied = self.model.config.tie_word_embeddings
        for name, tensor in self.model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            if name.endswith("experts.gate_up_proj"):
                for expert, both in enumerate(tensor):
                    for part, weight in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                        yield name.replace("gate_up_proj", f"{expert}.{part}.weight"), weight.contiguous()
            elif name.endswith("experts.down_proj"):
                for expert, weight in enumerate(tensor):
                    yield name.replace("down_proj", f"{expert}.down_proj.weight"), weight
            else:
                yield name, tensor

    def copy_of_model(self) -> torch.nn.Module:
        """As it is now."""
        return copy.deepcopy(self.model)

    def advance(self, scale: float = 0.1) -> None:
        """Moves every parameter far enough that old weights would show, and advances the version."""
        self.source.version += 1
        generator = torch.Generator().manual_seed(self.source.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator) * parameter.std().nan_to_num(0.1))

    def mean_gap(
        self, samples: Sequence[Sample], temperature: float = 1.0, kept: Callable[[Tensor], Tensor] | None = None
    ) -> float:
        """Mean absolute difference between the engines' log-probs and this model's; arguments as those of :meth:`gaps`."""
        gaps = self.gaps(samples, temperature, kept)
        return sum(gaps) / len(gaps)

    def gaps(
        self, samples: Sequence[Sample], temperature: float = 1.0, kept: Callable[[Tensor], Tensor] | None = None
    ) -> list[float]:
        """Absolute difference between the engines' log-prob and this model's of every response token.

        Args:
            kept: probabilities -> which tokens could be sampled; None for all.
        """
        gaps: list[float] = []
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            with torch.no_grad():
                log_probs = torch.log_softmax(self.model(ids).logits[0].double() / temperature, dim=-1)
            if kept is not None:
                left = torch.stack([kept(row) for row in log_probs.exp()])
                log_probs = torch.log_softmax(log_probs.masked_fill(~left, -torch.inf), dim=-1)
            first = len(sample.prompt_ids) - 1
            for index, (token, log_prob) in enumerate(zip(sample.response_ids, sample.log_probs, strict=True)):
                gaps.append(abs(log_probs[first + index, token].item() - log_prob))
        return gaps
