"""Megatron-Bridge's conversion of parameters to Hugging Face tensors, planned once and run piece by piece."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.bridge.models.conversion import param_mapping
from megatron.bridge.models.conversion.model_bridge import WeightConversionTask
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from rl_backend.checkpoint.hf_reader import HFReader
from rl_backend.contracts import VALUE_HEAD_WEIGHTS, Head, UnsupportedError
from rl_backend.parallel.collectives import gather_objects
from rl_backend.runtime.bridge.megatron.deltanet import FLOAT32_PARAMETERS
from rl_backend.runtime.export_stream import require_known_names

_EXPERT = re.compile(r"experts\.(\d+)")
_VALUE_HEAD = "output_layer.value_head"


@dataclass(frozen=True)
class Conversion:
    """What Megatron-Bridge gathers at one time: one parameter, or the same one of an expert on every expert-parallel rank.

    Attributes:
        tasks: Megatron-Bridge's, one, or those of all experts that the directory stores as one tensor. On ranks of other
            pipeline stages they have no parameter.
        shapes: Hugging Face name -> shape of what comes out, in order, the same on every rank.
        trained: it has a gradient; buffers have none.
    """

    tasks: tuple[Any, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    trained: bool

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values()) * self.dtype.itemsize

    @property
    def in_float32(self) -> bool:
        """Whether Megatron computes with the parameter in float32, whatever the dtype of the rest."""
        return self.tasks[0].global_param_name.rpartition(".")[2] in (*FLOAT32_PARAMETERS, "expert_bias")

    def __str__(self) -> str:
        first, *others = self.shapes
        return f"{first} (gathered with {', '.join(others)})" if others else first


@dataclass(eq=False)
class WeightConverter:
    """Converts one model, whose weights :func:`load_model` has loaded. Making one is a collective over the pipeline stages.

    Attributes:
        models: this rank's chunks without their wrappers.
        pretrained, model_bridge: the directory, and Megatron-Bridge's part for the model family.
        hf_path: the directory that the model was built from; its headers say the shapes.
        conversions: in the order of export, the same on every rank.
    """

    models: Sequence[nn.Module]
    pretrained: Any
    model_bridge: Any
    pg: ProcessGroupCollection
    head: Head
    hf_path: str
    conversions: tuple[Conversion, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._config: Any = self.models[0].config
        self.conversions = self._plan()

    @property
    def names(self) -> list[str]:
        """Hugging Face names of all weights, in the order of export."""
        return [name for conversion in self.conversions for name in conversion.shapes]

    def select(self, operation: str, names: Collection[str] | None) -> list[Conversion]:
        """Those that give a tensor of ``names``; raises :class:`ConfigError` for a name that the model does not have."""
        require_known_names(operation, names, self.names)
        return [each for each in self.conversions if names is None or not each.shapes.keys().isdisjoint(names)]

    @torch.no_grad()
    def convert(
        self, conversion: Conversion, replacements: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of a conversion, whole, on every rank. A collective over the ranks of a model replica.
        ``replacements``: :func:`parameter_key` -> what to convert instead of the parameter, of the same shape. The
        conversion is linear then: the constant that some norms add to their weight is left out.
        """
        tasks = list(conversion.tasks)
        if replacements is not None:
            tasks = [_replaced(task, replacements) for task in tasks]
        missing = dict(conversion.shapes)
        stream = self.model_bridge.stream_weights_megatron_to_hf(
            self.models, self.pretrained, cpu=False, show_progress=False, conversion_tasks=tasks, merge_adapter_weights=False
        )
        for name, tensor in stream:
            # A tied lm_head comes as well when the directory stores it.
            if name in missing:
                yield name, _in_shape(name, tensor, missing.pop(name))
        if missing:
            raise UnsupportedError(
                f"Megatron-Bridge converted {tasks[0].global_param_name} without giving {', '.join(missing)}",
                names=list(missing),
            )

    def release(self) -> None:
        self.models = ()
        self.conversions = ()

    def _plan(self) -> tuple[Conversion, ...]:
        tasks = [task for task in self.model_bridge.build_conversion_tasks(self.pretrained, self.models) if task is not None]
        shapes: dict[str, tuple[int, ...]] = {name: info.shape for name, info in HFReader(self.hf_path).infos.items()}
        if self.head == "values":
            tasks += self._value_head_tasks()
            shapes |= dict(zip(VALUE_HEAD_WEIGHTS, [(1, self._config.hidden_size), (1,)], strict=True))
        found = self._found(tasks)
        members: dict[str, list[Any]] = {}
        for task in tasks:
            members.setdefault(task.mapping.group_key if is_stacked(task) else task.global_param_name, []).append(task)
        return tuple(
            Conversion(tuple(group), self._named_shapes(group, shapes), *found[group[0].global_param_name])
            for group in members.values()
        )

    def _value_head_tasks(self) -> list[Any]:
        # No family of Megatron-Bridge has a critic's head.
        modules = [dict(model.named_modules()).get(_VALUE_HEAD) for model in self.models]
        stage, head = next(((stage, module) for stage, module in enumerate(modules) if module is not None), (None, None))
        fields = {hf_name: hf_name.rpartition(".")[2] for hf_name in VALUE_HEAD_WEIGHTS}
        return [
            WeightConversionTask(
                param_name=f"{_VALUE_HEAD}.{field}",
                global_param_name=f"{_VALUE_HEAD}.{field}",
                mapping=param_mapping.ReplicatedMapping(f"{_VALUE_HEAD}.{field}", hf_name),
                vp_stage=stage,
                megatron_module=head,
                param_weight=None if head is None else head.get_parameter(field),
            )
            for hf_name, field in fields.items()
        ]

    def _found(self, tasks: Sequence[Any]) -> dict[str, tuple[torch.dtype, bool]]:
        """Global parameter name -> dtype and whether it is trained, from the stages that have it."""
        here = {
            task.global_param_name: (task.param_weight.dtype, isinstance(task.param_weight, nn.Parameter))
            for task in tasks
            if task.param_weight is not None
        }
        return {name: found for stage in gather_objects(here, self.pg.pp) for name, found in stage.items()}

    def _named_shapes(self, tasks: Sequence[Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The names that ``megatron_to_hf`` of Megatron-Bridge's mappings gives, with the directory's shapes."""
        names = list(hf_names(tasks[0]))
        if tasks[0].mapping.is_expert and not is_stacked(tasks[0]):
            names = [name for template in names for name in self._of_every_rank(template)]
        return {name: shapes[name] for name in names}

    def _of_every_rank(self, template: str) -> list[str]:
        # Each expert-parallel rank converts one of its experts at the same time.
        size, found = self.pg.ep.size(), _EXPERT.search(template)
        if size == 1 or found is None:
            return [template]
        per_rank = self._config.num_moe_experts // size
        return [_EXPERT.sub(f"experts.{int(found[1]) % per_rank + rank * per_rank}", template) for rank in range(size)]


def hf_names(task: Any) -> tuple[str, ...]:
    names = task.mapping.hf_param
    return (names,) if isinstance(names, str) else tuple(names.values())


def unconverted(models: Sequence[nn.Module], tasks: Sequence[Any]) -> list[str]:
    """Parameters that no task converts; not the last stage's copy of tied embeddings, which has no weights of its own."""
    converted = {parameter_key(task) for task in tasks if task.param_weight is not None}
    return [
        name
        for stage, model in enumerate(models)
        for name, _ in model.named_parameters()
        if f"{stage}.{name}" not in converted
        and not (name == "output_layer.weight" and getattr(model, "share_embeddings_and_output_weights", False))
    ]


def parameter_key(task: Any) -> str:
    """``<virtual stage>.<name in the chunk>`` of the parameter that a task converts."""
    return f"{task.vp_stage}.{task.param_name}"


def is_stacked(task: Any) -> bool:
    """Whether the directory stores the experts of this parameter as one tensor."""
    return bool(getattr(task.mapping, "is_grouped_export", False))


def _replaced(task: Any, replacements: Mapping[str, Tensor]) -> Any:
    mapping = task.mapping
    if isinstance(mapping, param_mapping.RMSNorm2ZeroCenteredRMSNormMapping):
        mapping = param_mapping.AutoMapping(mapping.megatron_param, mapping.hf_param)
    else:
        # Mappings remember the dtype of what came from another stage.
        mapping = mapping.resolve(())
    weight = None if task.param_weight is None else replacements[parameter_key(task)]
    return dataclasses.replace(task, mapping=mapping, param_weight=weight)


def _in_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Without the rows by which Megatron pads a vocabulary, and with the dimensions of 1 that gathering experts drops."""
    if tensor.dim() == len(shape) and tensor.shape[1:] == shape[1:] and tensor.shape[0] > shape[0]:
        return tensor[: shape[0]]
    if tensor.numel() != math.prod(shape):
        raise UnsupportedError(
            f"{name}: Megatron-Bridge gave the shape {tuple(tensor.shape)}, the directory stores {shape}", name=name
        )
    return tensor.reshape(shape)
