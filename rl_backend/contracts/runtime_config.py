"""Configuration of a runtime: layout over ranks, optimizer, and the options of the backend and the model family it names."""

import importlib
import math
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SerializeAsAny, ValidationInfo, field_validator, model_validator

from rl_backend.contracts.base_config import MAY_CHANGE, SAME_CONTENTS, BaseConfig, HasEffect, ModelOptions
from rl_backend.contracts.errors import ConfigError, RegistryError, RLBackendError

NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]

_DECAYS = HasEffect(lambda c: c.lr_decay_style != "constant", "lr_decay_style='constant' never decays; set the style")
_WSD = HasEffect(lambda c: c.lr_decay_style == "WSD", "lr_decay_style={0.lr_decay_style!r} does not read it; use WSD")
_WARMS_UP = HasEffect(
    lambda c: c.warmup_steps, "there is no warm-up to begin with it; set lr_warmup_steps or lr_warmup_steps_ratio"
)
_BY_RATIO = HasEffect(lambda c: c.lr_warmup_steps < 0, "lr_warmup_steps={0.lr_warmup_steps} decides; give one of them")


class OptimizerConfig(BaseConfig):
    """AdamW with Megatron's schedules.

    Attributes:
        lr: peak learning rate.
        min_lr: learning rate at the end of the decay, and the least of ``inverse-square-root``.
        lr_warmup_init: learning rate of the first step of a warm-up.
        lr_warmup_steps: optimizer steps of linear warm-up; -1 takes ``lr_warmup_steps_ratio * total_training_steps``.
        lr_decay_steps: step at which ``min_lr`` is reached, warm-up included; None takes ``total_training_steps``.
        lr_wsd_decay_steps: length of the final decay of the ``WSD`` style, in steps.
        total_training_steps: -1 when unknown; every style but ``constant`` and ``inverse-square-root`` needs it or
            ``lr_decay_steps``.
        weight_decay: final value; biases and parameters of one dimension are never decayed (as in Megatron).
        weight_decay_start: first value when ``weight_decay_incr_style`` is not ``constant``; None takes ``weight_decay``.
        clip_grad: largest global gradient norm; 0 switches clipping off.
        log_num_zeros_in_grad: count zeros in the gradient in each step (the third result of ``optimizer_step``).
    """

    optimizer: Literal["adam"] = "adam"
    lr: NonNegative = 1e-3
    min_lr: Annotated[NonNegative, _DECAYS] = 0.0
    lr_warmup_init: Annotated[NonNegative, _WARMS_UP] = 0.0
    lr_warmup_steps: int = Field(default=-1, ge=-1)
    lr_warmup_steps_ratio: Annotated[float, _BY_RATIO] = Field(default=0.0, ge=0.0, le=1.0)
    lr_decay_steps: Annotated[int | None, Field(ge=1), _DECAYS] = None
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    lr_wsd_decay_style: Annotated[Literal["exponential", "linear", "cosine", "minus_sqrt"], _WSD] = "exponential"
    lr_wsd_decay_steps: Annotated[int | None, Field(ge=0), _WSD] = None
    total_training_steps: int = Field(default=-1, ge=-1)
    weight_decay: NonNegative = 0.01
    weight_decay_start: NonNegative | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    clip_grad: NonNegative = 1.0
    log_num_zeros_in_grad: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        ConfigError.refuse_all((f"{type(self).__name__}.{name}", value, why) for name, value, why in self._problems())
        return self

    def _problems(self) -> Iterator[tuple[str, object, str]]:
        style, decay_steps = self.lr_decay_style, self.decay_steps
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield "betas", self.betas, "each must be in [0, 1)"
        if self.min_lr > self.lr:
            yield "min_lr", self.min_lr, f"must not exceed lr={self.lr}"
        if self.lr_warmup_init > self.lr:
            yield "lr_warmup_init", self.lr_warmup_init, f"must not exceed lr={self.lr}"
        if style in ("linear", "cosine", "WSD"):
            if decay_steps is None:
                yield "lr_decay_style", style, "needs lr_decay_steps or total_training_steps"
            elif self.warmup_steps >= decay_steps:
                yield "lr_warmup_steps", self.warmup_steps, f"must be less than lr_decay_steps={decay_steps}"
        if style == "WSD":
            if self.lr_wsd_decay_steps is None:
                yield "lr_wsd_decay_steps", None, "lr_decay_style='WSD' needs it"
            elif decay_steps is not None and self.lr_wsd_decay_steps > decay_steps:
                yield "lr_wsd_decay_steps", self.lr_wsd_decay_steps, f"must not exceed lr_decay_steps={decay_steps}"
        start = self.weight_decay if self.weight_decay_start is None else self.weight_decay_start
        increase = self.weight_decay_incr_style
        if increase == "constant" and start != self.weight_decay:
            kept = f"weight_decay_incr_style='constant' keeps weight_decay={self.weight_decay}"
            yield "weight_decay_start", start, f"{kept}; leave it None or set the style"
        if start > self.weight_decay:
            yield "weight_decay_start", start, f"must not exceed weight_decay={self.weight_decay}"
        if self.total_training_steps <= 0:
            if self.lr_warmup_steps == -1 and self.lr_warmup_steps_ratio > 0:
                yield "lr_warmup_steps_ratio", self.lr_warmup_steps_ratio, "needs total_training_steps"
            if increase != "constant":
                yield "weight_decay_incr_style", increase, "needs total_training_steps"

    @property
    def warmup_steps(self) -> int:
        # A count decides over a ratio, as in verl.
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * max(self.total_training_steps, 0))

    @property
    def decay_steps(self) -> int | None:
        """Optimizer steps until ``min_lr``, or None when the schedule never decays to it."""
        if self.lr_decay_steps is not None:
            return self.lr_decay_steps
        return self.total_training_steps if self.total_training_steps > 0 else None


class AdamParams(BaseConfig):
    """Values of AdamW for one ``optimizer_step``, as of :class:`OptimizerConfig`; None takes those of its schedules."""

    lr: NonNegative | None = None
    betas: tuple[Beta, Beta] | None = None
    eps: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    weight_decay: NonNegative | None = None
    clip_grad: NonNegative | None = None

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}


class ParallelConfig(BaseConfig):
    """Sizes of the model-parallel dimensions; the data-parallel size follows from the world size.

    Attributes:
        tp: tensor parallel, with sequence parallel.
        pp: pipeline stages (ranks).
        vpp: stages per pipeline rank.
        cp: context parallel.
        ep: expert parallel; divides ``dp * cp * tp / etp``.
        etp: tensor parallel inside an expert.
    """

    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    vpp: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    etp: int = Field(default=1, ge=1)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense model: ``tp * pp * cp``."""
        return self.tp * self.pp * self.cp

    def data_parallel_size(self, world_size: int) -> int:
        """``world_size / (tp * pp * cp)``; raises :class:`ConfigError` when that, or the expert layout, does not divide."""
        size = self.model_parallel_size
        experts = self.ep * self.etp * self.pp
        parts = {
            f"tp*pp*cp = {self.tp}*{self.pp}*{self.cp} = {size}": size,
            f"ep*etp*pp = {self.ep}*{self.etp}*{self.pp} = {experts}": experts,
        }
        if undivided := next((product for product, value in parts.items() if world_size % value), ""):
            both = math.lcm(size, experts)
            use = " or ".join(str(both * copies) for copies in (world_size // both, world_size // both + 1) if copies)
            raise ConfigError(
                f"world size {world_size} is not a multiple of {undivided}; use {use} ranks",
                world_size=world_size,
            )
        return world_size // size


@dataclass(eq=False)
class Registry[T]:
    """Entries of one kind by name.

    ``how`` is the call that adds one, for messages; the module ``built_in`` adds those that are always there.
    """

    kind: str
    how: str
    built_in: str | None = None
    _entries: dict[str, T] = field(default_factory=dict)

    def add(self, name: str, entry: T) -> None:
        """Adds ``entry``; a second, different entry of one name raises :class:`RegistryError`."""
        known = self._entries.get(name)
        if known is not None and known != entry:
            raise RegistryError(f"{self.kind} {name!r} is registered already; choose another name", name=name)
        self._entries[name] = entry

    def remove(self, name: str) -> None:
        self.get(name)
        del self._entries[name]

    def get(self, name: str) -> T:
        if name not in self:
            known = ", ".join(sorted(self._entries)) or "none"
            raise RegistryError(f"unknown {self.kind} {name!r}; known: {known}; {self.how} adds one", name=name)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._add_built_in()
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        # A plugin's entry needs no import of the built-in ones, which takes seconds.
        if name not in self._entries:
            self._add_built_in()
        return name in self._entries

    def _add_built_in(self) -> None:
        # Imported only now: the families import these contracts.
        if self.built_in is not None:
            importlib.import_module(self.built_in)


_ROUNDED = HasEffect(
    lambda config: config.param_dtype != "float32", "with param_dtype='float32' all is computed in float32; leave it out"
)

type Checkpointing = Literal["none", "selective", "full"]
type Reduction = Literal["once", "per_micro_batch"]
type PipelineSchedule = Literal["auto", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zbv", "dualpipev"]


class BackendConfig(BaseConfig):
    """Base of the options of one runtime: what every runtime has.

    Attributes:
        collective_timeout: seconds that a rank waits for the others in a collective. Longer than what one rank may do while
            they wait: write a Hugging Face directory to a slow disk, say.
    """

    parallel: Annotated[ParallelConfig, MAY_CHANGE] = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    collective_timeout: Annotated[float, MAY_CHANGE] = Field(default=1800.0, gt=0, le=30 * 86400)

    @property
    def waits_for_ranks(self) -> timedelta:
        return timedelta(seconds=self.collective_timeout)


BACKEND_CONFIGS: Registry[type[BackendConfig]] = Registry(
    "runtime", "register_runtime(...)", built_in="rl_backend.runtime.registry"
)
MODEL_CONFIGS: Registry[type[ModelOptions]] = Registry("model family", "register_model(...)", built_in="rl_backend.model")


class NativeConfig(BackendConfig):
    """Options of the ``native`` runtime.

    Attributes:
        device: ``auto`` takes CUDA when there is a device.
        param_dtype: dtype of parameters in forward and backward; the optimizer always works on float32 masters.
        head_in_float32: with another ``param_dtype``, the last norm and the head compute in float32, with their parameters
            as the optimizer has them.
        reduce_dtype: dtype in which gradients are accumulated and reduced over ranks.
        reduce_gradients: ``once`` keeps whole gradients until the last micro-batch of a pass and reduces them over ranks
            there; ``per_micro_batch`` reduces them in every backward pass and keeps this rank's shards: less memory, more
            communication. Not for schedules that split backward passes.
        activation_checkpointing: ``full`` recomputes each layer in the backward pass; ``selective`` keeps attention and
            every second product of matrices, and recomputes the rest.
        reshard_after_forward: free gathered parameters between forward and backward.
        compile: compile layers with ``torch.compile``, in minutes when the first micro-batch comes; needs a C++ compiler.
        log_prob_chunk_tokens: tokens whose full-vocabulary logits are computed at one time.
        share_prefixes: ``auto`` computes tokens once with which several sequences of a micro-batch begin, and keeps those
            sequences together, where the model and the layout can.
        pipeline_schedule: ``1f1b``, ``interleaved-1f1b``, ``zb-h1``, ``zb-h2``, ``zbv`` or ``dualpipev``; ``auto`` takes
            ``interleaved-1f1b`` where ``parallel.vpp`` is more than 1, and ``1f1b`` otherwise.
        pipeline_layers: layers of each of the ``pp * vpp`` stages; None divides them evenly.
        model: name of the registered model family, or ``auto``: the one that claims the directory's ``model_type``.
        model_cfg: that family's own options; needs ``model`` to be named. None takes its defaults.
    """

    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    head_in_float32: Annotated[bool, _ROUNDED] = False
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_gradients: Annotated[Reduction, MAY_CHANGE] = "once"
    activation_checkpointing: Annotated[Checkpointing, MAY_CHANGE] = "none"
    reshard_after_forward: Annotated[bool, MAY_CHANGE] = True
    compile: Annotated[bool, MAY_CHANGE] = False
    log_prob_chunk_tokens: Annotated[int, MAY_CHANGE] = Field(default=1024, ge=1)
    share_prefixes: Annotated[Literal["auto", "off"], MAY_CHANGE] = "auto"
    pipeline_schedule: Annotated[PipelineSchedule, MAY_CHANGE] = "auto"
    pipeline_layers: Annotated[tuple[int, ...] | None, MAY_CHANGE] = None
    model: str = "auto"
    model_cfg: SerializeAsAny[ModelOptions] | None = None

    @field_validator("model_cfg", mode="before")
    @classmethod
    def _resolve_model_cfg(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or "model" not in info.data:
            return value
        if info.data["model"] == "auto":
            raise ConfigError.of("NativeConfig.model_cfg", value, "name the family in `model` to give it options")
        return MODEL_CONFIGS.get(info.data["model"]).model_validate(value)


BACKEND_CONFIGS.add("native", NativeConfig)


def import_plugins[N: Iterable[str]](names: N) -> N:
    """Imports modules that register model families and runtimes; :class:`ConfigError` names the process that could not."""
    for name in names:
        try:
            importlib.import_module(name)
        except RLBackendError:
            raise
        except (Exception, SystemExit) as error:  # a module may raise anything, and even end the process
            # The message may be read on another machine.
            rank = f"training rank {os.environ['RANK']}, " if "RANK" in os.environ else ""
            who = f"{rank}process {os.getpid()} on node {socket.gethostname()}"
            problem = f"fails when {who} imports it ({type(error).__name__}: {error}); mend it, or leave it out"
            if isinstance(error, ModuleNotFoundError):
                problem = (
                    f"cannot be imported by {who} ({error}); install it on every node, have its folder in PYTHONPATH "
                    "there, or send it along with the job's working_dir"
                )
            raise ConfigError.of("RuntimeConfig.plugins", name, problem) from error
    return names


Plugins = Annotated[tuple[str, ...], AfterValidator(import_plugins)]


class RuntimeConfig(BaseConfig):
    """What ``create_runtime`` takes.

    Attributes:
        plugins: modules imported before the rest is read, in every process that builds the runtime; they call
            ``register_model`` and ``register_runtime``. Text has commas between them.
        backend: name of a registered runtime.
        hf_path: local Hugging Face directory with ``config.json`` and safetensors; commands also take a name on the Hub.
        seed: seeds every random generator of the runtime.
        max_tokens_per_micro_batch: largest number of tokens in one micro-batch.
        backend_cfg: the runtime's own options; their type is the one registered for ``backend``.
    """

    plugins: Plugins = ()
    backend: Annotated[str, MAY_CHANGE] = "native"
    hf_path: Annotated[str, SAME_CONTENTS] = Field(min_length=1)
    seed: int = 0
    max_tokens_per_micro_batch: Annotated[int, MAY_CHANGE] = Field(default=8192, ge=1)
    backend_cfg: SerializeAsAny[BackendConfig] = Field(default_factory=dict, validate_default=True)

    def options[B: BackendConfig](self, kind: type[B]) -> B:
        assert isinstance(self.backend_cfg, kind), "RuntimeConfig resolves backend_cfg by backend"
        return self.backend_cfg

    @field_validator("plugins", mode="before")
    @classmethod
    def _split_plugins(cls, plugins: Any) -> Any:
        return tuple(name for part in plugins.split(",") if (name := part.strip())) if isinstance(plugins, str) else plugins

    @field_validator("backend")
    @classmethod
    def _known_backend(cls, backend: str) -> str:
        BACKEND_CONFIGS.get(backend)
        return backend

    @field_validator("backend_cfg", mode="before")
    @classmethod
    def _resolve_backend_cfg(cls, value: Any, info: ValidationInfo) -> Any:
        if "backend" not in info.data:  # it was refused
            return value
        return BACKEND_CONFIGS.get(info.data["backend"]).model_validate(value)
