"""Options of every program with training ranks: which runtime, how many ranks, laid out how, in which dtype."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import ray
from pydantic import Field

from rl_backend.contracts import BACKEND_CONFIGS, MAY_CHANGE, BaseConfig, ConfigError, ParallelConfig, RuntimeConfig
from rl_backend.contracts.runtime_config import import_plugins
from rl_backend.options.option_set import Follows, OptionSet

BACKEND = "train.backend_cfg"
"""Where the options of the runtime are."""

ChosenDtype = Literal["auto", "float32", "bfloat16"]

Runtime = Annotated[RuntimeConfig, Field(description="the training runtime")]
Ranks = Annotated[int, MAY_CHANGE, Field(ge=1, description="training ranks; data parallel as far as tp, pp and cp leave")]
# A resumed run is checked for the dtype that comes of it, see actors.folder.identity.
RunDtype = Annotated[ChosenDtype, MAY_CHANGE, Field(description="of training and sampling; auto: bfloat16 with GPUs")]


def resolve_dtype(dtype: ChosenDtype) -> Literal["float32", "bfloat16"]:
    """``auto`` is bfloat16 on a cluster with GPUs, else float32."""
    if dtype == "auto":
        return "bfloat16" if ray.cluster_resources().get("GPU", 0) > 0 else "float32"
    return dtype


def _section_types(values: Mapping[str, Any]) -> dict[str, type[BaseConfig]]:
    train = values.get("train", {})
    plugins = train.get("plugins", ())
    import_plugins(re.findall(r"[\w.]+", plugins) if isinstance(plugins, str) else plugins)
    return {BACKEND: BACKEND_CONFIGS.get(train.get("backend", "native"))}


RANKS = OptionSet(
    short={
        "backend": "train.backend",
        "plugins": "train.plugins",
        **{name: f"{BACKEND}.parallel.{name}" for name in ParallelConfig.model_fields},
        "seed": "train.seed",
    },
    follows={
        f"{BACKEND}.param_dtype": Follows(lambda config: resolve_dtype(config.dtype), shown=lambda config: config.dtype),
    },
    section_types=_section_types,
    groups={
        "training": ("seed",),
        "layout": ("ranks", "backend", "plugins", *ParallelConfig.model_fields),
    },
    metavars={"plugins": "MODULE,..."},
)


def check_ranks(owner: str, train: RuntimeConfig, ranks: int, dtype: ChosenDtype) -> None:
    """Raises :class:`ConfigError` where the layout does not divide the ranks, or the runtime has no dtype to choose.

    Args:
        owner: name of the configuration that has these options.
    """
    try:
        train.backend_cfg.parallel.data_parallel_size(ranks)
    except ConfigError as error:
        raise ConfigError.of(f"{owner}.ranks", ranks, str(error)) from None
    if dtype != "auto" and not hasattr(train.backend_cfg, "param_dtype"):
        raise ConfigError.of("dtype", dtype, f"runtime {train.backend!r} has no param_dtype; use auto")
