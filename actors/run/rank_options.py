"""Options of every program with training ranks: which runtime, how many ranks, laid out how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, model_validator

from actors.run.dtype import ChosenDtype, resolve_dtype
from actors.run.options import Follows, Options, get, has
from rl_backend.contracts import BACKEND_CONFIGS, MAY_CHANGE, BaseConfig, ConfigError, ParallelConfig, RuntimeConfig
from rl_backend.contracts.runtime_config import import_plugins

BACKEND = "train.backend_cfg"
"""Where the options of the runtime are."""


class RankOptions(Options):
    """Which runtime trains, on how many ranks, laid out how."""

    model_config = ConfigDict(allow_inf_nan=False)

    short: ClassVar[Mapping[str, str]] = {
        "backend": "train.backend",
        "plugins": "train.plugins",
        **{name: f"{BACKEND}.parallel.{name}" for name in ParallelConfig.model_fields},
        "seed": "train.seed",
    }
    renamed: ClassVar[Mapping[str, str]] = {"backend_options": BACKEND}
    follows: ClassVar[Mapping[str, Follows]] = {
        f"{BACKEND}.param_dtype": Follows(lambda config: resolve_dtype(config.dtype), shown=lambda config: config.dtype),
    }
    help_groups: ClassVar[Mapping[str, Sequence[str]]] = {
        "training": ("seed",),
        "layout": ("ranks", "backend", "plugins", *ParallelConfig.model_fields),
    }
    metavars: ClassVar[Mapping[str, str]] = {"plugins": "MODULE,..."}

    train: RuntimeConfig = Field(description="the training runtime")
    ranks: Annotated[int, MAY_CHANGE] = Field(
        default=1, ge=1, description="training ranks; data parallel as far as tp, pp and cp leave"
    )
    # A resumed run is checked for the dtype that comes of it, see actors.folder.resume.
    dtype: Annotated[ChosenDtype, MAY_CHANGE] = Field(
        default="auto", description="of training and sampling; auto: bfloat16 with GPUs"
    )

    @classmethod
    def section_types(cls, values: Mapping[str, Any]) -> dict[str, type[BaseConfig]]:
        train = values.get("train", {})
        plugins = train.get("plugins", ())
        import_plugins(re.findall(r"[\w.]+", plugins) if isinstance(plugins, str) else plugins)
        return {BACKEND: BACKEND_CONFIGS.get(train.get("backend", "native"))}

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        try:
            self.parallel.data_parallel_size(self.ranks)
        except ConfigError as error:
            raise ConfigError.of(f"{type(self).__name__}.ranks", self.ranks, str(error)) from None
        if self.dtype != "auto" and not has(self, f"{BACKEND}.param_dtype"):
            raise ConfigError.of("dtype", self.dtype, f"runtime {self.train.backend!r} has no param_dtype; use auto")
        return self

    @property
    def parallel(self) -> ParallelConfig:
        return self.train.backend_cfg.parallel

    @property
    def data_parallel_size(self) -> int:
        return self.parallel.data_parallel_size(self.ranks)

    @property
    def trained_dtype(self) -> str:
        """Dtype of the trained parameters; unless it is chosen, needs Ray, which knows the GPUs."""
        if has(self, f"{BACKEND}.param_dtype") and self.gives(f"{BACKEND}.param_dtype"):
            return str(get(self, f"{BACKEND}.param_dtype"))
        return resolve_dtype(self.dtype)

    def describe_ranks(self) -> str:
        """Runtime, ranks and layout, for a run's first line."""
        layout = "".join(f", {name}={size}" for name, size in self.parallel.model_dump().items() if size > 1)
        return f"{self.ranks} training rank(s) of {self.train.backend}{layout}"

    def runtime_config(self) -> RuntimeConfig:
        """Of the trained model, with what follows from other options; needs Ray, which knows the GPUs."""
        config: RuntimeConfig = self.filled("train")
        return config
