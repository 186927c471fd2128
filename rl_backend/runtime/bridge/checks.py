"""Refusals of the bridge runtime, from ``config.json`` alone. Megatron is not imported."""

import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from rl_backend.checkpoint.hf_reader import read_hf_config
from rl_backend.contracts import EXPERT_COUNTS, ConfigError, RuntimeConfig, UnsupportedError, text_config
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
        installed = None
        with suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(distribution)
        if installed is None or Version(installed).release[:2] != supported:
            found = "is not installed" if installed is None else f"{installed} is installed"
            raise UnsupportedError(f"{distribution} {found}; {INSTALL}", package=distribution)


class LayerSizes(NamedTuple):
    """Numbers of a model that a layout divides; None where it is not known, and not checked."""

    num_layers: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    ffn_hidden_size: int | None
    num_experts: int  # 0 for a dense model
    shared_expert_size: int | None = None  # features inside of the expert of all tokens
    linear_num_key_heads: int | None = None  # of gated DeltaNet; each has the same number of value heads
    model_type: str = ""  # of the text model


# Their gradients, with Megatron's own layers, differ between tp=2 and one rank.
_WHOLE_WITHOUT_TRANSFORMER_ENGINE = frozenset({"deepseek_v3", "glm4_moe_lite"})


def check_config(config: RuntimeConfig) -> None:
    """Refuses a directory ``config.hf_path`` that :func:`require_layout` refuses, and one whose model has no bridge."""
    hf_config, options = read_hf_config(config.hf_path), config.options(BridgeConfig)
    require_bridge(config.hf_path, hf_config)
    text = text_config(hf_config)
    experts = (_size(text, name) for name in EXPERT_COUNTS)
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
    """Raises one :class:`ConfigError` for all sizes of a layout that Megatron cannot make of a model."""
    ConfigError.refuse_all(
        (f"BridgeConfig.parallel.{size}", getattr(options.parallel, size), problem)
        for size, problem in _layout_problems(options, sizes, transformer_engine)
    )


def _layout_problems(options: BridgeConfig, sizes: LayerSizes, transformer_engine: bool) -> Iterator[tuple[str, str]]:
    parallel = options.parallel
    if parallel.cp > 1:
        reason = (
            "the bridge runtime does not split packed sequences over context-parallel ranks"
            if transformer_engine
            else "Megatron's own attention has no context parallelism (it asserts cp=1), only Transformer Engine's has"
        )
        yield "cp", f"{reason}; use 1"
    if parallel.tp > 1 and sizes.model_type == "minimax_m2" and transformer_engine:
        reason = "Megatron-Bridge's norm over all heads adds up squares over the ranks, but not their gradients"
        yield "tp", f"minimax_m2: {reason}; use 1, or backend='native'"
    if parallel.tp > 1 and sizes.model_type in _WHOLE_WITHOUT_TRANSFORMER_ENGINE and not transformer_engine:
        reason = "Megatron's own layers give other gradients on several ranks, only Transformer Engine's may not"
        yield "tp", f"{sizes.model_type}: {reason}; use 1, or backend='native'"
    for size in ("ep", "etp") if not sizes.num_experts else ():
        if getattr(parallel, size) != 1:
            yield size, "this model has no experts; use 1"
    if sizes.num_experts % parallel.ep:
        yield "ep", f"does not divide experts={sizes.num_experts}; {nearest(parallel.ep, divisors(sizes.num_experts))}"
    if sizes.num_layers is not None:
        yield from _uneven_stages(options, sizes.num_layers)
    # Transformer Engine copies heads of keys where there are fewer of them than ranks.
    copied = transformer_engine and parallel.tp % (sizes.num_key_value_heads or 1) == 0
    divided = ("num_attention_heads", "ffn_hidden_size", "shared_expert_size", "linear_num_key_heads")
    numbers = {name: getattr(sizes, name) or 0 for name in (*divided, *(() if copied else ("num_key_value_heads",)))}
    if whole := [f"{name}={number}" for name, number in numbers.items() if number % parallel.tp]:
        yield "tp", f"does not divide {', '.join(whole)}; {nearest(parallel.tp, divisors(math.gcd(*numbers.values())))}"


def _uneven_stages(options: BridgeConfig, num_layers: int) -> Iterator[tuple[str, str]]:
    parallel, overrides = options.parallel, options.override_transformer_config
    stages = parallel.pp * parallel.vpp
    counted = [name for name in COUNTED_AS_LAYERS if overrides.get(name)]
    if (num_layers + len(counted)) % stages and not set(UNEVEN_STAGES) & overrides.keys():
        counting = f", counted as {num_layers + len(counted)} with {' and '.join(counted)}," if counted else ""
        yield (
            "pp",
            f"{num_layers} layers{counting} do not divide into pp*vpp = {parallel.pp}*{parallel.vpp} = {stages} stages; use "
            f"a divisor, or set {', '.join((*UNEVEN_STAGES, *COUNTED_AS_LAYERS))} in override_transformer_config",
        )


def _size(text: Mapping[str, Any], name: str) -> int | None:
    value = text.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def require_bridge(hf_path: str, hf_config: Mapping[str, Any]) -> None:
    """Raises :class:`UnsupportedError` for a model that transformers or Megatron-Bridge does not know by its type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type, problem = hf_config.get("model_type"), ""
    if model_type not in CONFIG_MAPPING_NAMES:
        problem = "transformers has no configuration"
    architectures = hf_config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        named = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    bridges = _names_in_bridges()
    if not problem and bridges and not bridges.intersection(named):
        problem = "Megatron-Bridge has no bridge"
    if problem:
        raise no_bridge(hf_path, model_type, named, problem)


def no_bridge(
    hf_path: str, model_type: Any, architectures: Iterable[Any], problem: str = "Megatron-Bridge has no bridge"
) -> UnsupportedError:
    names = ", ".join(map(str, architectures))
    return UnsupportedError(
        f"{hf_path}: {problem} for model_type={model_type!r} ({names}); backend='native' may serve it", model_type=model_type
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
