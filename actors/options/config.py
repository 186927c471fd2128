"""Options of every run: runtime and layout, data, resources, checkpoints, metrics."""

import importlib
import importlib.util
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import ray
from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from actors.cluster.placement import ClusterShare
from actors.options.eval_sets import EvalDatasets, EvalSet, sets_by_name
from actors.options.policy_options import LoRAOptions
from actors.rollout.config import MOST_SEEDS, RolloutConfig
from actors.train.layout import check_fewest
from actors.train.pulse import BOUNDS, Recover
from rl_backend.contracts import (
    BACKEND_CONFIGS,
    MAY_CHANGE,
    SAME_CONTENTS,
    BaseConfig,
    ConfigError,
    HasEffect,
    Head,
    OptimizerConfig,
    ParallelConfig,
    RuntimeConfig,
)
from rl_backend.contracts.lora import LoRAConfig
from rl_backend.contracts.runtime_config import import_plugins
from rl_backend.data.examples import DataConfig, read_examples
from rl_backend.data.hub import local_model
from rl_backend.options.option_set import Follows, OptionSet, filled, get, gives, has, read_options, write_options

# Where the options of the runtime are.
BACKEND = "train.backend_cfg"
MICRO_BATCH, CHECKPOINTING = "train.max_tokens_per_micro_batch", f"{BACKEND}.activation_checkpointing"
REDUCTION = f"{BACKEND}.reduce_gradients"
MOST_TOKENS = 16384
_DTYPE = f"{BACKEND}.param_dtype"

ChosenDtype = Literal["auto", "float32", "bfloat16"]

Runtime = Annotated[RuntimeConfig, Field(description="the training runtime")]
Ranks = Annotated[int, MAY_CHANGE, Field(ge=1, description="training ranks; data parallel as far as tp, pp and cp leave")]
# A resumed run is checked for the dtype that comes of it, see actors.folder.resume.
RunDtype = Annotated[ChosenDtype, MAY_CHANGE, Field(description="of training and sampling; auto: bfloat16 with GPUs")]


def resolve_dtype(dtype: ChosenDtype) -> Literal["float32", "bfloat16"]:
    if dtype == "auto":
        return "bfloat16" if ray.cluster_resources().get("GPU", 0) > 0 else "float32"
    return dtype


def _section_types(values: Mapping[str, Any]) -> dict[str, type[BaseConfig]]:
    # Nothing is checked yet: what has another type is refused when the configuration is made.
    given = values.get("train")
    train: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    plugins = train.get("plugins")
    # One of them may register the runtime whose options these are.
    import_plugins(
        re.findall(r"[\w.]+", plugins) if isinstance(plugins, str) else plugins if isinstance(plugins, list | tuple) else ()
    )
    return {BACKEND: BACKEND_CONFIGS.get(str(train.get("backend", "native")))}


RANKS = OptionSet(
    short={
        "backend": "train.backend",
        "plugins": "train.plugins",
        **{name: f"{BACKEND}.parallel.{name}" for name in ParallelConfig.model_fields},
        "seed": "train.seed",
        "collective_timeout": f"{BACKEND}.collective_timeout",
    },
    follows={
        _DTYPE: Follows(lambda config: resolve_dtype(config.dtype), shown=lambda config: config.dtype),
    },
    section_types=_section_types,
    groups={
        "training": ("seed",),
        "layout": ("ranks", "backend", "plugins", *ParallelConfig.model_fields),
    },
    metavars={"plugins": "MODULE,..."},
)


def check_ranks(owner: str, train: RuntimeConfig, ranks: int, dtype: ChosenDtype) -> None:
    try:
        train.backend_cfg.parallel.data_parallel_size(ranks)
    except ConfigError as error:
        raise ConfigError.of(f"{owner}.ranks", ranks, str(error)) from None
    if dtype != "auto" and not hasattr(train.backend_cfg, "param_dtype"):
        raise ConfigError.of("dtype", dtype, f"runtime {train.backend!r} has no param_dtype; use auto")


# Names of metric writers, which are also those of the packages that they need.
BUILT_IN = ("tensorboard", "wandb", "mlflow", "trackio")


def writer_names(names: str | None) -> list[str]:
    wanted = list(dict.fromkeys(name for part in (names or "").split(",") if (name := part.strip())))
    if wanted == ["none"]:
        return []
    for name in wanted:
        if name not in BUILT_IN:
            import_writer(name)
        elif importlib.util.find_spec(name) is None:
            problem = f"{name} is not installed: pip install {name}, or {instead_of(wanted)}"
            raise ConfigError.of("metrics_to", name, problem)
    return wanted


def import_writer(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # noqa: BLE001, a module of the user's may raise anything
        problem = f"cannot be imported ({error}); give package.module:Class, or one of {', '.join(BUILT_IN)}"
        raise ConfigError.of("metrics_to", name, problem) from None


def instead_of(names: Collection[str]) -> str:
    return "leave it out" if len(names) > 1 else "give none"


_OPTIMIZER = f"{BACKEND}.optimizer"
_SAVES = HasEffect(lambda config: config.save_every, "save_every=0 saves no checkpoints; set it too")
_RECOVERS = HasEffect(
    lambda config: config.saves or config.recover == "memory",
    "save_every=0 saves no checkpoints; set it too, or recover=memory",
)
_REPLACES = HasEffect(
    lambda config: config.recover == "memory" or (config.recover == "checkpoint" and config.saves),
    "no rank is replaced; set save_every, or recover=memory",
)


class RunModel(NamedTuple):
    option: str
    path: str
    head: Head = "log_probs"
    forward_only: bool = False
    group: int = 0


TRAINING = RANKS | OptionSet(
    short={
        "model": "train.hf_path",
        "max_tokens_per_micro_batch": MICRO_BATCH,
        **{name: f"{_OPTIMIZER}.{name}" for name in ("lr", "lr_warmup_steps", "lr_decay_style")},
        **{name: f"data.{name}" for name in DataConfig.model_fields},
    },
    preset={MICRO_BATCH: MOST_TOKENS, f"{_OPTIMIZER}.lr": 1e-6},
    follows={
        # Until a run has chosen by the memory that is free, see actors.checks.memory.
        MICRO_BATCH: Follows(
            lambda config: MOST_TOKENS, until=MOST_TOKENS, text=f"{MOST_TOKENS} (2048 on CPUs), or fewer, as memory allows"
        ),
        f"{_OPTIMIZER}.total_training_steps": Follows(
            lambda config: config.optimizer_steps,
            "follows from steps; set lr_decay_steps for a decay of another length",
            # Longer than any warm-up, which is compared with it.
            until=1 << 31,
        ),
        "lora.seed": Follows(lambda config: config.seed),
    },
    groups={
        "model": ("model", "dtype", "lora."),
        "data": ("dataset", "eval_dataset", "max_prompt_tokens", "data."),
        "training": ("steps", "lr", "lr_warmup_steps", "lr_decay_style"),
        "layout": ("placement", "min_ranks", "rank_silence", "operation_timeout", "collective_timeout"),
        "memory": (
            "max_tokens_per_micro_batch",
            CHECKPOINTING,
            REDUCTION,
            *(f"{BACKEND}.{name}" for name in ("log_prob_chunk_tokens", "reshard_after_forward")),
        ),
        "checkpoints": (
            *("run_dir", "save_every", "keep_checkpoints", "async_save", "resume", "damaged_checkpoint", "recover"),
        ),
        "logging": ("metrics_to", "trace"),
        "health": ("health.",),
    },
    metavars={
        "model": "DIR",
        "dataset": "FILE",
        "eval_dataset": "FILE",
        "run_dir": "DIR",
        "metrics_to": "NAME,...",
        "resume": "auto|DIR",
    },
)


class HealthLimits(BaseConfig):
    """Limits of a step; none watches for nothing.

    Attributes:
        log_prob_gap: mean difference between trainer and engine, in nats per token.
        kl: mean of the metric kl, to the reference.
        skipped_updates: steps in a row of which every update was skipped.
        failed_rewards: share of a step's rewards, or episodes, that failed.
        free_disk_gib: least GiB that are free where the run folder is.
        on_limit: warn once, or stop: the run ends with an error after the step that is beyond a limit.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    log_prob_gap: Annotated[float | None, MAY_CHANGE] = Field(default=1.0, gt=0)
    kl: Annotated[float | None, MAY_CHANGE] = Field(default=None, gt=0)
    skipped_updates: Annotated[int | None, MAY_CHANGE] = Field(default=5, ge=1)
    failed_rewards: Annotated[float | None, MAY_CHANGE] = Field(default=0.5, gt=0, lt=1)
    free_disk_gib: Annotated[float | None, MAY_CHANGE] = Field(default=1.0, gt=0)
    on_limit: Annotated[Literal["warn", "stop"], MAY_CHANGE] = "warn"


HeldOutSets = Annotated[
    EvalDatasets,
    SAME_CONTENTS,
    Field(
        description="held-out rows, named likewise, once for each set; or a mapping {NAME: {path: ..., n: 8}} of sets with "
        "options of their own, see docs/evaluation.md",
    ),
]


class TrainingOptions(BaseModel):
    """Model, data, resources and checkpoints: the options that every run has, for a configuration to take in.

    ``MAY_CHANGE`` marks the fields that a run that continues from a checkpoint may have otherwise.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    option_set: ClassVar[OptionSet] = TRAINING
    _read = model_validator(mode="wrap")(read_options)
    _write = model_serializer(mode="wrap")(write_options)

    train: Runtime
    ranks: Ranks = 1
    dtype: RunDtype = "auto"
    # Configurations that take this in narrow the type: only runs that sample push adapters.
    lora: LoRAConfig = Field(default=LoRAOptions(), description="adapters over a frozen model, see docs/lora.md")
    dataset: Annotated[str, SAME_CONTENTS] = Field(
        min_length=1,
        description="rows to train on: a .jsonl, .json, .csv or .parquet file, a folder of datasets, or a name on the Hub "
        "such as openai/gsm8k:main:train; see docs/data.md",
    )
    eval_dataset: HeldOutSets = None
    data: DataConfig = Field(default=DataConfig(), description="how rows are read, see docs/data.md")
    run_dir: Annotated[str, MAY_CHANGE] = Field(
        min_length=1, description="new folder for all that the run writes, with the trained model"
    )
    steps: Annotated[int, MAY_CHANGE] = Field(default=100, ge=1, description="training steps")
    max_prompt_tokens: int = Field(
        default=512,
        ge=1,
        description="longest prompt, in tokens; where runs sample, at most what the model has positions for",
    )
    placement: Annotated[Literal["pack", "spread"], MAY_CHANGE] = Field(
        default="pack", description="ranks on few nodes of a cluster, or on many; engines likewise"
    )
    save_every: Annotated[int, MAY_CHANGE] = Field(
        default=0, ge=0, description="steps between checkpoints in run_dir/checkpoints, and one after the last; 0: none"
    )
    keep_checkpoints: Annotated[int, MAY_CHANGE, _SAVES] = Field(
        default=2, ge=0, description="newest checkpoints that are kept; 0: all"
    )
    async_save: Annotated[bool, MAY_CHANGE, _SAVES] = Field(
        default=True, description="train on while a checkpoint is written"
    )
    recover: Annotated[Recover, MAY_CHANGE, _RECOVERS] = Field(
        default="checkpoint",
        description="what the death of a training rank does. checkpoint: other ranks go on from the newest checkpoint, and "
        "what came since runs again; memory: they go on from the last step, of which the state is kept in memory outside of "
        "the ranks, also without checkpoints; off: the run ends, see docs/reliability.md",
    )
    min_ranks: Annotated[int, MAY_CHANGE, _REPLACES] = Field(
        default=0,
        ge=0,
        description="fewest training ranks of a group with which the run goes on, with fewer data-parallel ones, where the "
        "cluster has no room for all after a node was lost; it takes them back between two steps; 0: it ends",
    )
    rank_silence: Annotated[float, MAY_CHANGE] = Field(
        default=BOUNDS.silence, gt=0, description="seconds without a sign of life after which a training rank counts as dead"
    )
    operation_timeout: Annotated[float, MAY_CHANGE] = Field(
        default=BOUNDS.operation, gt=0, description="most seconds of a training rank for one operation, such as a pass"
    )
    trace: Annotated[bool, MAY_CHANGE] = Field(
        default=False, description="record all actors in run_dir/trace.json, for Perfetto"
    )
    metrics_to: Annotated[str | None, MAY_CHANGE] = Field(
        default="tensorboard",
        description="where each step's metrics go beside metrics.jsonl, with commas between: tensorboard, wandb, mlflow, "
        "trackio, or package.module:Class of your own; none: nowhere",
    )
    resume: Annotated[str | None, MAY_CHANGE] = Field(
        default=None,
        description="auto: continue from the newest checkpoint in run_dir, if any; or the checkpoint to continue from",
    )
    damaged_checkpoint: Annotated[Literal["refuse", "earlier"], MAY_CHANGE] = Field(
        default="refuse",
        description="where resume=auto finds the newest checkpoint damaged. earlier: read all of it first, and continue "
        "from the one before; damaged ones are renamed",
    )
    health: HealthLimits = Field(default=HealthLimits(), description="limits of sense, see docs/reading_a_run.md")

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        name, optimizer = type(self).__name__, self.train.backend_cfg.optimizer
        check_ranks(name, self.train, self.ranks, self.dtype)
        check_fewest(name, self.parallel, self.ranks, self.min_ranks)
        wrong: list[tuple[str, Any, str]] = []
        if not 0 <= self.seed < MOST_SEEDS:
            wrong.append((f"{name}.seed", self.seed, f"must be from 0 to {MOST_SEEDS - 1}"))
        if not optimizer.lr:
            wrong.append((f"{name}.lr", optimizer.lr, "must be above 0, or nothing is learned"))
        # Unless the data decide the steps, which nobody has read yet.
        if self.chooses_steps and 0 < self.optimizer_steps <= optimizer.warmup_steps:
            problem = f"the run has {self.optimizer_steps} optimizer steps and would never reach lr={optimizer.lr:g}"
            wrong.append((f"{name}.lr_warmup_steps", optimizer.warmup_steps, problem))
        ConfigError.refuse_all(wrong)
        writer_names(self.metrics_to)
        return self

    @property
    def model(self) -> str:
        """Hugging Face directory, or a name on the Hub."""
        return self.train.hf_path

    @property
    def seed(self) -> int:
        return self.train.seed

    @property
    def parallel(self) -> ParallelConfig:
        return self.train.backend_cfg.parallel

    @property
    def data_parallel_size(self) -> int:
        return self.parallel.data_parallel_size(self.ranks)

    @property
    def trained_dtype(self) -> str:
        """Dtype of the trained parameters; unless it is chosen, needs Ray, which knows the GPUs."""
        return str(get(self, _DTYPE)) if self._gives_dtype else resolve_dtype(self.dtype)

    @property
    def chooses_dtype(self) -> bool:
        """Whether the dtype of the trained parameters is given."""
        return self.dtype != "auto" or self._gives_dtype

    @property
    def _gives_dtype(self) -> bool:
        return has(self, _DTYPE) and gives(self, _DTYPE)

    def describe_ranks(self) -> str:
        layout = "".join(f", {name}={size}" for name, size in self.parallel.model_dump().items() if size > 1)
        return f"{self.ranks} training rank(s) of {self.train.backend}{layout}"

    def runtime_config(self) -> RuntimeConfig:
        config: RuntimeConfig = filled(self, "train")
        return config

    @property
    def saves(self) -> bool:
        """Whether any of :meth:`runs` saves checkpoints."""
        return bool(self.save_every)

    def runs(self) -> Mapping[str, Any]:
        return {"": self}

    def models(self) -> tuple[RunModel, ...]:
        return (RunModel("model", self.model),)

    @property
    def longest_sequence(self) -> int | None:
        """Most tokens of a sequence that the run may make; None where its data alone decide."""
        return None

    def read_data(self) -> str:
        return f"{len(read_examples(self.dataset, self.data, require_answer=False))} rows"

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        return sets_by_name(self.eval_dataset)

    @property
    def pushes_adapters(self) -> bool:
        """Whether engines may serve the policy as an adapter beside the weights of the frozen model."""
        return False

    @property
    def optimizer_steps(self) -> int:
        return self.steps

    def other_optimizer(self, lr_option: str, **changes: Any) -> OptimizerConfig:
        lr = getattr(self, lr_option)
        try:
            return self.train.backend_cfg.optimizer.replace(lr=lr, **changes)
        except ConfigError as error:
            problem = f"the trained model's schedule does not fit it: {error}"
            raise ConfigError.of(f"{type(self).__name__}.{lr_option}", lr, problem) from None

    @property
    def chooses_steps(self) -> bool:
        """Whether ``steps`` is the length of the run; else it is known when the data has been read."""
        return True

    def with_known_steps(self) -> Self:
        """With the length of the run as ``steps``; reads data where they decide it."""
        return self

    @property
    def training_groups(self) -> int:
        return 1

    @property
    def num_engines(self) -> int:
        """vLLM engines; 0 for a run that samples nothing."""
        return 0

    @property
    def batches_ahead(self) -> int:
        return 0

    @property
    def colocates(self) -> bool:
        """Whether engines sleep while ranks train, and ranks leave the GPU while engines sample."""
        return False

    def rollout_config(self, share: ClusterShare) -> RolloutConfig | None:
        """Of the engines, with their share of the cluster; None without any."""
        return None


def with_local_model[C: TrainingOptions](config: C) -> C:
    folder = local_model(config.model, field=f"{type(config).__name__}.model")
    if folder == config.model:
        return config
    return with_options(config, {"model": folder})


def with_options[C: TrainingOptions](config: C, changes: Mapping[str, Any]) -> C:
    """With other values, by short name or place; those of sections that were not given still count so."""
    values = {name: getattr(config, name) for name in type(config).model_fields}
    return type(config)(**{**values, **changes})


class TrainingConfig(TrainingOptions, BaseConfig):
    """Options of a run that samples nothing."""

    lora: LoRAOptions = Field(default=LoRAOptions(), description="adapters over a frozen model, see docs/lora.md")
