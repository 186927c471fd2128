"""Linear layers by the names that verl's LoRA options give them: Megatron's, or those of peft."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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
    **dict.fromkeys(
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), ("in_proj", "in_proj")
    ),
    "out_proj": ("out_proj", "out_proj"),
}
"""Last part of a Hugging Face name -> Megatron's fused layer, and the part of it that Bridge's CanonicalLoRA names."""

_PLACES = (
    (re.compile(r"self_attn|linear_attn"), "self_attention"),
    (re.compile(r"(mlp|block_sparse_moe)\.experts\.\d+"), "mlp.experts"),
    (re.compile(r"mlp\.shared_experts?"), "mlp.shared_experts"),
    (re.compile(r"mlp"), "mlp"),
)
_IN_A_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.(.+)\.([^.]+)")

type Naming = Literal["megatron", "peft", "expression"]
"""``megatron``: as Megatron-Bridge matches names, ``linear_qkv``, or all of one with ``*`` for any characters. ``peft``: the
last parts of Hugging Face names, ``q_proj``. ``expression``: a regular expression of whole Hugging Face names."""


@dataclass(frozen=True)
class TargetModules:
    """Which linear layers have an adapter.

    Attributes:
        field: of verl's, for messages.
        naming: of ``include``.
        include: names; empty takes every linear layer of attention and of feed-forward blocks.
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
            modules: Hugging Face names of everything that has a matrix of weights.

        Raises:
            ConfigError: a name that no module has, or all are excluded.
        """
        for target in self.include:
            if not any(_matches(target, self.naming, module) for module in modules):
                names = ", ".join(sorted({end for module in modules for end in _ends(module, self.naming)}))
                raise ConfigError.of(self.field, target, f"no linear layer of the model has this name; there are {names}")
        chosen = [module for module in modules if self._takes(module)]
        if not chosen:
            raise ConfigError.of(self.field, list(self.include), f"nothing is left to adapt without {list(self.exclude)}")
        left_out = {_end(module) for module in set(modules).difference(chosen)}
        return tuple(dict.fromkeys(module if _end(module) in left_out else _end(module) for module in chosen))

    def _takes(self, module: str) -> bool:
        if any(_matches(target, self.naming_of_excluded, module) for target in self.exclude):
            return False
        if self.include:
            return any(_matches(target, self.naming, module) for target in self.include)
        return bool(_megatron_names(module)) and (self.experts or ".experts." not in module)


def _megatron_names(module: str) -> tuple[str, ...]:
    """Full names of Megatron's layer and of the part of it; empty for what is no linear layer of a block.

    Layers are counted over the whole model, whatever the stages of a pipeline.
    """
    found = _IN_A_LAYER.fullmatch(module)
    if found is None or found[3] not in _MEGATRON:
        return ()
    for pattern, place in _PLACES:
        if pattern.fullmatch(found[2]):
            return tuple(f"decoder.layers.{found[1]}.{place}.{name}" for name in _MEGATRON[found[3]])
    return ()


def _matches(target: str, naming: Naming, module: str) -> bool:
    if naming == "peft":
        return f".{module}".endswith(f".{target}")
    if naming == "expression":
        return re.fullmatch(target, module) is not None
    pattern = ".*".join(map(re.escape, target.split("*")))
    return any(_end(name) == target or re.fullmatch(pattern, name) for name in _megatron_names(module))


def _ends(module: str, naming: Naming) -> Iterable[str]:
    return map(_end, _megatron_names(module)) if naming == "megatron" else (_end(module),)


def _end(name: str) -> str:
    return name.rpartition(".")[2]
