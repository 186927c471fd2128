"""Megatron-Bridge's conversion of parameters to Hugging Face tensors, planned once and run piece by piece."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ReplicatedMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import VALUE_HEAD_WEIGHTS, Head, UnsupportedError

_EXPERT = re.compile(r"experts\.(\d+)")
_VALUE_HEAD = "output_layer.value_head"


@dataclass(frozen=True)
class Conversion:
    """What Megatron-Bridge gathers at one time: the parts of one parameter, or those of all experts of a stacked one.

    Attributes:
        tasks: Megatron-Bridge's; on ranks of other pipeline stages without a parameter.
        shapes: Hugging Face name -> shape of what comes out, in order, the same on every rank.
        dtype: of the parameter.
    """

    tasks: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def names(self) -> str:
        """For messages."""
        first, *others = self.shapes
        return f"{first} (converted together with {len(others)} more)" if others else first

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def plan_conversions(
    models: Sequence[nn.Module], bridge: Any, model_bridge: Any, pg: ProcessGroupCollection, head: Head, hf_path: str
) -> tuple[Conversion, ...]:
    """The conversions of a model in one order on every rank. A collective over the pipeline stages.

    Args:
        models: this rank's chunks without their wrappers.
        bridge: the ``AutoBridge``; ``model_bridge`` its part for the family.
        hf_path: the directory that the model was built from; its headers say the shapes.

    Raises:
        UnsupportedError: a parameter that Megatron-Bridge does not convert, or under a name that the directory lacks.
    """
    tasks = [task for task in model_bridge.build_conversion_tasks(bridge.hf_pretrained, list(models)) if task is not None]
    shapes: dict[str, tuple[int, ...]] = {name: info.shape for name, info in HFReader(hf_path).infos.items()}
    if head == "values":
        tasks += _value_head_tasks(models)
        hidden_size = models[0].config.hidden_size
        shapes |= dict(zip(VALUE_HEAD_WEIGHTS, ((1, hidden_size), (1,)), strict=True))
    _require_every_parameter(models, tasks)
    dtypes = _dtypes(tasks, pg.pp)
    groups: dict[str, list[Any]] = {}
    for task in tasks:
        # Experts that the directory stores as one tensor are converted together.
        key = task.mapping.group_key if _is_stacked(task) else task.global_param_name
        groups.setdefault(key, []).append(task)
    return tuple(
        Conversion(tuple(members), _named_shapes(members, shapes, pg, hf_path), dtypes[members[0].global_param_name])
        for members in groups.values()
    )


@torch.no_grad()
def convert(
    conversion: Conversion,
    models: Sequence[nn.Module],
    bridge: Any,
    model_bridge: Any,
    replacements: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Gathers and converts one conversion; every rank gets every tensor. A collective over the model's ranks.

    Args:
        replacements: tensors to convert in the place of parameters, by their id in :func:`parameter_id`; all of one dtype.
            They are converted linearly: a norm's constant offset is not applied.
    """
    tasks = list(conversion.tasks)
    if replacements is not None:
        tasks = [_replaced(task, replacements) for task in tasks]
    found = dict.fromkeys(conversion.shapes)
    stream = model_bridge.stream_weights_megatron_to_hf(
        list(models),
        bridge.hf_pretrained,
        cpu=False,
        show_progress=False,
        conversion_tasks=tasks,
        merge_adapter_weights=False,
    )
    for name, tensor in stream:
        # A tied lm_head comes a second time when the directory stores it.
        if name in found:
            yield name, _without_padding(name, tensor, conversion.shapes[name])
            found.pop(name)
    if found:
        raise UnsupportedError(
            f"Megatron-Bridge converted {conversion.tasks[0].global_param_name} without {', '.join(found)}", names=list(found)
        )


def parameter_id(task: Any) -> str:
    """Which parameter of this rank a task converts."""
    return f"{task.vp_stage}:{task.param_name}"


def _replaced(task: Any, replacements: Mapping[str, Tensor]) -> Any:
    mapping = task.mapping
    if isinstance(mapping, RMSNorm2ZeroCenteredRMSNormMapping):
        mapping = AutoMapping(mapping.megatron_param, mapping.hf_param)
    weight = None if task.param_weight is None else replacements[parameter_id(task)]
    return dataclasses.replace(task, mapping=mapping, param_weight=weight)


def _without_padding(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Megatron pads the vocabulary to a multiple of the tensor-parallel size, and squeezes dimensions of gathered experts."""
    if tensor.dim() == len(shape) and tensor.shape[1:] == shape[1:] and tensor.shape[0] > shape[0]:
        return tensor[: shape[0]]
    if tensor.numel() != math.prod(shape):
        raise UnsupportedError(
            f"{name}: Megatron-Bridge converted the model's parameter to shape {tuple(tensor.shape)}, the directory has {shape}",
            name=name,
        )
    return tensor.reshape(shape)


def _value_head_tasks(models: Sequence[nn.Module]) -> list[Any]:
    """Tasks for a critic's head, which no family of Megatron-Bridge has."""
    tasks = []
    for hf_name in VALUE_HEAD_WEIGHTS:
        name = f"{_VALUE_HEAD}.{hf_name.rpartition('.')[2]}"
        owners = [(stage, model) for stage, model in enumerate(models) if name in dict(model.named_parameters())]
        stage, model = owners[0] if owners else (None, None)
        tasks.append(
            WeightConversionTask(
                param_name=name,
                global_param_name=name,
                mapping=ReplicatedMapping(name, hf_name),
                vp_stage=stage,
                megatron_module=None if model is None else model.get_submodule(_VALUE_HEAD),
                param_weight=None if model is None else model.get_parameter(name),
            )
        )
    return tasks


def _require_every_parameter(models: Sequence[nn.Module], tasks: Sequence[Any]) -> None:
    converted = {parameter_id(task) for task in tasks if task.param_weight is not None}
    for stage, model in enumerate(models):
        tied = getattr(model, "share_embeddings_and_output_weights", False)
        for name, _ in model.named_parameters():
            if f"{stage}:{name}" not in converted and not (tied and name == "output_layer.weight"):
                raise UnsupportedError(
                    f"Megatron-Bridge has no Hugging Face name in the directory for the parameter {name}", name=name
                )


def _dtypes(tasks: Sequence[Any], group: dist.ProcessGroup) -> dict[str, torch.dtype]:
    here = {task.global_param_name: task.param_weight.dtype for task in tasks if task.param_weight is not None}
    stages: list[dict[str, torch.dtype] | None] = [None] * group.size()
    dist.all_gather_object(stages, here, group=group)
    return {name: dtype for stage in stages if stage is not None for name, dtype in stage.items()}


def _is_stacked(task: Any) -> bool:
    return bool(getattr(task.mapping, "is_grouped_export", False))


def _named_shapes(
    tasks: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], pg: ProcessGroupCollection, hf_path: str
) -> dict[str, tuple[int, ...]]:
    """Names as ``MegatronParamMapping.megatron_to_hf`` gives them, with the directory's shapes."""
    mapping = tasks[0].mapping
    templates = [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())
    names = templates
    if mapping.is_expert and not _is_stacked(tasks[0]):
        names = [name for template in templates for name in _of_every_rank(template, tasks[0], pg)]
    missing = [name for name in names if name not in shapes]
    if missing:
        raise UnsupportedError(
            f"Megatron-Bridge converts {tasks[0].global_param_name} to {', '.join(missing[:4])}, which {hf_path} does not have",
            names=missing,
        )
    return {name: shapes[name] for name in names}


def _of_every_rank(template: str, task: Any, pg: ProcessGroupCollection) -> list[str]:
    """An expert's name on each expert-parallel rank: they convert one expert each at the same time."""
    size = pg.ep.size()
    found = _EXPERT.search(template)
    if size == 1 or found is None:
        return [template]
    per_rank = task.mapping.num_experts // size if hasattr(task.mapping, "num_experts") else 0
    first = int(found[1]) % per_rank
    return [_EXPERT.sub(f"experts.{first + rank * per_rank}", template) for rank in range(size)]
