"""Refusals of the bridge runtime, from ``config.json`` alone. Megatron is not imported."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import ConfigError, RuntimeConfig, UnsupportedError, text_config
from rl_backend.model.blocks import divisors, nearest
from rl_backend.runtime.bridge.config import BridgeConfig

UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
)
"""Overrides of Megatron that spread layers unevenly."""

COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Overrides of Megatron that leave the first or the last stage one layer less than the others."""


SUPPORTED = {"megatron-core": (0, 19), "megatron-bridge": (0, 6)}
"""Distribution -> the (major, minor) version whose internals this runtime was tested with."""

INSTALL = (
    "the bridge runtime needs megatron-core 0.19 and megatron-bridge 0.6: pip install 'rl-backend[bridge]', then "
    "pip install --no-deps megatron-bridge==0.6.2"
)


def require_installed() -> None:
    """Raises :class:`UnsupportedError` where Megatron is not installed here, or in another version."""
    for distribution, supported in SUPPORTED.items():
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            raise UnsupportedError(f"{distribution} is not installed; {INSTALL}", package=distribution) from None
        if Version(installed).release[:2] != supported:
            raise UnsupportedError(
                f"{distribution} {installed} is installed; {INSTALL}", package=distribution, installed=installed
            )


class LayerSizes(NamedTuple):
    """Numbers of a model that a layout divides; None where it is not known, and not checked.

    Attributes:
        num_experts: 0 for a dense model.
        model_type: of the text model; empty where it is not known.
        shared_expert_size: features inside of the expert of all tokens.
        linear_num_key_heads: of gated DeltaNet; each has the same number of value heads.
    """

    num_layers: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    ffn_hidden_size: int | None
    num_experts: int
    shared_expert_size: int | None = None
    linear_num_key_heads: int | None = None
    model_type: str = ""


_WHOLE_WITHOUT_TRANSFORMER_ENGINE = frozenset({"deepseek_v3", "glm4_moe_lite"})
"""``model_type`` of models whose gradients, with Megatron's own layers, differ between tp=2 and one rank."""


def check_config(config: RuntimeConfig) -> None:
    """Refuses what :func:`require_layout` refuses of the directory ``config.hf_path``, and a model without a bridge.

    Raises:
        ConfigError: a layout that Megatron cannot make of the model.
        UnsupportedError: transformers or Megatron-Bridge does not know the model.
    """
    hf_config, options = read_hf_config(config.hf_path), config.options(BridgeConfig)
    _require_bridge(config.hf_path, hf_config)
    text = text_config(hf_config)
    experts = (_size(text, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    heads = _size(text, "num_attention_heads")
    sizes = LayerSizes(
        num_layers=_size(text, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_size(text, "num_key_value_heads") or heads,
        ffn_hidden_size=_size(text, "intermediate_size"),
        num_experts=next(filter(None, experts), 0),
        shared_expert_size=_size(text, "shared_expert_intermediate_size"),
        linear_num_key_heads=_size(text, "linear_num_key_heads"),
        model_type=str(text.get("model_type", "")),
    )
    # Ranks may run on other machines than this process, with kernels that it cannot see.
    require_layout(options, sizes, transformer_engine=options.device != "cpu")


def require_layout(options: BridgeConfig, sizes: LayerSizes, *, transformer_engine: bool) -> None:
    """Raises :class:`ConfigError` for a layout that Megatron cannot make of a model.

    Args:
        transformer_engine: whether layers are Transformer Engine's.
    """
    parallel = options.parallel
    if parallel.cp > 1:
        reason = (
            "the bridge runtime does not split packed sequences over context-parallel ranks"
            if transformer_engine
            else "Megatron's own attention has no context parallelism (it asserts cp=1), only Transformer Engine's has"
        )
        raise ConfigError.of("BridgeConfig.parallel.cp", parallel.cp, f"{reason}; use 1")
    _require_whole(parallel.tp, sizes.model_type, transformer_engine=transformer_engine)
    if not sizes.num_experts:
        for name in ("ep", "etp"):
            if getattr(parallel, name) != 1:
                raise ConfigError.of(
                    f"BridgeConfig.parallel.{name}", getattr(parallel, name), "this model has no experts; use 1"
                )
    _require_divided("ep", parallel.ep, "experts", sizes.num_experts)
    _require_stages(options, sizes.num_layers)
    for name in ("num_attention_heads", "ffn_hidden_size", "shared_expert_size", "linear_num_key_heads"):
        _require_divided("tp", parallel.tp, name, getattr(sizes, name))
    query_groups = sizes.num_key_value_heads
    if query_groups and not (transformer_engine and parallel.tp % query_groups == 0):
        _require_divided("tp", parallel.tp, "num_key_value_heads", query_groups)


def _require_stages(options: BridgeConfig, num_layers: int | None) -> None:
    parallel, overrides = options.parallel, options.override_transformer_config
    stages = parallel.pp * parallel.vpp
    counted = [name for name in COUNTED_AS_LAYERS if overrides.get(name)]
    if num_layers is not None and (num_layers + len(counted)) % stages and not set(UNEVEN_STAGES) & overrides.keys():
        counting = f", counted as {num_layers + len(counted)} with {' and '.join(counted)}," if counted else ""
        raise ConfigError.of(
            "BridgeConfig.parallel.pp",
            parallel.pp,
            f"{num_layers} layers{counting} do not divide into pp*vpp = {parallel.pp}*{parallel.vpp} = {stages} stages; use "
            f"a divisor, or set {', '.join((*UNEVEN_STAGES, *COUNTED_AS_LAYERS))} in override_transformer_config",
        )


def _require_whole(tp: int, model_type: str, *, transformer_engine: bool) -> None:
    reason = ""
    if model_type == "minimax_m2" and transformer_engine:
        reason = "Megatron-Bridge's norm over all heads adds up squares over the ranks, but not their gradients"
    elif model_type in _WHOLE_WITHOUT_TRANSFORMER_ENGINE and not transformer_engine:
        reason = "Megatron's own layers give other gradients on several ranks, only Transformer Engine's may not"
    if tp > 1 and reason:
        raise ConfigError.of("BridgeConfig.parallel.tp", tp, f"{model_type}: {reason}; use 1, or backend='native'")


def _require_divided(size: str, ranks: int, name: str, number: int | None) -> None:
    if number and number % ranks:
        raise ConfigError.of(
            f"BridgeConfig.parallel.{size}", ranks, f"does not divide {name}={number}; {nearest(ranks, divisors(number))}"
        )


def _size(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _require_bridge(hf_path: str, hf_config: Mapping[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = hf_config.get("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        raise UnsupportedError(
            f"{hf_path}: transformers has no configuration for model_type={model_type!r}, which Megatron-Bridge starts "
            "from; use a model that it has, or backend='native' with a family of your own",
            model_type=model_type,
        )
    architectures = hf_config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        named = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    bridges = _names_in_bridges()
    if bridges and not bridges.intersection(named):
        raise UnsupportedError(
            f"{hf_path}: Megatron-Bridge has no bridge for model_type={model_type!r} ({', '.join(map(str, named))}); "
            "backend='native' may serve it",
            model_type=model_type,
        )


@cache
def _names_in_bridges() -> frozenset[str]:
    """Names of models in the sources of Megatron-Bridge, which takes half a minute to import; empty without it."""
    try:
        spec = importlib.util.find_spec("megatron.bridge")
    except ModuleNotFoundError:
        return frozenset()
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in (Path(folder) / "models").rglob("*.py")]
    return frozenset(word for file in files for word in re.findall(r"\w+For\w+", file.read_text(encoding="utf-8")))
