"""Model families by name and by the ``model_type`` of a Hugging Face ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rl_backend.contracts import (
    MODEL_CONFIGS,
    Head,
    IndexedLayers,
    ModelOptions,
    NativeConfig,
    ParallelConfig,
    Registry,
    RoutedLayers,
    UnsupportedError,
    WeightName,
    text_config,
)
from rl_backend.model.input import BuildSettings
from rl_backend.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class ModelFamily:
    """One implementation of one architecture.

    Attributes:
        name: value of ``NativeConfig.model``.
        hf_model_types: values of ``model_type`` that this family is the default for.
        options_type: type of ``NativeConfig.model_cfg``.
        parse_config: ``config.json`` -> the family's own architecture description; raises
            :class:`~rl_backend.contracts.UnsupportedError` that names a field it cannot honour.
        configured: (architecture, options) -> the architecture with what the options change in it.
        build: (architecture, settings) -> module on the current default device (``meta`` when the runtime builds it), in
            float32, whose ``forward(ModelInput)`` returns a :class:`~rl_backend.contracts.ModelOutput`: ``log_probs`` and,
            on request, ``entropy``; with ``head="values"``, ``values`` alone. A stage that is not the last returns the
            ``ModelInput.hidden`` of the next. Parameters of a stage are called as in the whole model.
        parallelize: (module, groups, config) -> lays the module out over the ranks in place: the layouts that
            ``check_layout`` lets through, activation checkpointing, FSDP.
        weight_names: (architecture, head) -> parameter name in the module -> Hugging Face name, in export order, or a
            :class:`~rl_backend.contracts.PackedWeight` of several. A tied ``lm_head`` has no entry; the head of a critic has
            the names :data:`~rl_backend.contracts.VALUE_HEAD_WEIGHTS`, and starts at 0 where a checkpoint lacks them.
        heads: what ``build`` and ``weight_names`` understand.
        max_length: architecture -> longest sequence, in tokens. None takes ``max_position_embeddings`` of ``config.json``.
        num_layers: architecture -> number of layers, where ``build`` makes stages of pipelines. Hidden states between
            stages are as wide as ``hidden_size`` of ``config.json``.
        stage_copies: parameter that a last stage has of its own -> the first stage's parameter that it is a copy of.
        check_layout: (architecture, parallel) -> raises :class:`~rl_backend.contracts.ConfigError` for a layout that
            ``parallelize`` cannot make of this model. None stands for data parallelism only.
        routed_layers: architecture -> its layers with experts, where models take ``ModelInput.routes`` and route with one
            :class:`~rl_backend.primitive.router.Router` in each of them, in the order of their modules; None without any.
        indexed_layers: architecture -> its layers that choose keys, where models take ``ModelInput.keys``; None without any.
        float32_head: whether ``build`` makes a :class:`~rl_backend.primitive.float32.EndsInFloat32` that honours
            ``BuildSettings.layer_dtype``; else ``NativeConfig.head_in_float32`` is refused.
        stored_buffers: endings of Hugging Face names that directories hold and no parameter has; they are not read.
        kept_weights: architecture -> beginnings of Hugging Face names of weights that nothing here trains or computes with,
            such as a vision tower. A saved model has them byte for byte from the directory that it was built from.
        why_unshared: (architecture, options) -> what keeps models from taking a prefix tree in ``ModelInput.segments``;
            empty where nothing does. None where they take none.
        compiles: whether ``parallelize`` honours ``NativeConfig.compile``; else it is refused.
    """

    name: str
    hf_model_types: tuple[str, ...]
    options_type: type[ModelOptions]
    parse_config: Callable[[Mapping[str, Any]], Any]
    build: Callable[[Any, BuildSettings], nn.Module]
    parallelize: Callable[[nn.Module, ParallelGroups, NativeConfig], None]
    weight_names: Callable[[Any, Head], Mapping[str, WeightName]]
    heads: tuple[Head, ...] = ("log_probs",)
    max_length: Callable[[Any], int] | None = None
    num_layers: Callable[[Any], int] | None = None
    stage_copies: Mapping[str, str] = field(default_factory=dict)
    check_layout: Callable[[Any, ParallelConfig], None] | None = None
    routed_layers: Callable[[Any], RoutedLayers | None] | None = None
    indexed_layers: Callable[[Any], IndexedLayers | None] | None = None
    float32_head: bool = False
    stored_buffers: tuple[str, ...] = ()
    kept_weights: Callable[[Any], tuple[str, ...]] | None = None
    why_unshared: Callable[[Any, ModelOptions | None], str] | None = None
    configured: Callable[[Any, ModelOptions], Any] | None = None
    compiles: bool = False

    def positions(self, architecture: Any, hf_config: Mapping[str, Any]) -> int | None:
        """The longest sequence, in tokens; None where nothing limits it."""
        return self.max_length(architecture) if self.max_length is not None else _max_position_embeddings(hf_config)

    def architecture(self, hf_config: Mapping[str, Any], options: ModelOptions | None) -> Any:
        """What ``config.json`` and the family's options say together; None takes the options' defaults."""
        parsed = self.parse_config(hf_config)
        return parsed if self.configured is None else self.configured(parsed, options or self.options_type())

    def kept_prefixes(self, architecture: Any) -> tuple[str, ...]:
        return () if self.kept_weights is None else self.kept_weights(architecture)

    def require_head(self, head: Head) -> None:
        """Raises :class:`~rl_backend.contracts.UnsupportedError` for a head that the family does not have."""
        if head not in self.heads:
            raise UnsupportedError(
                f"head={head!r}: model family {self.name!r} has only {', '.join(map(repr, self.heads))}; add a family whose "
                "ModelFamily.heads lists it with register_model(...)",
                family=self.name,
                head=head,
            )


MODEL_FAMILIES: Registry[ModelFamily] = Registry("model family", "register_model(...)")


def register_model(family: ModelFamily) -> None:
    """Adds a family; raises :class:`~rl_backend.contracts.RegistryError` when its name is taken by another."""
    MODEL_CONFIGS.add(family.name, family.options_type)
    MODEL_FAMILIES.add(family.name, family)


def find_model(name: str, hf_config: Mapping[str, Any]) -> ModelFamily:
    """The family called ``name`` or, for ``auto``, the latest registered one that claims ``hf_config["model_type"]``.

    Raises:
        UnsupportedError: no family claims the ``model_type``.
    """
    if name != "auto":
        return MODEL_FAMILIES.get(name)
    model_type = hf_config.get("model_type")
    families = [MODEL_FAMILIES.get(key) for key in MODEL_FAMILIES]
    claimed = {kind: family for family in families for kind in family.hf_model_types}
    if not isinstance(model_type, str) or model_type not in claimed:
        raise UnsupportedError(
            f"model_type={model_type!r}: no registered model family; the native runtime has {', '.join(sorted(claimed))}; "
            "register_model(...) adds one",
            model_type=model_type,
        )
    return claimed[model_type]


def model_positions(hf_config: Mapping[str, Any], model: str = "auto") -> int | None:
    """The longest sequence of a model, in tokens; None where nothing limits it.

    Of a model without a family, or one that its family refuses, ``max_position_embeddings``.
    """
    try:
        family = find_model(model, hf_config)
        return family.positions(family.parse_config(hf_config), hf_config)
    except UnsupportedError:
        return _max_position_embeddings(hf_config)


def model_kept_prefixes(hf_config: Mapping[str, Any], model: str = "auto") -> tuple[str, ...]:
    """``ModelFamily.kept_weights`` of a model; none of one without a family, or that its family refuses."""
    try:
        family = find_model(model, hf_config)
        return family.kept_prefixes(family.parse_config(hf_config))
    except UnsupportedError:
        return ()


def _max_position_embeddings(hf_config: Mapping[str, Any]) -> int | None:
    value = text_config(hf_config).get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None
