"""State of Megatron's distributed optimizer: of each parameter, and by storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_backend.contracts.operations import Part


class ParameterState(NamedTuple):
    """This rank's part of one parameter.

    Attributes:
        parameter: of the model.
        start, end: the part, in elements of the flattened parameter.
        tensors: flat, ``end - start`` elements each: ``param`` (the master; a view of the parameter when it is float32)
            and the moments ``exp_avg`` and ``exp_avg_sq``.
    """

    parameter: nn.Parameter
    start: int
    end: int
    tensors: Mapping[str, Tensor]


def distributed_optimizers(megatron: Any) -> list[Any]:
    """The ``DistributedOptimizer`` objects in a ``MegatronOptimizer``: one for experts, one for the rest."""
    parts = getattr(megatron, "chained_optimizers", [megatron])
    return [part for part in parts if not part.is_stub_optimizer]


def allocate_moments(megatron: Any) -> None:
    """Allocates what Adam would in its first step, so that offloading and checkpoints see one layout at all times."""
    for part in distributed_optimizers(megatron):
        adam = part.optimizer
        fresh = [(group, each) for group in adam.param_groups for each in group["params"] if not adam.state[each]]
        part.init_state_fn(adam, part.config)
        for group, parameter in fresh:
            if isinstance(adam, torch.optim.Adam):
                device = parameter.device if group["fused"] or group["capturable"] else torch.device("cpu")
                adam.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=device)


def parameter_states(megatron: Any) -> Iterator[ParameterState]:
    """Every parameter of which this rank has a part."""
    for part in distributed_optimizers(megatron):
        for parameter in part.model_param_group_index_map:
            span = part._get_model_param_range_map(parameter)["param"]
            tensors = part._get_main_param_and_optimizer_states(parameter)
            yield ParameterState(
                parameter, span.start, span.end, {name: tensors[name] for name in ("param", "exp_avg", "exp_avg_sq")}
            )


def num_steps(megatron: Any) -> int:
    """Steps that Adam has taken. torch counts them for each parameter, the Adam of Transformer Engine for each group."""
    for part in distributed_optimizers(megatron):
        adam = part.optimizer
        if isinstance(adam, torch.optim.Adam):
            counts = [state["step"] for state in adam.state.values()]
        else:
            counts = [group.get("step", 0) for group in adam.param_groups if group["params"]]
        if counts:
            return int(counts[0])
    return 0


def set_num_steps(megatron: Any, steps: int) -> None:
    """Makes the next step of Adam the one after ``steps``."""
    for part in distributed_optimizers(megatron):
        adam = part.optimizer
        if isinstance(adam, torch.optim.Adam):
            for state in adam.state.values():
                state["step"].fill_(steps)
        else:
            for group in adam.param_groups:
                group["step"] = steps


def part_tensors(chunks: Sequence[Any], megatron: Any | None) -> dict[Part, list[Tensor]]:
    """This rank's tensors of each part that a model has.

    Args:
        chunks: the model.
        megatron: its ``MegatronOptimizer``; None without one.

    Parameters, and gradients, of one dtype share a buffer. In float32 the optimizer's masters are views of the parameters:
    they go with the model.
    """
    parts: dict[Part, list[Tensor]] = {"model": [parameter.detach() for chunk in chunks for parameter in chunk.parameters()]}
    if megatron is not None:
        buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        parts["grad"] = [buffer.grad_data for buffer in buffers]
        held = [
            tensor
            for part in distributed_optimizers(megatron)
            for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"])
            for tensor in [parameter, *part.optimizer.state[parameter].values()]
            if isinstance(tensor, Tensor)
        ]
        models = {tensor.untyped_storage()._cdata for tensor in parts["model"]}
        parts["optimizer"] = [tensor.detach() for tensor in held if tensor.untyped_storage()._cdata not in models]
    return parts
