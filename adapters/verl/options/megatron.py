"""Megatron's own fields in verl's ``override_`` dictionaries, as options of either runtime."""

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from adapters.verl.options.decisions import (
    ADAM,
    DDP,
    DECISIONS,
    EMBEDDING,
    FIRST,
    LAST,
    LAYOUT,
    LOSS,
    STAGE_FIELDS,
    TRANSFORMER,
    Decision,
    same,
)
from rl_backend.contracts import EXPERT_COUNTS, ConfigError, ParallelConfig, UnsupportedError
from rl_backend.model import find_model
from rl_backend.runtime.bridge import config as bridge_config

OF_DTYPE = frozenset({"bf16", "fp16", "params_dtype"})
_OF_CONFIG = """
activation_func activation_func_clamp_value add_bias_linear add_qkv_bias apply_residual_connection_post_layernorm
attention_output_gate experimental_attention_variant ffn_hidden_size gated_linear_unit glu_linear_offset
heterogeneous_block_specs hidden_size is_hybrid_model kv_channels layernorm_epsilon layernorm_zero_centered_gamma
linear_attention_freq moe_apply_probs_on_input moe_ffn_hidden_size moe_latent_size moe_layer_freq moe_router_group_topk
moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk moe_router_topk_limited_devices
moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size mrope_section mtp_detach_heads
mtp_hybrid_override_pattern mtp_num_layers mtp_standalone mtp_use_repeated_layer multi_latent_attention no_rope_freq
num_attention_heads num_layers num_moe_experts num_query_groups qk_l2_norm qk_layernorm rotary_interleaved softmax_scale
softmax_type use_mup window_attn_skip_freq window_size
"""
DECIDED = OF_DTYPE.union(_OF_CONFIG.split())
"""Fields that ``config.json`` and the dtype decide, so that Megatron's default says nothing about them."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a language model; ``hf_config`` is transformers' configuration of it, ``dtype`` the engine's."""

    hf_config: Any
    dtype: str

    @property
    def model_type(self) -> str | None:
        return getattr(self.hf_config, "model_type", None)

    @property
    def num_layers(self) -> int:
        return getattr(self.hf_config, "num_hidden_layers", 0)

    @property
    def has_experts(self) -> bool:
        return has_experts(self.hf_config)

    @property
    def of_dtype(self) -> Mapping[str, Any]:
        return {"bf16": self.dtype == "bfloat16", "fp16": False, "params_dtype": f"torch.{self.dtype}"}

    @cached_property
    def of_config(self) -> Mapping[str, Any]:
        """The other fields of ``DECIDED``; none of a model that Megatron-Bridge does not have.

        Raises:
            UnsupportedError: Megatron is not installed.
        """
        from rl_backend.runtime.bridge.installed import import_megatron, quiet

        import_megatron()
        from megatron.bridge import AutoBridge
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        from rl_backend.runtime.bridge.model.provider import complete_provider

        config = copy.deepcopy(self.hf_config)
        # Directories of critics, and of models that also read images, name another class.
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)]
        try:
            with quiet():
                provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError):
            return {}
        complete_provider(config, provider)
        found = {name: getattr(provider, name) for name in DECIDED - OF_DTYPE if hasattr(provider, name)}
        found["activation_func"] = found["activation_func"].__name__
        # As Megatron itself fills in what is left out.
        if found["num_moe_experts"] is not None:
            found["moe_ffn_hidden_size"] = found["moe_ffn_hidden_size"] or found["ffn_hidden_size"]
        found["kv_channels"] = found["kv_channels"] or found["hidden_size"] // found["num_attention_heads"]
        if found["multi_latent_attention"]:
            # Keys and values of latent attention have different sizes, which Megatron reads elsewhere.
            del found["kv_channels"]
        return found | {name: layers_or_period(found[name]) for name in ("linear_attention_freq", "window_attn_skip_freq")}


def layers_or_period(layers: Any) -> Any:
    """Megatron's number for a periodic pattern of layers, of which the last is another; any other pattern as it is."""
    if not isinstance(layers, Sequence):
        return layers
    period = layers.index(0) + 1 if 0 in layers else len(layers) + 1
    return period if list(layers) == [int((layer + 1) % period != 0) for layer in range(len(layers))] else list(layers)


def text_config(hf_config: Any) -> Any:
    """The language model's part of transformers' configuration, where the model also reads images."""
    return getattr(hf_config, "text_config", None) or hf_config


def has_experts(hf_config: Any) -> bool:
    config = text_config(hf_config)
    return any(getattr(config, name, None) for name in EXPERT_COUNTS)


_ON_THE_BRIDGE = {TRANSFORMER: bridge_config.TRANSFORMER, DDP: bridge_config.DDP, ADAM: bridge_config.OPTIMIZER}
_AUX, _Z, _BALANCING = "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type"
_BIAS, _BIAS_RATE = "moe_router_enable_expert_bias", "moe_router_bias_update_rate"
_OFFLOAD, _FRACTION = "optimizer_cpu_offload", "optimizer_offload_fraction"
# verl's own fields set these, whatever Megatron's defaults are.
_SET_BY_VERL = frozenset({"lr", "min_lr", "weight_decay", "clip_grad", "use_distributed_optimizer"})
_NOWHERE = {
    **dict.fromkeys(("fp8", "fp4", "fp8_recipe"), "parameters are bfloat16 or float32 in both runtimes; remove it"),
    "cpu_offloading": "activations stay on the device; recompute them with recompute_granularity",
    **dict.fromkeys(
        ("moe_token_dispatcher_type", "moe_enable_deepep", "moe_shared_expert_overlap"),
        "backend=bridge sends tokens to experts by all-to-all; remove it, or set backend=native",
    ),
}
"""Fields that no runtime has, and why."""

type Given = Mapping[str, Mapping[str, Any]]
"""``TRANSFORMER``, ``DDP`` and ``ADAM`` -> fields, the former without those of recomputation, the latter without Adam's."""


def native_options(given: Given, facts: ModelFacts, parallel: ParallelConfig) -> dict[str, Any]:
    """Fields of ``NativeConfig`` for what the three dictionaries ask for; :class:`ConfigError` for what it cannot honour."""
    asked = {where: _asked(where, fields, parallel, facts) for where, fields in given.items()}
    # Kernels have the same results, so a runtime that has others may take any of them.
    asked[TRANSFORMER] = {name: value for name, value in asked[TRANSFORMER].items() if not _decision(name).is_kernel}
    transformer = asked[TRANSFORMER]
    options: dict[str, Any] = {}
    stages = {name: transformer.pop(name) for name in STAGE_FIELDS if name in transformer}
    if stages:
        options["pipeline_layers"] = stage_layers(TRANSFORMER, stages, facts.num_layers, parallel.pp, parallel.vpp)
    losses = _router_losses(transformer, facts)
    if losses:
        options |= {"model": find_model("auto", {"model_type": facts.model_type}).name, "model_cfg": losses}
    _require_known(asked, "native")
    return options


def bridge_options(
    given: Given, facts: ModelFacts, parallel: ParallelConfig, *, transformer_engine: bool
) -> dict[str, dict[str, Any]]:
    """Fields of ``BridgeConfig``: the dictionaries without what asks for nothing; :class:`ConfigError` as for native.

    Args:
        transformer_engine: whether layers can be Transformer Engine's here.
    """
    asked = {where: _asked(where, fields, parallel, facts) for where, fields in given.items()}
    allowed = bridge_config.TRANSFORMER.allowed
    asked[TRANSFORMER] = transformer = {
        name: value
        for name, value in asked[TRANSFORMER].items()
        if name in allowed or not _decision(name).is_kernel or (name in _NOWHERE and value not in (False, "alltoall"))
    }
    _require_types(TRANSFORMER, transformer)
    if parallel.pp == 1:
        # There are no outputs between stages to free.
        transformer.pop("deallocate_pipeline_outputs", None)
    if transformer.get(_AUX):
        # Megatron's default: with it the coefficient has an effect.
        transformer.setdefault(_BALANCING, "aux_loss")
    elif transformer.get(_BALANCING) in ("none", "aux_loss"):
        # Without a coefficient neither adds a loss.
        del transformer[_BALANCING]
    if not facts.has_experts:
        _require_no_experts({name: value for name, value in transformer.items() if name.startswith("moe_") and value})
        asked[TRANSFORMER] = transformer = {name: transformer[name] for name in transformer if not name.startswith("moe_")}
    _require_known(asked, "bridge")
    kernels = [name for name in bridge_config.NEEDS_TRANSFORMER_ENGINE if transformer.get(name)]
    if kernels and not transformer_engine:
        problem = (
            "chooses a kernel of Transformer Engine, which needs CUDA and the package transformer-engine; remove it, or "
            "set backend=native, where it has no meaning"
        )
        raise ConfigError.of(f"{TRANSFORMER}[{kernels[0]!r}]", transformer[kernels[0]], problem)
    return {where.rpartition(".")[2]: fields for where, fields in asked.items()}


def optimizer_on_host(overrides: Mapping[str, Any] | None) -> bool:
    given = overrides or {}
    offload, fraction = given.get(_OFFLOAD), given.get(_FRACTION)
    if (offload and fraction not in (0, 1)) or (fraction and not offload):
        problem = (
            "the optimizer's state is offloaded whole, and Megatron reads neither field without the other; set "
            f"{_OFFLOAD}=True with {_FRACTION}=1, or megatron.optimizer_offload=True"
        )
        raise ConfigError.of(ADAM, {_OFFLOAD: offload, _FRACTION: fraction}, problem)
    return bool(offload and fraction == 1)


@functools.cache
def megatron_defaults(where: str) -> Mapping[str, Any]:
    """Default of each field of one of Megatron's classes; dtypes, functions and members of enumerations by name."""
    from rl_backend.runtime.bridge.installed import import_megatron

    import_megatron()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind = {TRANSFORMER: TransformerConfig, DDP: DistributedDataParallelConfig, ADAM: OptimizerConfig}[where]
    return {field.name: _as_text(field) for field in dataclasses.fields(kind)}


def _as_text(field: dataclasses.Field[Any]) -> Any:
    value: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if isinstance(value, bool | int | float | str | list | tuple | None):
        return value
    return str(value) if isinstance(value, torch.dtype) else getattr(value, "name", None) or value.__name__


def _decision(name: str) -> Decision:
    return DECISIONS[TRANSFORMER].get(name, Decision())


def _asked(where: str, given: Mapping[str, Any], parallel: ParallelConfig, facts: ModelFacts) -> dict[str, Any]:
    asked = {}
    for name, value in given.items():
        decision = DECISIONS[where].get(name)
        if where == TRANSFORMER and name in bridge_config.SIZES:
            size = getattr(parallel, bridge_config.SIZES[name])
            if size != 1 or value is not None:
                _require_decided(where, name, value, {name: size}, f"the engine's {name}")
        elif name in DECIDED:
            told = f"torch.{str(value).removeprefix('torch.')}" if name == "params_dtype" else value
            if name in OF_DTYPE:
                _require_decided(where, name, told, facts.of_dtype, "the engine's dtype")
            else:
                _require_decided(where, name, told, _of_megatron(where, name, value, lambda: facts.of_config), "config.json")
        elif where == TRANSFORMER and _is_off(name, value, given, parallel):
            continue
        elif where == ADAM and (name in (_OFFLOAD, _FRACTION) or (decision and decision.is_kernel)):
            # optimizer_on_host reads the first two.
            continue
        elif decision is None:
            if name in _SET_BY_VERL or not _is_default(where, name, value):
                asked[name] = value
        elif not decision.takes(value):
            if decision.reason is not None:
                raise ConfigError.of(f"{where}[{name!r}]", value, f"{decision.reason}; remove it")
            asked[name] = value
    return asked


def _is_off(name: str, value: Any, given: Mapping[str, Any], parallel: ParallelConfig) -> bool:
    if name == "sequence_parallel":
        return value is False and parallel.tp == 1
    # A bias of 0 that never moves chooses no expert.
    return name == _BIAS and bool(value) and given.get(_BIAS_RATE) == 0


def _is_default(where: str, name: str, value: Any) -> bool:
    defaults = _of_megatron(where, name, value, lambda: megatron_defaults(where))
    return name in defaults and same(value, defaults[name])


def _of_megatron(where: str, name: str, value: Any, read: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    try:
        return read()
    except UnsupportedError as error:
        problem = f"cannot be compared with Megatron's value, which would ask for nothing; remove it. {error}"
        raise ConfigError.of(f"{where}[{name!r}]", value, problem) from error


def _require_decided(where: str, name: str, value: Any, decided: Mapping[str, Any], by: str) -> None:
    if name not in decided or not same(value, decided[name]):
        known = f", as {decided[name]!r}" if name in decided else ""
        raise ConfigError.of(f"{where}[{name!r}]", value, f"decided by {by}{known}; remove it")


def _router_losses(asked: dict[str, Any], facts: ModelFacts) -> dict[str, Any]:
    balancing = asked.pop(_BALANCING, None)
    given = {name: asked.pop(name) for name in (_AUX, _Z) if name in asked}
    if balancing not in (None, "aux_loss", "none") or (balancing == "none" and given.get(_AUX)):
        problem = f"backend=native has 'aux_loss', and 'none' without {_AUX}; set one of these, or backend=bridge"
        raise ConfigError.of(f"{TRANSFORMER}[{_BALANCING!r}]", balancing, problem)
    if not facts.has_experts:
        _require_no_experts(given)
    names = {_AUX: "router_aux_loss_coef", _Z: "router_z_loss_coef"}
    return {names[name]: value for name, value in given.items()}


def _require_no_experts(asked: Mapping[str, Any]) -> None:
    problem = "this model has no experts; remove it"
    ConfigError.refuse_all((f"{TRANSFORMER}[{name!r}]", value, problem) for name, value in asked.items())


def _require_known(asked: Given, backend: str) -> None:
    ConfigError.refuse_all(
        (f"{where}[{name!r}]", value, reason)
        for where, fields in asked.items()
        for name, value in fields.items()
        if (reason := _why_unknown(_ON_THE_BRIDGE[where], name, backend))
    )


def _why_unknown(bridge: bridge_config.Overrides, name: str, backend: str) -> str:
    if name in bridge.allowed:
        here = "a field of Megatron's that backend=native does not have; remove it or set backend=bridge"
        return here if backend == "native" else ""
    if name in bridge.elsewhere and name not in _NOWHERE:
        return f"decided by {bridge.elsewhere[name]}; remove it"
    return _NOWHERE.get(name, "neither runtime has this field of Megatron's; remove it")


def stage_layers(where: str, fields: Mapping[str, Any], num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of each of the ``pp * vpp`` pipeline stages in the order of the model, as Megatron counts them.

    Args:
        where: name of the dictionary, for errors.
        fields: of ``STAGE_FIELDS``, at least one, those that ask for something.

    Raises:
        ConfigError: fields that contradict each other or do not fit the layers.
    """
    _require_types(where, fields)
    kinds = sum(any(name in fields for name in kind) for kind in ((LAYOUT,), (FIRST, LAST), (EMBEDDING, LOSS)))
    stages: tuple[int, ...] = ()
    if pp == 1:
        problem = "needs stages; set pipeline_model_parallel_size above 1"
    elif kinds > 1:
        problem = "exclude each other; keep the layout, first and last, or embedding and loss"
    elif LAYOUT in fields:
        stages = _layers_of_layout(fields[LAYOUT])
        problem = (
            f"expected E in front, L at the end, and t for each of {num_layers} layers between, in {pp * vpp} stages of |"
        )
    else:
        stages = _counted_layers(fields, num_layers, pp, vpp)
        problem = (
            f"cannot divide {num_layers} layers: what the first and the last of {pp} pipeline ranks do not take must divide "
            f"among the others, and each rank's among its {vpp} virtual stages; an embedding or a loss counts as a layer"
        )
    if len(stages) != pp * vpp or sum(stages) != num_layers:
        raise ConfigError.of(where, dict(fields), problem)
    return stages


def _require_types(where: str, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        of_layers = name in (FIRST, LAST)
        # True is an int in Python, and would be one layer.
        right = type(value) is int and value > 0 if of_layers else isinstance(value, bool)
        if name in (FIRST, LAST, EMBEDDING, LOSS) and not right:
            expected = "a number of layers, 1 or more, or null" if of_layers else "True or False"
            raise ConfigError.of(f"{where}[{name!r}]", value, f"expected {expected}")


def _counted_layers(fields: Mapping[str, Any], num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """None of them where they do not divide."""
    # The embedding and the loss take a layer's place in the first and in the last stage.
    num_layers += (EMBEDDING in fields) + (LOSS in fields)
    first, last = ([fields[name]] if name in fields else [] for name in (FIRST, LAST))
    between, ranks = num_layers - sum(first + last), pp - len(first + last)
    if between < ranks or (between % ranks if ranks else between):
        return ()
    sizes = [*first, *[between // max(ranks, 1)] * ranks, *last]
    if any(size % vpp for size in sizes):
        return ()
    # Stage ``chunk * pp + rank`` is part ``chunk`` of ``rank``.
    stages = [size // vpp for _chunk in range(vpp) for size in sizes]
    stages[0] -= EMBEDDING in fields
    stages[-1] -= LOSS in fields
    return tuple(stages)


def _layers_of_layout(layout: Any) -> tuple[int, ...]:
    """Reads Megatron's text, such as ``Et*3|(tt|)*2tL``: ``E`` embedding, ``t`` layer, ``L`` loss; none of another."""
    text = str(layout).strip("'\"").replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return tuple(stage.count("t") for stage in text.split("|")) if re.fullmatch(r"Et*(\|t*)*L", text) else ()
