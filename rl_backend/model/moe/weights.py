"""Hugging Face names of the parameters of a decoder with mixtures of experts."""

from __future__ import annotations

from typing import NamedTuple

from rl_backend.contracts import Head, PackedWeight, WeightName
from rl_backend.model.dense.weights import attention_and_norms, decoder_names, feed_forward
from rl_backend.model.moe.architecture import MoEArchitecture


class ExpertNames(NamedTuple):
    """How a family calls the modules of a mixture.

    Attributes:
        block: the mixture, within a layer.
        gate, up, down: the projections, within one expert.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def weight_names(arch: MoEArchitecture, head: Head, experts: ExpertNames) -> dict[str, WeightName]:
    """Parameter name -> Hugging Face name or, for packed experts, names, in export order."""

    def layer_names(index: int) -> dict[str, WeightName]:
        parameters = (*attention_and_norms(arch), *(() if arch.sparse[index] else feed_forward(arch)))
        names: dict[str, WeightName] = {f"layers.{index}.{name}": f"model.layers.{index}.{name}" for name in parameters}
        if arch.sparse[index]:
            names.update(
                _mixture(arch.router.num_experts, f"layers.{index}.mlp", f"model.layers.{index}.{experts.block}", experts)
            )
        return names

    return decoder_names(arch, head, layer_names)


def _mixture(num_experts: int, module: str, block: str, names: ExpertNames) -> dict[str, WeightName]:
    def packed(shape: tuple[int, ...], *projections: str) -> PackedWeight:
        stored = (f"{block}.experts.{expert}.{name}.weight" for expert in range(num_experts) for name in projections)
        return PackedWeight((num_experts, *shape), tuple(stored))

    return {
        f"{module}.gate.weight": f"{block}.gate.weight",
        f"{module}.experts.gate_up_proj": packed((2,), names.gate, names.up),
        f"{module}.experts.down_proj": packed((), names.down),
    }
