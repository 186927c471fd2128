"""Linear layers by the names that verl's LoRA options give them: Megatron's, or those of peft."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_backend.contracts import ConfigError

_MEGATRON: Mapping[str, tuple[str, str]] = {
    "q_proj": ("linear_qkv", "linear_q"),
    "k_proj": ("linear_qkv", "linear_k"),
    "v_proj": ("linear_qkv", "linear_v"),
    "o_proj": ("linear_proj", "linear_proj"),
    "gate_proj": ("linear_fc1", "linear_fc1_gate"),
    "up_proj": ("linear_fc1", "linear_fc1_up"),
    "down_proj": ("linear_fc2", "linear_fc2"),
    "w1": ("linear_fc1", "linear_fc1_gate"),
    "w3": ("linear_fc1", "linear_fc1_up"),
    "w2": ("linear_fc2", "linear_fc2"),
    "dense": ("linear_proj", "linear_proj"),
    **dict.fromkeys(("fc1", "c_fc"), ("linear_fc1", "linear_fc1")),
    **dict.fromkeys(("fc2", "c_proj"), ("linear_fc2", "linear_fc2")),
    **dict.fromkeys(
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), ("in_proj", "in_proj")
    ),
    "out_proj": ("out_proj", "out_proj"),
}
"""Last part of a Hugging Face name -> Megatron's fused layer, and the part of it that Bridge's CanonicalLoRA names."""
_LATENT: Mapping[str, tuple[str, str]] = {
    "q_proj": ("linear_q_proj", "linear_q_proj"),
    "q_a_proj": ("linear_q_down_proj", "linear_q_down_proj"),
    "q_b_proj": ("linear_q_up_proj", "linear_q_up_proj"),
    "kv_a_proj_with_mqa": ("linear_kv_down_proj", "linear_kv_down_proj"),
    "kv_b_proj": ("linear_kv_up_proj", "linear_kv_up_proj"),
}
"""The same of latent attention, which fuses nothing."""
_NOT_ADAPTED = re.compile(r".*\.(gate|router|indexer\..+)")
"""Routers, and indexers, which no gradient of a loss reaches."""

_PLACES = (
    (re.compile(r"self_attn|linear_attn"), "self_attention"),
    (re.compile(r"(mlp|block_sparse_moe)\.experts\.\d+"), "mlp.experts"),
    (re.compile(r"(mlp|block_sparse_moe)\.shared_experts?"), "mlp.shared_experts"),
    (re.compile(r"mlp"), "mlp"),
)
_IN_A_LAYER = re.compile(r"(?:.+\.)?layers\.(\d+)\.(.+)\.([^.]+)")

type Naming = Literal["megatron", "peft", "expression"]
"""``megatron``: as Megatron-Bridge matches names, ``linear_qkv``, or all of one with ``*`` for any characters. ``peft``: the
last parts of Hugging Face names, ``q_proj``. ``expression``: a regular expression of whole Hugging Face names."""


@dataclass(frozen=True)
class TargetModules:
    """Which linear layers have an adapter.

    Attributes:
        field: of verl's, for messages.
        naming: of ``include``.
        include: names; empty takes every linear layer of attention and of feed-forward blocks, shared experts included.
        naming_of_excluded: of ``exclude``.
        exclude: names of those not to take.
        experts: whether layers of experts are among those that an empty ``include`` takes.
    """

    field: str
    naming: Naming
    include: tuple[str, ...] = ()
    naming_of_excluded: Naming = "megatron"
    exclude: tuple[str, ...] = ()
    experts: bool = True

    def of_model(self, modules: Sequence[str]) -> tuple[str, ...]:
        """:attr:`~rl_backend.contracts.lora.LoRAConfig.targets` for a model.

        Args:
            modules: Hugging Face names of everything that has a matrix of weights, and of packed experts.

        Raises:
            ConfigError: a name that no module has, or all are excluded.
        """
        megatron = _megatron_names(modules)
        for target in self.include:
            if not any(_matches(target, self.naming, module, names) for module, names in megatron.items()):
                ends = {_end(name) for module, names in megatron.items() for name in _of(self.naming, module, names)}
                there_are = ", ".join(sorted(ends))
                raise ConfigError.of(
                    self.field, target, f"no linear layer of the model has this name; there are {there_are}"
                )
        chosen = [module for module, names in megatron.items() if self._takes(module, names)]
        if not chosen:
            raise ConfigError.of(self.field, list(self.include), f"nothing is left to adapt without {list(self.exclude)}")
        left_out = {_end(module) for module in set(modules).difference(chosen)}
        return tuple(dict.fromkeys(module if _end(module) in left_out else _end(module) for module in chosen))

    def _takes(self, module: str, megatron: Sequence[str]) -> bool:
        if any(_matches(target, self.naming_of_excluded, module, megatron) for target in self.exclude):
            return False
        if self.include:
            return any(_matches(target, self.naming, module, megatron) for target in self.include)
        is_linear = _IN_A_LAYER.fullmatch(module) is not None and _NOT_ADAPTED.fullmatch(module) is None
        return is_linear and (self.experts or ".experts." not in module)


def _megatron_names(modules: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Module -> full names of Megatron's layer and of the part of it; none for what Megatron has no linear layer for.

    Layers are counted over the whole model, whatever the stages of a pipeline.
    """
    has_latents = any(_end(module) == "kv_a_proj_with_mqa" for module in modules)
    ends = {**_MEGATRON, **_LATENT} if has_latents else _MEGATRON
    found: dict[str, tuple[str, ...]] = dict.fromkeys(modules, ())
    for module in modules:
        parts = _IN_A_LAYER.fullmatch(module)
        place = parts and next((place for pattern, place in _PLACES if pattern.fullmatch(parts[2])), None)
        if parts and place and parts[3] in ends:
            found[module] = tuple(f"decoder.layers.{parts[1]}.{place}.{name}" for name in ends[parts[3]])
    return found


def _matches(target: str, naming: Naming, module: str, megatron: Sequence[str]) -> bool:
    if naming == "peft":
        return f".{module}".endswith(f".{target}")
    if naming == "expression":
        return re.fullmatch(target, module) is not None
    pattern = ".*".join(map(re.escape, target.split("*")))
    return any(_end(name) == target or re.fullmatch(pattern, name) for name in megatron)


def _of(naming: Naming, module: str, megatron: Sequence[str]) -> Sequence[str]:
    return megatron if naming == "megatron" else (module,)


def _end(name: str) -> str:
    return name.rpartition(".")[2]
