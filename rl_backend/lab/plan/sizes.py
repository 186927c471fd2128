"""Sizes of a model's parameters on one rank, and of what is gathered of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl_backend.parallel.shards import local_tensor
from rl_backend.primitive.float32 import kept_ends, parameters_in_float32


class ParameterSize(NamedTuple):
    """Elements of one parameter.

    Attributes:
        held: what this rank keeps of it.
        computed: what this rank computes with, of a parameter that tensor or expert parallelism splits: its part.
        whole: shape on all ranks together.
        trained: whether it has a gradient.
        in_float32: it is computed with in float32, whatever the dtype of the rest.
    """

    held: int
    computed: int
    whole: tuple[int, ...]
    trained: bool
    in_float32: bool


@dataclass(frozen=True)
class ShardedStage:
    """Parameters of a stage, or of a model without stages, on one rank.

    Attributes:
        parameters: by name.
        units: name -> names of the parameters that FSDP gathers with that module; those of the root under "". Empty where
            nothing is sharded.
        ends: names of those outside the layers, where they are computed with in float32.
    """

    parameters: Mapping[str, ParameterSize]
    units: Mapping[str, Sequence[str]]
    ends: frozenset[str] = frozenset()

    @classmethod
    def of(cls, sharded: nn.Module, plain: nn.Module) -> Self:
        """Args:
        sharded: as the runtime builds it.
        plain: the same without FSDP.
        """
        computed = {name: local_tensor(value).numel() for name, value in plain.named_parameters()}
        in_float32 = parameters_in_float32(plain)
        parameters = {
            name: ParameterSize(
                local_tensor(value).numel(), computed[name], tuple(value.shape), value.requires_grad, name in in_float32
            )
            for name, value in sharded.named_parameters()
        }
        modules = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
        units: dict[str, list[str]] = {module: [] for module in modules}
        for name in parameters if units else ():
            units[max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)].append(name)
        kept = {id(parameter) for end in kept_ends(plain) for parameter in end.parameters()}
        ends = frozenset(name for name, parameter in plain.named_parameters() if id(parameter) in kept)
        return cls(parameters, units, ends)

    def gathered_bytes(self, dtype: torch.dtype, *, all_at_once: bool) -> int:
        """Bytes of :meth:`gathered` where layers are computed with in ``dtype``."""
        of_ends = sum(self.parameters[name].computed for names in self.units.values() for name in names if name in self.ends)
        wider = torch.float32.itemsize - dtype.itemsize
        return self.gathered(all_at_once=all_at_once) * dtype.itemsize + of_ends * wider

    def held_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of what this rank keeps of a model that is not trained, whose layers are computed with in ``dtype``."""
        wide = torch.float32.itemsize
        return sum(size.held * (wide if name in self.ends else dtype.itemsize) for name, size in self.parameters.items())

    def gathered(self, *, all_at_once: bool, trained: bool = False) -> int:
        """Elements of whole parameters that exist at one time.

        Args:
            all_at_once: nothing is freed between forward and backward. Otherwise two layers are there, the one that
                computes and the one that is fetched ahead, and the parameters outside of layers.
            trained: count those that have gradients only.
        """
        sizes = {
            unit: sum(self.parameters[name].computed for name in names if self.parameters[name].trained or not trained)
            for unit, names in self.units.items()
        }
        if all_at_once:
            return sum(sizes.values())
        layers = [unit for unit in sizes if unit and not any(unit.startswith(f"{other}.") for other in sizes if other)]
        whole = [sum(size for unit, size in sizes.items() if f"{unit}.".startswith(f"{layer}.")) for layer in layers]
        return sizes.get("", 0) + 2 * max(whole, default=0)
