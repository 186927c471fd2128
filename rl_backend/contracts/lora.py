"""LoRA tenants: adapters over one frozen model, each with a rank, targets and an optimizer of its own."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from rl_backend.contracts.atoms import Head
from rl_backend.contracts.base_config import BaseConfig
from rl_backend.contracts.errors import ConfigError

type LoRAKind = Literal["attention", "feed_forward", "experts", "embedding", "head"]
"""What a module is part of: a mixer, a feed-forward block that all tokens go through (shared experts are such blocks), the
experts that a router chooses between, the embedding or the head."""

LORA_KINDS: tuple[LoRAKind, ...] = get_args(LoRAKind.__value__)

LORA_FIELD = "lora"
"""Sequence field, () int64: the :attr:`~rl_backend.contracts.ModelHandle.lora_id` of the tenant whose sequence it is; -1 for
the base model alone."""

BASE_ONLY = -1

type LoRAPart = Literal["A", "B", "magnitude"]
"""What a tenant has for one module: A, (rank, inputs); B, (outputs, rank); with DoRA the magnitudes of the rows
of the weight."""

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM keeps memory for."""

PEFT_PREFIX = "base_model.model."
"""What peft puts before the Hugging Face names of a model's modules."""


class LoRAConfig(BaseConfig):
    """Low-rank adapters (Hu et al., arXiv 2106.09685), with peft's names, initialisation and scaling.

    Attributes:
        rank: of both factors.
        alpha: the product is scaled by ``alpha / rank``.
        targets: kinds of blocks, and Hugging Face names of modules: whole ones (``model.layers.0.mlp.up_proj``) or their
            ends (``q_proj``).
        dropout: of the adapters' inputs in training, drawn from a generator of the tenant's own.
        use_rslora: scale by ``alpha / sqrt(rank)`` instead (Kalajdzievski, arXiv 2312.03732).
        use_dora: learn the direction of each output's weights by the factors and their magnitude by itself (Liu et al.,
            arXiv 2402.09353). The change has full rank: engines take such a tenant merged only.
        experts_share_factor: the experts of a layer have one factor on the side of the hidden size, A of gates and ups and B
            of downs, and the other each, as Tinker and vLLM's ``enable_moe_shared_loras`` have it. Their factors are one
            tensor for all of them then, (experts, .., ..), or (1, .., ..) for what they share.
        seed: of the initial factors and of dropout. The factors of a module depend on it and the module's name alone.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0.0, allow_inf_nan=False)
    targets: tuple[str, ...] = Field(default=("attention", "feed_forward"), min_length=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    use_rslora: bool = False
    use_dora: bool = False
    experts_share_factor: bool = False
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        # An empty name would select nothing, without a word.
        if any(not target.strip(". ") for target in self.targets):
            raise ConfigError.of("LoRAConfig.targets", self.targets, "has an empty name; name modules or kinds of blocks")
        if self.use_dora and self.experts_share_factor:
            raise ConfigError.of("LoRAConfig.use_dora", True, "beside experts_share_factor=True; set one of the two")
        return self

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def parts(self) -> tuple[LoRAPart, ...]:
        return ("A", "B", "magnitude") if self.use_dora else ("A", "B")

    def selects(self, module: str, kind: LoRAKind) -> bool:
        return any(target == kind or f".{module}".endswith(f".{target}") for target in self.targets)

    @property
    def at_one_end(self) -> bool:
        """Whether it adapts the embedding or the head, which may be one weight of the model."""
        return self.selects("model.embed_tokens", "embedding") or self.selects("lm_head", "head")


@dataclass(frozen=True)
class LoRAInfo:
    """Facts about a tenant.

    Attributes:
        modules: Hugging Face names of the modules that it adapts.
        learning_rate: of the next step.
        num_parameters, bytes: that this rank holds; bytes of weights, gradients and moments, padding included.
        shapes: peft's name -> size of each whole factor.
        hf_path: of the base.
    """

    name: str
    config: LoRAConfig
    head: Head
    modules: tuple[str, ...]
    step: int
    weight_version: int
    learning_rate: float
    num_parameters: int
    bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    hf_path: str


def engine_slots(adapters: int, device: str) -> int:
    """Slots of an engine that serves so many adapters at one time."""
    # One more: while a version is loaded, the one before still serves. On a CPU requests without an adapter read the last
    # slot (vLLM 0.30, lora/ops/torch_ops), so another one stays empty.
    return adapters + (2 if device == "cpu" else 1)


def peft_name(module: str, *, is_a: bool) -> str:
    return f"{PEFT_PREFIX}{module}.lora_{'A' if is_a else 'B'}.weight"


def part_name(module: str, kind: LoRAKind, part: LoRAPart) -> str:
    """The name in peft's files."""
    if part == "magnitude":
        return f"{PEFT_PREFIX}{module}.lora_magnitude_vector"
    return f"{PEFT_PREFIX}{module}.lora_embedding_{part}" if kind == "embedding" else peft_name(module, is_a=part == "A")
